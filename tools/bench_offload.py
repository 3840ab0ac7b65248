"""Time decoding and prefill with experts in host memory, by policy and number of slots, beside the link's floor.

Weights are random, and so are the tokens of every step. Embeddings are large, so that the residual stream stays a
token's own and routing does not collapse onto few experts; hit rates are those of a model without habits. The floor of
a step is its fetched bytes over the rate at which records were copied in the same run. Experts repeat a few random
records: that changes neither bytes nor times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.measure import synchronize
from bench.random_weights import SCALE, fill
from provenance import provenance

from tritonmoe.architectures import parse_config
from tritonmoe.config_reader import read_json
from tritonmoe.errors import TritonMoeError
from tritonmoe.expert_store import ExpertStore
from tritonmoe.kv_cache import KVCache
from tritonmoe.memory_plan import minimum_slots, read_slots
from tritonmoe.model import Decoder
from tritonmoe.offload import OffloadedExperts
from tritonmoe.operations import operations
from tritonmoe.placement import make_predictor
from tritonmoe.policy import resolve
from tritonmoe.spec import ModelSpec
from tritonmoe.weights import ModelWeights, allocate

CASES = ("on-demand:minimum", "router-pf:minimum", "exact:minimum", "on-demand:25%", "exact:25%", "exact:50%")
DISTINCT_RECORDS = 32
THREADS = 12
SEED = 0


def random_store(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[ExpertStore, ModelWeights]:
    """A filled store and the other weights, experts being copies of a few random records."""
    store = ExpertStore.allocate(spec, dtype)
    weights = allocate(spec, device, dtype, store)
    fill(weights, dtype, SEED, with_experts=False)
    weights.embedding.normal_(0.0, 1.0)
    shape = (DISTINCT_RECORDS, store.layout.num_elements)
    sources = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, SCALE).cpu()
    keys = [(i, e) for i, moe in spec.moe_layers.items() for e in range(moe.num_experts)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda key: store.record(*key).copy_(sources[sum(key) % DISTINCT_RECORDS]), keys))
    store.pin()
    return store, weights


def link_rate(store: ExpertStore, layer: int, device: torch.device) -> float:
    """Bytes per second of copies of whole records to the device, one after the other."""
    count = 64
    slot = torch.empty(store.layout.num_elements, dtype=store.layout.dtype, device=device)
    times = []
    for _ in range(3):
        synchronize(device)
        began = time.perf_counter()
        for expert in range(count):
            slot.copy_(store.record(layer, expert % 8), non_blocking=True)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return count * store.layout.num_bytes / min(times)


def measure(
    spec: ModelSpec, weights: ModelWeights, store: ExpertStore, case: str, context: int, steps: int, rate: float
) -> dict[str, Any]:
    """TTFT of a prompt of `context` random tokens, TPOT over `steps` random tokens after it, and what was fetched."""
    name, _, size = case.partition(":")
    policy, device = resolve(name), weights.embedding.device
    total = sum(moe.num_experts for moe in spec.moe_layers.values())
    least = minimum_slots(spec, policy)
    num_slots = least if size == "minimum" else read_slots(size, total)
    ops = operations(device)
    most = max(moe.num_experts for moe in spec.moe_layers.values())
    vectors = weights.embedding.new_zeros(len(spec.layers), most, spec.hidden_size).normal_(0.0, SCALE)
    predictor = make_predictor(policy, ops, spec, weights, vectors)
    experts = OffloadedExperts(ops, spec, weights, store, num_slots, policy, predictor)
    decoder = Decoder(spec, weights, ops, experts)
    cache = KVCache.allocate(spec, 1, context + 2 * steps, device, weights.embedding.dtype)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(spec.vocab_size, (context + 2 * steps,), generator=generator).to(device)
    prefills = []
    for _ in range(2):
        synchronize(device)
        began = time.perf_counter()
        decoder.prefill(tokens[None, :context], 0, cache).argmax().item()
        prefills.append(time.perf_counter() - began)
    times = []
    for i in range(2 * steps):
        if i == steps:  # the first half fills the slots and compiles
            experts.begin()
        position = torch.tensor([context + i], device=device)
        synchronize(device)
        began = time.perf_counter()
        decoder.decode(tokens[context + i : context + i + 1], position, cache, context + i + 1).argmax().item()
        times.append(time.perf_counter() - began)
    p10, median, p90 = (1e3 * float(value) for value in np.percentile(times[steps:], [10, 50, 90]))
    counters = experts.counters
    moved = counters.moved_records() * store.layout.num_bytes / steps
    experts.copies.close()  # the store, and its pinned memory, serves the next case
    return {
        "policy": str(policy),
        "slots": num_slots,
        "slots_share": num_slots / total,
        "context": context,
        "ttft_ms": 1e3 * min(prefills),
        "tpot_ms": {"median": median, "p10": p10, "p90": p90},
        "bytes_per_token": moved,
        "floor_ms": 1e3 * moved / rate,
        "counters": {key: value for key, value in counters.summary().items() if key != "layers"},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--random-weights", type=Path, required=True, metavar="CONFIG")
    parser.add_argument("--cases", default=",".join(CASES), help="policy:slots, …; slots: minimum, N or P%%")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    try:
        spec = parse_config(read_json(options.random_weights), options.random_weights.name)
        store, weights = random_store(spec, dtype, device)
        moe_layer = next(iter(spec.moe_layers))
        rate = link_rate(store, moe_layer, device)
        result: dict[str, Any] = {
            "provenance": provenance(),
            "model": options.random_weights.stem,
            "dtype": options.dtype,
            "is_pinned": store.is_pinned,
            "link_bytes_per_s": rate,
            "record_bytes": store.layout.num_bytes,
            "rows": [],
        }
        print(
            f"link {rate / 1e9:.1f} GB/s, records of {store.layout.num_bytes / 1e6:.2f} MB, pinned: {store.is_pinned}"
        )
        for case in options.cases.split(","):
            row = measure(spec, weights, store, case, options.context, options.steps, rate)
            result["rows"].append(row)
            hits = row["counters"]["hit_rate"]["all"]
            print(
                f"{case:<20}{row['slots']:6} slots  first token {row['ttft_ms']:8.1f} ms  then "
                f"{row['tpot_ms']['median']:7.2f} ms  floor {row['floor_ms']:7.2f} ms  hits {hits or 0:.1%}",
                flush=True,
            )
            options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except TritonMoeError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
