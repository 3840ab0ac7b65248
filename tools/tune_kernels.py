"""Fill kernels/tritonmoe_kernels/launch_table.json with the fastest configurations on this GPU for known shapes.

Kernels of the decode step are timed within a whole step of a model with a few layers, since what is best depends on
what a launch can overlap with (dependent launches). Prefill kernels, and attention over a long cache, are timed alone,
as tools/bench_kernels.py does. Both in a CUDA graph. Candidates are compiled first, in several processes. A row is
written for this GPU's architecture, before the general rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from bench.kernel_cases import DEVICE, FORMATS, Case, decode_attention, experts, prefill_attention, projection
from bench.random_weights import random_weights
from bench_kernels import replay_times
from provenance import ROOT

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache
from tritonmoe_kernels import launch_table

TABLE = ROOT / "kernels/tritonmoe_kernels/launch_table.json"
CONFIGS = ROOT / "tools/bench/configs"
PROCESSES = 14
STEP_LAYERS = 4


@dataclass(frozen=True)
class Tuned:
    """One row to find: `shape`, `tokens` and `form` are its keys; `build` makes what is timed."""

    kernel: str
    shape: tuple[int, ...] | None
    tokens: int | None
    build: Callable[[torch.dtype], Case]
    candidates: Callable[[], Iterator[dict[str, Any]]]
    form: str | None = None

    def tiles(self, dtype: torch.dtype) -> list[dict[str, Any]]:
        """The candidates that mean anything for x of that dtype."""
        return [config for config in self.candidates() if "dot" not in config or dtype == torch.bfloat16]

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.form}" if self.form else self.kernel


def row_candidates(columns: int, most: int = 256) -> Iterator[dict[str, Any]]:
    """Decode forms: rows a program, columns a step, warps; 8 to `most` weights a thread."""
    whole = 1 << (columns - 1).bit_length()
    for block_n, block_k, num_warps in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 4, 8)):
        if block_k <= whole and 16 <= block_n * block_k // (32 * num_warps) <= most:
            yield {"block_n": block_n, "block_k": block_k, "num_warps": num_warps}


def quantized_row_candidates(columns: int, most: int, chunk: int) -> Iterator[dict[str, Any]]:
    """Decode forms of quantised weights: `chunk` columns a thread at a time, of 2 to 16 rows or `most` weights."""
    whole = 1 << (columns - 1).bit_length()
    for block_n, block_k, num_warps in itertools.product((2, 4, 8, 16, 32), (256, 512, 1024, 2048, 4096), (1, 2, 4)):
        if block_k <= whole and 2 * chunk <= block_n * block_k // (32 * num_warps) <= most:
            yield {"block_n": block_n, "block_k": block_k, "num_warps": num_warps}


def dot_candidates(columns: int, rows_of_a_unit: int) -> Iterator[dict[str, Any]]:
    """Decode forms of mxfp4 on tensor cores: tiles of 1, 2 or 4 times the 16 rows of parts that a warp multiplies."""
    whole = max(128, 1 << (columns - 1).bit_length())
    for block_n, block_k, num_warps, ahead in itertools.product(
        (2, 4, 8, 16, 32, 64), (128, 256, 512, 1024), (1, 2, 4, 8), (1, 2, 3)
    ):
        stacked, steps = block_n * rows_of_a_unit * block_k // 128, -(-columns // block_k)
        if block_k <= whole and stacked // (16 * num_warps) in (1, 2, 4) and ahead <= steps:
            yield {"block_n": block_n, "block_k": block_k, "num_warps": num_warps, "ahead": ahead, "dot": True}


def quantized_prefill_candidates() -> Iterator[dict[str, Any]]:
    for block_m, n_gate, n_down, warps, stages, block_k in itertools.product(
        (64, 128), (64, 128), (64, 128, 256), (4, 8), (2, 3), (64, 128)
    ):
        if block_m * n_down > 64 * 256 or (block_k == 128 and stages == 3):
            continue
        tile = {"block_k": block_k, "num_warps": warps, "num_stages": stages}
        yield {"block_m": block_m, "gate_up": {"block_n": n_gate, **tile}, "down": {"block_n": n_down, **tile}}


def attention_candidates() -> Iterator[dict[str, Any]]:
    for block_l, warps, stages, programs in itertools.product((32, 64, 128), (2, 4), (2, 3, 4), (128, 256, 512)):
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


def decode_step(config: str, context: int = 1024) -> Callable[[torch.dtype], Case]:
    """One token through the first layers of a published model with random weights."""

    def build(dtype: torch.dtype) -> Case:
        spec = parse_config(read_json(CONFIGS / config), config)
        spec = replace(spec, layers=spec.layers[:STEP_LAYERS])
        decoder = Decoder(spec, random_weights(spec, DEVICE, dtype, 0))
        cache = KVCache.allocate(spec, 1, context + 8, DEVICE, dtype)
        for part in (*cache.keys, *cache.values):
            part.normal_()
        ids, positions = (torch.tensor([value], device=DEVICE) for value in (7, context))
        return Case([partial(decoder.decode, ids, positions, cache)] * 2, 1)

    return build


def dense(config: str, units: int, hidden: int) -> Tuned:
    return Tuned("linear", (units, hidden), 1, decode_step(config), lambda: row_candidates(hidden))


def decode_experts(config: str, kernel: str, units: int, columns: int) -> Tuned:
    most = 128 if "gate" in kernel else 256  # gate_up holds two tiles
    return Tuned(kernel, (units, columns), 1, decode_step(config), lambda: row_candidates(columns, most))


def prefill_experts(tokens: int, top_k: int, num: int, hidden: int, size: int, kind: str) -> Tuned:
    def build(dtype: torch.dtype) -> Case:
        return experts(tokens, top_k, num, hidden, size, kind, dtype)

    return Tuned("expert_prefill", (2 * size, hidden), tokens, build, prefill_candidates)


def quantized(name: str, top_k: int, num: int, hidden: int, size: int, kind: str) -> list[Tuned]:
    """The rows of one format for a model's experts, each timed with the products alone."""
    form = FORMATS[name]
    shape = (top_k, num, hidden, size, kind)
    chunk = 128 // form.bits

    def decode(dtype: torch.dtype) -> Case:
        return experts(1, *shape, dtype, "gemm", form)

    def prefill(dtype: torch.dtype) -> Case:
        return experts(4096, *shape, dtype, "gemm", form)

    def gate_rows() -> Iterator[dict[str, Any]]:
        yield from quantized_row_candidates(hidden, 8 * chunk, chunk)
        if form.name == "mxfp4":
            yield from dot_candidates(hidden, 2)

    def down_rows() -> Iterator[dict[str, Any]]:
        yield from quantized_row_candidates(size, 16 * chunk, chunk)
        if form.name == "mxfp4":
            yield from dot_candidates(size, 1)

    return [
        Tuned("expert_gate_up_decode", (size, hidden), 1, decode, gate_rows, form.name),
        Tuned("expert_down_decode", (hidden, size), 1, decode, down_rows, form.name),
        Tuned("expert_prefill", (2 * size, hidden), 4096, prefill, quantized_prefill_candidates, form.name),
    ]


