"""Documents agree with the measurements and with the files that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import render_docs
from documents import markdown, measurement, performance

ROOT = Path(__file__).resolve().parent.parent
ALL = [ROOT / "README.md", ROOT / "kernels/README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCE = {
    "command": "python tools/x.py --output /tmp/x.json --batch 1",
    "commit": "abc",
    "gpu": "a GPU",
    "versions": {},
}


@pytest.mark.parametrize("path", render_docs.DOCUMENTS, ids=lambda path: path.name)
def test_generated_regions_are_up_to_date(path: Path) -> None:
    """`python tools/render_docs.py` writes them."""
    text = path.read_text(encoding="utf-8")
    assert render_docs.REGION.search(text)
    assert render_docs.render(text) == text


def test_every_region_is_in_a_document_and_rendered() -> None:
    named = {path: re.findall(r"<!-- generated: (\S+) -->", path.read_text(encoding="utf-8")) for path in ALL}
    assert {name for names in named.values() for name in names} == render_docs.REGIONS.keys()
    assert {path for path, names in named.items() if names} == set(render_docs.DOCUMENTS)
    for path, source in render_docs.SOURCES.items():
        assert source.REGIONS.keys() <= set(named[path]), f"{source.__name__} has regions of another document"
    assert len(render_docs.REGIONS) == sum(len(source.REGIONS) for source in render_docs.SOURCES.values())


def test_readme_names_every_module() -> None:
    tree = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert tree is not None
    named = set(re.findall(r"\w+\.py", tree[1]))
    existing = {path.name for path in (ROOT / "tritonmoe").rglob("*.py")} - {"__init__.py"}
    assert existing <= named
    assert named <= existing | {path.name for folder in ("tools", "kernels") for path in (ROOT / folder).rglob("*.py")}


def test_documents_name_every_kernel_file_with_its_tests() -> None:
    files = {path.name for path in (ROOT / "kernels/tritonmoe_kernels").glob("*.py")} - {"__init__.py"}
    text = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    assert files <= set(re.findall(r"\w+\.py", text))
    tests = {path.name for path in (ROOT / "tests").glob("test_kernel_*.py")}
    assert tests <= set(re.findall(r"\w+\.py", text))


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_documents_name_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    prose = render_docs.REGION.sub("", text)
    for name in re.findall(r"`((?:tritonmoe|kernels|tools|tests|docs)/[\w./-]+)`", prose):
        assert (ROOT / name).exists(), name
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
        assert (path.parent / target).exists(), target
    assert not re.search(r"(?<![\w.])/(?:root|home|tmp|work|mnt|Users)/", text), "a folder of some machine"


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_documents_name_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for file, test in re.findall(r"`(tests/\w+\.py)::(\w+)`", text):
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test


def test_every_known_fault_has_its_test() -> None:
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    rows = [
        row for row in re.search(r"## Known faults.*?\n## ", text, re.DOTALL)[0].splitlines() if row.startswith("| ")
    ]  # type: ignore[index]
    assert len(rows) == 2 + 21
    assert all(re.search(r"`tests/\w+\.py::test_\w+` *\|$|\(GPU\) *\|$", row) for row in rows[2:])


def test_commands_of_readme_are_found() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("run", "test"):
        assert len(re.findall(rf"<!-- command: {name} -->\s*```sh\n(.*?)```", text, re.DOTALL)) == 1


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of docs/measurements."""
    monkeypatch.setattr(measurement, "MEASUREMENTS", tmp_path)
    return tmp_path


def store(folder: Path, name: str, **parts: Any) -> None:
    (folder / name).write_text(json.dumps({"provenance": SOURCE, **parts}), encoding="utf-8")


def side(tpot: float, **more: Any) -> dict[str, Any]:
    times = {"median": tpot, "p10": 0.9 * tpot, "p90": 1.1 * tpot}
    return {"tpot_ms": times, "tpot_device_ms": tpot / 2, "ttft_ms": 40.04, "gpu_peak_bytes": 61152218624, **more}


def bench_row(batch: int = 1, baseline: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "batch": batch,
        "context": 4096,
        "status": "measured",
        "ours": side(2.5),
        "floor_ms": 1.4342,
        "share_of_floor": 0.57368,
        "distinct_experts": [{"per_step": 8.0, "over_all": 10}, {"per_step": 9.0, "over_all": 9}],
        "baseline": baseline,
        **more,
    }


