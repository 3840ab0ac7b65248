"""How near to a layer's true router input the guesses of it are, and how alike they rank its experts."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F

from tritonmoe_kernels.routing import NormRouterOutput, SpeculateOutput


def spearman(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation of each row [T] of two [T, E] without ties."""
    ranks = [values.argsort(-1).argsort(-1).double() for values in (one, other)]
    count = one.shape[-1]
    squares = (ranks[0] - ranks[1]).square().sum(-1)
    return 1 - 6 * squares / (count * (count * count - 1))


class DriftTable:
    """Means over tokens by name of a guess and layer: cosine, where the guess is a state, and Spearman's rho."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))

    def add(self, name: str, layer: int, guess: SpeculateOutput, truth: NormRouterOutput, is_state: bool) -> None:
        sums = self._sums[name][layer]
        sums[0] += len(truth.x)
        sums[1] += float(spearman(guess.logits, truth.logits).sum())
        if is_state:
            assert guess.q is not None
            sums[2] += float(F.cosine_similarity(guess.q.float(), truth.x.float(), dim=-1).double().sum())
        else:
            sums[2] = float("nan")

    def summary(self) -> dict[str, dict[str, dict[str, float | None]]]:
        return {
            name: {
                str(layer): {"spearman": rho / count, "cosine": None if cosine != cosine else cosine / count}
                for layer, (count, rho, cosine) in sorted(layers.items())
            }
            for name, layers in self._sums.items()
        }
