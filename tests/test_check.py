"""Steps that --check runs a second time: nothing changes where all is right, and what is wrong is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_offload import DEVICE, POLICIES, Offloaded, make_spec, noise

from tritonmoe import Engine, SamplingParams, chat, console
from tritonmoe.errors import EXIT_FAULT, CheckError, InputError
from tritonmoe.generation.check import StepCheck, make_check, read_option
from tritonmoe.generation.decode_runner import DecodeRunner
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.offload.copy_engine import Copy, ThreadCopies
from tritonmoe.offload.policy import minimum_slots, resolve
from tritonmoe.placement.loader import Placement

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
ALL_SLOTS = 32
CHECKED = {name: POLICIES[name] for name in ("on-demand", "quasi-hidden", "lookahead")} | {"pf": resolve("router-pf")}
PLANNERS = pytest.mark.parametrize("plan_on_device", [False, True], ids=["host", "device"])


def prepared(num_slots: int, policy: str = "on-demand", plan_on_device: bool = False, **options: Any) -> Offloaded:
    spec = make_spec("qwen3")
    offloaded = Offloaded(spec, noise(spec), num_slots, CHECKED[policy], **options)
    offloaded.store.pin()
    offloaded.experts._plan_on_device = plan_on_device
    return offloaded


def steps(decoder: Decoder, check: StepCheck | None, count: int, batch: int = 1) -> Iterator[list[int]]:
    """The tokens of decode steps, and at the end what the cache holds."""
    cache = KVCache.allocate(decoder.spec, batch, 40, DEVICE, torch.float32)
    for tensor in cache.keys + cache.values:
        tensor.zero_()
    runner = DecodeRunner(decoder, cache, decoder.spec.vocab_size, check=check)
    decoder.experts.begin()
    runner.begin([[row + 1] for row in range(batch)], [SamplingParams()] * batch)
    for _ in range(count):
        runner.launch()
        yield runner.tokens()
    decoder.cache = cache  # type: ignore[attr-defined]


@PLANNERS
@pytest.mark.parametrize("policy", CHECKED)
@pytest.mark.parametrize("batch", [1, 3])
def test_checking_changes_nothing(policy: str, batch: int, plan_on_device: bool) -> None:
    """Tokens and every bit of the cache, with the fewest slots that run a batch of three."""
    found = []
    num_slots = minimum_slots(make_spec("qwen3"), CHECKED[policy], batch)
    for is_checked in (False, True):
        offloaded = prepared(num_slots, policy, plan_on_device)
        check = make_check("slots:1", offloaded.decoder) if is_checked else None
        tokens = list(steps(offloaded.decoder, check, 5, batch))
        found.append((tokens, offloaded.decoder.cache))  # type: ignore[attr-defined]
        assert offloaded.experts.needs_host != plan_on_device
        if check is not None:
            assert check.line().startswith("checked 5 of 5 decode steps, ")
            assert "every bit equal" in check.line()
    assert found[0][0] == found[1][0]
    for plain, checked in zip(*(cache.keys + cache.values for _, cache in found), strict=True):
        assert torch.equal(plain, checked)


@PLANNERS
def test_a_byte_of_a_slot_is_named(plan_on_device: bool) -> None:
    offloaded = prepared(ALL_SLOTS, plan_on_device=plan_on_device)
    experts = offloaded.experts
    run = steps(offloaded.decoder, make_check("slots:1", offloaded.decoder), 12)
    for _ in range(3):
        next(run)
    planner = experts.pool if experts._device is None else experts._device
    slots = planner.resident(2)
    for slot in slots[slots >= 0]:
        experts._buffer[int(slot)].view(torch.uint8)[77] ^= 1
    with pytest.raises(CheckError) as caught:
        list(run)
    named = re.fullmatch(
        r"--check: decode step (\d+), expert (\d+) of layer 2: slot (\d+) is not its record, from byte 77 on",
        str(caught.value),
    )
    assert named, caught.value
    assert slots[int(named[2])] == int(named[3])
    assert int(named[1]) >= 4
    assert caught.value.exit_code == EXIT_FAULT


@PLANNERS
def test_two_experts_that_changed_places_are_named(plan_on_device: bool) -> None:
    """The map says one thing, the slots another: every layer's experts are mapped to their neighbours' slots."""
    offloaded = prepared(ALL_SLOTS, plan_on_device=plan_on_device)
    experts = offloaded.experts
    run = steps(offloaded.decoder, make_check("slots:1", offloaded.decoder), 12)
    for _ in range(3):
        next(run)
    if experts._device is None:
        experts.pool.slot_of[...] = experts.pool.slot_of[:, ::-1].copy()
        experts.pool.slot_of[experts.pool.slot_of < 0] = 0
    else:
        state = experts._device.state
        state.slot_of.copy_(state.slot_of.flip(1).clamp(min=0))
    with pytest.raises(CheckError, match=r"expert \d+ of layer 0: slot \d+ is not its record"):
        list(run)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="copies by a thread are the CPU's")
def test_a_slot_that_was_used_again_is_told_by_its_outputs() -> None:
    """With the fewest slots no byte of an early layer is left to compare."""

    class Forgetful(ThreadCopies):
        calls = 0

        def _copy(self, copy: Copy) -> None:
            self.calls += 1
            if self.calls != 2 * 4 * 4 + 2 + 1:  # the first of the second layer in the fifth step
                super()._copy(copy)

    offloaded = prepared(2, make_copies=Forgetful)
    with pytest.raises(CheckError, match=r"decode step 5, expert \d of layer 1: its output for sequence 0 is not that"):
        list(steps(offloaded.decoder, make_check("slots:1", offloaded.decoder), 12))


def test_only_a_sample_is_checked() -> None:
    offloaded = prepared(ALL_SLOTS)
    check = make_check("slots:4", offloaded.decoder)
    list(steps(offloaded.decoder, check, 10))
    assert check.line().startswith("checked 3 of 10 decode steps, 24 experts")


@pytest.mark.parametrize("is_resident", [False, True])
def test_the_reference_agrees_and_tells_a_wrong_expert(is_resident: bool) -> None:
    spec = make_spec("gpt_oss")
    weights = noise(spec)
    decoder = Decoder(spec, weights) if is_resident else Offloaded(spec, weights, 6, POLICIES["quasi-hidden"]).decoder
    check = make_check("reference:1", decoder)
    list(steps(decoder, check, 6, batch=2))
    assert "relative error at most" in check.line()
    ops = decoder.experts._ops

    def louder(*arguments: Any, **options: Any) -> torch.Tensor:
        out = ops.expert_gemm(*arguments, **options)
        return out.mul_(1.1)

    decoder.experts._ops = ops._replace(expert_gemm=louder)
    with pytest.raises(
        CheckError, match=r"step 7, expert \d of layer 0: relative error 0\.1\d* against float32, of 0\.001"
    ):
        list(steps(decoder, check, 1, batch=2))


@pytest.mark.parametrize(
    ("check", "policy", "message"),
    [
        ("slots", None, "here all are resident; add --policy exact"),
        ("slots", resolve("on-demand", miss_tolerance=0.1), "needs --miss-tolerance 0"),
        ("reference", resolve("router-pf"), "use --execute routed, or --check slots"),
    ],
)
def test_nothing_to_compare(check: str, policy: Any, message: str) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    decoder = Decoder(spec, weights) if policy is None else Offloaded(spec, weights, 8, policy).decoder
    with pytest.raises(InputError, match=message):
        make_check(check, decoder)


@pytest.mark.parametrize("text", ["", "slots:", "slots:0", "slot", "reference:x", "slots:1000000", "slots:٣"])
def test_options_that_are_not_understood(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"--check {text!r} is not understood")):
        read_option(text)


def test_the_engine_checks_every_kind_of_call(pristine_folder: Path) -> None:
    placement = Placement(policy="exact", expert_slots="4")
    engine = Engine.from_pretrained(pristine_folder, placement=placement, check="slots:2", device="cpu")
    plain = Engine.from_pretrained(pristine_folder, device="cpu")
    params = SamplingParams(max_new_tokens=12, temperature=1.0)
    for prompts in (["Hello"], ["Hello", "you"]):
        ours, theirs = (e.generate_batch(prompts, params) for e in (engine, plain))
        assert [row.token_ids for row in ours] == [row.token_ids for row in theirs]
    session = engine.session()
    assert "".join(engine.stream("Hello", params, session)) == plain.generate("Hello", params).text
    assert re.match(r"checked 17 of 33 decode steps, \d+ experts: every bit equal", engine.report()[-1])
    engine.close()


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_difference_ends_the_command(
    is_chat: bool, pristine_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a chat, and on a line of its own."""
    engine, params = Engine.from_pretrained(pristine_folder, device="cpu"), SamplingParams()

    def differing(*_arguments: Any) -> Iterator[str]:
        yield "half"
        raise CheckError("layer 0")

    def run() -> None:
        if is_chat:
            chat._turn(engine, params, engine.session(), [], "hello")
        else:
            console._stream(engine, engine.stream("hello", params))

    monkeypatch.setattr(engine, "stream", differing)
    with pytest.raises(CheckError):
        run()
    assert capsys.readouterr().out == "half\n"
