"""Fill the generated regions of the documents from docs/measurements; `--check` only says whether they agree.

A region is `<!-- generated: NAME -->`, its text, `<!-- end -->`. So no figure in a document is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from typing import Any

from prediction import report as prediction
from provenance import ROOT

MEASUREMENTS = ROOT / "docs/measurements"
DOCUMENTS = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "embedded-model",
            "kernels",
            "offload",
            "parity",
            "performance",
            "prediction",
            "quantization",
            "reliability",
        )
    ),
)
REGION = re.compile(r"(<!-- generated: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BENCHES = ("bench-qwen3-30b-a3b.json", "bench-gpt-oss-20b.json")
PROFILED_KERNELS = 12  # rows of a profile that are shown one by one
NAME_LENGTH = 60  # of a kernel's name in C++
ABSENT = "—"
NOT_YET = "Not measured yet.\n"
KINDS = ("decode", "prefill")  # of steps


def read(name: str) -> dict[str, Any]:
    path = MEASUREMENTS / name
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent.name}/{name} is missing, and a document shows what is in it")
    return json.loads(path.read_text(encoding="utf-8"))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def machine(part: dict[str, Any]) -> str:
    source = part["provenance"]
    return source.get("gpu") or f"{source['cpu']}, {source['torch_threads']} thread(s)"


def origin(part: dict[str, Any]) -> str:
    """One line that says how to repeat a measurement."""
    source = part["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    command = re.sub(r" --output \S+", "", source["command"])  # where the result lay does not matter
    return f"\n`{command}` at commit {source['commit']} on {machine(part)} ({versions}).\n"


def figure(value: float | None) -> str:
    """Three significant digits, or all of those before the point."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def spread(median: float, low: float, high: float) -> str:
    return f"{figure(median)} ({figure(low)}–{figure(high)})"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def gigabytes(num_bytes: int | None) -> str:
    return figure(None if num_bytes is None else num_bytes / 1e9)


def embedded_tasks() -> str:
    part = read("embedded-model.json")["tasks"]
    families = sorted({name.split("-")[0] for name in part["results"]})
    rows = []
    for family in families:
        cells = [part["results"][f"{family}-{level}"] for level in ("easy", "hard")]
        rows.append([family, *(f"{100 * c['accuracy']:.1f} ± {100 * c['standard_error']:.1f}" for c in cells)])
    return table(["family", "easy, % right", "hard, % right"], rows) + origin(part)


def embedded_text() -> str:
    part = read("embedded-model.json")["text"]
    names = {
        "works": "20 whole works that training never saw",
        "passages": "held-out passages of works whose other passages were trained on (the simplest third of the text)",
    }
    rows = [
        [
            names[name],
            f"{cell['bits_per_character']:.3f}",
            f"{cell['perplexity_per_token']:.1f}",
            f"{cell['characters']:,}",
        ]
        for name, cell in part["results"].items()
    ]
    return table(["held-out text", "bits per character", "perplexity per token", "characters"], rows) + origin(part)


def embedded_speed() -> str:
    part = read("embedded-model.json")["speed"]
    names = {
        "ready_s": "start of the process to ready (imports, loading), s",
        "first_token_ms": "first token, ms",
        "decode_tokens_per_s": "decoding, tokens/s",
    }
    rows = [
        [names[name], *(f"{cell[kind]:.3g}" for kind in ("median", "min", "max"))]
        for name, cell in part["results"].items()
    ]
    return table(["on the CPU", "median", "least", "most"], rows) + origin(part)


def embedded_samples() -> str:
    part = read("embedded-model.json")["samples"]
    blocks = [
        f"`{json.dumps(sample['prompt'])}` ({sample['sampling']})\n\n```text\n{sample['text'].rstrip()}\n```\n"
        for sample in part["results"]
    ]
    return "\n".join(blocks) + origin(part)


def gpu_parity() -> str:
    part = read("gpu-tests.json")
    rows = [
        [name, f"{cell['ours']:.4g}", f"{cell['transformers']:.4g}", f"{cell['ratio']:.2f}"]
        for name, cell in part["results"]["bfloat16_rms_error"].items()
    ]
    head = table(["checkpoint", "tritonmoe", "transformers", "ratio"], rows)
    return head + f"\npytest: {part['results']['summary']}.\n" + origin(part)


def gpu_tests() -> str:
    part = read("gpu-tests.json")
    return f"pytest: {part['results']['summary']}.\n" + origin(part)


