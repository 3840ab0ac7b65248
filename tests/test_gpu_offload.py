"""The engine on a GPU with experts in host memory draws the tokens of the resident one."""

from __future__ import annotations

import pytest
import torch

from tritonmoe.engine import Engine
from tritonmoe.placement import Placement
from tritonmoe.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = ["Once upon a time", "Add 734 and 589.", "The old man went down to the sea and", "In the garden"]
GREEDY = SamplingParams(max_new_tokens=120)
SAMPLED = SamplingParams(max_new_tokens=120, temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(device="cuda", dtype="bfloat16")


@pytest.mark.parametrize("policy", ["on-demand", "exact"])
@pytest.mark.parametrize("slots", ["8", "12%", "100%"])
def test_offloaded_tokens_are_the_resident_ones(engine: Engine, policy: str, slots: str) -> None:
    placement = Placement(policy=policy, expert_slots=slots)
    offloaded = Engine.from_pretrained(device="cuda", dtype="bfloat16", placement=placement)
    for params in (GREEDY, SAMPLED):
        assert offloaded.generate(PROMPTS[0], params).token_ids == engine.generate(PROMPTS[0], params).token_ids
    rows = [PROMPTS[0], PROMPTS[2]]
    expected = [result.token_ids for result in engine.generate_batch(rows, GREEDY)]
    assert [result.token_ids for result in offloaded.generate_batch(rows, GREEDY)] == expected
    assert offloaded.decoder.experts.report()
