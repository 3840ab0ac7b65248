"""The engine on a GPU: captured steps draw what uncaptured ones do, and offloaded experts give the resident bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tritonmoe.decode_runner import DecodeRunner
from tritonmoe.engine import Engine
from tritonmoe.errors import InputError
from tritonmoe.kv_cache import KVCache
from tritonmoe.placement import Placement
from tritonmoe.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = ["Once upon a time", "Add 734 and 589.", "The old man went down to the sea and", "In the garden"]
GREEDY = SamplingParams(max_new_tokens=120)
SAMPLED = SamplingParams(max_new_tokens=120, temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(device="cuda", dtype="bfloat16")


def draw(
    engine: Engine, prompts: list[str], params: SamplingParams, capture: bool, runner: DecodeRunner | None = None
) -> list[list[int]]:
    """The tokens of every step [steps][B], through `runner` or a fresh one."""
    decoder, steps = engine.decoder, params.max_new_tokens
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    if runner is None:
        cache = KVCache.allocate(decoder.spec, len(ids), 256, decoder.device, decoder.dtype)
        runner = DecodeRunner(decoder, cache, engine.tokenizer.vocab_size, capture)
    logits = [
        decoder.prefill(torch.tensor([row], device="cuda"), 0, runner.cache.rows(i, 1)) for i, row in enumerate(ids)
    ]
    runner.begin(ids, [dataclasses.replace(params, seed=params.seed + i) for i in range(len(ids))])
    runner.sample(torch.cat(logits))
    drawn = [runner.tokens()]
    runner.launch()
    for _ in range(steps - 2):  # one step ahead, as the engine does
        runner.launch()
        drawn.append(runner.tokens())
    return [*drawn, runner.tokens()]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_captured_steps_draw_the_same_tokens(engine: Engine, batch: int, params: SamplingParams) -> None:
    expected = draw(engine, PROMPTS[:batch], params, capture=False)
    assert draw(engine, PROMPTS[:batch], params, capture=True) == expected


def test_a_runner_serves_one_request_after_another(engine: Engine) -> None:
    decoder = engine.decoder
    cache = KVCache.allocate(decoder.spec, 1, 256, decoder.device, decoder.dtype)
    runner = DecodeRunner(decoder, cache, engine.tokenizer.vocab_size)
    for prompt, params in zip(PROMPTS, (GREEDY, SAMPLED, GREEDY, SAMPLED), strict=True):
        assert draw(engine, [prompt], params, True, runner) == draw(engine, [prompt], params, False)


def test_bits_do_not_depend_on_the_capacity_of_the_cache(engine: Engine) -> None:
    decoder, ids = engine.decoder, torch.arange(5, 45, device="cuda")[None]
    found = []
    for capacity in (64, 64, 100, 1000):
        cache = KVCache.allocate(decoder.spec, 1, capacity, decoder.device, decoder.dtype)
        decoder.prefill(ids, 0, cache)
        found.append(decoder.decode(torch.tensor([7], device="cuda"), torch.tensor([40], device="cuda"), cache))
    assert all(torch.equal(found[0], logits) for logits in found[1:])


def test_float32_tokens_are_those_of_the_cpu() -> None:
    params = SamplingParams(max_new_tokens=60)
    on_gpu = Engine.from_pretrained(device="cuda", dtype="float32")
    on_cpu = Engine.from_pretrained(device="cpu")
    for prompt in PROMPTS:
        assert on_gpu.generate(prompt, params).token_ids == on_cpu.generate(prompt, params).token_ids


def test_stream_session_and_batch(engine: Engine) -> None:
    session = engine.session()
    first = engine.stream(PROMPTS[0], GREEDY, session)
    assert "".join(first) == engine.generate(PROMPTS[0], GREEDY).text
    grown = engine.tokenizer.encode(PROMPTS[0]) + first.result().token_ids + engine.tokenizer.encode(" And then")
    second = engine.stream(grown, SamplingParams(max_new_tokens=300), session)
    "".join(second)
    assert second.result().reused_tokens > 100
    assert len(second.result().token_ids) > 0
    abandoned = iter(engine.stream(PROMPTS[1], GREEDY, session))
    next(abandoned)
    del abandoned
    again = engine.stream(PROMPTS[0], GREEDY, session)
    assert "".join(again) == engine.generate(PROMPTS[0], GREEDY).text
    results = engine.generate_batch([PROMPTS[i % 4] for i in range(17)], SamplingParams(max_new_tokens=8))
    assert all(len(result.token_ids) > 0 for result in results)


def test_logits_that_are_not_finite(engine: Engine) -> None:
    norm = engine.decoder.weights.final_norm
    kept = norm.clone()
    norm.fill_(float("nan"))
    try:
        with pytest.raises(InputError, match="not finite"):
            engine.generate(PROMPTS[0], GREEDY)
    finally:
        norm.copy_(kept)
    assert engine.generate(PROMPTS[0], GREEDY).text


def test_memory_does_not_grow(engine: Engine) -> None:
    engine.generate(PROMPTS[0], GREEDY)
    engine.generate(PROMPTS[0], SAMPLED)
    before = torch.cuda.memory_allocated()
    for i in range(6):
        engine.generate(PROMPTS[i % 4], SAMPLED if i % 2 else GREEDY)
    assert torch.cuda.memory_allocated() <= before


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
