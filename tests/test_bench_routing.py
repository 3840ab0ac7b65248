"""The routing benchmark: ids made to measure, floors by hand, whole runs on a tiny model, and pictures of samples."""

from __future__ import annotations

import gzip
import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import bench_routing
import numpy as np
import pytest
import render_figures
import timeline
import torch
from bench import figures, svg, table_replay
from bench.synthetic_routing import Shape, make_routing, simulate
from bench.table_replay import Case, Model, TableReplay
from bench.trace import host_launches
from bench_offload import random_store
from conftest import TINY_CONFIG

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.offload.slot_pool import SlotPool

CPU = torch.device("cpu")
CONFIG = {**TINY_CONFIG, "num_hidden_layers": 4, "num_experts": 16}
QWEN = Shape(48, 128, 1, 8)
FIGURES = Path(__file__).resolve().parent.parent / "docs/figures"


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model; collecting garbage between rows takes half a second where tests have run."""
    monkeypatch.setattr(bench_routing, "release", lambda device: None)
    monkeypatch.setattr(table_replay, "GATHERED_BYTES", 1)
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(config_file: Path, *options: object) -> dict[str, Any]:
    output = config_file.parent / "routing.json"
    common = [config_file, "--dtype", "float32", "--device", "cpu", "--output", output, "--context", 5]
    assert bench_routing.main([str(option) for option in (*common, *options)]) == 0
    return json.loads(output.read_text())


@pytest.mark.parametrize("hit_rate", [0.5, 0.75, 0.88, 0.9, 0.95])
def test_hit_rate_and_recall_as_asked(hit_rate: float) -> None:
    routing = make_routing(QWEN, 1536, 24, hit_rate, (0.9, 0.8))
    timed = routing.routed[routing.warm_steps :]
    assert timed.shape == (24, 48, 1, 8)
    assert routing.hit_rate == pytest.approx(hit_rate, abs=0.02)
    assert routing.hit_rate == 1 - routing.misses.sum() / (24 * 48 * 8)
    assert routing.recall == pytest.approx([0.9, 0.8], abs=0.02)
    assert routing.misses.shape == (24, 48)
    again = make_routing.__wrapped__(QWEN, 1536, 24, hit_rate, (0.9, 0.8))
    assert np.array_equal(again.routed, routing.routed)
    assert np.array_equal(again.foretold, routing.foretold)


def test_guesses_are_resident_experts_and_the_share_of_the_others_that_was_asked_for() -> None:
    routing = make_routing(Shape(6, 32, 3, 4), 48, 40, 0.6, (0.7, 0.4))
    foretold, further = routing.foretold
    is_right = (routing.routed[..., :, None] == foretold[..., None, :]).any(-1)
    assert is_right[routing.simulation.is_resident].all()
    assert 0.65 < is_right[~routing.simulation.is_resident].mean() < 0.75
    is_right_further = (routing.routed[..., :, None] == further[..., None, :]).any(-1)
    assert not (is_right_further & ~is_right).any(), "what is wrong one layer ahead is wrong two layers ahead"
    assert 0.35 < is_right_further[~routing.simulation.is_resident].mean() < 0.45
    for ids in (routing.routed, foretold, further):
        assert ids.dtype == np.int32
        assert ((ids >= 0) & (ids < 32)).all()
        ordered = np.sort(ids, axis=-1)
        assert (ordered[..., 1:] > ordered[..., :-1]).all(), "an id twice for a token"
    is_wrong = ~(foretold[..., :, None] == routing.routed[..., None, :]).any(-1)
    assert is_wrong.any(axis=(0, 1, 2)).all(), "wrong ids are always at the same places"
    by_layer = routing.routed.reshape(*routing.routed.shape[:2], -1)
    for step, layer, token, place in np.argwhere(is_wrong).tolist():
        assert foretold[step, layer, token, place] not in by_layer[step, layer]


def test_simulation_is_the_engines_cache() -> None:
    """Slot by slot what the pool does that the scheduler plans with."""
    random = np.random.default_rng(5)
    routed = np.argsort(random.random((30, 3, 2, 12)), axis=-1)[..., :4].astype(np.int32)
    found = simulate(routed, 17, 12)
    pool = SlotPool(17, 3, 12)
    for step in range(30):
        for layer in range(3):
            pool.tick()
            wanted = list(dict.fromkeys(routed[step, layer].ravel().tolist()))
            slots = pool.lookup_all(layer, wanted)
            hits = {expert: slot for expert, slot in zip(wanted, slots, strict=True) if slot >= 0}
            pool.touch(hits.values())
            pool.pin(hits.values())
            fetches = pool.take(layer, [expert for expert in wanted if expert not in hits])
            for _, slot, epoch in fetches:
                pool.touch([slot])
                pool.landed(slot, epoch)
            pool.unpin(hits.values())
            assert found.misses[step, layer] == len(fetches)
            assert found.routed[step, layer] == len(wanted)
            is_hit = [expert in hits for expert in routed[step, layer].ravel().tolist()]
            assert found.is_resident[step, layer].ravel().tolist() == is_hit


def test_slots_for_everything_and_the_fewest() -> None:
    everything = make_routing(Shape(5, 10, 1, 4), 50, 8, None, (0.9,))
    assert everything.misses.sum() == 0
    assert everything.recall == [None]
    assert everything.simulation.misses.sum() == 50
    fewest = make_routing(Shape(5, 10, 1, 4), 4, 8, None, (0.9,))
    assert (fewest.misses == 4).all()


def test_floors_by_hand() -> None:
    misses = np.array([[0, 1, 4], [0, 0, 0]])
    floors = bench_routing.schedule_floor_ms(misses, 1_000_000, 2e9, 0.6)
    assert floors.tolist() == pytest.approx([0.6 + 0.6 + 2.0, 1.8])


def test_what_rows_are_held_against() -> None:
    """3 layers, a resident step of 1.8 ms, 2 GB/s: floors of 3.2 and 1.8 ms, in series 4.3 and 1.8."""

    class Routing:
        misses = np.array([[0, 1, 4], [0, 0, 0]])

    row = {"tpot_ms": {"median": 5.0}, "record_bytes": 1_000_000, "mispredicted_bytes_per_token": 400_000.0}

    def held(text: str, **more: Any) -> dict[str, Any]:
        return bench_routing.held_against({**row, **more}, Case.parse(text), Routing(), 2e9, 1.8, 1.07)  # type: ignore[arg-type]

    exact, speculated, plain = held("exact:50"), held("router-pf:50"), held("on-demand:50")
    assert exact["floor_ms"]["median"] == pytest.approx(2.5)
    assert exact["mispredicted_ms"] == pytest.approx(0.2)
    assert (exact["best_ms"], exact["ratio"]) == (pytest.approx(2.7), pytest.approx(5 / 2.7))
    assert (speculated["best_ms"], speculated["wanted_ratio"]) == (pytest.approx(2.5), 1.07)
    assert (plain["best_ms"], plain["wanted_ratio"]) == (pytest.approx((4.3 + 1.8) / 2), None)
    assert plain["saved_bound"] == pytest.approx(1 - 2.5 / 3.05)
    everything = held("exact:everything", resident_ms={"median": 4.0})
    assert (everything["ratio"], everything["wanted_ratio"]) == (1.25, 1.10)


def test_rows_of_every_kind(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_routing.os, "sched_getaffinity", lambda _: {0})
    cases = (
        "exact:75:host,on-demand:75,on-demand:90,router-pf:75,on-demand:everything,router-pf:everything,"
        "on-demand:minimum,on-demand:88@2560,exact:88@2560,exact+lookahead=2:75,router-pf+lookahead=2:75"
    )
    result = run(config_file, "--steps", 24, "--slots", "50%", "--cases", cases)
    assert result["skipped"] == []
    rows = {row["case"]: row for row in result["rows"]}
    assert set(rows) == set(cases.split(","))
    assert list(rows)[:2] == ["on-demand:everything", "router-pf:everything"]  # while the resident weights are there
    for row in rows.values():
        per_token = row["per_token"]
        assert per_token["routed"] == 4 * 2
        assert per_token["routed"] == pytest.approx(per_token["hits"] + per_token["late"] + per_token["demand"])
        whole = per_token["demand"] + per_token["prefetched"] - per_token["cancelled"]
        assert row["bytes_per_token"] == pytest.approx(whole * row["record_bytes"])  # no copy ends halfway on a CPU
        assert row["floor_ms"]["median"] >= result["resident_ms"]["median"] - 1e-9
        assert sum(row["layers_by_misses"]) == 24 * 4
        if row["wanted_hit_rate"] is not None:
            assert row["hit_rate_without_prediction"] == pytest.approx(row["wanted_hit_rate"], abs=0.02)
        if row["case"].startswith("on-demand"):
            assert row["is_as_simulated"], row["case"]
            assert row["hit_rate"] == pytest.approx(row["hit_rate_without_prediction"])
    for case in ("on-demand:everything", "router-pf:everything"):
        assert rows[case]["bytes_per_token"] == 0
        assert rows[case]["ratio"] == rows[case]["tpot_ms"]["median"] / rows[case]["resident_ms"]["median"]
    exact, speculated = rows["exact:75:host"], rows["router-pf:75"]
    assert exact["recall"] == pytest.approx([0.9], abs=0.05)
    assert exact["per_token"]["prefetched_wasted"] > 0
    assert speculated["recall"] == [None]
    assert speculated["per_token"]["prefetched_wasted"] == 0
    assert speculated["hit_rate"] > speculated["hit_rate_without_prediction"]
    assert exact["host"]["busy_cores"] == 1
    assert exact["host"]["launches_per_token"] is None
    plain_ms = rows["on-demand:75"]["tpot_ms"]["median"]
    assert exact["saved"] == pytest.approx(1 - exact["tpot_ms"]["median"] / plain_ms)
    assert rows["on-demand:minimum"]["slots"] == 2
    assert rows["on-demand:minimum"]["per_token"]["demand"] == 8
    small = rows["exact:88@2560"]
    assert (small["is_timing_only"], small["record_bytes"], small["wanted_saved"]) == (True, 2560, 0.25)
    twice = rows["exact+lookahead=2:75"]
    assert "lookahead 2" in twice["policy"]
    assert twice["recall"] == pytest.approx([0.9, 0.92 * 0.9], abs=0.05)
    first, second = rows["router-pf+lookahead=2:75"]["recall"]
    assert first is None
    assert second == pytest.approx(0.92, abs=0.05)
    assert twice["per_token"]["prefetched"] >= exact["per_token"]["prefetched"]
    assert str(config_file.parent) not in json.dumps(result)
    check_picture(figures.tpot_by_hit_rate(result))


def test_rows_not_begun_in_time_or_without_room(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room\nfor it")

    monkeypatch.setattr(bench_routing, "TableReplay", refuse)
    result = run(config_file, "--steps", 2, "--cases", "on-demand:75")
    assert result["skipped"] == [{"case": "on-demand:75", "reason": "no room"}]
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(bench_routing.time, "perf_counter", lambda: float(next(clock)))
    result = run(config_file, "--steps", 2, "--cases", "on-demand:75", "--time-limit", 5)
    assert result["rows"] == []
    assert result["skipped"] == [{"case": "on-demand:75", "reason": "not begun within --time-limit 5"}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "resident:75"], "'resident:75' is not POLICY[+OPTION=VALUE]:HITS[@BYTES][:host]"),
        (["--cases", "exact"], "'exact' needs a hit rate between 0 and 100, everything or minimum"),
        (["--cases", "exact:100"], "'exact:100' needs a hit rate between 0 and 100"),
        (["--cases", "exact:75@small"], "'exact:75@small' is not POLICY[+OPTION=VALUE]:HITS[@BYTES][:host]"),
        (["--cases", "exact:75@100"], "'exact:75@100' has records that are no multiple of 256 bytes"),
        (["--cases", "all:75"], "--policy 'all' is not known"),
        (["--slots", "3"], "--slots 3 are 3, fewer than the 4 that exact:50 needs"),
        (["--recall", "90"], "argument --recall: '90' is not a number from 0 to 1"),
    ],
)
def test_bad_arguments_give_one_line(
    options: list[str], message: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(config_file, *options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_launches_of_the_host_are_counted(tmp_path: Path) -> None:
    names = ["cudaGraphLaunch", "cudaMemcpyAsync", "cudaEventRecord", "cuLaunchKernelEx", "cudaStreamSynchronize"]
    events = [{"name": name, "cat": "cuda_driver" if "cuL" in name else "cuda_runtime"} for name in names]
    events.append({"name": "cudaLaunchKernel", "cat": "cpu_op"})
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events}, file)
    assert host_launches(path) == 3


# The timeline.


def test_order_of_fetches() -> None:
    assert timeline.fetch_order([1, 2, 4], 0) == [("demand", 1), ("demand", 2), ("demand", 4)]
    expected = [("demand", 1), ("prefetch", 2), ("demand", 2), ("prefetch", 4), ("demand", 4)]
    assert timeline.fetch_order([1, 2, 4], 1) == expected


def test_outcomes_of_a_step(config_file: Path) -> None:
    """What the planner's lists say of the last step adds up to what was counted for it."""
    spec = parse_config(CONFIG)
    store, weights = random_store(spec, torch.float32, CPU)
    model, case = Model(spec, weights, store), Case.parse("exact:60")
    routing = case.routing(model.shape, 24, 6, 0.6, 1.0)
    replay = TableReplay(model, case.policy, 24, None, 5, len(routing.routed))
    replay.load(routing)
    replay.restart()
    seen: dict[str, int] = {}
    for step in range(len(routing.routed)):
        before = replay.counts()
        replay.launch()
        replay.tokens()
        after = replay.counts()
        launches = timeline.read_launches(replay, list(spec.moe_layers))
        outcomes = [what for launch in launches for _, what in launch.records]
        counted = {name: after[name] - before[name] for name in after}
        assert replay.routed_ids(2) == routing.routed[step, 2].flatten().tolist()
        assert outcomes.count("demand") == counted["demand"]
        assert outcomes.count("used") + outcomes.count("late") == counted["prefetched_used"]
        assert outcomes.count("wasted") == counted["prefetched_wasted"]
        seen |= {what: seen.get(what, 0) + 1 for what in outcomes}
    assert seen.keys() >= {"demand", "used", "wasted"}
    replay.close()


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ((True, True, False, 8), "used"),
        ((True, False, True, 8), "late"),
        ((False, False, False, 8), "wasted"),
        ((False, False, False, 5), "cancelled"),
    ],
)
def test_outcome_of_a_foretold_record(state: tuple[bool, bool, bool, int], expected: str) -> None:
    assert timeline.outcome(*state, programs=8) == expected


