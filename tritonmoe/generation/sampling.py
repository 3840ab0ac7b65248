"""Choosing the next token from logits.

Random numbers are counter-based: the draw for a token depends on the seed and on the token's position alone, so
batching, streaming, chunking or resuming a generation cannot change what is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from tritonmoe.errors import InputError

MAX_NEW_TOKENS_LIMIT = 1 << 24
MIN_TEMPERATURE = 1e-5  # below, dividing by it overflows; the distribution is that of greedy long before
PHILOX_KEY_STEP = (0x9E3779B9, 0xBB67AE85)
PHILOX_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
WORD = 0xFFFFFFFF
ONE = 1 << 52  # probability 1 in fixed point: sums stay within int64, and exact as float64
NOT_FINITE = "the model computed logits that are not finite; check its weights, or use --dtype float32"


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Filters apply in this order, as in transformers: repetition penalty, temperature,
    top-k, top-p, min-p. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check("max_new_tokens", self.max_new_tokens, 1, MAX_NEW_TOKENS_LIMIT, integer=True)
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_k", self.top_k, 0, 1 << 30, integer=True)
        _check("top_p", self.top_p, 0.0, 1.0, exclude_low=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check("seed", self.seed, 0, (1 << 63) - 1, integer=True)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise InputError("--stop must be text that is not empty (in the API: a tuple of such strings)")


def _check(name: str, value: object, low: float, high: float, integer: bool = False, exclude_low: bool = False) -> None:
    option = "--" + name.replace("_", "-")
    kind = int if integer else (int, float)
    number = isinstance(value, kind) and not isinstance(value, bool)
    if not number or math.isnan(value) or not low <= value <= high or (exclude_low and value == low):  # type: ignore[arg-type,operator]
        what = "an integer" if integer else "a number"
        above = "above" if exclude_low else "from"
        limits = f"{low} to {high}" if integer else f"{low:g} to {high:g}"
        raise InputError(f"{option} must be {what} {above} {limits}, not {value!r}")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from Philox-4x32-10 (Salmon et al., SC'11): the first word for counter `position`.

    The same bits as `tl.rand(seed, position)` of Triton, so that sampling on the GPU draws alike.
    """
    counter = [position & WORD, 0, 0, 0]
    key = [seed & WORD, (seed >> 32) & WORD]
    for _ in range(10):
        high0, low0 = divmod(PHILOX_MULTIPLIER[0] * counter[0], WORD + 1)
        high1, low1 = divmod(PHILOX_MULTIPLIER[1] * counter[2], WORD + 1)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(k + step) & WORD for k, step in zip(key, PHILOX_KEY_STEP, strict=True)]
    word = counter[0]
    folded = word if word < 1 << 31 else WORD - word  # Triton folds the sign of its int32
    return float(np.float32(folded) * np.float32(4.6566127342e-10))  # just below 2^-31, so that 1 is never drawn


def sample(logits: torch.Tensor, params: SamplingParams, history: list[int], position: int) -> int:
    """The token to put at `position`: logits [V] float32 of the position before; history: all tokens so far."""
    if not logits.isfinite().all():
        raise InputError(NOT_FINITE)
    if params.repetition_penalty != 1.0:
        logits = _penalize(logits, history, params.repetition_penalty)
    if params.temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    candidates, ids = _descending(logits, params.top_k)
    weights = fixed_point((candidates.double() / params.temperature).softmax(-1))
    if params.top_p < 1.0:
        before = weights.cumsum(-1) - weights  # what more likely tokens already cover
        weights = weights * (before.double() < params.top_p * ONE)  # beside a number, torch would round to float32
    if params.min_p > 0.0:
        weights = weights * (weights.double() >= params.min_p * weights[0].double())
    covered = weights.cumsum(-1)
    threshold = (uniform(params.seed, position) * covered[-1].double()).floor().long()
    return int(ids[torch.searchsorted(covered, threshold, right=True)])


def fixed_point(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities (float64) as int64 multiples of 2^-52, whose sums are the same in any order: on a GPU that of a
    running sum of floats changes from run to run."""
    return (probabilities * ONE).round().long()


def _descending(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` largest logits (0: all) in descending order and their ids; equal ones by ascending id."""
    ids = torch.arange(len(logits), device=logits.device)
    if 0 < top_k < len(logits):
        # A full sort of 200,000 logits takes 20 ms on a CPU core; topk leaves the order of equal ones open.
        least = logits.topk(top_k).values[-1]
        ids = (logits >= least).nonzero()[:, 0]
    order = torch.sort(logits[ids], descending=True, stable=True)
    count = top_k if top_k > 0 else len(ids)
    return order.values[:count], ids[order.indices[:count]]


def _penalize(logits: torch.Tensor, history: list[int], penalty: float) -> torch.Tensor:
    """Divide positive and multiply negative logits of tokens already seen (arXiv 1909.05858)."""
    seen = torch.tensor(sorted(i for i in set(history) if i < len(logits)), device=logits.device, dtype=torch.long)
    values = logits[seen]
    return logits.index_put((seen,), torch.where(values > 0, values / penalty, values * penalty))
