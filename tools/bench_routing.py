"""Time decode steps whose experts come over the link, by slot hit rate and policy, beside the schedule floor.

Routing is synthetic: tables of ids with a given reuse take the place of what the routers chose, after the routers and
the predictor have run, so that their time counts. A hit rate is that of an LRU cache without prediction over the same
tables. `recall` is that of guesses on experts that are not resident there; each of those that it misses is guessed to
be another expert, whose fetch is in vain. Where guesses are executed, the tables are what was guessed. With
+lookahead=2 a layer is foretold two layers ahead, and again one layer ahead: what is right there is `--falloff` times
`--recall`, which is about the share that embedded models have (docs/prediction.md).

    schedule floor = sum over layers of max(window, needed bytes of the layer / gather rate)

needed: the misses of that cache without prediction, step by step and layer by layer; window: the resident step of the
same run / layers; gather rate: that of the fetch kernel, in the same run. A step is held against the floor where
experts are prefetched ("exact": plus its mispredicted bytes / gather rate; "router-pf" never, although two layers ahead
it has some), against the resident step + needed bytes / gather rate where they are not, and against the resident step
with slots for everything.

A case is POLICY[+OPTION=VALUE]:HITS[@BYTES][:host]. HITS: a percentage, with --slots, or "everything" or "minimum"
slots. BYTES: so many are fetched of each record, in place of all, which shows the times of smaller records; experts are
still computed with weights in --dtype, so that the window is longer than with such records. host: the steps again while
every CPU core is busy, and the launches that a step costs the host.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.cli import add_storage_options, first_line, positive, release, stored_forms
from bench.cli import store as write
from bench.measure import spread
from bench.random_weights import random_storage, random_weights
from bench.synthetic_routing import SyntheticRouting
from bench.table_replay import EVERYTHING, FORM, MINIMUM, Case, Model, Replay, TableReplay, gather_rate, run
from bench.trace import PROFILED_STEPS, host_launches, profile_steps
from bench_offload import EMBEDDING_SCALE, random_store
from provenance import ROOT, provenance

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.errors import InputError, TritonMoeError
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.spec import ModelSpec
from tritonmoe.placement.storage import name_of

POLICIES = ("on-demand", "exact", "router-pf")
RATES = (50, 75, 90, 95)
SMALL = "88@2506752"  # an expert of 2048 x 768 with 4 bits: link and compute in balance
CASES = (
    *(f"{policy}:{EVERYTHING}" for policy in POLICIES),
    *(f"{policy}:{rate}{':host' * (policy == 'exact' and rate == 75)}" for policy in POLICIES for rate in RATES),
    *(f"{policy}:{SMALL}" for policy in POLICIES),
    *(f"{policy}+lookahead=2:{rate}" for policy in POLICIES[1:] for rate in (EVERYTHING, *RATES, SMALL)),
    f"on-demand:{MINIMUM}",
)
RESIDENT_WARM_STEPS = 8
WANTED_FLOOR_RATIO, WANTED_PACKED_RATIO = 1.08, 1.10  # the latter where experts are kept in fewer bits
WANTED_RESIDENT_RATIO = 1.10
WANTED_SAVED = {"exact": 0.25, "router-pf": 0.28}  # of the step on demand, with small records
WANTED_MINIMUM_MS = {  # on one H200, by model, form of the experts and preset
    ("qwen3-30b-a3b", "bfloat16", "on-demand"): 74.0,
    **{("qwen3-30b-a3b", form, "on-demand"): 21.5 for form in ("int4", "mxfp4")},
    **{("qwen3-30b-a3b", form, "router-pf"): 19.8 for form in ("int4", "mxfp4")},
}
WANTED_CHANGE = 0.03  # by busy cores
WANTED_LAUNCHES = 5


@dataclass
class Bench:
    """What all rows share, and the rates that were measured so far."""

    options: argparse.Namespace
    model: Model
    name: str
    resident: Replay | None
    resident_ms: list[float] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)  # bytes per second, by size of record
    replay: TableReplay | None = None
    held: tuple[object, ...] = ()  # what `replay` was made for

    def measure_resident(self) -> list[float]:
        """Milliseconds of steps with all experts on the device, from the same prompt every time."""
        assert self.resident is not None
        self.resident.restart()
        self.resident.step_ms(RESIDENT_WARM_STEPS)
        return self.resident.step_ms(self.options.steps)

    def rate(self, record_bytes: int) -> float:
        if record_bytes not in self.rates:
            self.rates[record_bytes] = gather_rate(self.model, record_bytes)
        return self.rates[record_bytes]

    def replay_for(self, case: Case, num_slots: int, routing: SyntheticRouting) -> TableReplay:
        """Slots and captured steps, those of the last case where they serve this one, with its tables."""
        wanted = (case.policy, num_slots, case.record_bytes)
        if self.replay is None or self.held != wanted:
            self.end_replay()
            steps = len(routing.routed)
            context = self.options.context
            self.replay = TableReplay(self.model, case.policy, num_slots, case.record_bytes, context, steps)
            self.held = wanted
        self.replay.load(routing)
        return self.replay

    def end_replay(self) -> None:
        if self.replay is not None:
            self.replay.close()
        self.replay = None
        release(self.model.device)


def schedule_floor_ms(misses: np.ndarray, record_bytes: int, bytes_per_s: float, window_ms: float) -> np.ndarray:
    """Of each step, from the experts that each layer lacks [steps, L]."""
    return np.maximum(window_ms, 1e3 * misses * record_bytes / bytes_per_s).sum(-1)


def measure(bench: Bench, case: Case) -> dict[str, Any]:
    """A row."""
    model, options = bench.model, bench.options
    num_slots = case.num_slots(model.spec, options.slots)
    routing = case.routing(model.shape, num_slots, options.steps, options.recall, options.falloff)
    record_bytes = case.record_bytes or model.store.layout.num_bytes
    rate = bench.rate(record_bytes)
    replay = bench.replay_for(case, num_slots, routing)
    row: dict[str, Any] = {
        "case": case.text,
        "policy": str(case.policy),
        "slots": num_slots,
        "record_bytes": record_bytes,
        "is_timing_only": case.record_bytes is not None,
        "wanted_hit_rate": case.hits,
        "hit_rate_without_prediction": routing.hit_rate,
        "recall": recall_of(case, routing),
        "reuse": routing.reuse,
        "misses_per_step": float(routing.misses.sum(-1).mean()),
        "layers_by_misses": np.bincount(routing.misses.ravel()).tolist(),  # layers x steps with 0, 1, 2 … of them
    }
    if case.slots == EVERYTHING:
        before = bench.measure_resident()
        times, counts = run(replay, routing, options.steps)
        again, more = run(replay, routing, options.steps)
        after = bench.measure_resident()
        times += again
        counts = {name: (counts[name] + more[name]) / 2 for name in counts}
        row["resident_ms"] = spread(before + after)
    else:
        times, counts = run(replay, routing, options.steps)
    row |= {"tpot_ms": spread(times), "notes": replay.notes}
    row |= moved(counts, options.steps, record_bytes)
    if case.policy.predictor == "none":  # the cache that was simulated
        row["is_as_simulated"] = bool(row["per_token"]["demand"] * options.steps == routing.misses.sum())
    wanted = WANTED_FLOOR_RATIO if model.weights.storage.experts is None else WANTED_PACKED_RATIO
    row |= held_against(row, case, routing, rate, float(np.median(bench.resident_ms)), wanted)
    kind = (bench.name, name_of(model.weights.storage, model.weights.embedding.dtype), case.policy.name)
    if case.slots == MINIMUM and kind in WANTED_MINIMUM_MS:
        row["wanted_ms"] = WANTED_MINIMUM_MS[kind]
    if case.is_host:
        row["host"] = measure_host(replay, routing, options.steps, times)
    return row


def recall_of(case: Case, routing: SyntheticRouting) -> list[float | None]:
    """Those of the tables by layers ahead; None where a guess is what is routed."""
    if case.policy.predictor == "none":
        return []
    return routing.recall if case.policy.execute == "routed" else [None, *routing.recall[1:]]


def moved(counts: dict[str, float], steps: int, record_bytes: int) -> dict[str, Any]:
    """What the device counted, per step."""
    whole = counts["demand"] + counts["prefetched"] - counts["cancelled"]
    cancelled_bytes = counts["moved_bytes"] - whole * record_bytes
    names = ("routed", "hits", "late", "demand", "prefetched", "prefetched_used", "prefetched_wasted", "cancelled")
    return {
        "hit_rate": counts["hits"] / counts["routed"],
        "bytes_per_token": counts["moved_bytes"] / steps,
        "mispredicted_bytes_per_token": (counts["prefetched_wasted"] * record_bytes + cancelled_bytes) / steps,
        "per_token": {name: counts[name] / steps for name in names},
    }


def held_against(
    row: dict[str, Any],
    case: Case,
    routing: SyntheticRouting,
    bytes_per_s: float,
    resident_ms: float,
    wanted_floor_ratio: float,
) -> dict[str, Any]:
    """The floor, what the row's step is held against, and how many times that it took."""
    record_bytes, num_layers = row["record_bytes"], routing.misses.shape[1]
    floors = schedule_floor_ms(routing.misses, record_bytes, bytes_per_s, resident_ms / num_layers)
    serial = resident_ms + 1e3 * routing.misses.sum(-1) * record_bytes / bytes_per_s
    mispredicted_ms = 1e3 * row["mispredicted_bytes_per_token"] / bytes_per_s
    floor_ms, serial_ms = float(np.median(floors)), float(np.median(serial))
    wanted: float | None = wanted_floor_ratio
    if case.slots == EVERYTHING:
        best_ms, wanted = row["resident_ms"]["median"], WANTED_RESIDENT_RATIO
    elif case.policy.predictor == "none":
        best_ms, wanted = serial_ms, None
    else:
        best_ms = floor_ms + (mispredicted_ms if case.policy.execute == "routed" else 0.0)
    return {
        "gather_bytes_per_s": bytes_per_s,
        "floor_ms": spread(floors),
        "serial_ms": spread(serial),
        "mispredicted_ms": mispredicted_ms,
        "best_ms": best_ms,
        "ratio": row["tpot_ms"]["median"] / best_ms,
        "wanted_ratio": wanted,
        "saved_bound": 1.0 - floor_ms / serial_ms,
    }


