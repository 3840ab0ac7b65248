"""The decoder against transformers: same checkpoint, same logits, for every architecture and layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import TINY, build, save

from tritonmoe.checkpoint.architectures import load_spec
from tritonmoe.checkpoint.loading import load_weights
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache

PROMPT_LENGTH = 40
# Measured: at most 2e-5 on logits of about 5 (float32, both sides sum in another order).
TOLERANCE = 1e-4


def oracle(name: str):
    pytest.importorskip("transformers")
    model = build(name)
    if model is None:
        pytest.skip(f"this transformers has no {TINY[name].model_type}")
    return model


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    spec = load_spec(folder)
    return Decoder(spec, load_weights(folder, spec, torch.device(device), dtype))


def prompt(seed: int = 1, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 64, (batch, PROMPT_LENGTH), generator=torch.Generator().manual_seed(seed))


def run(decoder: Decoder, ids: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """Logits [B, T, V] of ids [B, T], computed in pieces of the given sizes through one KV cache."""
    cache = KVCache.allocate(decoder.spec, len(ids), ids.shape[1], decoder.device, decoder.dtype)
    ids, out, start = ids.to(decoder.device), [], 0
    for size in steps:
        if size == 1:
            positions = torch.full((len(ids),), start, device=decoder.device)
            out.append(decoder.decode(ids[:, start], positions, cache, start + 1)[:, None])
        else:
            out.append(decoder.prefill(ids[:, start : start + size], start, cache, last_only=False))
        start += size
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("original_format", [True, False], ids=["published", "fused"])
@pytest.mark.parametrize("name", TINY)
def test_logits_equal_transformers(name: str, original_format: bool, tmp_path: Path) -> None:
    model = oracle(name)
    decoder = load(save(model, tmp_path, save_original_format=original_format))
    ids = prompt()
    with torch.no_grad():
        expected = model(ids).logits
    whole = run(decoder, ids, [PROMPT_LENGTH])
    pieces = run(decoder, ids, [16, 11, *[1] * (PROMPT_LENGTH - 27)])
    assert (whole - expected).abs().max() < TOLERANCE
    assert (pieces - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", TINY)
def test_greedy_continuation_equals_transformers(name: str, tmp_path: Path) -> None:
    """Chunked prefill, then 24 tokens one by one, past the sliding windows."""
    model = oracle(name)
    decoder = load(save(model, tmp_path))
    ids, steps = prompt(seed=2)[:, :20], 24
    with torch.no_grad():
        # No attention mask would make it guess one from pad tokens inside the random prompt.
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, min_new_tokens=steps, do_sample=False
        )
    cache = KVCache.allocate(decoder.spec, 1, 20 + steps, decoder.device, decoder.dtype)
    for start, end in ((0, 13), (13, 20)):
        logits = decoder.prefill(ids[:, start:end], start, cache)
    for position in range(20, 20 + steps):
        allowed = logits.clone()
        allowed[:, 2] = float("-inf")  # min_new_tokens forbids the end token (id 2) there
        ids = torch.cat((ids, allowed.argmax(-1, keepdim=True)), dim=1)
        logits = decoder.decode(ids[:, -1], torch.tensor([position]), cache, position + 1)
    assert ids.tolist() == expected.tolist()