def quantized_dense(name: str, units: int, hidden: int, norm: bool) -> Tuned:
    form = FORMATS[name]

    def build(dtype: torch.dtype) -> Case:
        return projection(units, hidden, norm, dtype, form=form)

    return Tuned("linear", (units, hidden), 1, build, lambda: quantized_row_candidates(hidden, 256, 16), form.name)


QWEN3, GPT_OSS = "qwen3-30b-a3b.json", "gpt-oss-20b.json"
TUNED = [
    dense(QWEN3, 5120, 2048),
    dense(QWEN3, 2048, 4096),
    dense(QWEN3, 151936, 2048),
    dense(GPT_OSS, 5120, 2880),
    dense(GPT_OSS, 2880, 4096),
    dense(GPT_OSS, 201088, 2880),
    decode_experts(QWEN3, "expert_gate_up_decode", 768, 2048),
    decode_experts(QWEN3, "expert_down_decode", 2048, 768),
    decode_experts(GPT_OSS, "expert_gate_up_decode", 2880, 2880),
    decode_experts(GPT_OSS, "expert_down_decode", 2880, 2880),
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
    *(row for name in ("mxfp4", "int4", "int8", "fp8") for row in quantized(name, 8, 128, 2048, 768, "silu")),
    *(row for name in ("mxfp4", "int4") for row in quantized(name, 4, 32, 2880, 2880, "swiglu_clamped")),
    *(quantized_dense(name, *s) for name in ("int8", "fp8") for s in ((5120, 2048, True), (2048, 4096, False))),
]  # fmt: skip


