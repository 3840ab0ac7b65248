"""How right predictors are, layer by layer, on text that a model reads with its true routing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from tritonmoe.prediction.predictors import Predictor
from tritonmoe_kernels.routing import NormRouterOutput, SpeculateOutput

from .routings import Chunk


@dataclass
class Recall:
    """Sums over tokens of one layer. k ids are routed, m >= k foretold."""

    tokens: int = 0
    routed: int = 0
    right: int = 0  # routed ids among the foretold
    foretold: int = 0
    mass: float = 0.0  # gate weights of the routed
    right_mass: float = 0.0
    whole: int = 0  # tokens whose routed ids were all foretold
    squares: float = 0.0  # of the share of a token's ids that were foretold, for the standard error

    def add(self, foretold: torch.Tensor, routed: torch.Tensor, weights: torch.Tensor) -> None:
        """foretold [T, M] against routed ids and their gate weights, [T, K] each."""
        is_right = (routed[:, :, None] == foretold[:, None, :]).any(-1)
        share = is_right.double().mean(1)
        self.tokens += len(routed)
        self.routed += routed.numel()
        self.foretold += foretold.numel()
        self.right += int(is_right.sum())
        self.mass += float(weights.double().sum())
        self.right_mass += float((weights * is_right).double().sum())
        self.whole += int(is_right.all(1).sum())
        self.squares += float(share.square().sum())

    def summary(self) -> dict[str, float]:
        recall = self.right / self.routed
        variance = max(0.0, self.squares / self.tokens - recall**2)
        return {
            "recall": recall,
            "standard_error": (variance / self.tokens) ** 0.5,
            "precision": self.right / self.foretold,
            "gate_mass_recall": self.right_mass / self.mass,
            "whole": self.whole / self.tokens,
        }


Guesses = Mapping[int, SpeculateOutput]


class RecallTable:
    """By name of a predictor and layer."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, Recall]] = {}

    def add(self, name: str, layer: int, foretold: torch.Tensor, routed: NormRouterOutput) -> None:
        recall = self._found.setdefault(name, {}).setdefault(layer, Recall())
        recall.add(foretold, routed.topk_ids, routed.topk_weights)

    def add_guesses(self, name: str, guesses: Guesses, chunk: Chunk, count: int | None = None) -> None:
        """What one layer foretold of later ones, or the `count` best of it."""
        for later, guess in guesses.items():
            self.add(name, later, guess.ids[:, :count], chunk.routed[later])

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        return {
            name: {str(layer): recall.summary() for layer, recall in sorted(layers.items())}
            for name, layers in self._found.items()
        }


def measure(predictors: Mapping[str, Predictor], chunks: Iterable[Chunk]) -> RecallTable:
    """Every predictor's recall of later layers' ids."""
    table = RecallTable()
    for chunk in chunks:
        for layer in chunk.routed:
            for name, predictor in predictors.items():
                table.add_guesses(name, predictor.guess_prompt(layer, chunk.routed[layer]), chunk)
    return table