def store_bench(folder: Path, rows: list[dict[str, Any]]) -> None:
    for name in performance.BENCHES:
        store(
            folder,
            name,
            settings={"model": name[6:-5], "weights": "random", "dtype": "bfloat16"},
            weight_bytes=61089832960,
            memory_gbps=4270.4,
            baseline={"attention": "sdpa"},
            rows=rows,
        )


ANY_NUMBER = ("packed", "memory", "quantization-error")  # of files, none included


@pytest.mark.parametrize("name", [name for name in render_docs.REGIONS if name not in ANY_NUMBER])
def test_a_missing_measurement_is_named(name: str, measurements: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"/[\w-]+\.json is missing"):
        render_docs.REGIONS[name]()


def test_bench_measured_with_and_without_baseline(measurements: Path) -> None:
    theirs = side(11.6, status="measured", experts="batched_mm")
    store_bench(measurements, [bench_row(baseline=theirs, speedup=4.64), bench_row(batch=2)])
    text = render_docs.REGIONS["bench-decode"]()
    assert "### qwen3-30b-a3b in bfloat16, random weights\n\nWeights: 61.1 GB. A large copy moves 4,270 GB/s." in text
    assert "### gpt-oss-20b in bfloat16" in text
    assert "| 1 | 4,096 | 2.50 (2.25–2.75) | 1.25 | 1.43 | 57.4 | 11.6 (10.4–12.8) | 4.64 |\n" in text
    assert "| 1 | 4,096 | 40.0 | 40.0 | 8.5 | 61.2 | 61.2 |\n" in text
    assert "| 2 | 4,096 | 2.50 (2.25–2.75) | 1.25 | 1.43 | 57.4 | — | — |\n" in text
    assert "| 2 | 4,096 | 40.0 | — | 8.5 | 61.2 | — |\n" in text
    assert "transformers ran `sdpa` attention and `batched_mm` experts." in text
    assert "Not measured" not in text
    assert "`python tools/x.py --batch 1` at commit abc on a GPU" in text


def test_bench_says_why_rows_are_missing(measurements: Path) -> None:
    row = {"batch": 8, "context": 65536, "status": "skipped", "reason": "too long"}
    store_bench(measurements, [bench_row(baseline={"status": "skipped", "reason": "no memory"}), row])
    text = render_docs.REGIONS["bench-decode"]()
    assert (
        "Not measured:\n\n- transformers, batch 1, context 4,096: no memory\n- batch 8, context 65,536: too long\n"
        in text
    )
    assert "transformers ran" not in text


def test_headline_is_the_first_row_of_batch_1(measurements: Path) -> None:
    theirs = side(11.6, status="measured", experts="batched_mm")
    early = {"batch": 1, "context": 128, "status": "skipped", "reason": "…"}
    store_bench(measurements, [early, bench_row(batch=2), bench_row(baseline=theirs)])
    text = render_docs.REGIONS["headline"]()
    assert "| qwen3-30b-a3b in bfloat16, random weights | a GPU | 4,096 | 2.50 | 11.6 | 1.43 |\n" in text
    assert text.endswith("`tools/bench.py` at commit abc.\n")
    store_bench(measurements, [early])
    with pytest.raises(ValueError, match=r"bench-qwen3-30b-a3b\.json has no measured row"):
        render_docs.REGIONS["headline"]()


def test_kernels_are_rated_by_what_binds_them(measurements: Path) -> None:
    common = {"us_p10": 9.0, "us_p90": 11.0, "kernels": 1, "gb_per_s": 3274.6, "tflop_per_s": 420.5}
    results = {
        "read": {"us": 10.0, "bytes": 4e7, "flops": 2e7, "floor_us": 9.5, "share_of_floor": 0.95, **common},
        "multiply": {"us": 10.0, "bytes": 4e6, "flops": 7e9, "floor_us": 10.0, "share_of_floor": 1.0, **common},
        "read, in part": {"us": 1.0, "bytes": 4e7, "flops": 0, "floor_us": 9.5, "share_of_floor": 9.5, **common},
    }
    rates = {"copy_bytes_per_s": 4.2e12, "matrix_flop_per_s": 7e14}
    store(measurements, "kernels.json", dtype="bfloat16", rates=rates, results=results)
    text = render_docs.REGIONS["kernels"]()
    assert "bfloat16; a large copy moves 4.20 TB/s, a large matrix product does 700 TFLOP/s." in text
    assert "| read | 10.0 (9.00–11.0) | 9.50 | 95.0 | 3,275 GB/s |\n" in text
    assert "| multiply | 10.0 (9.00–11.0) | 10.0 | 100.0 | 420 TFLOP/s |\n" in text
    assert "| read, in part | 1.00 (9.00–11.0) | — | — | — |\n" in text