def select(item: Tuned, config: dict[str, Any]) -> None:
    """Make the item's kernel launch with `config`, at its shape, whatever the table says."""
    keys = {"architecture": None, "bits": None, "tokens": item.tokens}
    forced = {"kernel": item.kernel, "format": item.form, "shape": item.shape, "config": config, **keys}
    launch_table.rows = lambda: [forced, *json.loads(TABLE.read_text())]
    launch_table._find.cache_clear()


def compile_share(job: tuple[list[int], str, int]) -> list[tuple[int, int]]:
    """Launch every PROCESSES-th candidate once, which leaves it in triton's cache; those that fail."""
    global STEP_LAYERS
    STEP_LAYERS = 1  # what is compiled does not depend on it
    chosen, dtype, share = job
    failed = []
    for i in chosen:
        case = None  # freed before the next one is made
        torch.cuda.empty_cache()
        case = TUNED[i].build(getattr(torch, dtype))
        for j, config in enumerate(TUNED[i].tiles(getattr(torch, dtype))):
            if j % PROCESSES != share:
                continue
            select(TUNED[i], config)
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
    for j, config in enumerate(item.tiles(dtype)):
        if j in failed:
            continue
        select(item, config)
        times = replay_times(case.launches, replays=7)
        found.append((times[len(times) // 2], config))
    return sorted(found, key=lambda pair: pair[0])


def store(rows: list[dict[str, Any]]) -> None:
    """Put the rows first, in place of older ones with the same keys."""
    keys = ("kernel", "architecture", "bits", "dtype", "format", "shape", "tokens")
    new = {tuple(str(row.get(key)) for key in keys) for row in rows}
    kept = [row for row in json.loads(TABLE.read_text()) if tuple(str(row.get(key)) for key in keys) not in new]
    lines = ",\n".join(" " + json.dumps(row) for row in [*rows, *kept])
    TABLE.write_text(f"[\n{lines}\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="tune kernels whose name contains this text")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    chosen = [i for i, item in enumerate(TUNED) if options.only in item.name]
    dtype = getattr(torch, options.dtype)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        failed = set(itertools.chain(*pool.map(compile_share, [(chosen, options.dtype, i) for i in range(PROCESSES)])))
    rows = []
    for i in chosen:
        item = TUNED[i]
        found = tune(item, {j for k, j in failed if k == i}, dtype)
        print(f"{item.name} {item.shape} {item.tokens}: {len(found)} of {len(item.tiles(dtype))} run")
        for seconds, config in [*found[:5], found[-1]]:
            print(f"  {seconds * 1e6:9.2f} us  {config}", flush=True)
        rows.append(
            {
                "kernel": item.kernel,
                "architecture": launch_table.architecture(torch.device("cuda")),
                "bits": 8 * dtype.itemsize,
                # Candidates for tensor cores are for one dtype: another one's row must not come before its.
                **({"dtype": options.dtype} if any("dot" in config for config in item.candidates()) else {}),
                **({"format": item.form} if item.form else {}),
                "shape": None if item.shape is None else list(item.shape),
                "tokens": item.tokens,
                "config": found[0][1],
            }
        )
        store(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
