"""The engine on a GPU with experts in host memory draws the tokens of the resident one, captured or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tritonmoe.engine import Engine
from tritonmoe.generation.decode_runner import DecodeRunner
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.generation.session import allocate_cache
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.trace import TraceRecorder, read_trace
from tritonmoe.placement.loader import Placement

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


@pytest.mark.parametrize(("form", "dense"), [("mxfp4", "fp8"), ("int4", "int8"), ("int8", "published"), ("fp8", "fp8")])
def test_forms_of_fewer_bits_wherever_weights_are(form: str, dense: str) -> None:
    """Experts in slots, and the embedding in main memory where the head does not need it."""

    def load(policy: str, slots: str | None, embedding: str) -> Engine:
        placement = Placement(policy, expert_slots=slots, expert_dtype=form, dense_dtype=dense, embedding=embedding)
        return Engine.from_pretrained(device="cuda", dtype="bfloat16", max_context=512, placement=placement)

    resident = load("resident", None, "device")
    expected = [resident.generate(prompt, GREEDY).token_ids for prompt in PROMPTS[:2]]
    can_move = dense != "published" or not resident.decoder.spec.tied_head
    for slots in ("8", "12%", "100%"):
        offloaded = load("exact", slots, "host" if can_move else "device")
        assert [offloaded.generate(prompt, GREEDY).token_ids for prompt in PROMPTS[:2]] == expected
        offloaded.close()


def offloaded_engine(slots: str = "12%", policy: str = "exact", **overrides: object) -> Engine:
    placement = Placement(policy=policy, expert_slots=slots, overrides=overrides)
    return Engine.from_pretrained(device="cuda", dtype="bfloat16", max_context=512, placement=placement)


def uncaptured(engine: Engine, batch: int = 1) -> None:
    """Have the engine run every step launch by launch."""
    cache = allocate_cache(engine.decoder, batch, engine.max_context)
    engine._idle[batch] = DecodeRunner(engine.decoder, cache, engine.tokenizer.vocab_size, capture=False)


@pytest.mark.parametrize("plan_on_device", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        {"predictor": "residual", "lookahead": 3, "candidates": 2},
        {"predictor": "previous-token"},
        {"eviction": "lfu"},
        {"policy": "router-pf"},
        {"policy": "router-pf", "gate": "routed"},
    ],
)
def test_captured_steps_draw_what_uncaptured_ones_do(overrides: dict[str, object], plan_on_device: bool) -> None:
    overrides = dict(overrides)
    engine = offloaded_engine(policy=str(overrides.pop("policy", "exact")), **overrides)
    experts = engine.decoder.experts
    assert isinstance(experts, OffloadedExperts)
    experts._plan_on_device = plan_on_device
    captured = engine.generate(PROMPTS[0], GREEDY).token_ids
    counted = engine.decoder.experts.report()
    uncaptured(engine)
    assert engine.generate(PROMPTS[0], GREEDY).token_ids == captured
    assert [line.split()[:2] for line in engine.decoder.experts.report()] == [line.split()[:2] for line in counted]
    engine.close()


def test_a_resized_pool_is_captured_anew(engine: Engine) -> None:
    offloaded = offloaded_engine()
    experts = offloaded.decoder.experts
    assert isinstance(experts, OffloadedExperts)
    expected = engine.generate(PROMPTS[0], GREEDY).token_ids
    for num_slots in (experts.pool.num_slots, 20, 64):
        if num_slots != experts.pool.num_slots:
            experts.resize(num_slots)
        assert offloaded.generate(PROMPTS[0], GREEDY).token_ids == expected
        experts.scheduler.check_integrity()
        moved = experts.counters.moved_records() + experts.prefill_counters.moved_records()
        experts.settle()
        assert moved >= experts.copies.num_copies
    offloaded.close()


@pytest.mark.parametrize("name", ["refute", "plan", "finish", "prefetch"])
def test_interrupted_between_two_pieces(engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded = offloaded_engine()
    experts = offloaded.decoder.experts
    assert isinstance(experts, OffloadedExperts)
    experts._plan_on_device = False
    expected = engine.generate(PROMPTS[0], GREEDY).token_ids
    offloaded.generate(PROMPTS[0], GREEDY)
    for after in (3, 40, 101):
        calls = 0
        wrapped = getattr(type(experts.scheduler), name)

        def interrupt(*arguments: object, wrapped=wrapped, after=after, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == after:
                raise KeyboardInterrupt
            return wrapped(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(type(experts.scheduler), name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                offloaded.generate(PROMPTS[0], GREEDY)
        assert offloaded.generate(PROMPTS[0], GREEDY).token_ids == expected
        experts.scheduler.check_integrity()
    offloaded.close()


def test_a_trace_is_recorded_between_captured_generations(engine: Engine, tmp_path: Path) -> None:
    offloaded = offloaded_engine()
    expected = engine.generate(PROMPTS[0], GREEDY).token_ids
    assert offloaded.generate(PROMPTS[0], GREEDY).token_ids == expected
    offloaded._idle.clear()  # what is captured calls no hooks
    with TraceRecorder(tmp_path / "trace.npz").attach(offloaded.decoder):
        assert offloaded.generate(PROMPTS[0], GREEDY).token_ids == expected
    assert len(read_trace(tmp_path / "trace.npz").runs) > len(expected)
    assert offloaded.generate(PROMPTS[0], GREEDY).token_ids == expected
    offloaded.close()