def sample_trace(num_layers: int) -> tuple[list[dict[str, Any]], list[timeline.Launch]]:
    """Two steps of 100 us a layer in which every layer foretells for the next."""
    events = []
    for step in range(2):
        for layer in range(num_layers):
            start = 1e6 * step + 100.0 * layer
            for name, begin, duration in (
                ("_norm_router_kernel", 0, 2), ("_gate_up_decode_kernel", 2, 20), ("_plan_demand_kernel", 2, 4),
                ("_fetch_kernel", 6, 30), ("_speculate_kernel", 6, 4), ("_plan_prefetch_kernel", 10, 5),
                ("_linear_kernel", 60, 20),
            ):  # fmt: skip
                events.append({"name": name, "ts": start + begin, "dur": duration})
            if layer + 1 < num_layers:
                events.append({"name": "_fetch_kernel", "ts": start + 36, "dur": 80})
    outcomes = {0: ["used"], 1: ["used", "late"], 2: ["wasted", "cancelled"], 3: []}
    launches = []
    for kind, layer in timeline.fetch_order(range(num_layers), 1):
        records = ["demand"] if kind == "demand" else outcomes[layer % 4]
        launches.append(timeline.Launch(layer, list(enumerate(records))))
    return sorted(events, key=lambda event: event["ts"]), launches


