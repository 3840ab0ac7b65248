"""Faults end in one clear line and leave the engine, and the files, as they were; threads may share an engine.

The scenarios are those of tools/inject_faults.py, whose long form has many more cases.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import inject_faults
import pytest
import soak
import torch
from test_device_scheduler import generate, on_device
from test_offload import DEVICE, POLICIES, Offloaded, make_spec, noise

from tritonmoe import Engine, SamplingParams, waiting
from tritonmoe.errors import InputError, TransferError
from tritonmoe.model.decoder import Decoder
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import minimum_slots
from tritonmoe.placement.loader import Placement

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
ON_CPU = pytest.mark.skipif(DEVICE.type == "cuda", reason="faults of the CPU's path")
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
CASES = {
    "refused allocations": 96, "faulty copies": 9, "read errors": 10, "failed resizes": 16, "signals": 4,
    "memory limits": 2, "full disks": 5, "two processes": 1,
}  # fmt: skip


@ON_CPU
@pytest.mark.parametrize("name", inject_faults.SCENARIOS)
def test_scenario(name: str, pristine_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        found = inject_faults.SCENARIOS[name](pristine_folder, CASES[name], 0)
    assert found.problems == []
    assert found.cases >= 0.8 * CASES[name], "few of the faults were injected"


@ON_CPU
def test_a_scenario_sees_what_it_looks_for(pristine_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check on the checks: a loader that cannot tell a changed file."""
    monkeypatch.setattr("tritonmoe.checkpoint.tensor_files.Checkpoint.require_unchanged", lambda self: None)
    assert inject_faults.read_errors(pristine_folder, 5, 0).problems


@ON_CPU
def test_a_copy_that_fails_is_never_resident(pristine_folder: Path) -> None:
    """Also one that nobody waits for: a foretold record."""
    spec = make_spec("qwen3")
    offloaded = Offloaded(spec, noise(spec), 16, POLICIES["quasi-hidden"])
    copies, landed = offloaded.experts.copies, []
    copies.landed = lambda slot, epoch: landed.append(slot)
    copies.submit(torch.zeros(3), 1, 1, inject_faults.copy_engine.Priority.PREFETCH)  # of another size
    with pytest.raises(TransferError, match=r"copying slot 1 failed: .*size"):
        copies.drain()
    assert landed == []


