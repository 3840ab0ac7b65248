"""Hold the plan of memory against the driver: what a model takes of a card, from its plan to the last decode step.

For each budget the engine divides the memory as it does for a user, with random weights; then a prompt as long as the
context allows is prefilled and decoded from. What it took is the change of free memory by the driver's own figure
since before anything was allocated, with whatever libraries, compiled kernels and captured graphs took. torch may not
allocate more than the budget, as on a card of that size.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.cli import add_storage_options, first_line, positive, release, stored_forms
from bench.cli import store as write
from bench.random_text import WARM_STEPS, RandomText
from bench.random_weights import SCALE, random_weights
from bench_offload import EMBEDDING_SCALE, random_store
from provenance import provenance

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.checkpoint.quantization import EXPERT_FORMATS
from tritonmoe.errors import InputError, TritonMoeError
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import ExpertStore
from tritonmoe.model.operations import operations
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights, Storage
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import Policy
from tritonmoe.placement.loader import Loading, Placement, decide, make_predictor
from tritonmoe.placement.memory_plan import MemoryPlan
from tritonmoe.placement.storage import resolve_storage
from tritonmoe.prediction.files import PredictionFiles

STEPS = 32
SECONDS = 2.0  # for the timed steps, about


@dataclass
class Bench:
    """What all rows of a model share."""

    options: argparse.Namespace
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    published: Storage
    held: tuple[Storage, ExpertStore] | None = None  # of the last row, for the next one of the same form

    def store(self, storage: Storage) -> ExpertStore:
        """Experts in `storage` in host memory."""
        if self.held is None or self.held[0] != storage:
            if self.held is not None:
                self.held[1].close()
            self.held = None
            self.held = storage, random_store(self.spec, self.dtype, self.device, storage)[0]
        return self.held[1]


def measure(bench: Bench, budget: str) -> dict[str, Any]:
    """The figures of one budget."""
    spec, device, dtype, options = bench.spec, bench.device, bench.dtype, bench.options
    placement = Placement(gpu_memory=budget, expert_dtype=options.expert_dtype, dense_dtype=options.dense_dtype)
    storages = resolve_storage(options.expert_dtype, options.dense_dtype, spec, dtype, bench.published)
    files = PredictionFiles(vectors=Path(), estimator=None, hybrid=None)  # random ones are made
    loading = Loading(Path(), spec, device, dtype)
    policy, storage, plan = decide(loading, placement, storages, options.max_context, 1, files)
    print("\n".join(plan.lines()), flush=True)
    store = None if policy.is_resident else bench.store(storage)
    release(device)
    free = Free(device, plan.budget_bytes)
    text, experts = build(bench, policy, storage, plan, store)
    found = {"built": free.taken()}
    prompt = options.max_context - WARM_STEPS - STEPS
    first_token_ms = text.prefill_ms(prompt)
    found["prefilled"] = free.taken()
    text.begin()
    text.warm_up(SECONDS)
    times = text.step_ms(SECONDS)
    found["decoded"] = free.taken()
    if experts is not None:
        experts.copies.close()
    return {
        "budget": budget,
        "budget_bytes": plan.budget_bytes,
        "policy": policy.name,
        **stored_forms(storage, dtype),
        "embedding_on_host": storage.embedding_on_host,
        "slots": plan.num_slots,
        "slot_share": plan.slot_share,
        "plan": dict(plan.rows),
        "host_bytes": plan.host_bytes,
        "taken_bytes": found,
        "reserved_bytes": free.reserved(),
        "is_within": max(found.values()) <= plan.budget_bytes,
        "prompt": prompt,
        "first_token_ms": first_token_ms,
        "tpot_ms": float(np.median(times)),
    }


class Free:
    """What is taken of a device since this was made; torch can take no more than `most` bytes."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before, total = torch.cuda.mem_get_info(device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)

    def taken(self) -> int:
        """By the driver; torch gives nothing back meanwhile, so that this is the most so far."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        return self._before - torch.cuda.mem_get_info(self._device)[0]

    def reserved(self) -> int:
        """The most that torch held."""
        return torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else 0


def build(
    bench: Bench, policy: Policy, storage: Storage, plan: MemoryPlan, store: ExpertStore | None
) -> tuple[RandomText, OffloadedExperts | None]:
    """The decoder as the engine makes it, its caches, and the experts that are in slots."""
    spec, device, dtype = bench.spec, bench.device, bench.dtype
    weights = random_weights(spec, device, dtype, 0, storage, store)
    weights.embedding.normal_(0.0, EMBEDDING_SCALE)
    ops, experts = operations(device), None
    if store is not None:
        experts = offloaded(bench, weights, store, policy, plan.num_slots)
    context = bench.options.max_context - WARM_STEPS - STEPS
    return RandomText(Decoder(spec, weights, ops, experts), context, STEPS), experts


def offloaded(
    bench: Bench, weights: ModelWeights, store: ExpertStore, policy: Policy, num_slots: int
) -> OffloadedExperts:
    spec, ops = bench.spec, operations(bench.device)
    vectors = None
    if policy.uses_default_vectors:
        most = max(moe.num_experts for moe in spec.moe_layers.values())
        vectors = weights.embedding.new_empty(len(spec.layers), most, spec.hidden_size).normal_(0.0, SCALE)
    predictor = make_predictor(policy, ops, spec, weights, vectors)
    return OffloadedExperts(ops, spec, weights, store, num_slots, policy, predictor, vectors)


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    taken = max(row["taken_bytes"].values())
    return (
        f"{row['budget']:>8}: {row['policy']}, experts in {row['expert_dtype']}, slots for {row['slot_share']:.1%}; "
        f"took {taken / 2**30:.2f} GiB{'' if row['is_within'] else ', MORE THAN THE BUDGET'}; first token "
        f"{row['first_token_ms']:.0f} ms, then {row['tpot_ms']:.2f} ms"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_memory.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a config.json; no weights needed")
    parser.add_argument("--budgets", default="8GiB,12GiB,16GiB,24GiB", help="as --gpu-memory (default: %(default)s)")
    parser.add_argument("--max-context", type=positive, default=8192, help="tokens (default: %(default)s)")
    parser.add_argument("--published", choices=EXPERT_FORMATS, help="the form that the model is published in")
    parser.add_argument("--embedding", choices=("device", "host"), default="device")
    add_storage_options(parser)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    device, dtype = torch.empty(0, device=options.device).device, getattr(torch, options.dtype)  # with its number
    if options.max_context <= WARM_STEPS + STEPS:
        parser.error(f"--max-context must be above {WARM_STEPS + STEPS}")
    try:
        spec = parse_config(read_json(options.config), options.config.name)
    except TritonMoeError as error:
        parser.error(str(error))
    form = None if options.published is None else EXPERT_FORMATS[options.published]
    bench = Bench(options, spec, device, dtype, Storage(form, embedding_on_host=options.embedding == "host"))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.touch()  # so that the stored command names it without its folder
    result: dict[str, Any] = {
        "provenance": provenance(),
        "model": options.config.stem,
        "dtype": options.dtype,
        "max_context": options.max_context,
        "rows": [],
        "skipped": [],
    }
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the driver's own context is not the model's
    for budget in options.budgets.split(","):
        began = time.perf_counter()
        try:
            row = measure(bench, budget)
            result["rows"].append(row)
            print(f"{line(row)}; {time.perf_counter() - began:.0f} s", flush=True)
        except (InputError, torch.OutOfMemoryError) as error:
            result["skipped"].append({"budget": budget, "reason": first_line(error)})
            print(f"{budget:>8}: skipped: {first_line(error)}", flush=True)
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        release(device)
        write(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
