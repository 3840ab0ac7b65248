"""The offload benchmark: whole runs on a tiny model, targets by hand, and links that wait."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import bench_offload
import pytest
import torch
from bench import link, random_text
from bench.random_text import RandomText
from bench.random_weights import random_weights
from conftest import TINY_CONFIG

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.errors import InputError
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import ExpertStore
from tritonmoe.model.weights import ModelWeights
from tritonmoe.offload.copy_engine import Priority
from tritonmoe.offload.counters import Counters
from tritonmoe.offload.policy import PRESETS

CPU = torch.device("cpu")
CONFIG = {**TINY_CONFIG, "num_hidden_layers": 3, "num_experts": 8}


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between rows it takes half a second in a process that has run tests, and only frees a GPU's memory."""
    monkeypatch.setattr(bench_offload, "release", lambda device: None)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(config_file: Path, *options: object) -> dict[str, Any]:
    output = config_file.parent / "out" / "offload.json"
    common = ["--random-weights", config_file, "--dtype", "float32", "--device", "cpu", "--output", output]
    given = [*common, "--steps", 3, "--seconds", "0.01", *options]
    assert bench_offload.main([str(option) for option in given]) == 0
    return json.loads(output.read_text())


def test_default_sweep(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every policy at every size, 4 % of 24 experts being no slot."""
    result = run(config_file, "--context", 9)
    rows = result["rows"]
    assert [(row["policy"].split(":")[0], row["size"]) for row in rows] == [
        (policy, size) for size in bench_offload.SIZES if size != "4%" for policy in bench_offload.POLICIES
    ]
    assert [row["slots"] for row in rows[::3]] == [2, 2, 6, 12, 24]
    assert {row["case"] for row in result["skipped"]} == {f"{policy}:4%" for policy in bench_offload.POLICIES}
    assert "no slot" in result["skipped"][0]["reason"]
    for row in rows:
        moved, rate = row["bytes_per_token"], row["link_bytes_per_s"]
        assert rate == result["link_bytes_per_s"]
        assert row["emulated_gbps"] is None
        assert row["planner"] == "host"  # as on every CPU
        assert row["steps"] == 3
        assert row["floor_ms"] == pytest.approx(1e3 * moved / rate)
        assert row["ratio"] == pytest.approx(row["tpot_ms"]["median"] / row["target_ms"])
        assert row["ttft_ratio"] == pytest.approx(row["ttft_ms"] / row["ttft_bound_ms"])
        assert row["ttft_bound_ms"] >= row["ttft_resident_ms"]
        assert row["ttft_ms"] == sorted(row["ttft_runs_ms"])[1]
    on_demand = rows[0]
    assert on_demand["bytes_per_token"] == 3 * 2 * result["record_bytes"]  # layers x experts of a token
    assert on_demand["target_ms"] == pytest.approx(on_demand["floor_ms"] + on_demand["resident_ms"])
    assert rows[1]["target_ms"] == max(rows[1]["floor_ms"], rows[1]["resident_ms"])
    assert "saved" not in on_demand
    assert rows[1]["saved"] == pytest.approx(1 - rows[1]["tpot_ms"]["median"] / on_demand["tpot_ms"]["median"])
    # Slots for all: what is fetched still is what no token before it has wanted.
    assert rows[-1]["counters"]["hit_rate"]["all"] > 0.8
    assert rows[-1]["bytes_per_token"] < on_demand["bytes_per_token"] / 3
    assert str(config_file.parent) not in json.dumps(result)
    assert capsys.readouterr().out.count("resident") == len(rows)


def test_contexts_and_links(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the first context and link only the fewest slots, and not both at once; a long prompt is not run."""
    monkeypatch.setattr(bench_offload, "LINK_RECORDS", 12)
    result = run(
        config_file, "--context", "5,200", "--link-gbps", "own,0.01", "--sweep-once", "--prefill-up-to", 100,
        "--cases", "on-demand:minimum,on-demand:50%",
    )  # fmt: skip
    rows = result["rows"]
    assert [(row["context"], row["emulated_gbps"], row["size"]) for row in rows] == [
        (5, None, "minimum"), (5, None, "50%"), (5, 0.01, "minimum"), (200, None, "minimum"),
    ]  # fmt: skip
    assert [row["ttft_ms"] is None for row in rows] == [False] * 3 + [True]
    slow = rows[2]
    assert 0.002e9 < slow["link_bytes_per_s"] <= 0.01e9
    assert slow["tpot_ms"]["median"] > 1e3 * slow["bytes_per_token"] / 0.01e9


def test_steps_planned_on_the_device(config_file: Path) -> None:
    """Where the slots suffice for it; waits that emulate a link need the host."""
    options = ["--plan-on", "device", "--context", 5, "--link-gbps", "own,0.05", "--cases"]
    rows = run(config_file, *options, "on-demand:minimum,exact:minimum,exact:1")["rows"]
    assert [row["planner"] for row in rows] == ["device", "device", "host"] + 3 * ["host"]


def test_counts_of_the_timed_steps_alone() -> None:
    before = Counters(2, 100)
    before.tokens, before.wait_s = 3, 0.5
    before.layers[1].demand, before.layers[1].gate_mass = 6, 1.5
    now = copy.deepcopy(before)
    now.tokens, now.wait_s = 5, 0.75
    now.layers[1].demand, now.layers[1].gate_mass, now.layers[0].hits = 10, 2.0, 1
    found = bench_offload.since(before, now)
    assert (found.tokens, found.wait_s) == (2, 0.25)
    assert (found.layers[1].demand, found.layers[1].gate_mass, found.layers[0].hits) == (4, 0.5, 1)
    assert found.summary()["bytes_per_token"]["total"] == 200
    now.wait_s = None  # the device has fetched, which nobody can time
    assert bench_offload.since(before, now).wait_s is None


def test_rows_not_begun_in_time(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(bench_offload.time, "perf_counter", lambda: float(next(clock)))
    result = run(config_file, "--cases", "on-demand:minimum", "--time-limit", 5, "--context", 3)
    assert result["rows"] == []
    assert result["skipped"][0]["reason"] == "not begun within --time-limit 5"


def test_no_resident_times_where_the_experts_do_not_fit(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> ModelWeights:
        """Those of all experts; beside a store, which is the last argument, the others fit."""
        if not isinstance(arguments[-1], ExpertStore):
            raise InputError("out of memory: the weights")
        return random_weights(*arguments)

    monkeypatch.setattr(bench_offload, "random_weights", refuse)
    row = run(config_file, "--cases", "on-demand:minimum", "--context", 3)["rows"][0]
    assert row["floor_ms"] > 0
    assert [row[key] for key in ("resident_ms", "target_ms", "ratio", "ttft_bound_ms", "ttft_ratio")] == [None] * 5


def test_targets_by_hand() -> None:
    """Fetching on demand adds up, prefetching hides the shorter part behind the longer one."""
    plain = bench_offload.step_target(PRESETS["on-demand"], 80.0, 67.0, 3.0)
    assert (plain["target_ms"], plain["ratio"]) == (70.0, 80.0 / 70.0)
    ahead = bench_offload.step_target(PRESETS["exact"], 80.0, 67.0, 3.0)
    assert (ahead["target_ms"], ahead["ratio"]) == (67.0, 80.0 / 67.0)
    shared = {"size": "minimum", "context": 128, "emulated_gbps": None}
    rows: list[dict[str, Any]] = [
        {"policy": "on-demand: …", "tpot_ms": {"median": 80.0}, **plain, **shared},
        {"policy": "exact: …", "tpot_ms": {"median": 78.0}, **ahead, **shared},
        {"policy": "exact: …", "tpot_ms": {"median": 78.0}, **ahead, **shared, "context": 1024},
    ]
    for row in rows:
        bench_offload.add_saving(row, rows)
    assert rows[1]["saved"] == pytest.approx(0.025)
    assert rows[1]["saved_bound"] == pytest.approx(3 / 70)
    assert "saved" not in rows[0]
    assert "saved" not in rows[2]


def test_steps_run_on_the_tokens_drawn_beforehand() -> None:
    """What a step samples is not the next one's input, and it stands behind all tokens before it."""
    spec = parse_config(CONFIG)
    decoder = Decoder(spec, random_weights(spec, CPU, torch.float32))
    text = RandomText(decoder, 7, 4)
    text.prefill_ms(7)
    sampled: list[int] = []
    tokens = text._runner.tokens
    text._runner.tokens = lambda: sampled.append(tokens()[0]) or [sampled[-1]]  # type: ignore[method-assign]
    text.begin()
    text.warm_up(0.0)
    assert len(text.step_ms(60.0)) == 4
    cache = random_text.allocate_cache(decoder, 1, 30)
    ids = torch.tensor([text._tokens[: 7 + len(sampled)]])
    logits = decoder.prefill(ids, 0, cache, last_only=False)[0]
    assert sampled == logits[7:].argmax(-1).tolist()
    assert len(sampled) == random_text.LEAST_STEPS // 2 + 4


def test_a_link_no_faster_than_the_own_is_refused() -> None:
    records = [torch.zeros(1 << 16)] * 3
    own = link.own_link(records, CPU)
    with pytest.raises(InputError, match=r"^--link-gbps 1e\+06 cannot be emulated on a link of .*; use a lower one"):
        link.emulated_link(records, CPU, 1e6, own)


def test_slow_copies_are_whole_and_never_closer_than_asked() -> None:
    records = [torch.full((100,), float(i)) for i in range(6)]
    slow = link.emulated_link(records, CPU, 400 / 0.004 / 1e9, link.Link(1e12))
    assert slow.bytes_per_s <= 400 / 0.004
    slots, landed = torch.zeros(6, 100), []
    copies = slow.make_copies(slots, lambda slot, _epoch: landed.append(slot))
    began = time.perf_counter()
    for i, record in enumerate(records):
        copies.submit(record, i, i, Priority.DEMAND)
    copies.drain()
    assert time.perf_counter() - began >= 6 * 0.004
    assert torch.equal(slots, torch.stack(records))
    copies.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link-gbps", "fast"], "'fast' is not a list of numbers and own"),
        (["--link-gbps", "25,-1"], "'25,-1' has a rate that is not above 0"),
        (["--context", "0"], "argument --context: '0' is not a positive integer"),
        (["--cases", "resident:minimum"], "--cases: the resident step is measured with every row; leave it out"),
        (["--cases", "all:minimum"], "--policy 'all' is not known"),
        (["--cases", "exact:few"], "--expert-slots 'few' is not understood"),
    ],
)
def test_bad_arguments_give_one_line(
    options: list[str], message: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(config_file, *options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (config_file.parent / "out").exists()


def test_records_of_fewer_bits(config_file: Path) -> None:
    case = ["--cases", "exact:minimum", "--context", 9]
    plain, packed = run(config_file, *case), run(config_file, *case, "--expert-dtype", "mxfp4", "--dense-dtype", "int8")
    assert (packed["expert_dtype"], packed["dense_dtype"]) == ("mxfp4", "int8")
    assert plain["record_bytes"] == 3 * 32 * 16 * 4
    assert packed["record_bytes"] == 512 + 256 + 256 + 256  # codes and scales of gate_up and of down, aligned
    (row,) = packed["rows"]
    assert row["bytes_per_token"] % packed["record_bytes"] == 0
