"""Time decoding and prefill with experts in host memory, by policy and number of slots, beside what they cannot beat.

Weights are random, and so are the tokens of every step. Embeddings are large, so that the residual stream stays a
token's own and routing does not collapse onto few experts; hit rates are those of a model without habits. Experts
repeat a few random records: that changes neither bytes nor times.

The link floor of a row is its fetched bytes over the rate at which records were copied in the same run, and the
resident step is that of the same shape with all experts on the device, in the same run. Fetching on demand is held
against the sum of the two, prefetching against the larger one, a first token against the larger of its bytes over that
rate and the resident first token. Slower links are emulated by waits after each copy, which the host then starts; their
rows say so. Prompts longer than --prefill-up-to are not run: their keys and values are random.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.cli import add_storage_options, first_line, positive, positive_list, release, stored_forms
from bench.cli import store as write
from bench.link import Link, emulated_link, own_link
from bench.measure import spread
from bench.random_text import PREFILL_SECONDS, RandomText
from bench.random_weights import SCALE, random_records, random_storage, random_weights
from provenance import provenance

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.errors import InputError, TritonMoeError
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import ExpertStore
from tritonmoe.model.operations import operations
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import PLAIN, ModelWeights, Storage
from tritonmoe.offload.counters import Counters
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import Policy, minimum_slots, resolve
from tritonmoe.placement.loader import make_predictor
from tritonmoe.placement.memory_plan import read_slots

POLICIES = ("on-demand", "exact", "router-pf")
SIZES = ("minimum", "4%", "12%", "25%", "50%", "100%")
CASES = [f"{policy}:{size}" for size in SIZES for policy in POLICIES]
DISTINCT_RECORDS = 32
LINK_RECORDS = 64  # copied to measure the link
THREADS = 12
SEED = 0
EMBEDDING_SCALE = 32.0  # at 1 what attention adds over the layers is larger than the token, and all tokens become alike
WARM_PROMPT = 512  # tokens, which choose every expert: slots are full before the first step


@dataclass(frozen=True)
class Resident:
    """Milliseconds with all experts on the device; None where they do not fit or the prompt is not run."""

    step_ms: float | None = None
    first_token_ms: float | None = None


@dataclass
class Bench:
    """What all rows share."""

    options: argparse.Namespace
    spec: ModelSpec
    weights: ModelWeights
    store: ExpertStore
    residents: dict[int, Resident]  # by context

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device


def random_store(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, storage: Storage = PLAIN
) -> tuple[ExpertStore, ModelWeights]:
    """A filled store and the other weights, experts being copies of a few random records."""
    store = ExpertStore.allocate(spec, dtype, storage)
    sources = random_records(store.layout, DISTINCT_RECORDS, device).cpu()
    keys = [(i, e) for i, moe in spec.moe_layers.items() for e in range(moe.num_experts)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda key: store.record(*key).copy_(sources[sum(key) % DISTINCT_RECORDS]), keys))
    store.pin()
    weights = random_weights(spec, device, dtype, SEED, storage, store)
    weights.embedding.normal_(0.0, EMBEDDING_SCALE)
    return store, weights


def first_records(spec: ModelSpec, store: ExpertStore) -> list[torch.Tensor]:
    """Records of one layer, to measure the link with."""
    layer, moe = next(iter(spec.moe_layers.items()))
    return [store.record(layer, i % moe.num_experts) for i in range(LINK_RECORDS)]


def measure_residents(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, storage: Storage, options: argparse.Namespace
) -> dict[int, Resident]:
    """By context, the times with all experts on the device, whose memory is then free again."""
    try:
        weights = random_weights(spec, device, dtype, SEED, storage)
        weights.embedding.normal_(0.0, EMBEDDING_SCALE)
        decoder = Decoder(spec, weights)
        return {context: measure_resident(decoder, context, options) for context in options.context}
    except (InputError, torch.OutOfMemoryError) as error:
        print(f"no resident times: {first_line(error)}", flush=True)
        return dict.fromkeys(options.context, Resident())


def measure_resident(decoder: Decoder, context: int, options: argparse.Namespace) -> Resident:
    text = RandomText(decoder, context, options.steps)
    first_token_ms = None
    if context <= options.prefill_up_to:
        text.prefill_ms(context)
        first_token_ms = float(np.median([text.prefill_ms(context) for _ in range(3)]))
    text.begin()
    text.warm_up(options.seconds)
    return Resident(float(np.median(text.step_ms(options.seconds))), first_token_ms)


def measure(bench: Bench, case: str, context: int, link: Link) -> dict[str, Any]:
    """The figures of a row: first token, decode steps, what was fetched for them, and what they are held against."""
    spec, weights, options = bench.spec, bench.weights, bench.options
    name, _, size = case.partition(":")
    policy = resolve(name)
    total = sum(moe.num_experts for moe in spec.moe_layers.values())
    num_slots = minimum_slots(spec, policy) if size == "minimum" else read_slots(size, total)
    if num_slots < 1:
        raise InputError(f"{size} of {total} experts are no slot; use a larger share")
    experts = make_experts(bench, policy, num_slots, link)
    text = RandomText(Decoder(spec, weights, operations(bench.device), experts), context, options.steps)
    try:
        first = first_token(bench, text, experts, context, link)
        text.begin()
        text.warm_up(0.7 * options.seconds)
        experts.report()  # takes up what was counted so far
        before = copy.deepcopy(experts.counters)
        times = text.step_ms(options.seconds)
        experts.report()
        counted = since(before, experts.counters).summary()
        planner = "host" if experts.needs_host else "device"
    finally:
        experts.copies.close()  # the store, and its pinned memory, serves the next case
    moved = counted["bytes_per_token"]["total"]
    tpot_ms = spread(times)
    return {
        "policy": str(policy),
        "size": size,
        "slots": num_slots,
        "slots_share": num_slots / total,
        "context": context,
        "emulated_gbps": link.emulated_gbps,
        "link_bytes_per_s": link.bytes_per_s,
        "planner": planner,
        "steps": len(times),
        "tpot_ms": tpot_ms,
        "bytes_per_token": moved,
        **step_target(policy, tpot_ms["median"], 1e3 * moved / link.bytes_per_s, bench.residents[context].step_ms),
        **first,
        "counters": {key: value for key, value in counted.items() if key != "layers"},
    }


def since(before: Counters, now: Counters) -> Counters:
    """What was counted between the two."""
    found = copy.deepcopy(now)
    found.tokens -= before.tokens
    if found.wait_s is not None and before.wait_s is not None:
        found.wait_s -= before.wait_s
    for layer, earlier in zip(found.layers, before.layers, strict=True):
        for name, count in asdict(earlier).items():
            setattr(layer, name, getattr(layer, name) - count)
    return found


def make_experts(bench: Bench, policy: Policy, num_slots: int, link: Link) -> OffloadedExperts:
    spec, weights, ops = bench.spec, bench.weights, operations(bench.device)
    most = max(moe.num_experts for moe in spec.moe_layers.values())
    vectors = weights.embedding.new_zeros(len(spec.layers), most, spec.hidden_size).normal_(0.0, SCALE)
    predictor = make_predictor(policy, ops, spec, weights, vectors)
    # Waits that emulate a link follow copies which the host starts; what the device fetches by itself has none.
    on_host = bench.options.plan_on == "host" or link.emulated_gbps is not None
    on_device = {"auto": None, "host": False, "device": True}["host" if on_host else bench.options.plan_on]
    return OffloadedExperts(
        ops, spec, weights, bench.store, num_slots, policy, predictor,
        make_copies=link.make_copies, plan_on_device=on_device,
    )  # fmt: skip


def step_target(policy: Policy, step_ms: float, floor_ms: float, resident_ms: float | None) -> dict[str, float | None]:
    """The best that the row's step could be with the bytes that it fetched, and how many times that it took."""
    target_ms = None
    if resident_ms is not None:
        target_ms = floor_ms + resident_ms if policy.predictor == "none" else max(floor_ms, resident_ms)
    ratio = None if target_ms is None else step_ms / target_ms
    return {"floor_ms": floor_ms, "resident_ms": resident_ms, "target_ms": target_ms, "ratio": ratio}


