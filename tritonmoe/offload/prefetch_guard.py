"""Stops fetching ahead for layers where it loses."""

from __future__ import annotations

import numpy as np

LEAST_RECORDS = 64  # fetched ahead for a layer before it is judged


class PrefetchGuard:
    """Judges each layer by the bytes that were fetched ahead for it.

    A byte that is used was moved while the layer before computed, and saves at most the time in which the link moves
    it. One that is not used delays what is demanded by at most as long. So where at least as much is wasted as used,
    fetching ahead cannot win, and it stops until the next generation.
    """

    def __init__(self, record_bytes: int, used_bytes: np.ndarray, wasted_bytes: np.ndarray) -> None:
        """`used_bytes`, `wasted_bytes` [layers]: what was counted before."""
        self.is_off = np.zeros(len(used_bytes), dtype=bool)
        self._least_bytes = LEAST_RECORDS * record_bytes
        self._judged = np.stack([used_bytes, wasted_bytes])

    def look(self, used_bytes: np.ndarray, wasted_bytes: np.ndarray) -> bool:
        """Judge by what was counted so far, [layers] each; whether a layer's prefetching stopped just now.

        What was judged once does not count again: a layer may become worse.
        """
        counted = np.stack([used_bytes, wasted_bytes])
        used, wasted = counted - self._judged
        is_ripe = used + wasted >= self._least_bytes
        self._judged[:, is_ripe] = counted[:, is_ripe]
        stops = is_ripe & (wasted >= used) & ~self.is_off
        self.is_off |= stops
        return bool(stops.any())

    def line(self) -> str | None:
        """What to print at the end, if prefetching stopped anywhere."""
        layers = np.flatnonzero(self.is_off).tolist()
        if not layers:
            return None
        shown = ", ".join(map(str, layers[:8])) + (f", … ({len(layers)})" if len(layers) > 8 else "")
        noun = "layers" if len(layers) > 1 else "layer"
        return (
            f"prefetching wasted more than it brought and was stopped for {noun} {shown}; --prefetch always keeps it on"
        )
