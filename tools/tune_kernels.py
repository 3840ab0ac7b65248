"""Fill kernels/tritonmoe_kernels/launch_table.json with the fastest configurations on this GPU for known shapes.

Each candidate is timed as tools/bench_kernels.py times kernels: cold, in a CUDA graph. Candidates are compiled first,
in several processes. A row is written for this GPU's architecture, before the general rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench.kernel_cases import Case, decode_attention, experts, head, prefill_attention, projection
from bench_kernels import replay_times
from provenance import ROOT

from tritonmoe_kernels import launch_table

TABLE = ROOT / "kernels/tritonmoe_kernels/launch_table.json"
PROCESSES = 14


@dataclass(frozen=True)
class Tuned:
    """One row to find: `shape` and `tokens` are its keys; `build` makes what is timed."""

    kernel: str
    shape: tuple[int, ...] | None
    tokens: int | None
    build: Callable[[torch.dtype], Case]
    candidates: Callable[[], Iterator[dict[str, Any]]]


def row_candidates(columns: int, most: int = 256) -> Iterator[dict[str, Any]]:
    """Decode forms: rows a program, columns a step, warps; 8 to `most` weights a thread."""
    whole = 1 << (columns - 1).bit_length()
    for block_n, block_k, num_warps in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 4, 8)):
        if block_k <= whole and 16 <= block_n * block_k // (32 * num_warps) <= most:
            yield {"block_n": block_n, "block_k": block_k, "num_warps": num_warps}


def attention_candidates() -> Iterator[dict[str, Any]]:
    for block_l, warps, stages, programs in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4), (128, 256, 512)):
        yield {"block_l": block_l, "num_warps": warps, "num_stages": stages, "programs": programs}


def prefill_candidates() -> Iterator[dict[str, Any]]:
    for block_m, n_gate, n_down, warps, stages, block_k in itertools.product(
        (64, 128), (64, 128), (128, 256), (4, 8), (3, 4), (64, 128)
    ):
        if block_k == 128 and (stages == 4 or block_m * n_down > 128 * 128):
            continue
        tile = {"block_k": block_k, "num_warps": warps, "num_stages": stages}
        yield {"block_m": block_m, "gate_up": {"block_n": n_gate, **tile}, "down": {"block_n": n_down, **tile}}


def attention_prefill_candidates() -> Iterator[dict[str, Any]]:
    for block_m, block_l, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        yield {"block_m": block_m, "block_l": block_l, "num_warps": warps, "num_stages": stages}


def dense(units: int, hidden: int, norm: bool) -> Tuned:
    build = (lambda t: head(units, hidden, t)) if units > 1 << 16 else (lambda t: projection(units, hidden, norm, t))
    return Tuned("linear", (units, hidden), 1, build, lambda: row_candidates(hidden))


def decode_experts(kernel: str, top_k: int, hidden: int, size: int, kind: str) -> Tuned:
    shape = (size, hidden) if "gate" in kernel else (hidden, size)
    most = 128 if "gate" in kernel else 256  # gate_up holds two tiles
    return Tuned(
        kernel, shape, 1, lambda t: experts(1, top_k, 32, hidden, size, kind, t), lambda: row_candidates(shape[1], most)
    )


def prefill_experts(tokens: int, top_k: int, num: int, hidden: int, size: int, kind: str) -> Tuned:
    def build(dtype: torch.dtype) -> Case:
        return experts(tokens, top_k, num, hidden, size, kind, dtype)

    return Tuned("expert_prefill", (2 * size, hidden), tokens, build, prefill_candidates)


QWEN3, GPT_OSS = (8, 2048, 768, "silu"), (4, 2880, 2880, "swiglu_clamped")
TUNED = [
    dense(5120, 2048, True),
    dense(2048, 4096, False),
    dense(151936, 2048, True),
    dense(5120, 2880, True),
    dense(2880, 4096, False),
    dense(201088, 2880, True),
    decode_experts("expert_gate_up_decode", *QWEN3),
    decode_experts("expert_down_decode", *QWEN3),
    decode_experts("expert_gate_up_decode", *GPT_OSS),
    decode_experts("expert_down_decode", *GPT_OSS),
    Tuned("attention_decode", (128,), 1, lambda t: decode_attention(16384, 32, 4, 128, None, t), attention_candidates),
    Tuned("attention_decode", (64,), 1, lambda t: decode_attention(16384, 64, 8, 64, None, t), attention_candidates),
    Tuned(
        "attention_prefill", (128,), None, lambda t: prefill_attention(4096, 32, 4, 128, t, True),
        attention_prefill_candidates,
    ),
    prefill_experts(512, 8, 128, 2048, 768, "silu"),
    prefill_experts(4096, 8, 128, 2048, 768, "silu"),
    prefill_experts(512, 4, 32, 2880, 2880, "swiglu_clamped"),
    prefill_experts(4096, 4, 32, 2880, 2880, "swiglu_clamped"),
]  # fmt: skip


def select(kernel: str, config: dict[str, Any]) -> None:
    """Make `kernel` launch with `config` whatever the table says."""
    table = [row for row in json.loads(TABLE.read_text()) if row["kernel"] != kernel]
    forced = {"kernel": kernel, "architecture": None, "bits": None, "shape": None, "tokens": None, "config": config}
    launch_table.rows = lambda: [forced, *table]
    launch_table._find.cache_clear()


def compile_share(job: tuple[list[int], str, int]) -> list[tuple[int, int]]:
    """Launch every PROCESSES-th candidate once, which leaves it in triton's cache; those that fail."""
    chosen, dtype, share = job
    failed = []
    for i in chosen:
        case = TUNED[i].build(getattr(torch, dtype))
        for j, config in enumerate(TUNED[i].candidates()):
            if j % PROCESSES != share:
                continue
            select(TUNED[i].kernel, config)
            try:
                case.launches[0]()
                torch.cuda.synchronize()
            except Exception:  # too much shared memory, mostly: not a candidate here
                failed.append((i, j))
    return failed