def tpot(side: dict[str, Any]) -> str:
    return spread(*(side["tpot_ms"][kind] for kind in ("median", "p10", "p90")))


def baseline_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """What transformers did in this row, if it was measured."""
    found = row["baseline"]
    return found if found is not None and found["status"] == "measured" else None


def decoding_cells(row: dict[str, Any]) -> list[str]:
    ours, theirs = row["ours"], baseline_of(row)
    return [
        tpot(ours),
        figure(ours["tpot_device_ms"]),
        figure(row["floor_ms"]),
        percent(row["share_of_floor"]),
        ABSENT if theirs is None else tpot(theirs),
        figure(row.get("speedup")),
    ]


def prefill_cells(row: dict[str, Any]) -> list[str]:
    ours, theirs = row["ours"], baseline_of(row) or {"ttft_ms": None, "gpu_peak_bytes": None}
    experts = [layer["per_step"] for layer in row["distinct_experts"]]
    return [
        figure(ours["ttft_ms"]),
        figure(theirs["ttft_ms"]),
        f"{sum(experts) / len(experts):.1f}" if experts else ABSENT,
        gigabytes(ours["gpu_peak_bytes"]),
        gigabytes(theirs["gpu_peak_bytes"]),
    ]


def skipped(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each row, or baseline of a row, that was not measured, with the reason."""
    lines = []
    for row in rows:
        where = f"batch {row['batch']}, context {row['context']:,}"
        if row["status"] == "skipped":
            lines.append(f"- {where}: {row['reason']}\n")
        elif row["baseline"] is not None and row["baseline"]["status"] == "skipped":
            lines.append(f"- transformers, {where}: {row['baseline']['reason']}\n")
    return lines


def bench(name: str) -> str:
    """One model: decoding, prefill and memory, what was skipped, and what the baseline ran."""
    part = read(name)
    measured = [row for row in part["rows"] if row["status"] == "measured"]
    sizes = [[str(row["batch"]), f"{row['context']:,}"] for row in measured]
    decoding = [[*size, *decoding_cells(row)] for size, row in zip(sizes, measured, strict=True)]
    prefill = [[*size, *prefill_cells(row)] for size, row in zip(sizes, measured, strict=True)]
    ratios = ["floor / TPOT, %", "transformers TPOT, ms", "ratio"]
    memory = ["experts of a layer in a step", "GPU memory, GB", "transformers, GB"]
    text = f"### {model_of(part)}\n\nWeights: {gigabytes(part['weight_bytes'])} GB. A large copy moves "
    text += f"{figure(part['memory_gbps'])} GB/s.\n\n"
    text += table(["batch", "context", "TPOT, ms", "on the device", "floor, ms", *ratios], decoding) + "\n"
    text += table(["batch", "context", "TTFT, ms", "transformers TTFT, ms", *memory], prefill)
    if lines := skipped(part["rows"]):
        text += "\nNot measured:\n\n" + "".join(lines)
    chosen = sorted({theirs["experts"] for row in measured if (theirs := baseline_of(row)) is not None})
    if chosen:
        kinds = " or ".join(f"`{kind}`" for kind in chosen)
        text += f"\ntransformers ran `{part['baseline']['attention']}` attention and {kinds} experts.\n"
    return text + origin(part)


def model_of(part: dict[str, Any]) -> str:
    settings = part["settings"]
    weights = ", random weights" if settings["weights"] == "random" else ""
    return f"{settings['model']} in {forms(settings)}{weights}"


def forms(part: dict[str, Any]) -> str:
    """The type that was computed in, and what was kept in fewer bits."""
    kept = {"experts": part.get("expert_dtype"), "other matrices": part.get("dense_dtype")}
    fewer = [f"{what} in {form}" for what, form in kept.items() if form not in (None, part["dtype"])]
    return ", ".join([part["dtype"], *fewer])


def headline() -> str:
    """The first measured row of each model at batch 1."""
    rows, commits = [], []
    for name in BENCHES:
        part = read(name)
        row = next((r for r in part["rows"] if r["batch"] == 1 and r["status"] == "measured"), None)
        if row is None:
            raise ValueError(f"{name} has no measured row of batch 1")
        theirs = baseline_of(row)
        times = [row["ours"]["tpot_ms"]["median"], theirs and theirs["tpot_ms"]["median"], row["floor_ms"]]
        rows.append([model_of(part), machine(part), f"{row['context']:,}", *map(figure, times)])
        commits.append(part["provenance"]["commit"])
    text = table(["ms per token", "on", "prompt, tokens", "tritonmoe", "transformers", "floor"], rows)
    return text + f"\n`tools/bench.py` at commit {' and '.join(dict.fromkeys(commits))}.\n"


def headline_offload() -> str:
    """Exact decoding with experts in host memory, by the share of them that is found in slots."""
    part = read("routing-qwen3-30b-a3b.json")
    rows = [
        [percent(row["hit_rate"]), figure(row["tpot_ms"]["median"]), figure(row["floor_ms"]["median"])]
        for row in part["rows"]
        if row["policy"].startswith("exact") and not row["is_timing_only"]
    ]
    text = table(["found in slots, %", "ms per token", "floor"], sorted(rows, key=lambda row: float(row[0])))
    return (
        f"{part['model']} in {part['dtype']} on {machine(part)}:\n\n{text}\n`tools/bench_routing.py` at commit "
        f"{part['provenance']['commit']}.\n"
    )


def kernels() -> str:
    return kernels_part(read("kernels.json"))


def kernels_part(part: dict[str, Any]) -> str:
    copy, product = part["rates"]["copy_bytes_per_s"], part["rates"]["matrix_flop_per_s"]
    rows = []
    for name, cell in part["results"].items():
        is_memory_bound = cell["bytes"] / copy >= cell["flops"] / product
        rate = f"{figure(cell['gb_per_s'])} GB/s" if is_memory_bound else f"{figure(cell['tflop_per_s'])} TFLOP/s"
        against = [figure(cell["floor_us"]), percent(cell["share_of_floor"]), rate]
        if ", " in name:  # a part of the launches that the row before it is: their bytes are not its own
            against = [ABSENT] * 3
        rows.append([name, spread(cell["us"], cell["us_p10"], cell["us_p90"]), *against])
    text = f"{part['dtype']}; a large copy moves {figure(copy / 1e12)} TB/s, "
    text += f"a large matrix product does {figure(product / 1e12)} TFLOP/s.\n\n"
    return text + table(["kernel", "us", "floor, us", "floor / time, %", "rate"], rows) + origin(part)


def short_name(name: str) -> str:
    """A kernel's name without namespaces and argument lists, as far as it fits."""
    name = re.sub(r"\(anonymous namespace\)::|\b\w+::|^void ", "", name.replace("|", " "))
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1].rstrip() + "…"


