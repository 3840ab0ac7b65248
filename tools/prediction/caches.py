"""Hit rates of caches over what a model was recorded to route: replayed, so that every cache sees the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from replay import Setting, replay

from tritonmoe.offload.slot_pool import EVICTIONS
from tritonmoe.offload.trace import Trace


def cache_rows(trace: Trace, shares: Sequence[float], popularity: dict[tuple[int, int], int]) -> list[dict[str, Any]]:
    """By share of all experts: each eviction with and without what was foretold, a static set, and the best there is.

    `popularity` counts how often each (layer, expert) was chosen on other text; the most chosen are the static set.
    """
    rows = []
    num_experts = sum(trace.header.experts)
    has_guesses = any(run.foretold for run in trace.runs)
    for share in shares:
        slots = max(1, int(share * num_experts))
        row: dict[str, Any] = {"share": share, "slots": slots, "static": static_hit_rate(trace, slots, popularity)}
        for eviction in EVICTIONS:
            for predict in ("none", "recorded") if has_guesses else ("none",):
                result = replay(trace, Setting(slots, eviction, predict))
                name = eviction if predict == "none" else f"{eviction} and prefetch"
                total = result.total
                row[name] = {
                    "hit_rate": total.hit_rate,
                    "bytes_per_token": result.moved * trace.header.record_bytes / result.tokens,
                    "wasted": total.prefetched_wasted,
                }
                if result.best_fetches is not None:
                    row["best"] = 1 - result.best_fetches / total.routed
        rows.append(row)
    return rows


def static_hit_rate(trace: Trace, slots: int, popularity: dict[tuple[int, int], int]) -> float:
    """Of the experts that decode steps ask for, the share in a set that never changes."""
    kept = {key for key, _ in Counter(popularity).most_common(slots)}
    wanted = [(run.layer, expert) for run in trace.runs if not run.is_prefill for expert in run.wanted]
    return sum(key in kept for key in wanted) / len(wanted)