def first_token(
    bench: Bench, text: RandomText, experts: OffloadedExperts, context: int, link: Link
) -> dict[str, float | list[float] | None]:
    """The first token of the prompt and what it is held against, with slots full of what the prompt before it left."""
    if context > bench.options.prefill_up_to:
        text.prefill_ms(min(context, WARM_PROMPT))
        return {"ttft_ms": None, "ttft_bytes": None, "ttft_bound_ms": None, "ttft_ratio": None}
    times: list[float] = []
    experts.begin()
    text.prefill_ms(context)  # compiles, and fills the slots as a prompt leaves them
    while len(times) < 3 and sum(times) < 1e3 * PREFILL_SECONDS:
        experts.begin()
        times.append(text.prefill_ms(context))
    moved = experts.prefill_counters.moved_records() * bench.store.layout.num_bytes
    resident_ms = bench.residents[context].first_token_ms
    bound_ms = None if resident_ms is None else max(1e3 * moved / link.bytes_per_s, resident_ms)
    return {
        "ttft_ms": float(np.median(times)),
        "ttft_runs_ms": times,
        "ttft_bytes": moved,
        "ttft_resident_ms": resident_ms,
        "ttft_bound_ms": bound_ms,
        "ttft_ratio": None if bound_ms is None else float(np.median(times)) / bound_ms,
    }


