"""The decoder on a GPU against transformers: float32 exactly as on the CPU, bfloat16 no worse than its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_parity import PROMPT_LENGTH, TOLERANCE, load, oracle, prompt, run
from tiny_checkpoints import TINY, save

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Routing flips where two experts score alike dominate a single prompt's error: with 16 prompts the ratio of the
# errors scattered from 0.75 to 1.35 on a CPU, with 96 from 0.88 to 1.0.
NUM_PROMPTS = 96
BF16_ERROR_RATIO = 1.5


@pytest.mark.parametrize("name", TINY)
def test_float32_equals_transformers(name: str, tmp_path: Path) -> None:
    model = oracle(name)
    decoder = load(save(model, tmp_path), "cuda")
    with torch.no_grad():
        expected = model.cuda()(prompt().cuda()).logits
    assert (run(decoder, prompt(), [PROMPT_LENGTH]) - expected).abs().max() < TOLERANCE
    assert (run(decoder, prompt(), [16, 11, *[1] * 13]) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", TINY)
def test_bfloat16_is_as_close_as_transformers(name: str, tmp_path: Path, record_property) -> None:
    model = oracle(name)
    decoder = load(save(model, tmp_path), "cuda", torch.bfloat16)
    ids = prompt(batch=NUM_PROMPTS).cuda()
    with torch.no_grad():
        model = model.cuda()
        expected = model(ids).logits
        theirs = model.to(torch.bfloat16)(ids).logits.float()
    ours = run(decoder, ids, [PROMPT_LENGTH])
    our_error, their_error = ((x - expected).square().mean().sqrt().item() for x in (ours, theirs))
    record_property("rms_error_ratio", our_error / their_error)
    print(f"\n{name}: rms error {our_error:.4g}, transformers {their_error:.4g}, ratio {our_error / their_error:.3f}")
    assert our_error <= BF16_ERROR_RATIO * their_error