def profile_decode() -> str:
    part = read("profile-qwen3-30b-a3b.json")
    found = part["kernels"]
    rows = [
        [
            f"`{short_name(row['name'])}`",
            f"{row['calls']:.0f}",
            figure(row["duration_us"]),
            figure(row["interval_us"]),
            figure(row["total_us"]),
        ]
        for row in found[:PROFILED_KERNELS]
    ]
    rest = found[PROFILED_KERNELS:]
    if rest:
        calls, total = (sum(row[key] for row in rest) for key in ("calls", "total_us"))
        rows.append([f"{len(rest)} others", f"{calls:.0f}", ABSENT, ABSENT, figure(total)])
    rows.append(
        [
            "all",
            f"{sum(row['calls'] for row in found):.0f}",
            ABSENT,
            ABSENT,
            figure(sum(row["total_us"] for row in found)),
        ]
    )
    text = f"{part['model']}, batch {part['batch']}, context {part['context']:,}.\n\n"
    text += table(["kernel", "calls a step", "us each", "interval, us", "us a step"], rows)
    text += f"\nWithout the profiler a step takes {figure(part['step_us'])} us; its floor is "
    text += f"{figure(part['floor_us'])} us, {percent(part['share_of_floor'])} % of that.\n"
    return text + origin(part)


def offload_place(row: dict[str, Any]) -> list[str]:
    slots = f"{row['slots']:,} ({percent(row['slots_share'])} %)"
    planner = ", host plans" if row.get("planner") == "host" and row["emulated_gbps"] is None else ""
    return [f"{row['context']:,}", row["policy"].split(":")[0] + planner, slots]


def offload_decoding(row: dict[str, Any]) -> list[str]:
    hits, saved = row["counters"]["hit_rate"]["all"], row.get("saved")
    return [
        tpot(row),
        figure(row["floor_ms"]),
        figure(row.get("resident_ms")),
        figure(row.get("ratio")),
        ABSENT if hits is None else percent(hits),
        figure(row["bytes_per_token"] / 1e6),
        ABSENT if saved is None else f"{percent(saved)} of {percent(row['saved_bound'])}",
    ]


