"""The replay gives the counters of the run that was recorded, and nothing beats the cache that knows the future."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay as tool
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import run as run_command
from test_trace import record

from tritonmoe.offload.policy import Policy, resolve
from tritonmoe.offload.trace import LayerRun, Trace, TraceHeader, read_trace

RECORDED = {
    "on-demand": (resolve("on-demand"), "none"),
    "lfu": (resolve("on-demand", eviction="lfu"), "none"),
    "residual": (resolve("exact", predictor="residual"), "recorded"),
    "lookahead": (resolve("exact", lookahead=3, candidates=2), "recorded"),
    "previous-token": (resolve("exact", predictor="previous-token", lookahead=2), "previous-token"),
    "router-pf": (resolve("router-pf"), "recorded"),
    "router-pf, gate routed": (resolve("router-pf", gate="routed"), "recorded"),
    "tolerant": (resolve("exact", miss_tolerance=0.45), "recorded"),
}


def as_recorded(trace: Trace, predict: str) -> tool.Setting:
    policy = trace.header.policy
    return tool.Setting(
        trace.header.num_slots, policy.eviction, predict, policy.lookahead, miss_tolerance=policy.miss_tolerance
    )


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("num_slots", [1, 3, 7, 16])
def test_counters_of_the_recorded_run(tmp_path: Path, name: str, batch: int, num_slots: int) -> None:
    """Every layer of every step finds what it found, and all counters end as they did; two generations."""
    policy, predict = RECORDED[name]
    offloaded, trace = record(tmp_path / "t.npz", policy, num_slots, batch=batch, generations=2, steps=20)
    result = tool.replay(trace, as_recorded(trace, predict))
    assert result.found == [(run.hits, run.late, run.demand) for run in trace.runs]
    skipped = {"left_out", "left_out_mass"}
    for mine, theirs in (
        (result.counters, offloaded.experts.counters),
        (result.prefill_counters, offloaded.experts.prefill_counters),
    ):
        assert mine.tokens == theirs.tokens
        for one, other in zip(mine.layers, theirs.layers, strict=True):
            for name, count in asdict(other).items():
                assert name in skipped or getattr(one, name) == pytest.approx(count), name


@pytest.mark.parametrize("name", ["dense-layer", "gpt_oss"])
def test_other_models(tmp_path: Path, name: str) -> None:
    _, trace = record(tmp_path / "t.npz", resolve("exact"), 6, name, steps=20)
    result = tool.replay(trace, as_recorded(trace, "recorded"))
    assert result.found == [(run.hits, run.late, run.demand) for run in trace.runs]


def test_the_recorded_guesses_are_cut_to_what_is_asked_for(tmp_path: Path) -> None:
    """A run with fewer candidates and a shorter lookahead foretells the first of what this one foretold."""
    _, rich = record(tmp_path / "rich.npz", resolve("exact", lookahead=3, candidates=2), 7, steps=20)
    _, poor = record(tmp_path / "poor.npz", resolve("exact", candidates=1), 7, steps=20)
    setting = tool.Setting(7, predict="recorded", lookahead=1, candidates=1)
    assert tool.replay(rich, setting).found == [(run.hits, run.late, run.demand) for run in poor.runs]


def test_a_trace_is_good_for_other_slots(tmp_path: Path) -> None:
    """Routing does not depend on slots: the replay of one run with another's slots is that other run."""
    _, one = record(tmp_path / "one.npz", resolve("exact"), 4, steps=20)
    _, other = record(tmp_path / "other.npz", resolve("on-demand", eviction="lfu"), 11, steps=20)
    result = tool.replay(one, tool.Setting(11, "lfu", "none"))
    assert result.found == [(run.hits, run.late, run.demand) for run in other.runs]


def test_an_oracle_foretells_everything(tmp_path: Path) -> None:
    _, trace = record(tmp_path / "t.npz", resolve("on-demand"), 8, steps=20)
    result = tool.replay(trace, tool.Setting(8, predict="oracle"))
    assert result.total.recall == 1.0
    assert result.total.prefetched_wasted == 0
    first = sum(run.demand for run in trace.runs if run.layer == 0 and not run.is_prefill)
    assert result.total.demand <= first


