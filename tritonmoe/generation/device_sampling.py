"""`sampling.sample` for a batch, on the device of the logits and without the host, so that a CUDA graph can hold it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tritonmoe.generation.sampling import MIN_TEMPERATURE, ONE, SamplingParams, fixed_point
from tritonmoe_kernels.uniform import uniform, uniform_ref


class SampleOutput(NamedTuple):
    """What `BatchSampler.sample` writes."""

    tokens: torch.Tensor  # [B] int64; any token where a row's logits are not finite
    is_finite: torch.Tensor  # [B] bool: whether all logits of the row are; where not, `sample` would raise


class BatchSampler:
    """Draws the next token of every row as `sampling.sample` does, each row with its own parameters.

    Parameters and the tokens seen are tensors at fixed addresses: `load` and `remember` change them between replays of
    a captured graph. `sample` chooses one of two sequences of operations, by `is_greedy`, and a graph holds the one it
    was captured with; the one captured while `is_greedy` was False serves any parameters.

    On the CPU the tokens are those of `sampling.sample`. On a GPU the softmax may differ in its last bits, so a draw
    that close to a boundary may take its neighbour; the sums over it are exact on both.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        batch = len(params)
        column = (batch, 1)
        self._params = tuple(params)
        self._temperature = torch.empty(column, dtype=torch.float64, device=device)
        self._top_k = torch.empty(column, dtype=torch.int64, device=device)
        self._top_p = torch.empty(column, dtype=torch.float64, device=device)
        self._min_p = torch.empty(column, dtype=torch.float64, device=device)
        self._penalty = torch.empty(column, dtype=torch.float32, device=device)
        self._seeds = torch.empty(batch, dtype=torch.int64, device=device)
        # One byte for each token of the vocabulary; always there, so that a graph need not be captured anew for it.
        self._seen = torch.zeros(batch, vocab_size, dtype=torch.bool, device=device)
        self._ranks = torch.arange(vocab_size, device=device)
        self.load(params)

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes its largest logit as it is, so that `sample` need not sort."""
        return all(p.temperature < MIN_TEMPERATURE and p.repetition_penalty == 1.0 for p in self._params)

    def load(self, params: Sequence[SamplingParams]) -> None:
        """Put other parameters in place, on the current stream, and forget the tokens seen.

        Raises ValueError where their number is not the batch size.
        """
        if len(params) != len(self._params):
            raise ValueError(f"{len(params)} parameters for a batch of {len(self._params)}")
        self._params = tuple(params)
        greedy = [p.temperature < MIN_TEMPERATURE for p in params]
        no_limit = len(self._ranks)
        for tensor, values in (
            # Greedy is the first of the descending order, whatever the distribution: top_k 1 at any temperature.
            (self._temperature, [1.0 if g else p.temperature for p, g in zip(params, greedy, strict=True)]),
            (self._top_k, [1 if g else p.top_k or no_limit for p, g in zip(params, greedy, strict=True)]),
            (self._top_p, [p.top_p if p.top_p < 1.0 else math.inf for p in params]),
            (self._min_p, [p.min_p for p in params]),
            (self._penalty, [p.repetition_penalty for p in params]),
            (self._seeds, [p.seed for p in params]),
        ):
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view_as(tensor))
        self._seen.zero_()

    def remember(self, row: int, token_ids: Sequence[int]) -> None:
        """Make tokens of a row's history subject to its repetition penalty; those that `sample` draws already are."""
        if self._params[row].repetition_penalty != 1.0:
            known = sorted({i for i in token_ids if i < len(self._ranks)})
            self._seen[row, torch.tensor(known, dtype=torch.int64, device=self._seen.device)] = True

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> SampleOutput:
        """Draw a token for each row: logits [B, V] float32, contiguous or not; positions [B] int64 of those tokens.

        No operation waits for the device or has a shape that depends on data. Marks the drawn tokens as seen, so call
        `load` and `remember` after the warm-up of a capture. Raises ValueError for other shapes or types.
        """
        self._check(logits, positions)
        is_finite = logits.isfinite().all(-1)
        if self.is_greedy:
            return SampleOutput(logits.argmax(-1), is_finite)  # documented to be the first of equals, on GPUs too
        penalized = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
        values, ids = torch.where(self._seen, penalized, logits).sort(dim=-1, descending=True, stable=True)
        scores = (values.double() / self._temperature).masked_fill(self._ranks >= self._top_k, -math.inf)
        tokens = ids.gather(-1, self._draw(scores.softmax(-1), positions))
        self._seen.scatter_(-1, tokens, True)
        return SampleOutput(tokens[:, 0], is_finite)

    def _draw(self, weights: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply top-p and min-p to descending weights [B, V] float64 and draw a rank for each row: [B, 1] int64."""
        weights = fixed_point(weights)
        covered = weights.cumsum(-1)
        before = covered - weights  # what more likely tokens already cover
        kept = (before < self._top_p * ONE) & (weights >= self._min_p * weights[:, :1])
        # Both filters keep a leading part, so one cumulative sum serves the draw too. Not a number keeps nothing.
        last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)
        draw = uniform_ref if weights.device.type == "cpu" else uniform
        drawn = draw(self._seeds, positions)[:, None].double() * covered.gather(-1, last).double()
        threshold = drawn.floor().long()
        return torch.minimum(torch.searchsorted(covered, threshold, right=True), last)

    def _check(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        if logits.shape != self._seen.shape or logits.dtype != torch.float32:
            raise ValueError(
                f"logits are {logits.dtype} {list(logits.shape)}, expected torch.float32 {list(self._seen.shape)}"
            )
        if positions.shape != self._seeds.shape or positions.dtype != torch.int64:
            raise ValueError(
                f"positions are {positions.dtype} {list(positions.shape)}, expected torch.int64 [{len(self._seeds)}]"
            )
