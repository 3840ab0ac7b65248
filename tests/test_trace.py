"""Traces: what is recorded is what happened, files are whole or absent, damaged ones are refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_generate import ENVIRONMENT, refused
from test_generate import run as run_command
from test_offload import POLICIES, Offloaded, generate, make_spec, noise

from tritonmoe.engine import Engine
from tritonmoe.errors import InputError
from tritonmoe.generate import main
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.model.decoder import Decoder
from tritonmoe.offload.copy_engine import Copy, CopyEngine
from tritonmoe.offload.policy import Policy, resolve
from tritonmoe.offload.trace import Trace, TraceRecorder, read_trace
from tritonmoe.placement.loader import Placement


class InstantCopies(CopyEngine):
    """Copies that are complete once started: what is found in flight depends on no clock."""

    def _start(self, copy: Copy) -> None:
        self._slots[copy.slot].copy_(copy.record)

    def _is_done(self, copy: Copy) -> bool:
        return True

    def _await(self, copy: Copy) -> None:
        pass

    _finish = _await

    def waited_s(self) -> float:
        return 0.0

    def _quiesce(self) -> None:
        pass


def record(
    path: Path,
    policy: Policy,
    num_slots: int,
    spec_name: str = "qwen3",
    batch: int = 1,
    generations: int = 1,
    **options: Any,
) -> tuple[Offloaded, Trace]:
    """A traced run of a tiny model with instant copies, and the trace that is read back."""
    spec = make_spec(spec_name)
    offloaded = Offloaded(spec, noise(spec), num_slots, policy, InstantCopies)
    with TraceRecorder(path).attach(offloaded.decoder):
        for _ in range(generations):
            offloaded.experts.begin()
            generate(offloaded.decoder, batch, **options)
    return offloaded, read_trace(path)


@pytest.mark.parametrize("name", ["qwen3", "dense-layer", "gpt_oss"])
@pytest.mark.parametrize("batch", [1, 3])
def test_read_back_is_what_the_hooks_saw(tmp_path: Path, name: str, batch: int) -> None:
    spec = make_spec(name)
    offloaded = Offloaded(spec, noise(spec), 9, resolve("exact", lookahead=2, candidates=1), InstantCopies)
    routes: list[tuple[int, torch.Tensor]] = []
    guesses: list[dict[int, torch.Tensor]] = []
    decoder, guess = offloaded.decoder, offloaded.experts._foretell

    def watch(layer: int, routed: Any) -> Any:
        found = guess(layer, routed)
        guesses.append({later: output.ids.clone() for later, output in found.items()})
        return found

    offloaded.experts._foretell = watch  # type: ignore[method-assign]
    decoder.hooks.on_route = lambda layer, ids: routes.append((layer, ids.clone()))
    with TraceRecorder(tmp_path / "t.npz").attach(decoder):
        generate(decoder, batch, steps=3)
    assert decoder.hooks.on_layer is None
    trace = read_trace(tmp_path / "t.npz")
    assert len(routes) == len(trace.runs) == 4 * len(trace.header.moe_layers)
    decoded = iter(guesses)
    for run, (layer, ids) in zip(trace.runs, routes, strict=True):
        assert (run.layer, run.num_tokens) == (layer, len(ids))
        first = list(dict.fromkeys(ids.ravel().tolist()))
        assert run.wanted == (sorted(first) if run.is_prefill else first)
        if not run.is_prefill:
            assert run.ids.tolist() == ids.tolist()
            assert run.weights.shape == ids.shape
            foretold = next(decoded)
            assert {later: rows.tolist() for later, rows in run.foretold.items()} == {
                later: rows.tolist() for later, rows in foretold.items()
            }
        assert run.hits + run.late + run.demand == len(run.wanted)
    experts = offloaded.experts
    for is_prefill, counters in ((True, experts.prefill_counters), (False, experts.counters)):
        for layer in trace.header.moe_layers:
            runs = [run for run in trace.runs if run.layer == layer and run.is_prefill == is_prefill]
            assert sum(run.hits for run in runs) == counters.layers[layer].hits
            assert sum(run.late for run in runs) == counters.layers[layer].late
            assert sum(run.demand for run in runs) == counters.layers[layer].demand
    began = [run.began_s for run in trace.runs]
    assert began == sorted(began)
    assert sum(run.wait_s for run in trace.runs) == pytest.approx(experts.counters.wait_s)


def test_gate_weights_and_header(tmp_path: Path) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    plain, path = Decoder(spec, weights), tmp_path / "t.npz"
    seen: list[np.ndarray] = []
    plain.hooks.on_layer = lambda layer, is_prefill, ids, gates, foretold: seen.append(gates.copy())
    generate(plain, 2, steps=2)
    offloaded = Offloaded(spec, weights, 5, POLICIES["lfu"], InstantCopies)
    with TraceRecorder(path).attach(offloaded.decoder):
        generate(offloaded.decoder, 2, steps=2)
    trace = read_trace(path)
    for run, gates in zip(trace.runs, seen, strict=True):
        assert run.weights.tolist() == ([] if run.is_prefill else gates.tolist())
    header = trace.header
    assert (header.experts, header.num_experts_per_tok, header.num_slots) == ((8,) * 4, 2, 5)
    assert header.policy == POLICIES["lfu"]
    assert header.record_bytes == offloaded.store.layout.num_bytes
    assert header.began_empty
    assert header.model.startswith("sha256:")
    with TraceRecorder(path).attach(offloaded.decoder):
        generate(offloaded.decoder, 2, steps=1)
    assert not read_trace(path).header.began_empty


def test_resident_experts_have_routes_only(tmp_path: Path) -> None:
    spec = make_spec("dense-layer")
    decoder = Decoder(spec, noise(spec))
    with TraceRecorder(tmp_path / "t.npz").attach(decoder):
        assert not decoder.experts.is_capturable
        for _ in range(2):
            generate(decoder, 2, steps=2)
    assert decoder.experts.is_capturable
    trace = read_trace(tmp_path / "t.npz")
    assert [step[0].generation for step in trace.steps] == [0, 0, 0, 1, 1, 1]
    assert trace.header.num_slots == 0
    assert trace.header.policy.is_resident
    assert trace.header.experts == (8, 0, 8, 8)
    assert all(run.foretold == {} and run.hits == run.late == run.demand == 0 for run in trace.runs)
    assert all(run.weights.sum() > 0 for run in trace.runs if not run.is_prefill)


def test_with_the_engine(tmp_path: Path, pristine_folder: Path) -> None:
    engine = Engine.from_pretrained(pristine_folder, device="cpu", placement=Placement("on-demand", expert_slots="3"))
    with TraceRecorder(tmp_path / "t.npz").attach(engine.decoder):
        for _ in range(2):
            engine.generate("Hello", SamplingParams(max_new_tokens=4))
    trace = read_trace(tmp_path / "t.npz")
    assert [step[0].generation for step in trace.steps] == [0] * 4 + [1] * 4
    assert [step[0].is_prefill for step in trace.steps] == [True, False, False, False] * 2
    assert sum(run.wait_s for run in trace.runs) > 0


def test_records_of_fewer_bits_have_their_own_size(tmp_path: Path, pristine_folder: Path) -> None:
    """For experts in slots and for resident ones, of which a trace says what they would cost to fetch."""
    for placement in (Placement("on-demand", expert_slots="3", expert_dtype="int8"), Placement(expert_dtype="int8")):
        engine = Engine.from_pretrained(pristine_folder, device="cpu", placement=placement)
        with TraceRecorder(tmp_path / "t.npz").attach(engine.decoder):
            engine.generate("Hello", SamplingParams(max_new_tokens=2))
        # H 32, I 16: 1,024 and 512 bytes of codes, each with two bytes of scale a row, which fill up to 256.
        assert read_trace(tmp_path / "t.npz").header.record_bytes == 1024 + 256 + 512 + 256


def test_only_whole_steps_of_an_interrupted_run(tmp_path: Path) -> None:
    spec = make_spec("qwen3")
    decoder = Decoder(spec, noise(spec))
    recorder = TraceRecorder(tmp_path / "t.npz").attach(decoder)
    calls = [0]

    def interrupt(layer: int, ids: torch.Tensor, out: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 11:
            raise KeyboardInterrupt

    decoder.hooks.on_experts = interrupt
    with pytest.raises(KeyboardInterrupt):
        generate(decoder, 1)
    recorder.detach()
    recorder.save()
    trace = read_trace(tmp_path / "t.npz")
    assert (len(trace.steps), trace.header.dropped_steps) == (2, 1)


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    spec = make_spec("qwen3")
    decoder = Decoder(spec, noise(spec))
    (tmp_path / "old.npz").write_bytes(b"old")

    def failing(path: Path) -> None:
        with TraceRecorder(path).attach(decoder):
            generate(decoder, 1, steps=1)
            raise RuntimeError

    for name in ("new.npz", "old.npz"):
        with pytest.raises(RuntimeError):
            failing(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old.npz"]
    assert (tmp_path / "old.npz").read_bytes() == b"old"
    assert decoder.hooks.on_layer is None


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("qwen3")
    decoder, path = Decoder(spec, noise(spec)), tmp_path / "t.npz"
    path.write_bytes(b"old")
    recorder = TraceRecorder(path).attach(decoder)
    generate(decoder, 1, steps=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        recorder.save()
    assert [found.name for found in tmp_path.iterdir()] == ["t.npz"]
    assert path.read_bytes() == b"old"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    spec = make_spec("qwen3")
    decoder = Decoder(spec, noise(spec))
    (tmp_path / "link.npz").symlink_to(tmp_path / "t.npz")
    with TraceRecorder(tmp_path / "link.npz").attach(decoder):
        generate(decoder, 1, steps=1)
    assert (tmp_path / "link.npz").is_symlink()
    assert len(read_trace(tmp_path / "t.npz").steps) == 2


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    record(path, POLICIES["lookahead"], 9, steps=3)
    return path


def rewrite(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    with np.load(source) as file:
        arrays = dict(file)
    change(arrays)
    np.savez_compressed(target, **arrays)
    return target


def header_with(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        facts = {**json.loads(str(arrays["header"])), **values}
        arrays["header"] = np.array(json.dumps({name: value for name, value in facts.items() if value is not None}))

    return change


def assign(name: str, index: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays[name].__setitem__(index, value)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other format": (header_with(format="x"), "its format is not"),
    "no model": (header_with(model=None), "model"),
    "unknown field": (header_with(more=1), "more"),
    "unknown policy": (header_with(policy={"name": "x"}), "--policy 'x' is not known"),
    "no experts": (header_with(experts=[0, 0, 0, 0]), "a size is out of range"),
    "no list of experts": (header_with(experts=8), "not iterable"),
    "fewer experts": (header_with(experts=[4] * 4), "an expert that the model does not have"),
    "other layers": (header_with(experts=[8, 0, 8, 8]), "has not every layer once"),
    "no header": (lambda arrays: arrays.pop("header"), "'header' is missing"),
    "no ids": (lambda arrays: arrays.pop("ids"), "'ids' is missing"),
    "short ids": (lambda arrays: arrays.update(ids=arrays["ids"][:-1]), "more or fewer ids"),
    "short column": (lambda arrays: arrays.update(wait_s=arrays["wait_s"][:-1]), "columns of different lengths"),
    "half a step": (assign("layer", 3, 0), "has not every layer once"),
    "NaN": (assign("weights", 0, np.nan), "a gate weight is not finite"),
    "size of no integer": (header_with(num_slots=2.5), "a size is no integer"),
    "size that is true": (header_with(num_slots=True), "a size is no integer"),
    "huge records": (header_with(record_bytes=10**400), "a size is out of range"),
    "steps in parts": (assign("is_prefill", -1, True), "is_prefill differs between the layers of a step"),
    "no token": (assign("num_tokens", slice(None), 0), "a step without a token"),
    "foretold by a prompt": (assign("foretold_run", 0, 0), "something foretold by a prompt"),
    "negative size": (assign("num_ids", 1, -1), "more or fewer ids"),
    "tokens": (assign("num_tokens", slice(None), 7), "reshape"),
    "tokens of one layer": (assign("num_tokens", -1, 3), "num_tokens differs between the layers of a step"),
    "foretold by nobody": (assign("foretold_run", 0, 999), "something foretold by no run"),
    "foretold backwards": (assign("foretold_layer", 0, 0), "something foretold for no later layer"),
    "objects": (lambda arrays: arrays.update(ids=np.array([{}])), "not a trace, or a damaged one"),
    "header of numbers": (lambda arrays: arrays.update(header=np.array(3)), "its format is not"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_damaged_contents(trace_file: Path, tmp_path: Path, name: str) -> None:
    change, message = CHANGES[name]
    path = rewrite(trace_file, tmp_path / "t.npz", change)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_damaged_bytes(trace_file: Path, tmp_path: Path) -> None:
    """Cut anywhere or with any byte changed, a file is refused, or reads as it was."""
    data, path = trace_file.read_bytes(), tmp_path / "t.npz"
    damaged = [data[: len(data) * i // 16] for i in range(16)]
    for at in range(0, len(data), 61):
        damaged.append(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
    expected, refusals = repr(read_trace(trace_file)), 0
    for found in damaged:
        path.write_bytes(found)
        try:
            assert repr(read_trace(path)) == expected
        except InputError:
            refusals += 1
    assert refusals > len(damaged) // 2


def test_files_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path)
    (tmp_path / "text").write_text("Once upon a time")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("header", "x")
    for name in ("text", "array.npy", "other.zip"):
        with pytest.raises(InputError, match="not a trace, or a damaged one"):
            read_trace(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "message"), [("absent/t.npz", "No such file"), (".", "not a regular file"), ("x" * 300, "too long")]
)
def test_refused_before_the_model_is_loaded(
    tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Engine, "from_pretrained", load)
    line = refused(capsys, "Hello", "--trace", str(tmp_path / name))
    assert "the trace cannot be written" in line
    assert message in line
    assert refused(capsys, "Hello", "--trace", "/dev/null").endswith("not a regular file")
    assert Path("/dev/null").is_char_device()
    assert list(tmp_path.iterdir()) == []


def test_command_line_with_resident_experts(tmp_path: Path, pristine_folder: Path) -> None:
    path = tmp_path / "t.npz"
    options = ["--model", str(pristine_folder), "--prompt", "Hello", "--prompt", "World", "--max-new-tokens", "5"]
    assert main([*options, "--device", "cpu", "--trace", str(path)]) == 0
    trace = read_trace(path)
    assert [step[0].num_tokens for step in trace.steps] == [5, 5, 2, 2, 2, 2]
    assert run_command(*options).stdout == run_command(*options, "--trace", str(path)).stdout


def test_ctrl_c_leaves_a_whole_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    options = ["Once upon a time", "--json", "--max-new-tokens", "900", "--temperature", "1", "--trace", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tritonmoe.generate", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stderr is not None
    assert b"loaded" in process.stderr.readline()
    assert list(tmp_path.iterdir()) == []
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    left = list(tmp_path.iterdir())  # nothing, where the interrupt came before the generation
    assert left in ([], [path])
    if left:
        assert read_trace(path).header.model_type == "qwen3_moe"
