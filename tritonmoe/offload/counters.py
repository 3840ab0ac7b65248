"""What happened to experts and their bytes, per layer, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MEGABYTE = 1e6


@dataclass
class LayerCounters:
    """Counts of experts unless named otherwise; an expert that several tokens of a step chose counts once.

    routed = hits + late + demand. prefetched = prefetched_used + prefetched_wasted + cancelled + those whose layer has
    not run yet. Records moved = demand + prefetched - cancelled.
    """

    routed: int = 0  # asked for
    hits: int = 0  # resident when asked for
    late: int = 0  # in flight when asked for
    demand: int = 0  # fetched because asked for
    prefetched: int = 0  # fetches planned before their layer's routing was known
    prefetched_used: int = 0
    prefetched_wasted: int = 0  # moved, and its layer did not ask for it
    cancelled: int = 0  # prefetched, and taken back before all of it moved
    cancelled_bytes: int = 0  # what had moved of those
    speculated: int = 0  # ids foretold, counted per token, as are the next two
    speculated_right: int = 0  # of the routed ids, those foretold
    speculated_routed: int = 0  # routed ids of the tokens that something was foretold for
    gate_mass_right: float = 0.0  # gate weights of speculated_right
    gate_mass: float = 0.0  # gate weights of speculated_routed
    left_out: int = 0  # routed ids that were not computed, per token
    left_out_mass: float = 0.0  # the sum of their shares of a token's gate mass

    @property
    def hit_rate(self) -> float | None:
        """Resident when asked for / asked for."""
        return _ratio(self.hits, self.routed)

    @property
    def late_rate(self) -> float | None:
        """In flight when asked for / asked for."""
        return _ratio(self.late, self.routed)

    @property
    def recall(self) -> float | None:
        """|speculated and routed| / |routed|."""
        return _ratio(self.speculated_right, self.speculated_routed)

    @property
    def gate_mass_recall(self) -> float | None:
        """The same, each expert counted with its gate weight."""
        return _ratio(self.gate_mass_right, self.gate_mass)


class Counters:
    """The counters of every layer and of the whole; `layers`, `tokens` and `wait_s` are for others to add to."""

    def __init__(self, num_layers: int, record_bytes: int) -> None:
        """`num_layers` counts the model's layers; those without experts stay at 0 and out of every mean."""
        self.layers = [LayerCounters() for _ in range(num_layers)]
        self.record_bytes = record_bytes
        self.tokens = 0  # generated
        # Exposed transfer time: how long the computation waited for copies. None where nobody could measure it.
        self.wait_s: float | None = 0.0

    def foretell(self, layer: int, speculated: np.ndarray, routed: np.ndarray, weights: np.ndarray) -> None:
        """Compare speculated ids [T, M] with routed ids [T, K] and their gate weights [T, K]."""
        assert len(speculated) == len(routed), "speculated and routed ids of different tokens"
        assert weights.shape == routed.shape, "gate weights of other experts"
        is_right = (routed[:, :, None] == speculated[:, None, :]).any(-1)
        counters = self.layers[layer]
        counters.speculated += speculated.size
        counters.speculated_right += int(is_right.sum())
        counters.speculated_routed += routed.size
        counters.gate_mass_right += float(weights[is_right].sum())
        counters.gate_mass += float(weights.sum())

    def total(self) -> LayerCounters:
        """The sum over layers."""
        rows = [asdict(layer) for layer in self.layers]
        return LayerCounters(**{name: sum(row[name] for row in rows) for name in asdict(LayerCounters())})

    def moved_records(self) -> int:
        """Records copied to the device, or on their way, so far."""
        total = self.total()
        return total.demand + total.prefetched - total.cancelled

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, shares from 0 to 1; a rate without a case is None."""
        total = self.total()
        active = max(1, sum(layer.routed > 0 for layer in self.layers))
        per_token = self.record_bytes / self.tokens if self.tokens else None
        partly = total.cancelled_bytes / self.record_bytes
        moved = {
            "demand": total.demand,
            "used": total.prefetched_used,
            "wasted": total.prefetched_wasted + partly,
            "total": self.moved_records() + partly,
        }
        return {
            "tokens": self.tokens,
            "record_bytes": self.record_bytes,
            "total": asdict(total),
            "layers": [asdict(layer) for layer in self.layers],
            "hit_rate": self._spread(total, lambda layer: layer.hit_rate, worst=min),
            "late_rate": self._spread(total, lambda layer: layer.late_rate, worst=max),
            "recall": self._spread(total, lambda layer: layer.recall, worst=min),
            "gate_mass_recall": self._spread(total, lambda layer: layer.gate_mass_recall, worst=min),
            "wasted_share": _ratio(total.prefetched_wasted, total.prefetched_used + total.prefetched_wasted),
            "bytes_per_token": {what: None if per_token is None else n * per_token for what, n in moved.items()},
            "wait_ms_per_token": None if self.wait_s is None else _ratio(1e3 * self.wait_s, self.tokens),
            "left_out_share": _ratio(total.left_out_mass, self.tokens * active),
        }

    def lines(self) -> list[str]:
        """The table printed at the end; rows about what did not happen are left out."""
        summary, total = self.summary(), self.total()
        lines = [f"{'experts':<24}{'all':>9}{'layer mean':>12}{'worst layer':>19}"]
        lines += [
            f"{title:<24}{_percent(row['all']):>9}{_percent(row['mean']):>12}"
            f"{_percent(row['worst']) + ' (layer ' + format(row['worst_layer'], '3d') + ')':>19}"
            for title, row in (
                ("slot hit rate", summary["hit_rate"]),
                ("late prefetches", summary["late_rate"]),
                ("speculation recall", summary["recall"]),
                ("gate-mass recall", summary["gate_mass_recall"]),
            )
            if row["all"] is not None
        ]
        if self.tokens:
            per_token = summary["bytes_per_token"]
            lines.append(f"{'fetched':<24}{'demand':>9}{'used':>12}{'wasted':>12}{'total':>12}")
            cells = [f"{per_token[what] / MEGABYTE:.2f}" for what in ("demand", "used", "wasted", "total")]
            lines.append(f"{'MB per token':<24}{cells[0]:>9}{cells[1]:>12}{cells[2]:>12}{cells[3]:>12}")
        if summary["wait_ms_per_token"] is not None:
            lines.append(f"{'exposed transfer time':<24}{summary['wait_ms_per_token']:>9.2f} ms per token")
        if total.left_out:
            lines.append(
                f"{'left out':<24}{total.left_out:>9} experts, {_percent(summary['left_out_share'])} of gate mass"
            )
        return lines

    def _spread(
        self,
        total: LayerCounters,
        rate: Callable[[LayerCounters], float | None],
        worst: Callable[..., tuple[float, int]],
    ) -> dict[str, Any]:
        """A rate over everything, its mean over layers, and the worst layer's."""
        rates = [(value, i) for i, layer in enumerate(self.layers) if (value := rate(layer)) is not None]
        if not rates:
            return {"all": None, "mean": None, "worst": None, "worst_layer": None}
        value, layer = worst(rates, key=lambda rate: rate[0])  # the first of equals
        mean = sum(value for value, _ in rates) / len(rates)
        return {"all": rate(total), "mean": mean, "worst": value, "worst_layer": layer}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