def measure_host(replay: TableReplay, routing: SyntheticRouting, steps: int, quiet: list[float]) -> dict[str, Any]:
    """The steps while every core is busy, twice, then without again; and what the host launches for one of them."""
    with busy_cores() as cores:
        busy = run(replay, routing, steps)[0] + run(replay, routing, steps)[0]
    quiet = quiet + run(replay, routing, steps)[0]
    change = float(np.median(busy) / np.median(quiet)) - 1.0
    launches = None
    if replay.device.type == "cuda":
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json.gz"
            profile_steps(replay, trace, steps)
            launches = host_launches(trace) / min(steps, PROFILED_STEPS)
    return {
        "busy_cores": cores,
        "quiet_ms": spread(quiet),
        "busy_ms": spread(busy),
        "change": change,
        "wanted_change": WANTED_CHANGE,
        "launches_per_token": launches,
        "wanted_launches": WANTED_LAUNCHES,
    }


@contextlib.contextmanager
def busy_cores() -> Iterator[int]:
    """Each core that this process may use runs one that does nothing but run."""
    count = len(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)  # until all have started
        yield count
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()


def add_saving(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """What prefetching saves of the step that fetches on demand, with the same slots and routing."""
    same = ("slots", "record_bytes", "wanted_hit_rate")
    plain = next((r for r in rows if r["policy"].startswith("on-demand") and all(r[k] == row[k] for k in same)), None)
    if plain is None or row is plain or row["wanted_hit_rate"] is None:
        return
    row["saved"] = 1.0 - row["tpot_ms"]["median"] / plain["tpot_ms"]["median"]
    if row["is_timing_only"]:
        row["wanted_saved"] = WANTED_SAVED.get(row["policy"].split(":")[0])


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    tpot, per_token, wanted = row["tpot_ms"], row["per_token"], row["wanted_ratio"]
    parts = [
        f"{row['case']:<24}{row['slots']:5} slots {tpot['median']:7.2f} ms ({tpot['p10']:.2f}-{tpot['p90']:.2f})",
        f"floor {row['floor_ms']['median']:6.2f}, best {row['best_ms']:6.2f}, ratio {row['ratio']:5.3f}"
        + ("" if wanted is None else f" <= {wanted}"),
        f"hits {row['hit_rate_without_prediction']:.1%} -> {row['hit_rate']:.1%}, late {per_token['late']:.1f}, wasted "
        f"{per_token['prefetched_wasted']:.1f}, cancelled {per_token['cancelled']:.1f}",
        f"{row['bytes_per_token'] / 1e6:.0f} MB",
    ]
    if "saved" in row:
        parts.append(f"saved {row['saved']:.1%} of {row['saved_bound']:.1%}")
    if "wanted_ms" in row:
        parts.append(f"wanted {row['wanted_ms']} ms")
    if "host" in row:
        host = row["host"]
        parts.append(f"busy cores {host['change']:+.1%}, host launches {host['launches_per_token']}")
    return "; ".join([*parts, *row["notes"]])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_routing.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--cases", default=",".join(CASES), help=f"{FORM}, …")
    parser.add_argument("--time-limit", type=positive, metavar="S", help="begin no row after this many seconds")
    parser.add_argument("--output", type=Path, help="the JSON to write (default: docs/measurements/routing-MODEL.json)")
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a case needs beside itself."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a config.json; no weights needed")
    parser.add_argument("--slots", default="25%", metavar="N", help="where a hit rate is given (default: 25%%)")
    parser.add_argument("--recall", type=share, default=0.9, help="of guesses, on what is not resident (default: 0.9)")
    parser.add_argument("--falloff", type=share, default=0.92, help="of recall, a layer further ahead (default: 0.92)")
    parser.add_argument("--context", type=positive, default=128, help="tokens before the first step (default: 128)")
    parser.add_argument("--steps", type=positive, default=64, help="timed steps of a row (default: 64)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add_storage_options(parser)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def prepare(options: argparse.Namespace, spec: ModelSpec) -> Bench:
    """Weights, the resident step, and the store. InputError where they do not fit."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    storage = random_storage(options.expert_dtype, options.dense_dtype, spec, dtype)
    weights = random_weights(spec, device, dtype, storage=storage)
    weights.embedding.normal_(0.0, EMBEDDING_SCALE)  # as those of the store's model
    resident = Replay(Decoder(spec, weights), options.context, RESIDENT_WARM_STEPS + options.steps)
    store, others = random_store(spec, dtype, device, storage)
    bench = Bench(options, Model(spec, others, store), options.config.stem, resident)
    bench.measure_resident()  # the first pass compiles and captures
    bench.resident_ms = bench.measure_resident() + bench.measure_resident()
    return bench


def main(arguments: list[str] | None = None) -> int:
    began = time.perf_counter()
    parser = build_parser()
    options = parser.parse_args(arguments)
    is_default = all(getattr(options, name) == parser.get_default(name) for name in ("cases", "expert_dtype"))
    if options.output is None and not is_default:
        parser.error("this is not what the documents show: give --output, so as not to write over that")
    output = options.output or ROOT / f"docs/measurements/routing-{options.config.stem}.json"
    try:
        cases = [Case.parse(text) for text in options.cases.split(",")]
        spec = parse_config(read_json(options.config), options.config.name)
        for case in cases:
            case.num_slots(spec, options.slots)
        output.parent.mkdir(parents=True, exist_ok=True)  # so that the stored command names the file alone
        source = provenance()
        bench = prepare(options, spec)
    except TritonMoeError as error:
        parser.error(str(error))
    result: dict[str, Any] = {
        "provenance": source,
        "model": bench.name,
        "dtype": options.dtype,
        **stored_forms(bench.model.weights.storage, getattr(torch, options.dtype)),
        "batch": 1,
        "context": options.context,
        "steps": options.steps,
        **bench.model.shape._asdict(),
        "resident_ms": spread(bench.resident_ms),
        "rows": [],
        "skipped": [],
    }
    print(f"resident step {result['resident_ms']['median']:.3f} ms; {time.perf_counter() - began:.0f} s", flush=True)
    for case in sorted(cases, key=lambda case: case.slots != EVERYTHING):  # they need the resident weights beside them
        if case.slots != EVERYTHING:
            bench.resident = None
        run_case(bench, result, case, began)
        write(output, result)
    bench.end_replay()
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


def run_case(bench: Bench, result: dict[str, Any], case: Case, began: float) -> None:
    """Add a row to the result, or the reason why there is none."""
    limit = bench.options.time_limit
    reason = None
    if limit is not None and time.perf_counter() - began > limit:
        reason = f"not begun within --time-limit {limit}"
    else:
        try:
            row = measure(bench, case)
            result["rows"].append(row)
            for other in result["rows"]:  # also those that came before what they are compared with
                add_saving(other, result["rows"])
            print(line(row), flush=True)
        except (InputError, torch.OutOfMemoryError) as error:
            reason = first_line(error)
            bench.end_replay()
    if reason is not None:
        result["skipped"].append({"case": case.text, "reason": reason})
        print(f"{case.text:<24}skipped: {reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