def test_timeline_of_a_trace() -> None:
    events, launches = sample_trace(6)
    layers = list(range(6))
    found = timeline.step_events(events, launches, layers)
    assert len(found) == len(events) // 2
    assert found[0] == {
        "lane": "compute", "kernel": "_norm_router_kernel", "layer": 0, "start_us": 0.0, "duration_us": 2.0,
        "records": [],
    }  # fmt: skip
    lanes = {event["kernel"]: event["lane"] for event in found}
    assert lanes["_plan_prefetch_kernel"] == lanes["_speculate_kernel"] == "plan"
    ahead = next(event for event in found if event["lane"] == "fetch" and event["start_us"] == 36)
    assert (ahead["layer"], [record["outcome"] for record in ahead["records"]]) == (1, ["used", "late"])
    chosen = timeline.choose_layers(launches, layers)
    assert chosen == [0, 1, 2]
    assert timeline.choose_layers(launches, layers, 5) == [0, 1, 2, 3, 4]
    shown, begins = timeline.cut(found, [1, 2, 3])
    assert begins == [0, 100, 200, 300]
    assert min(event["start_us"] for event in shown) == -64  # a fetch that began in the layer before
    with pytest.raises(ValueError, match="does not hold a whole step"):
        timeline.step_events(events[:3], launches, layers)