def test_exposed_time_by_hand() -> None:
    """Two layers, an expert each, never the same twice in one slot's reach: every copy is waited for, or hidden."""
    trace = make_trace([[[0], [0]], [[1], [1]], [[2], [2]]], num_experts=3)
    on_demand, oracle = tool.Setting(2), tool.Setting(2, predict="oracle")
    slow, fast = tool.Clock(record_s=3.0, compute_s=1.0), tool.Clock(record_s=1.0, compute_s=4.0)
    assert tool.replay(trace, on_demand, slow).wait_s == pytest.approx(6 * 3.0)
    assert tool.replay(trace, on_demand, fast).wait_s == pytest.approx(6 * 1.0)
    # The second layer's copy follows the first's on the link, and a second of computation hides a second of it.
    assert tool.replay(trace, oracle, slow).wait_s == pytest.approx(3 * (3.0 + 2.0))
    assert tool.replay(trace, oracle, fast).wait_s == pytest.approx(3 * 1.0)


def make_trace(steps: list[list[list[int]]], num_experts: int, num_slots: int = 1) -> Trace:
    """By decode step and layer, the experts of one token."""
    width = max(len(ids) for step in steps for ids in step)
    header = TraceHeader(
        "0", "sha256:0", "toy", (num_experts,) * len(steps[0]), width, 256, "cpu", "float32",
        Policy("on-demand"), num_slots, True,
    )  # fmt: skip

    def run(layer: int, ids: list[int]) -> LayerRun:
        weights = np.full((1, len(ids)), 1 / len(ids), dtype=np.float32)
        return LayerRun(layer, False, 0, 1, np.array([ids], dtype=np.int32), weights, {}, 0, 0, 0, 0.0, 0.0)

    return Trace(header, [[run(layer, ids) for layer, ids in enumerate(step)] for step in steps])


def fewest_by_search(accesses: list[frozenset[tuple[int, int]]], num_slots: int) -> int:
    """The fewest fetches over every choice of what to keep after each access, by exhaustion."""
    costs: dict[frozenset[tuple[int, int]], int] = {frozenset(): 0}
    for wanted in accesses:
        after: dict[frozenset[tuple[int, int]], int] = {}
        for kept, cost in costs.items():
            union, paid = kept | wanted, cost + len(wanted - kept)
            size = min(num_slots, len(union))
            for subset in itertools.combinations(sorted(union), size):
                key = frozenset(subset)
                after[key] = min(paid, after.get(key, paid))
        costs = after
    return min(costs.values())


ROUTES = st.lists(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True), min_size=2, max_size=2),
    min_size=1,
    max_size=7,
)


@settings(deadline=None, max_examples=60)
@given(ROUTES, st.integers(1, 4))
def test_best_is_the_fewest(steps: list[list[list[int]]], num_slots: int) -> None:
    trace = make_trace(steps, num_experts=4)
    accesses = [frozenset((run.layer, expert) for expert in run.wanted) for run in trace.runs]
    assert tool.best_fetches(trace, num_slots) == fewest_by_search(accesses, num_slots)


@settings(deadline=None, max_examples=60)
@given(
    ROUTES, st.integers(1, 6), st.sampled_from(["lru", "lfu"]), st.sampled_from(["none", "previous-token", "oracle"])
)
def test_nothing_beats_the_best(steps: list[list[list[int]]], num_slots: int, eviction: str, predict: str) -> None:
    for clock in (tool.Clock(), tool.Clock(1.0, 0.5)):
        result = tool.replay(make_trace(steps, num_experts=4), tool.Setting(num_slots, eviction, predict), clock)
        assert result.best_fetches is not None
        assert result.best_fetches <= result.moved
        assert result.total.hits + result.total.late + result.total.demand == result.total.routed


@pytest.mark.parametrize("name", ["on-demand", "residual", "lookahead", "previous-token"])
@pytest.mark.parametrize("num_slots", [2, 5, 9, 20, 32])
def test_nothing_beats_the_best_after_a_prompt(tmp_path: Path, name: str, num_slots: int) -> None:
    policy, predict = RECORDED[name]
    _, trace = record(tmp_path / "t.npz", policy, num_slots, batch=2, generations=2, prompt_length=20, steps=20)
    result = tool.replay(trace, as_recorded(trace, predict))
    assert result.best_fetches is not None
    assert result.best_fetches <= result.moved


