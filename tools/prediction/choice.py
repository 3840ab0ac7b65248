"""The choice of a predictor for each layer, from measured recall."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonmoe.prediction.hybrid import CHOICES, HybridChoice

MARGIN = 0.01
RULE = f"of {', '.join(CHOICES)}, the first whose recall is at most {MARGIN} below the layer's best"


def choose(recall: Mapping[str, Mapping[str, Mapping[str, float]]]) -> tuple[HybridChoice, dict[str, Any]]:
    """By `RecallTable.summary` of some of `CHOICES`; also why, by layer."""
    names = [name for name in CHOICES if name in recall]
    chosen, why = {}, {}
    for layer in recall[names[0]]:
        by_name = {name: recall[name][layer]["recall"] for name in names}
        best = max(by_name.values())
        chosen[int(layer)] = next(name for name in names if by_name[name] >= best - MARGIN)
        why[layer] = by_name
    return HybridChoice(chosen), {"rule": RULE, "recall": why}