def test_slots_that_cannot_be_had(caplog: pytest.LogCaptureFixture) -> None:
    """On the device's path, too: back to as many as there were, and the line says so."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1)
    for offloaded in (
        Offloaded(spec, weights, 8, POLICIES["quasi-hidden"]),
        on_device(spec, weights, 8, POLICIES["quasi-hidden"]),
    ):
        with inject_faults.slots_that_fit(8, interrupted=False):
            offloaded.experts.resize(30)
        assert offloaded.experts.pool.num_slots == 8
        assert caplog.messages[-1] == "out of memory: 30 expert slots could not be had; there are 8"
        assert torch.equal(generate(offloaded.decoder, 1), expected)
        offloaded.experts.resize(9)
        assert offloaded.experts.pool.num_slots == 9
        assert torch.equal(generate(offloaded.decoder, 1), expected)
        offloaded.experts.settle()
        offloaded.experts.scheduler.check_integrity()
        offloaded.experts.close()


def test_waits_end_and_say_what_for() -> None:
    looks = []
    with pytest.raises(TransferError, match=r"^the copy of x did not end within 0\.01 s \(not arrived: y\); does the"):
        waiting.await_until(lambda: False, "the copy of x", 0.01, lambda: looks.append(1), lambda: " (not arrived: y)")
    assert looks
    ready = iter([False, False, True])
    waiting.await_until(lambda: next(ready), "a step", 10.0)


def test_a_step_that_does_not_end_says_what_has_not_arrived() -> None:
    spec = make_spec("qwen3")
    offloaded = on_device(spec, noise(spec), minimum_slots(spec, POLICIES["quasi-hidden"]), POLICIES["quasi-hidden"])
    generate(offloaded.decoder, 1)
    assert offloaded.experts.outstanding() == " (not arrived: nothing)"
    device = offloaded.experts._device
    assert device is not None
    slot = int(device.resident(3).max())
    expert = device.resident(3).tolist().index(slot)
    device.state.landed[slot] = 0
    assert offloaded.experts.outstanding() == f" (not arrived: expert {expert} of layer 3)"


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Their results, made at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    return results


PROMPTS = ["Hello", "A longer one than that", "x", "and another"]


@pytest.mark.parametrize("policy", ["resident", "exact", "router-pf"])
def test_threads_share_an_engine(policy: str, pristine_folder: Path) -> None:
    """Calls of several threads, and streams that take turns by the token, draw what they draw alone."""
    slots = None if policy == "resident" else "5"
    engine = Engine.from_pretrained(pristine_folder, placement=Placement(policy=policy, expert_slots=slots))
    alone = [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
    calls: list[Callable[[], Any]] = [lambda p=p: engine.generate(p, PARAMS).token_ids for p in PROMPTS]

    def streamed(prompt: str) -> list[int]:
        stream = engine.stream(prompt, PARAMS, engine.session())
        for _ in stream:
            time.sleep(0)
        return stream.result().token_ids

    calls += [lambda p=p: streamed(p) for p in PROMPTS]
    calls.append(lambda: engine.score([5, 6, 7, 8]))
    results = in_threads(*calls)
    assert results[:4] == alone
    assert results[4:8] == alone
    assert results[8] == engine.score([5, 6, 7, 8])
    engine.close()


def test_two_engines_in_one_process(pristine_folder: Path) -> None:
    engines = [
        Engine.from_pretrained(pristine_folder, placement=Placement(policy=policy, expert_slots=slots))
        for policy, slots in (("exact", "4"), ("on-demand", "2"))
    ]
    alone = [engines[0].generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
    for prompt, expected in zip(PROMPTS, alone, strict=True):  # alternately
        assert [engine.generate(prompt, PARAMS).token_ids for engine in engines] == [expected] * 2
    together = in_threads(
        *(lambda e=engine: [e.generate(prompt, PARAMS).token_ids for prompt in PROMPTS] for engine in engines)
    )
    assert together == [alone, alone]
    for engine in engines:
        engine.close()


def test_two_streams_of_one_conversation_are_refused(pristine_folder: Path) -> None:
    engine = Engine.from_pretrained(pristine_folder)
    session = engine.session()
    first = iter(engine.stream("Hello", PARAMS, session))
    next(first)
    with pytest.raises(InputError, match="another stream continues this conversation"):
        list(engine.stream("Hello", PARAMS, session))
    next(first)  # and goes on
    first.close()  # type: ignore[attr-defined]
    assert "".join(engine.stream("Hello", PARAMS, session)) == engine.generate("Hello", PARAMS).text


def test_an_engine_that_nobody_holds_frees_its_experts(pristine_folder: Path) -> None:
    """At once: pinned memory and slots that wait for the collector are missing when the next model is loaded."""
    gc.collect()
    gc.disable()
    try:
        engine = Engine.from_pretrained(pristine_folder, placement=Placement(policy="exact", expert_slots="4"))
        engine.generate("Hello", PARAMS)
        experts = engine.decoder.experts
        assert isinstance(experts, OffloadedExperts)
        held = [weakref.ref(experts), weakref.ref(experts._store), weakref.ref(experts.copies)]
        del engine, experts
        assert [found() for found in held] == [None, None, None]
    finally:
        gc.enable()


def test_a_closed_engine_says_so(pristine_folder: Path) -> None:
    engine = Engine.from_pretrained(pristine_folder, placement=Placement(policy="exact", expert_slots="4"))
    engine.generate("Hello", PARAMS)
    engine.close()
    engine.close()
    with pytest.raises(InputError, match="this engine is closed"):
        engine.generate("Hello", PARAMS)


@ON_CPU
def test_a_short_soak(pristine_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The long form draws 20,000 tokens; docs/reliability.md"""
    output = tmp_path / "soak.json"
    options = ["--model", str(pristine_folder), "--tokens", "250", "--output", str(output), "--slots", "3"]
    assert soak.main([*options, "--policy", "exact", "--policy", "router-pf"]) == 0
    results = inject_faults.json.loads(output.read_text())["results"]
    assert [result["problems"] for result in results] == [[], []]
    assert all(result["compared_tokens"] == result["tokens"] >= 250 for result in results)


@ON_CPU
def test_a_soak_sees_another_token_and_growth(pristine_folder: Path) -> None:
    options = soak.argparse.Namespace(
        model=pristine_folder, device="cpu", dtype="auto", max_context=None, slots=3, tokens=20, seed=0
    )
    engine, reference = (soak.load(options, "on-demand", "3") for _ in range(2))
    generate_batch = reference.generate_batch
    reference.generate_batch = lambda prompts, _params: generate_batch(prompts, PARAMS)  # type: ignore[method-assign]
    outcome = soak.soak(engine, reference, "on-demand", 20, 0, time.perf_counter() + 100)
    assert any("is another one" in problem for problem in outcome.problems)
    assert not any("the next time" in problem for problem in outcome.problems), "the engine itself repeats itself"
    calls = itertools.count()
    generate = engine.generate_batch
    engine.generate_batch = lambda prompts, params: generate(prompts, replace(params, seed=next(calls)))  # type: ignore[method-assign]
    outcome = soak.soak(engine, reference, "on-demand", 200, 0, time.perf_counter() + 100)
    assert any("other tokens the next time" in problem for problem in outcome.problems)
    soak.growth([[0, 1], [0, 1], [1, 10]], "host memory", 8, outcome)
    assert outcome.problems[-1].startswith("host memory grew")