def offload_prefill(row: dict[str, Any]) -> list[str]:
    bound = figure(row.get("ttft_bound_ms"))
    return [figure(row["ttft_ms"]), gigabytes(row.get("ttft_bytes")), bound, figure(row.get("ttft_ratio"))]


def offload_tables(rows: list[dict[str, Any]]) -> str:
    """Decode steps, then the first tokens of the prompts that were run."""
    place = ["context", "policy", "slots"]
    header = ["ms per token", "link floor, ms", "resident, ms", "time / best", "hits, %", "MB per token", "saved, %"]
    text = table([*place, *header], [[*offload_place(row), *offload_decoding(row)] for row in rows])
    prompts = [[*offload_place(row), *offload_prefill(row)] for row in rows if row["ttft_ms"] is not None]
    if prompts:
        header = ["first token, ms", "fetched, GB", "best, ms", "time / best"]
        text += "\n" + table([*place, *header], prompts)
    return text


def offload_part(part: dict[str, Any]) -> str:
    """One run of the benchmark: the machine's own link, then each one that waits emulated."""
    text = f"{part['model']} in {forms(part)}, batch 1; records of {figure(part['record_bytes'] / 1e6)} MB.\n"
    for gbps in dict.fromkeys(row.get("emulated_gbps") for row in part["rows"]):
        rows = [row for row in part["rows"] if row.get("emulated_gbps") == gbps]
        rate = figure(rows[0].get("link_bytes_per_s", part["link_bytes_per_s"]) / 1e9)
        link = "The machine's own link" if gbps is None else f"A link of {gbps:g} GB/s, emulated by waits"
        text += f"\n{link}: copies of records at {rate} GB/s.\n\n" + offload_tables(rows)
    lines = []
    for row in part.get("skipped", []):
        link = "" if row["emulated_gbps"] is None else f", emulated {row['emulated_gbps']:g} GB/s"
        lines.append(f"- {row['case']}, context {row['context']:,}{link}: {row['reason']}\n")
    if lines:
        text += "\nNot measured:\n\n" + "".join(lines)
    return text + origin(part)


def offload() -> str:
    """Every run that is stored: they may differ in contexts and links."""
    others = sorted(path.name for path in MEASUREMENTS.glob("offload-qwen3-30b-a3b-*.json"))
    return "\n".join(offload_part(read(name)) for name in ["offload-qwen3-30b-a3b.json", *others])


def routing_cells(row: dict[str, Any]) -> list[str]:
    per_token, saved, wanted = row["per_token"], row.get("saved"), row["wanted_ratio"]
    return [
        row["policy"].split(":")[0],
        percent(row["hit_rate_without_prediction"]),
        f"{row['slots']:,}",
        tpot(row),
        figure(row["floor_ms"]["median"]),
        figure(row["best_ms"]),
        figure(row["ratio"]) + ("" if wanted is None else f" (wanted {wanted:.2f})"),
        percent(row["hit_rate"]),
        f"{per_token['late']:.1f}",
        f"{per_token['prefetched_wasted'] + per_token['cancelled']:.1f}",
        figure(row["bytes_per_token"] / 1e6),
        ABSENT if saved is None else f"{percent(saved)} of {percent(row['saved_bound'])}",
    ]


def routing(part: dict[str, Any]) -> str:
    """Synthetic routing by hit rate: whole records, then smaller ones, then what the host has to do with it."""
    header = [
        "policy", "hits without prediction, %", "slots", "ms per token", "schedule floor, ms", "held against, ms",
        "ratio", "hits, %", "late", "wasted", "MB per token", "saved, %",
    ]  # fmt: skip
    text = f"{part['model']} in {forms(part)}, batch {part['batch']}; all experts resident: "
    text += f"{tpot({'tpot_ms': part['resident_ms']})} ms per token.\n"
    for size in dict.fromkeys(row["record_bytes"] for row in part["rows"]):
        rows = [row for row in part["rows"] if row["record_bytes"] == size]
        rate = figure(rows[0]["gather_bytes_per_s"] / 1e9)
        text += f"\nRecords of {figure(size / 1e6)} MB, fetched at {rate} GB/s"
        text += f"; computed with weights in {part['dtype']}" if rows[0]["is_timing_only"] else ""
        text += ".\n\n" + table(header, [routing_cells(row) for row in rows])
    for row in part["rows"]:
        if "host" in row:
            host = row["host"]
            text += f"\n{row['case'].removesuffix(':host')} %: {figure(host['launches_per_token'])} launches of the "
            text += f"host per token; with {host['busy_cores']} cores busy {100 * host['change']:+.1f} % per token.\n"
    if part["skipped"]:
        text += "\nNot measured:\n\n" + "".join(f"- {row['case']}: {row['reason']}\n" for row in part["skipped"])
    return text + origin(part)


