"""Where a decode step's time goes: kernels, the gaps between them, and the share of the memory's floor.

Profiles a few steps as `tools/bench.py --profile` does, then reads the trace. A kernel's "interval" is the time from
its start to the start of the next one, so intervals add up to the step even where kernels overlap (dependent launches
begin before the one before them has ended). Profiling slows a step down; the untraced time is printed beside it.

The same steps under Nsight: `nsys profile -t cuda,nvtx python tools/bench.py …`, where NVTX ranges name phases, and
`ncu --set full --graph-profiling node --nvtx --nvtx-include "decode step/" python tools/bench.py …`.
(Not called profile.py: in the folder of a running script that would hide Python's own module `profile`.)
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from bench.cli import SEED, build_parser, prepare
from bench.floor import kv_bytes_per_step, weight_bytes_per_step
from bench.measure import run_steps, time_steps
from bench.ours import Ours
from bench.routing import probe
from bench.trace import PROFILED_STEPS, device_events, profile_steps
from provenance import provenance

WARM_STEPS = 3


def by_kernel(events: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """One row per kernel name, the largest sum of intervals first; counts and sums are per step."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for event, following in zip(events, [*events[1:], None], strict=True):
        duration = float(event["dur"])
        interval = duration if following is None else following["ts"] - event["ts"]
        if interval > 10 * duration + 20:  # the host's time between two steps
            interval = duration
        found[event["name"]].append((duration, interval, max(0.0, interval - duration)))
    rows = []
    for name, times in found.items():
        durations, intervals, gaps = np.array(times).T
        rows.append(
            {
                "name": name[:120],
                "calls": len(times) / steps,
                "duration_us": float(np.median(durations)),
                "interval_us": float(np.median(intervals)),
                "gap_us": float(np.median(gaps)),
                "total_us": float(intervals.sum()) / steps,
            }
        )
    return sorted(rows, key=lambda row: row["total_us"], reverse=True)


def main() -> int:
    parser = build_parser()
    parser.description = (__doc__ or "").split("\n")[0]
    options = parser.parse_args()
    if len(options.batch) != 1 or len(options.context) != 1 or options.baseline:
        parser.error("give one --batch and one --context, and no --baseline")
    bench, name = prepare(options)
    if bench.device.type != "cuda":
        parser.error("there is no GPU here")
    spec, dtype, batch, context = bench.decoder.spec, bench.decoder.dtype, options.batch[0], options.context[0]
    prompts = torch.randint(spec.vocab_size, (batch, context), generator=torch.Generator().manual_seed(SEED))
    ours = Ours(bench.decoder, prompts.to(bench.device), options.new_tokens)
    ours.prefill()
    run_steps(ours, WARM_STEPS)
    untraced = time_steps(ours, options.new_tokens)
    trace = options.output.with_suffix(".trace.json.gz")
    profile_steps(ours, trace, options.new_tokens)
    events = device_events(trace)
    steps = min(options.new_tokens, PROFILED_STEPS)
    rows = by_kernel(events, steps)
    experts = probe(bench.decoder, ours, untraced.tokens)
    moved = weight_bytes_per_step(
        spec, dtype, batch, [layer["per_step"] for layer in experts], bench.decoder.weights.storage
    )
    moved += kv_bytes_per_step(spec, dtype, batch, context)
    floor_us, step_us = 1e6 * moved / bench.memory_bps, 1e3 * float(untraced.device_ms or 0.0)
    result = {
        "provenance": provenance(),
        "model": name,
        "batch": batch,
        "context": context,
        "floor_us": floor_us,
        "step_us": step_us,
        "share_of_floor": floor_us / step_us,
        "traced_steps": steps,
        "kernels": rows,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{'calls':>6} {'us each':>8} {'interval':>8} {'gap':>6} {'us/step':>8}  kernel")
    for row in rows[:24]:
        print(
            f"{row['calls']:6.0f} {row['duration_us']:8.2f} {row['interval_us']:8.2f} {row['gap_us']:6.2f} "
            f"{row['total_us']:8.1f}  {row['name'][:70]}"
        )
    print(
        f"traced {sum(row['total_us'] for row in rows):.0f} us a step; "
        f"untraced {step_us:.0f} us, floor {floor_us:.0f} us"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