def test_timeline_needs_a_gpu(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        timeline.main([str(config_file), "--device", "cpu"])
    assert "there is no GPU here" in capsys.readouterr().err


# Pictures.

SOURCE = {"gpu": "a GPU", "cpu": "a CPU"}


def sample_routing() -> dict[str, Any]:
    rows = [
        {
            "case": f"{policy}:{100 * rate:g}", "is_timing_only": False, "hit_rate_without_prediction": rate,
            "tpot_ms": {"median": factor * floor, "p10": floor, "p90": 1.2 * factor * floor},
            "floor_ms": {"median": floor},
        }
        for policy, factor in (("on-demand", 1.4), ("exact", 1.1), ("exact+lookahead=2", 1.0))
        for rate, floor in ((0.0, 70.0), (0.5, 36.0), (0.9, 7.0), (1.0, 2.4))
    ]  # fmt: skip
    rows.append({**rows[0], "is_timing_only": True})
    head = {"model": "m <1>", "dtype": "bfloat16", "batch": 1, "provenance": SOURCE}
    return {**head, "resident_ms": {"median": 2.3}, "rows": rows}


def sample_timeline() -> dict[str, Any]:
    events, launches = sample_trace(6)
    shown, begins = timeline.cut(timeline.step_events(events, launches, range(6)), [1, 2, 3])
    head = {"model": "m", "dtype": "bfloat16", "policy": "exact: …", "provenance": SOURCE}
    return {**head, "hit_rate_without_prediction": 0.9, "layers": [1, 2, 3], "begins_us": begins, "events": shown}


def check_picture(text: str) -> xml.etree.ElementTree.Element:
    """It is well formed and everything lies within its frame."""
    root = xml.etree.ElementTree.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        for name, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0 <= float(element.attrib.get(name, 0)) <= limit
        for x, y in re.findall(r"([-\d.]+),([-\d.]+)", element.attrib.get("points", "")):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height
        if "width" in element.attrib and "x" in element.attrib:
            assert float(element.attrib["x"]) + float(element.attrib["width"]) <= width
    return root


def test_chart_of_times_by_hit_rate() -> None:
    text = figures.tpot_by_hit_rate(sample_routing())
    root = check_picture(text)
    words = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert "m <1> in bfloat16, batch 1, a GPU" in words
    assert {"on-demand", "exact", "schedule floor", "all experts resident"} <= set(words)
    assert "router-pf" not in words
    assert text.count("<circle") == 2 * 3  # from the least rate that is shown on
    with pytest.raises(ValueError, match="no row with a hit rate to draw"):
        figures.tpot_by_hit_rate({**sample_routing(), "rows": []})


def test_picture_of_a_timeline() -> None:
    root = check_picture(figures.timeline(sample_timeline()))
    notes = [element.text or "" for element in root.iter() if element.tag.endswith("}title")]
    assert "layer 2, cancelled: expert 1, 40.0 us" in notes
    words = {element.text for element in root.iter() if element.tag.endswith("}text")}
    assert {"layer 1", "layer 2", "layer 3", "compute", "fetch", "on demand", "foretold, late", "wasted"} <= words


def test_ticks_are_round() -> None:
    assert svg.Axis(48, 100, 0, 1).ticks() == [50, 60, 70, 80, 90, 100]
    assert svg.Axis(1.9, 41, 0, 1, is_log=True).ticks() == [2, 5, 10, 20]
    assert svg.Axis(10, 1000, 100, 0, is_log=True).at(100) == pytest.approx(50)


def test_pictures_are_up_to_date() -> None:
    """`python tools/render_figures.py` draws them."""
    assert render_figures.stale() == {}
    assert {path.name for path in FIGURES.glob("*.svg")} <= render_figures.FIGURES.keys()


def test_pictures_are_drawn_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_figures, "MEASUREMENTS", tmp_path)
    monkeypatch.setattr(render_figures, "PICTURES", tmp_path / "figures")
    assert render_figures.main([]) == 0
    assert not (tmp_path / "figures").exists()
    (tmp_path / "routing-qwen3-30b-a3b.json").write_text(json.dumps(sample_routing()))
    (tmp_path / "timeline-qwen3-30b-a3b.json").write_text(json.dumps(sample_timeline()))
    assert render_figures.main(["--check"]) == 1
    assert render_figures.main([]) == 0
    assert render_figures.main(["--check"]) == 0
    assert (tmp_path / "figures/timeline.svg").read_text().startswith("<svg ")
    (tmp_path / "timeline-qwen3-30b-a3b.json").unlink()
    with pytest.raises(SystemExit):
        render_figures.main(["--check"])


def test_replay_with_experts_of_fewer_bits(tmp_path: Path, config_file: Path) -> None:
    result = run(config_file, "--cases", "exact:60,on-demand:minimum", "--slots", "24", "--expert-dtype", "int4")
    assert result["expert_dtype"] == "int4"
    # H 32, I 16: 512 and 256 bytes of codes, as many scales of two bytes as rows, which fill up to 256.
    assert {row["record_bytes"] for row in result["rows"]} == {512 + 256 + 256 + 256}
    assert all(row["is_as_simulated"] for row in result["rows"] if row["policy"].startswith("on-demand"))