def packed() -> str:
    """Runs with weights in fewer bits, of tools/bench_kernels.py, tools/bench.py and tools/bench_routing.py."""
    products = [kernels_part(read(path.name)) for path in sorted(MEASUREMENTS.glob("packed-kernels-*.json"))]
    benches = [bench(path.name) for path in sorted(MEASUREMENTS.glob("packed-bench-*.json"))]
    routings = [routing(read(path.name)) for path in sorted(MEASUREMENTS.glob("packed-routing-*.json"))]
    return "\n".join([*products, *benches, *routings]) or NOT_YET


def quantization_error() -> str:
    """What formats of experts cost models, of tools/quantization_error.py."""
    parts = [read(path.name) for path in sorted(MEASUREMENTS.glob("quantization-*.json"))]
    return "\n".join(map(quantization_part, parts)) or NOT_YET


def quantization_part(part: dict[str, Any]) -> str:
    header = ["experts", "bits", "error of weights, %", "of layers, % (least–greatest)"]
    header += ["bits per character", "perplexity", "easy tasks, %", "hard tasks, %"]
    rows = []
    for name, found in part["formats"].items():
        layers, text, tasks = found.get("layers"), found["text"], found.get("tasks")
        cells = [ABSENT] * 3
        if layers:
            weights = [layer[kind] for layer in layers for kind in ("gate_up", "down")]
            outputs = [100 * layer["outputs"] for layer in layers]
            errors = spread(statistics.median(outputs), min(outputs), max(outputs))
            cells = [figure(found["bits"]), figure(100 * statistics.mean(weights)), errors]
        shares = [ABSENT] * 2
        if tasks:
            shares = [f"{percent(t['accuracy'])} ± {percent(t['standard_error'])}" for t in tasks.values()]
        rows.append([name, *cells, f"{text['bits_per_character']:.4f}", f"{text['perplexity_per_token']:.2f}", *shares])
    characters = part["formats"][next(iter(part["formats"]))]["text"]["characters"]
    return f"{part['model']}, {characters:,} characters of held-out text.\n\n" + table(header, rows) + origin(part)


def memory() -> str:
    """What models took of a card by the driver, beside the budget that was given."""
    parts = [read(path.name) for path in sorted(MEASUREMENTS.glob("memory-*.json"))]
    return "\n".join(map(memory_part, parts)) or NOT_YET


def memory_part(part: dict[str, Any]) -> str:
    header = ["budget", "experts in", "slots, % of experts", "by the plan used, GiB", "taken, GiB", "main memory, GiB"]
    cells = []
    for row in part["rows"]:
        used = row["budget_bytes"] - row["plan"].get("not used", 0)
        sizes = [used, max(row["taken_bytes"].values()), row["host_bytes"]]
        share = percent(row["slot_share"]) if row["slots"] else "all resident"
        cells.append([row["budget"], row["expert_dtype"], share, *(figure(size / 2**30) for size in sizes)])
    text = f"{part['model']} in {part['dtype']}, a context of {part['max_context']:,} tokens.\n\n{table(header, cells)}"
    if part["skipped"]:
        text += "\nNot run:\n\n" + "".join(f"- {row['budget']}: {row['reason']}\n" for row in part["skipped"])
    return text + origin(part)


def fuzz() -> str:
    part = read("fuzz.json")
    header = ["files", "cases", "of them directed", "accepted", "refused", "findings", "longest, s", "most memory, MiB"]
    rows = [
        [
            name,
            *(f"{row[key]:,}" for key in ("cases", "directed", "accepted")),
            ", ".join(f"{count:,} {error}" for error, count in row["refused"].items()) or ABSENT,
            str(len(row["findings"])),
            figure(row["longest_s"]),
            f"{row['grown_mib']:.0f}",
        ]
        for name, row in part["kinds"].items()
    ]
    text = f"{part['cases']:,} cases, {part['findings']} findings; a case may take {part['case_seconds']:g} s and map "
    return text + f"{part['memory_mib']:,} MiB.\n\n" + table(header, rows) + origin(part)