def tune(item: Tuned, failed: set[int], dtype: torch.dtype) -> list[tuple[float, dict[str, Any]]]:
    """(seconds, configuration) of each candidate that runs, fastest first."""
    case = item.build(dtype)
    found = []
    for j, config in enumerate(item.candidates()):
        if j in failed:
            continue
        select(item.kernel, config)
        times = replay_times(case.launches, replays=7)
        found.append((times[len(times) // 2], config))
    return sorted(found, key=lambda pair: pair[0])


def store(rows: list[dict[str, Any]]) -> None:
    """Put the rows first, in place of older ones with the same keys."""
    keys = ("kernel", "architecture", "bits", "shape", "tokens")
    new = {tuple(map(str, (row[key] for key in keys))) for row in rows}
    kept = [row for row in json.loads(TABLE.read_text()) if tuple(str(row[key]) for key in keys) not in new]
    lines = ",\n".join(" " + json.dumps(row) for row in [*rows, *kept])
    TABLE.write_text(f"[\n{lines}\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="tune kernels whose name contains this text")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    chosen = [i for i, item in enumerate(TUNED) if options.only in item.kernel]
    dtype = getattr(torch, options.dtype)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        failed = set(itertools.chain(*pool.map(compile_share, [(chosen, options.dtype, i) for i in range(PROCESSES)])))
    rows = []
    for i in chosen:
        item = TUNED[i]
        found = tune(item, {j for k, j in failed if k == i}, dtype)
        print(f"{item.kernel} {item.shape} {item.tokens}: {len(found)} of {len(list(item.candidates()))} run")
        for seconds, config in [*found[:5], found[-1]]:
            print(f"  {seconds * 1e6:9.2f} us  {config}", flush=True)
        rows.append(
            {
                "kernel": item.kernel,
                "architecture": launch_table.architecture(torch.device("cuda")),
                "bits": 8 * dtype.itemsize,
                "shape": None if item.shape is None else list(item.shape),
                "tokens": item.tokens,
                "config": found[0][1],
            }
        )
        store(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