def test_profile_adds_up(measurements: Path) -> None:
    names = ["_linear_kernel", *(f"void at::native::(anonymous namespace)::f<{i}, at::Tensor>(int)" for i in range(20))]
    rows = [
        {"name": name, "calls": 2.0, "duration_us": 1.0, "interval_us": 1.5, "gap_us": 0.5, "total_us": 3.0}
        for name in names
    ]
    step = {"floor_us": 30.0, "step_us": 60.0, "share_of_floor": 0.5, "batch": 1, "context": 128}
    store(measurements, "profile-qwen3-30b-a3b.json", model="a model", kernels=rows, **step)
    text = render_docs.REGIONS["profile-decode"]()
    assert "| `_linear_kernel` | 2 | 1.00 | 1.50 | 3.00 |\n| `f<0, Tensor>(int)` | 2 |" in text
    assert "| 9 others | 18 | — | — | 27.0 |\n| all | 42 | — | — | 63.0 |\n" in text
    assert "Without the profiler a step takes 60.0 us; its floor is 30.0 us, 50.0 % of that." in text


def offload_row(policy: str, slots: int, **more: Any) -> dict[str, Any]:
    return {
        "policy": f"{policy}: predict none",
        "slots": slots,
        "slots_share": slots / 6144,
        "context": 1024,
        "tpot_ms": {"median": 76.0, "p10": 75.0, "p90": 77.0},
        "floor_ms": 67.23,
        "bytes_per_token": 3.6e9,
        "ttft_ms": 1071.0,
        "counters": {"hit_rate": {"all": 0.0}},
        **more,
    }