def predicted(name: str, render: Callable[[dict[str, Any]], str], part: str) -> str:
    """A part of a model's evaluation; FileNotFoundError where it was not measured."""
    content = read(f"prediction-{name}.json")
    if part not in content:
        raise FileNotFoundError(f"measurements/prediction-{name}.json is missing its part {part}")
    return render(content[part]) + origin(content[part])


def siblings(part: str) -> list[str]:
    """Larger models of which a part was measured."""
    names = sorted(path.stem.removeprefix("prediction-") for path in MEASUREMENTS.glob("prediction-sibling-*.json"))
    return [name for name in names if part in read(f"prediction-{name}.json")]


def prediction_recall() -> str:
    """For text and tasks: means over layers, then layer by layer; of larger models, which figures show, the means."""

    def render(part: dict[str, Any]) -> str:
        texts = []
        for corpus in ("text", "tasks"):
            tokens = part["results"][corpus]["tokens"]
            texts.append(f"{tokens:,} tokens of {corpus}, the {part['results']['top_k']} experts of each layer:\n\n")
            texts.append(prediction.summary_table(part, corpus) + "\n" + prediction.recall_table(part, corpus) + "\n")
        untrained = prediction.summary_table(part, "untrained")
        return (
            "".join(texts) + f"The same model with its weights shuffled, so that it has learned nothing:\n\n{untrained}"
        )

    def means(part: dict[str, Any]) -> str:
        corpora = [name for name in ("text", "tasks", "untrained") if name in part["results"]]
        return "\n".join(f"{corpus}:\n\n{prediction.summary_table(part, corpus)}" for corpus in corpora)

    found = siblings("prediction")
    others = "".join(f"\n{name}, {predicted(name, means, 'prediction')}" for name in found)
    return predicted("nano", render, "prediction") + others


def prediction_drift() -> str:
    def render(part: dict[str, Any]) -> str:
        return "\n".join(f"On {c}:\n\n{prediction.drift_table(part, c)}" for c in ("text", "tasks"))

    return predicted("nano", render, "prediction")


def prediction_policies() -> str:
    """Every run that is stored: they may differ in policies and items."""
    others = sorted(path.stem.removeprefix("prediction-") for path in MEASUREMENTS.glob("prediction-nano-*.json"))

    def render(part: dict[str, Any]) -> str:
        return f"{prediction.policy_table(part)}\n{prediction.traffic_table(part)}"

    texts = [predicted(name, render, "policies") for name in ["nano", *others]]
    texts += [f"{name}:\n\n{predicted(name, render, 'policies')}" for name in siblings("policies")]
    return "\n".join(texts)


def prediction_caches() -> str:
    texts = [f"{name}:\n\n{predicted(name, prediction.cache_table, 'caches')}" for name in siblings("caches")]
    return "\n".join([predicted("nano", prediction.cache_table, "caches"), *texts])


def prediction_published() -> str:
    part = read("published-speculating-experts.json")
    accuracy = part["accuracy"]
    rows = [[name, *(percent(value) for value in row)] for name, row in accuracy["rows"].items()]
    text = table(["published", *(f"{column}, %" for column in accuracy["columns"])], rows)
    recall = [[name, value] for name, value in part["recall"].items()]
    return f"{text}\n{table(['published recall', ''], recall)}\n{part['source']}.\n"


def prediction_estimator() -> str:
    names = sorted(path.stem for path in MEASUREMENTS.glob("estimator-sibling-*.json"))
    others = (f"\n{name.removeprefix('estimator-')}: {estimator_part(read(f'{name}.json'))}" for name in names)
    return estimator_part(read("estimator-nano.json")) + "".join(others)


