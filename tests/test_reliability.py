"""Situations in which engines of this kind were seen to fail, beyond those that other tests are named after.

docs/reliability.md lists all of them, each with the test that holds it.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from conftest import TINY_CONFIG
from test_architectures import parse
from test_offload import DEVICE, POLICIES, SPECS, Offloaded, make_spec, noise

from tritonmoe.engine import Engine
from tritonmoe.generation.decode_runner import DecodeRunner
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.generation.session import prefill_chunk
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.placement.loader import Placement

TESTS = Path(__file__).resolve().parent
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []  # wherever it runs, on what is there


@pytest.mark.parametrize("policy", ["on-demand", "quasi-hidden", "lookahead"])
def test_rows_of_a_batch_with_no_expert_in_common(policy: str) -> None:
    """Four rows want eight experts of each layer at once, through one, two or three slots."""
    spec = make_spec("qwen3")
    weights, batch = noise(spec), 4
    directions = torch.eye(spec.hidden_size, device=DEVICE)[:batch]
    weights.embedding[:batch] = 100 * directions  # so large that no layer turns it
    for layer in weights.layers:
        assert layer.moe is not None
        layer.post_norm.fill_(1.0)
        layer.moe.router.mul_(0.01)
        layer.moe.router += directions.repeat_interleave(2, 0)  # experts 2b and 2b + 1 for row b
    routed: list[torch.Tensor] = []

    def run(decoder: Decoder) -> torch.Tensor:
        cache = KVCache.allocate(spec, batch, 32, DEVICE, torch.float32)
        tokens = torch.arange(batch, device=DEVICE)
        logits = [decoder.prefill(tokens[:, None].repeat(1, 5), 0, cache)]
        for position in range(5, 30):
            at = torch.full((batch,), position, device=DEVICE)
            logits.append(decoder.decode(tokens, at, cache, position + 1))
        return torch.stack(logits)

    resident = Decoder(spec, weights)
    resident.hooks.on_route = lambda layer, ids: routed.append(ids.clone())
    expected = run(resident)
    assert all(set(ids[-1].tolist()) == {6, 7} and len(ids.unique()) == 8 for ids in routed)
    for num_slots in (1, 2, 3):
        offloaded = Offloaded(spec, weights, num_slots, POLICIES[policy])
        assert torch.equal(run(offloaded.decoder), expected)
        offloaded.check()


def test_two_thousand_tokens_then_five_hundred_steps_with_the_fewest_slots() -> None:
    spec = parse(**{**SPECS["qwen3"], "num_hidden_layers": 2, "max_position_embeddings": 4096})
    weights, length, steps, chunk = noise(spec), 2000, 500, prefill_chunk(DEVICE)
    prompt = torch.randint(spec.vocab_size, (1, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(decoder: Decoder) -> torch.Tensor:
        cache = KVCache.allocate(spec, 1, length + steps, DEVICE, torch.float32)
        for start in range(0, length, chunk):
            last = decoder.prefill(prompt[:, start : start + chunk], start, cache)
        logits = [last]
        for position in range(length, length + steps):
            at = torch.tensor([position], device=DEVICE)
            logits.append(decoder.decode(logits[-1].argmax(-1), at, cache, position + 1))
        return torch.stack(logits)

    offloaded = Offloaded(spec, weights, 4, POLICIES["quasi-hidden"])
    assert torch.equal(run(offloaded.decoder), run(Decoder(spec, weights)))
    offloaded.check()


@pytest.fixture
def long_folder(model_folder: Path) -> Path:
    """The tiny model with room for long prompts."""
    config = {**TINY_CONFIG, "max_position_embeddings": 16384, "eos_token_id": None}
    (model_folder / "config.json").write_text(json.dumps(config))
    (model_folder / "tokenizer_config.json").write_text("{}")
    return model_folder


def test_prompts_and_steps_that_take_turns_allocate_once(long_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One runner with its cache and, on a GPU, its graphs serves all calls; two thousand steps there."""
    engine = Engine.from_pretrained(long_folder, device=DEVICE.type, placement=Placement("exact", expert_slots="50%"))
    made: list[DecodeRunner] = []
    original = DecodeRunner.__init__

    def counted(self: DecodeRunner, *arguments: object, **options: object) -> None:
        made.append(self)
        original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeRunner, "__init__", counted)
    params = SamplingParams(max_new_tokens=500 if DEVICE.type == "cuda" else 100)
    results = [engine.generate("Once upon a time", params).token_ids for _ in range(2)]
    used = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    results += [engine.generate("Once upon a time", params).token_ids for _ in range(2)]
    assert len(made) == 1
    assert len(results[0]) == params.max_new_tokens
    assert results == [results[0]] * 4
    assert used == (torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0)
    engine.close()


def test_a_long_prompt_after_a_short_one_in_divided_memory(long_folder: Path) -> None:
    """Slots take what is left when caches of the longest context and the largest chunk have their room."""
    options = {"device": DEVICE.type, "dtype": "float32"}
    engine = Engine.from_pretrained(long_folder, placement=Placement("exact", gpu_memory="1GiB"), **options)  # type: ignore[arg-type]
    resident = Engine.from_pretrained(long_folder, placement=Placement("resident"), **options)  # type: ignore[arg-type]
    length = 8000 if DEVICE.type == "cuda" else 2500
    ids = torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    params = SamplingParams(max_new_tokens=4)
    for prompt in (ids[:8], ids, ids[:8]):
        assert engine.generate(prompt, params).token_ids == resident.generate(prompt, params).token_ids
    if DEVICE.type == "cuda":
        assert torch.cuda.max_memory_allocated() < 2 << 30
    engine.close()


def test_the_oracle_is_never_offloaded() -> None:
    """transformers with experts on another device was seen to be wrong itself, so no test measures against that."""
    for path in TESTS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "device_map" in text else ():
            assert not (isinstance(node, ast.keyword) and node.arg == "device_map"), path