def store_offload(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    facts = {"model": "qwen3-30b-a3b", "dtype": "bfloat16", "record_bytes": 9437184, "link_bytes_per_s": 53.9e9}
    store(folder, name, rows=rows, **facts, **{k: v for k, v in more.items() if k not in facts})


def test_offload_has_its_targets_and_emulated_links_apart(measurements: Path) -> None:
    full = {
        "emulated_gbps": None, "link_bytes_per_s": 53.9e9, "resident_ms": 2.382, "ratio": 1.092,
        "ttft_bytes": 57.98e9, "ttft_bound_ms": 1075.0, "ttft_ratio": 0.996,
    }  # fmt: skip
    slow = {**full, "emulated_gbps": 25.0, "link_bytes_per_s": 24.8e9, "ttft_ms": None}
    rows = [
        offload_row("on-demand", 8, **full),
        offload_row("router-pf", 16, **full, saved=0.0251, saved_bound=0.0342),
        offload_row("on-demand", 8, **slow),
        offload_row("exact", 7, **full, planner="host"),
    ]
    reason = {"case": "exact:4%", "context": 1024, "emulated_gbps": 25.0, "reason": "not begun in time"}
    store_offload(measurements, "offload-qwen3-30b-a3b.json", rows, skipped=[reason])
    text = render_docs.REGIONS["offload"]()
    own, _, emulated = text.partition("A link of 25 GB/s, emulated by waits: copies of records at 24.8 GB/s.\n")
    assert "The machine's own link: copies of records at 53.9 GB/s.\n" in own
    figures = "76.0 (75.0–77.0) | 67.2 | 2.38 | 1.09 | 0.0 | 3,600"
    assert f"| 1,024 | on-demand | 8 (0.1 %) | {figures} | — |\n" in own
    assert f"| 1,024 | router-pf | 16 (0.3 %) | {figures} | 2.5 of 3.4 |\n" in own
    assert "| 1,024 | on-demand | 8 (0.1 %) | 1,071 | 58.0 | 1,075 | 0.996 |\n" in own
    assert f"| 1,024 | on-demand | 8 (0.1 %) | {figures} | — |\n" in emulated
    assert "first token" not in emulated
    assert f"| 1,024 | exact, host plans | 7 (0.1 %) | {figures} | — |\n" in own
    assert "- exact:4%, context 1,024, emulated 25 GB/s: not begun in time\n" in emulated


def test_offload_of_several_runs_and_without_targets(measurements: Path) -> None:
    """A run of other contexts lies in a file of its own; what a row lacks is shown as absent."""
    store_offload(measurements, "offload-qwen3-30b-a3b.json", [offload_row("on-demand", 8)])
    store_offload(measurements, "offload-qwen3-30b-a3b-contexts.json", [offload_row("exact", 16)])
    text = render_docs.REGIONS["offload"]()
    assert text.count("at commit abc on a GPU") == 2
    assert "| 1,024 | on-demand | 8 (0.1 %) | 76.0 (75.0–77.0) | 67.2 | — | — | 0.0 | 3,600 | — |\n" in text
    assert "| 1,024 | exact | 16 (0.3 %) | 1,071 | — | — | — |\n" in text


def test_fewer_bits_are_said_of_every_run(measurements: Path) -> None:
    for name in ANY_NUMBER:
        assert render_docs.REGIONS[name]() == "Not measured yet.\n"
    kept = {"dtype": "bfloat16", "expert_dtype": "int4", "dense_dtype": "bfloat16"}
    settings = {"model": "qwen3-30b-a3b", "weights": "random", **kept}
    store(
        measurements,
        "packed-bench-a.json",
        settings=settings,
        weight_bytes=19e9,
        memory_gbps=4270.4,
        rows=[bench_row()],
    )
    text = render_docs.REGIONS["packed"]()
    assert "### qwen3-30b-a3b in bfloat16, experts in int4, random weights\n\nWeights: 19.0 GB." in text
    store_offload(measurements, "offload-qwen3-30b-a3b.json", [], **{**kept, "dense_dtype": "fp8"})
    text = render_docs.REGIONS["offload"]()
    assert "qwen3-30b-a3b in bfloat16, experts in int4, other matrices in fp8, batch 1" in text


def test_memory_taken_beside_the_budget(measurements: Path) -> None:
    gib = 1 << 30
    few = {
        "budget": "8GiB", "budget_bytes": 8 * gib, "expert_dtype": "int4", "slots": 1430, "slot_share": 0.2327,
        "plan": {"not used": gib // 4}, "taken_bytes": {"built": 6 * gib, "prefilled": 7.5 * gib, "decoded": 7 * gib},
        "host_bytes": 15 * gib,
    }  # fmt: skip
    many = {**few, "budget": "24GiB", "budget_bytes": 24 * gib, "slots": 0, "slot_share": 1.0, "host_bytes": 0}
    skipped = [{"budget": "1GiB", "reason": "out of memory"}]
    facts = {"model": "qwen3-30b-a3b", "dtype": "bfloat16", "max_context": 8192}
    store(measurements, "memory-a.json", **facts, rows=[few, many], skipped=skipped)
    text = render_docs.REGIONS["memory"]()
    assert text.startswith("qwen3-30b-a3b in bfloat16, a context of 8,192 tokens.\n")
    assert "| 8GiB | int4 | 23.3 | 7.75 | 7.50 | 15.0 |\n| 24GiB | int4 | all resident | 23.8 | 7.50 | 0.00 |\n" in text
    assert "- 1GiB: out of memory\n" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0.004837, "0.00484"), (0.0, "0.00"), (2.6, "2.60"), (99.96, "100"), (4270.4, "4,270")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert markdown.figure(value) == text


def test_what_formats_cost(measurements: Path) -> None:
    text = {"bits_per_character": 1.18304, "perplexity_per_token": 17.3525, "characters": 60000}
    layers = [
        {"layer": i, "gate_up": 0.08, "down": 0.1, "outputs": outputs} for i, outputs in enumerate([0.2, 0.3, 0.1])
    ]
    tasks = {level: {"accuracy": share, "standard_error": 0.02} for level, share in (("easy", 0.99), ("hard", 0.7))}
    formats = {"as published": {"text": text}, "int4": {"text": text, "tasks": tasks, "bits": 4.5, "layers": layers}}
    source = {**SOURCE, "cpu": "a CPU", "torch_threads": 1, "gpu": None}
    (measurements / "quantization-x.json").write_text(
        json.dumps({"provenance": source, "model": "x", "formats": formats}), encoding="utf-8"
    )
    shown = render_docs.REGIONS["quantization-error"]()
    assert "x, 60,000 characters" in shown
    assert "| as published | — | — | — | 1.1830 | 17.35 | — | — |\n" in shown
    assert "| int4 | 4.50 | 9.00 | 20.0 (10.0–30.0) | 1.1830 | 17.35 | 99.0 ± 2.0 | 70.0 ± 2.0 |\n" in shown