def test_more_slots_never_need_more_fetches(tmp_path: Path) -> None:
    _, trace = record(tmp_path / "t.npz", resolve("on-demand"), 4, steps=30)
    fetches = [tool.best_fetches(trace, slots) for slots in range(1, 33)]
    assert fetches == sorted(fetches, reverse=True)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (("--policy", "on-demand", "--expert-slots", "25%"), 1),
        (("--policy", "exact", "--predict", "residual", "--expert-slots", "25%", "--candidates", "2"), 1),
    ],
)
def test_record_and_replay_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], rows: int
) -> None:
    """The embedded model, with the copies of a thread: what was foretold is late or not as the clock would have it."""
    path, output = tmp_path / "t.npz", tmp_path / "replay.json"
    done = run_command("Add 734", "--device", "cpu", "--max-new-tokens", "24", *options, "--trace", str(path))
    assert done.returncode == 0, done.stderr
    assert [found.name for found in tmp_path.iterdir()] == ["t.npz"]
    assert tool.main([str(path), "--output", str(output)]) == 0
    trace, result = read_trace(path), json.loads(output.read_text())
    assert {"commit", "command"} <= set(result["provenance"])
    assert len(result["rows"]) == rows
    row = result["rows"][0]
    assert row["num_slots"] == trace.header.num_slots == 128
    decoded = [run for run in trace.runs if not run.is_prefill]
    assert row["total"]["routed"] == sum(run.hits + run.late + run.demand for run in decoded)
    if not trace.header.policy.uses_default_vectors and trace.header.policy.predictor == "none":
        assert row["total"]["demand"] == sum(run.demand for run in decoded)
        assert row["total"]["hits"] == sum(run.hits for run in decoded)
    capsys.readouterr()
    asked = ["--slots", "10%", "128", "--predict", "none", "oracle", "--eviction", "lru", "lfu"]
    assert tool.main([str(path), *asked, "--link-gbps", "25", "--compute-us", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 8
    assert str(tmp_path) not in output.read_text()


def test_resident_experts_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str], pristine_folder: Path) -> None:
    path = tmp_path / "t.npz"
    common = ("Hello", "--model", str(pristine_folder), "--device", "cpu", "--max-new-tokens", "20")
    assert run_command(*common, "--trace", str(path)).returncode == 0
    assert "give --slots" in refused(capsys, path)
    assert tool.main([str(path), "--slots", "3"]) == 0
    offloaded = tmp_path / "offloaded.npz"
    extra = ("--policy", "on-demand", "--expert-slots", "3", "--trace", str(offloaded))
    assert run_command(*common, *extra).returncode == 0
    mine, theirs = read_trace(path), read_trace(offloaded)
    assert [run.wanted for run in mine.runs] == [run.wanted for run in theirs.runs]
    assert mine.header.record_bytes == theirs.header.record_bytes
    assert mine.header.model == theirs.header.model


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    capsys.readouterr()
    assert tool.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, rich, prompt = tmp_path / "plain.npz", tmp_path / "rich.npz", tmp_path / "prompt.npz"
    record(plain, resolve("on-demand"), 4, steps=2)
    record(rich, resolve("exact", candidates=1), 4, steps=2)
    record(prompt, resolve("on-demand"), 4, steps=0)
    assert "No such file" in refused(capsys, tmp_path / "absent")
    assert "holds no decode step" in refused(capsys, prompt)
    assert "nothing was foretold" in refused(capsys, plain, "--predict", "recorded")
    assert "is more than the 1 that were recorded" in refused(capsys, rich, "--lookahead", "2")
    assert "--lookahead must be" in refused(capsys, plain, "--lookahead", "4")
    assert "from 0 to the 1 that were recorded" in refused(capsys, rich, "--candidates", "2")
    assert "--candidates has no effect" in refused(capsys, rich, "--candidates", "1", "--predict", "oracle")
    assert "--slots x is not understood" in refused(capsys, plain, "--slots", "x").replace("'", "")
    assert "more than the model's 32 experts" in refused(capsys, plain, "--slots", "33")
    assert "less than one" in refused(capsys, plain, "--slots", "1%")
    assert "needs both" in refused(capsys, plain, "--link-gbps", "25")
    assert "must be above 0" in refused(capsys, plain, "--link-gbps", "0", "--compute-us", "1")
    assert "there is no such folder" in refused(capsys, plain, "--output", tmp_path / "absent" / "x.json")
    assert "invalid choice" in refused(capsys, plain, "--predict", "magic")
