"""Damaged and hostile files: only documented errors come out. `tools/fuzz.py --cases 24000` is the long form."""

from __future__ import annotations

import json
import random
import struct
import threading
from pathlib import Path
from typing import Any

import fuzz
import pytest
from fuzz_base import Base
from fuzz_kinds import KINDS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mutation import damage_bytes, damage_json
from test_architectures import TINY_CONFIG

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.checkpoint.tensor_files import read_header
from tritonmoe.errors import MAX_MESSAGE, CheckpointError, ConfigError, TokenizerError, TritonMoeError
from tritonmoe.memory import MAX_BYTES
from tritonmoe.model.weights import weight_bytes
from tritonmoe.text.generation_config import sampling_defaults

FILES = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([1 << 31, 1 << 63, 10**400])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


def test_five_hundred_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind, in a process of limited memory: 500 cases, half of them directed."""
    output = tmp_path / "fuzz.json"
    code = fuzz.main(["--cases", "507", "--seed", "7", "--output", str(output)])
    assert code == 0, capsys.readouterr().out
    found = json.loads(output.read_text())
    assert found["cases"] == 507
    assert set(found["kinds"]) == set(KINDS)
    for kind in found["kinds"].values():
        assert kind["accepted"] + sum(kind["refused"].values()) == kind["cases"] == 39
    assert sum(kind["accepted"] for kind in found["kinds"].values()) > 10  # some damage does no harm


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"changing"}))  # those are damaged while they are read
def test_undamaged_files_are_accepted(kind: str, base: Base, tmp_path: Path) -> None:
    """Else a fuzzer would only see its own mistakes."""
    base.lay_out(tmp_path, base.sharded if kind == "index" else base.model)
    (tmp_path / "trace.npz").write_bytes(base.trace.read_bytes())
    KINDS[kind].use(base, tmp_path, random.Random(0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.make(tmp_path_factory.mktemp("base"))


def test_what_the_fuzzer_calls_a_finding(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(error: BaseException) -> str:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setitem(KINDS, "config", fuzz.KINDS["config"].__class__(KINDS["config"].damage, fail))
        return fuzz.run_case(base, "config", 0, 0)

    assert outcome(ConfigError("x")) == "ConfigError"
    for error in (ValueError("x"), MemoryError(), RecursionError(), KeyboardInterrupt(), SystemExit(), ConfigError("")):
        assert outcome(error).startswith(fuzz.FINDING)
    line = ConfigError("x")
    line.args = ("two\nlines",)
    assert outcome(line).startswith(fuzz.FINDING)


def misbehave(base: Base, kind: str, number: int, seed: int) -> str:
    """One case that does not end, and one that wants too much memory."""
    if number == 1:
        hang.acquire()
    elif number == 2:
        try:
            bytearray(1 << 30)
        except MemoryError:
            return fuzz.FINDING + "MemoryError"
    return fuzz.ACCEPTED


hang = threading.Lock()
hang.acquire()


def test_processes_that_die_are_findings() -> None:
    """The cases before and behind them are still counted."""
    options = fuzz.build_parser().parse_args(["--case-seconds", "2", "--memory-mib", "256", "--processes", "1"])
    tally = fuzz.fuzz([("config", i) for i in range(4)], options, misbehave)["config"]
    assert (tally.cases, tally.accepted) == (4, 2)
    assert [finding.partition(" ")[0] for finding in sorted(tally.findings)] == ["1:", "2:"]
    assert "Timeout" in tally.findings[0]


def test_cases_repeat(base: Base, tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        KINDS["header"].make(base, tmp_path / name, 1000, random.Random("0 header 1000"))
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1] != (base.model / "model.safetensors").read_bytes()
    chance = random.Random(0)
    assert len({damage_json(chance, TINY_CONFIG) for _ in range(50)}) > 40
    assert len({damage_bytes(chance, b"abcdefgh" * 100) for _ in range(50)}) > 40


# Any value in place of any other, which hypothesis makes as small as it can


def refusals(error: type[TritonMoeError], caught: TritonMoeError) -> None:
    assert type(caught) is error or (not isinstance(caught, error) and isinstance(caught, TritonMoeError))
    assert str(caught).isprintable()
    assert 0 < len(str(caught)) <= MAX_MESSAGE


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(st.sampled_from([*TINY_CONFIG, "rope_scaling", "layer_types", "text_config"]), VALUES, max_size=3)
)
@example({"num_hidden_layers": 4096, "num_experts": 1 << 16, "hidden_size": (1 << 31) - 2, "head_dim": 2})
def test_any_value_in_a_config(changes: dict[str, Any]) -> None:
    import torch

    try:
        spec = parse_config({**TINY_CONFIG, **changes})
        assert 0 < weight_bytes(spec, torch.bfloat16) < 1 << 80
        assert 0 < spec.max_position < 1 << 31
    except TritonMoeError as caught:
        refusals(ConfigError, caught)


@settings(FILES)
@given(VALUES, st.sampled_from(["dtype", "shape", "data_offsets", "entry", "__metadata__", "header"]))
def test_any_value_in_a_header(tmp_path: Path, value: Any, place: str) -> None:
    entry: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header: Any = {"a": entry}
    if place in entry:
        entry[place] = value
    elif place == "header":
        header = value
    else:
        header["a" if place == "entry" else place] = value
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    try:
        found = read_header(tmp_path / "x")
        assert sum(entry.num_bytes for entry in found) == 8 < MAX_BYTES
    except CheckpointError as caught:
        refusals(CheckpointError, caught)


@settings(FILES)
@given(
    st.dictionaries(
        st.sampled_from(["temperature", "top_k", "top_p", "min_p", "do_sample", "repetition_penalty"]), VALUES
    )
)
def test_any_value_in_a_generation_config(tmp_path: Path, values: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    try:
        for name, value in sampling_defaults(tmp_path).items():
            assert value == values[name] or (name, values[name], value) == ("top_k", -1, 0)
    except TokenizerError as caught:
        refusals(TokenizerError, caught)