def estimator_part(part: dict[str, Any]) -> str:
    """What training took, what it brought to each layer on held-out text, and what a large model would take."""
    log, large = part["log"], part["large_model"]
    recall = part["recall"]
    rows = [[layer, *(percent(found[layer]["recall"]) for found in recall.values())] for layer in recall["estimator"]]
    weakest = min(recall["quasi-hidden"], key=lambda layer: recall["quasi-hidden"][layer]["recall"])
    gain = 100 * (recall["estimator"][weakest]["recall"] - recall["quasi-hidden"][weakest]["recall"])
    text = f"{part['parameters']:,} parameters, trained on {log['tokens']:,} tokens: {figure(log['collect_s'])} s of "
    text += f"running the model, {figure(log['train_s'])} s of training ({figure(part['train_flop_per_s'] / 1e9)} "
    text += f"GFLOP/s). The weakest layer, {weakest}, gains {gain:.1f} points.\n\n"
    text += table(["layer", *(f"{name}, %" for name in recall)], rows)
    text += f"\nArithmetic for Qwen3-30B-A3B on an H200 at {percent(large['share_of_peak'])} % of its matrix rate: "
    text += f"{figure(large['parameters'] / 1e6)} M parameters, {figure(large['tokens'] / 1e6)} M tokens gone through "
    text += f"{large['passes']} times take {figure(large['training_s'])} s of training and "
    text += f"{figure(large['forward_s'])} s of running the model; with all experts in host memory "
    text += f"{figure(large['link_s'])} s over the link.\n"
    return text + origin(part)


def faults() -> str:
    """What every scenario came to, and how often each outcome was seen."""
    part = read("inject-faults.json")
    rows = []
    for name, found in part["results"].items():
        outcomes = (f"{count} x {said}".replace("|", " ") for said, count in found["outcomes"].items())
        rows.append([name, f"{found['cases']:,}", "; ".join(outcomes)])
    text = table(["scenario", "cases", "how they ended"], rows)
    problems = [line for found in part["results"].values() for line in found["problems"]]
    return text + _problems(problems) + origin(part)


def soak() -> str:
    """Every run that is stored."""
    parts = [read("soak-nano.json"), *(read(path.name) for path in sorted(MEASUREMENTS.glob("soak-nano-*.json")))]
    header = ["policy", "slots", "tokens", "generations", "compared", "records fetched", "memory, MB", "grown by, MB"]
    rows, problems = [], []
    for part in parts:
        for found in part["results"]:
            counted, host = found["counters"], found["host_bytes"]
            fetched = sum(counted[f"{kind} {what}"] for kind in KINDS for what in ("demand", "prefetched"))
            rows.append(
                [
                    found["policy"],
                    f"{found['slots']:,} of {found['experts']:,}",
                    *(f"{found[name]:,}" for name in ("tokens", "generations", "compared_tokens")),
                    f"{fetched:,}",
                    figure(host["quarter 4"] / 1e6),
                    f"{host['grown'] / 1e6:.1f}",
                ]
            )
            problems += found["problems"]
    return table(header, rows) + _problems(problems) + "".join(origin(part) for part in parts)


def _problems(lines: list[str]) -> str:
    return "\nNo problem was found.\n" if not lines else "\nProblems:\n\n" + "".join(f"- {line}\n" for line in lines)


REGIONS: dict[str, Callable[[], str]] = {
    "embedded-tasks": embedded_tasks,
    "embedded-text": embedded_text,
    "embedded-speed": embedded_speed,
    "embedded-samples": embedded_samples,
    "gpu-parity": gpu_parity,
    "gpu-tests": gpu_tests,
    "headline": headline,
    "headline-offload": headline_offload,
    "bench-decode": lambda: "\n".join(map(bench, BENCHES)),
    "kernels": kernels,
    "profile-decode": profile_decode,
    "offload": offload,
    "routing": lambda: routing(read("routing-qwen3-30b-a3b.json")),
    "packed": packed,
    "memory": memory,
    "quantization-error": quantization_error,
    "fuzz": fuzz,
    "prediction-recall": prediction_recall,
    "prediction-drift": prediction_drift,
    "prediction-policies": prediction_policies,
    "prediction-caches": prediction_caches,
    "prediction-estimator": prediction_estimator,
    "prediction-published": prediction_published,
    "faults": faults,
    "soak": soak,
}


def render(text: str) -> str:
    return REGION.sub(lambda found: f"{found[1]}\n{REGIONS[found[2]]()}\n{found[4]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a document is out of date")
    check = parser.parse_args().check
    old = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    try:
        new = {path: render(text) for path, text in old.items()}  # all before any is written
    except FileNotFoundError as error:
        parser.error(str(error))
    stale = [path for path in DOCUMENTS if new[path] != old[path]]
    if not check:
        for path in stale:
            path.write_text(new[path], encoding="utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(path.name for path in stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