def add_saving(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """What prefetching saves of the step that fetches on demand, and the most that it could: one part of that step
    hidden behind the other."""
    same = ("size", "context", "emulated_gbps")
    plain = next(
        (r for r in rows if r["policy"].startswith("on-demand") and all(r[key] == row[key] for key in same)), None
    )
    if plain is None or row is plain or row["resident_ms"] is None:
        return
    row["saved"] = 1.0 - row["tpot_ms"]["median"] / plain["tpot_ms"]["median"]
    parts = (plain["floor_ms"], plain["resident_ms"])
    row["saved_bound"] = min(parts) / sum(parts)


def line(case: str, row: dict[str, Any]) -> str:
    """A row as text."""

    def ms(value: float | None, width: int = 8) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:{width}.2f}"

    hits = row["counters"]["hit_rate"]["all"]
    return (
        f"{case:<20}{row['slots']:6} slots{ms(row['tpot_ms']['median'])} ms, floor{ms(row['floor_ms'])}, resident"
        f"{ms(row['resident_ms'], 6)}, ratio{ms(row['ratio'], 6)}; {row['bytes_per_token'] / 1e6:8.1f} MB, hits "
        f"{hits or 0:6.1%}; first token{ms(row['ttft_ms'], 9)} ms, bound{ms(row['ttft_bound_ms'], 9)}"
    )


