"""Time every decode and prefill kernel against its floor, cold and inside a CUDA graph.

The floor of a memory-bound launch is its bytes over the rate of a large copy measured in the same run, that of a
matrix-bound one its FLOPs over the rate of a large matrix product. "Cold": each launch of a graph reads weights that
the launches before it did not, from at least 512 MB of them, so nothing comes from the GPU's cache. A figure is the
median over replays of (graph time / launches), with the 10th and the 90th percentile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from bench.floor import memory_rate
from bench.kernel_cases import CASES, Case
from provenance import ROOT, provenance

from tritonmoe_kernels import dependent_launch, launch_table

OUTPUT = ROOT / "docs/measurements/kernels.json"
REPLAYS = 30


def replay_times(launches: Sequence[Callable[[], object]], replays: int = REPLAYS) -> list[float]:
    """Seconds per launch in each of `replays` replays of one graph that holds all launches once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[:2]:  # compiled before the capture
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    times = []
    for i in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) / 1e3 / len(launches))
    return sorted(times)


def matrix_rate(dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """FLOP per second of a large dense product."""
    a, b = (torch.randn(size, size, dtype=dtype, device="cuda") for _ in range(2))
    times = replay_times([lambda: a @ b] * 4)
    return 2 * size**3 / times[len(times) // 2]


def measure(case: Case, rates: dict[str, float]) -> dict[str, object]:
    """Time of one launch (or of a group of launches that do one thing) and its share of the floor."""
    times = replay_times(case.launches)
    median, low, high = (times[int(share * (len(times) - 1))] for share in (0.5, 0.1, 0.9))
    floor = max(case.num_bytes / rates["copy_bytes_per_s"], case.flops / rates["matrix_flop_per_s"])
    return {
        "us": median * 1e6,
        "us_p10": low * 1e6,
        "us_p90": high * 1e6,
        "kernels": case.kernels,
        "bytes": case.num_bytes,
        "flops": case.flops,
        "gb_per_s": case.num_bytes / median / 1e9,
        "tflop_per_s": case.flops / median / 1e12,
        "floor_us": floor * 1e6,
        "share_of_floor": floor / median,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="measure cases whose name contains this text")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--no-dependent-launch", action="store_true", help="ordinary launches, for comparison")
    parser.add_argument("--rows", type=Path, help="JSON of launch_table.json's form, taken before the table's rows")
    parser.add_argument("--output", type=Path, help="the JSON to write (default: the documents', for all cases)")
    options = parser.parse_args()
    if options.output is None and (options.only or options.rows or options.no_dependent_launch):
        parser.error("this is not what the documents show: give --output, so as not to write over that")
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    if options.no_dependent_launch:
        dependent_launch._options = lambda *_device: {"PDL": False}
    if options.rows:
        try:
            rows = [*json.loads(options.rows.read_text(encoding="utf-8")), *launch_table.rows()]
        except (OSError, ValueError, TypeError) as error:
            parser.error(f"--rows {options.rows} is no list of rows: {error}")
        launch_table.rows = lambda: rows
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    rates = {"copy_bytes_per_s": memory_rate(torch.device("cuda")), "matrix_flop_per_s": matrix_rate()}
    print(f"copy {rates['copy_bytes_per_s'] / 1e12:.2f} TB/s, product {rates['matrix_flop_per_s'] / 1e12:.0f} TFLOP/s")
    results = {}
    for name, build in CASES.items():
        if options.only not in name:
            continue
        result = results[name] = measure(build(dtype), rates)
        print(
            f"{name:<44}{result['us']:9.2f} us  floor {result['floor_us']:8.2f}  {result['share_of_floor']:6.1%}"
            f"  {result['gb_per_s']:7.0f} GB/s  {result['tflop_per_s']:6.1f} TFLOP/s",
            flush=True,
        )
    stored = {"provenance": provenance(), "dtype": options.dtype, "rates": rates, "results": results}
    (options.output or OUTPUT).write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