def gbps_list(text: str) -> list[float | None]:
    """Rates of links to emulate; None for the machine's own."""
    try:
        found = [None if part == "own" else float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers and own") from None
    if not all(gbps is None or 0 < gbps < float("inf") for gbps in found):
        raise argparse.ArgumentTypeError(f"{text!r} has a rate that is not above 0")
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_offload.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random-weights", type=Path, required=True, metavar="CONFIG")
    parser.add_argument("--cases", default=",".join(CASES), help="policy:slots, …; slots: minimum, N or P%%")
    parser.add_argument("--context", type=positive_list, default=[128], help="prompt lengths (default: 128)")
    parser.add_argument(
        "--link-gbps", type=gbps_list, default=[None], help="links, of which numbers are emulated (default: own)"
    )
    parser.add_argument(
        "--sweep-once",
        action="store_true",
        help="all cases at the first context and link; those of minimum slots at other contexts, and at other links",
    )
    parser.add_argument("--steps", type=positive, default=64, help="at most so many decode steps (default: 64)")
    parser.add_argument("--seconds", type=float, default=1.0, help="about so long for the steps of a row (default: 1)")
    parser.add_argument(
        "--prefill-up-to", type=int, default=4096, metavar="N", help="longest prompt to time (default: 4096)"
    )
    parser.add_argument(
        "--plan-on",
        choices=("auto", "host", "device"),
        default="auto",
        help="who plans a step and starts its copies (default: as the engine does; the host on emulated links)",
    )
    parser.add_argument("--time-limit", type=positive, metavar="S", help="begin no row after this many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add_storage_options(parser)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    return parser


def main(arguments: list[str] | None = None) -> int:
    began = time.perf_counter()
    parser = build_parser()
    options = parser.parse_args(arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    cases = options.cases.split(",")
    try:
        check_cases(cases)
        spec = parse_config(read_json(options.random_weights), options.random_weights.name)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.touch()  # so that the stored command names it without its folder
        source = provenance()
        storage = random_storage(options.expert_dtype, options.dense_dtype, spec, dtype)
        residents = measure_residents(spec, dtype, device, storage, options)
        release(device)
        store, weights = random_store(spec, dtype, device, storage)
        records = first_records(spec, store)
        own = own_link(records, device)
        links = [own if gbps is None else emulated_link(records, device, gbps, own) for gbps in options.link_gbps]
    except TritonMoeError as error:
        parser.error(str(error))
    bench = Bench(options, spec, weights, store, residents)
    result: dict[str, Any] = {
        "provenance": source,
        "model": options.random_weights.stem,
        "dtype": options.dtype,
        **stored_forms(storage, dtype),
        "is_pinned": store.is_pinned,
        "link_bytes_per_s": own.bytes_per_s,
        "record_bytes": store.layout.num_bytes,
        "rows": [],
        "skipped": [],
    }
    print(f"records of {store.layout.num_bytes / 1e6:.2f} MB, pinned: {store.is_pinned}")
    for context in options.context:
        for link in links:
            is_first = context == options.context[0] and link is links[0]
            is_own_axis = context == options.context[0] or link is links[0]
            print(f"context {context}, {link.name}: {link.bytes_per_s / 1e9:.2f} GB/s", flush=True)
            for case in cases:
                if is_first or not options.sweep_once or (is_own_axis and case.endswith(":minimum")):
                    run_case(bench, result, case, context, link, began)
                    write(options.output, result)
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


def check_cases(cases: list[str]) -> None:
    for case in cases:
        name, _, size = case.partition(":")
        if resolve(name).is_resident:
            raise InputError("--cases: the resident step is measured with every row; leave it out")
        if size != "minimum":
            read_slots(size, sys.maxsize)


def run_case(bench: Bench, result: dict[str, Any], case: str, context: int, link: Link, began: float) -> None:
    """Add a row to the result, or the reason why there is none."""
    row = {"case": case, "context": context, "emulated_gbps": link.emulated_gbps}
    limit = bench.options.time_limit
    if limit is not None and time.perf_counter() - began > limit:
        result["skipped"].append({**row, "reason": f"not begun within --time-limit {limit}"})
        return
    release(bench.device)  # the slots of the last row
    try:
        row = measure(bench, case, context, link)
    except (InputError, torch.OutOfMemoryError) as error:
        result["skipped"].append({**row, "reason": first_line(error)})
        print(f"{case:<20}skipped: {first_line(error)}", flush=True)
        return
    result["rows"].append(row)
    add_saving(row, result["rows"])
    print(line(case, row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
