"""How likely a model finds given continuations, token by token as it generates, so that policies act on every one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tritonmoe import Engine
from tritonmoe.generation.session import allocate_cache, prefill_chunk
from tritonmoe.model.kv_cache import KVCache


class Pair(NamedTuple):
    """Token ids, at least one of each."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The natural log of a continuation's probability, and whether each of its tokens was the likeliest."""

    log_probability: float
    is_greedy: bool


@torch.inference_mode()
def score(engine: Engine, pairs: Sequence[Pair], batch: int, by_steps: bool = True) -> list[Score]:
    """In the order of the pairs, `batch` of about equal length together.

    The context is read as a prompt, but for its last token: that and the continuation are decode steps. Without
    `by_steps` all of it is read as a prompt, which is faster and, under an exact policy, as right.
    """
    order = sorted(range(len(pairs)), key=lambda i: (len(pairs[i].continuation), len(pairs[i].context), i))
    found: dict[int, Score] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        rows = [pairs[i] for i in chosen]
        scores = _decoded(engine, rows) if by_steps else [_read(engine, row) for row in rows]
        found.update(zip(chosen, scores, strict=True))
    return [found[i] for i in range(len(pairs))]


def _prefill(engine: Engine, ids: Sequence[int], cache: KVCache) -> torch.Tensor:
    """Residuals [T, H] after all of the ids."""
    step, device = prefill_chunk(engine.decoder.device), engine.decoder.device
    parts = [
        engine.decoder.prefill_residual(torch.tensor([list(ids[start : start + step])], device=device), start, cache)
        for start in range(0, len(ids), step)
    ]
    return torch.cat(parts) if parts else torch.empty(0)


def _read(engine: Engine, row: Pair) -> Score:
    ids = [*row.context, *row.continuation]
    residual = _prefill(engine, ids[:-1], allocate_cache(engine.decoder, 1, len(ids)))
    logits = engine.decoder.logits(residual[len(row.context) - 1 :])
    wanted = torch.tensor(list(row.continuation), device=logits.device)
    chosen = logits.log_softmax(-1).gather(1, wanted[:, None])
    return Score(float(chosen.double().sum()), bool((logits.argmax(-1) == wanted).all()))


def _decoded(engine: Engine, rows: Sequence[Pair]) -> list[Score]:
    """Rows that have ended go on with their last token, unscored, so that the shape of a step stays the same."""
    decoder, experts = engine.decoder, engine.decoder.experts
    length = max(len(row.context) + len(row.continuation) for row in rows)
    cache = allocate_cache(decoder, len(rows), length)
    experts.begin()
    for i, row in enumerate(rows):
        _prefill(engine, row.context[:-1], cache.rows(i, 1))
    steps = max(len(row.continuation) for row in rows)
    tokens = torch.tensor([_fed(row, steps) for row in rows], device=decoder.device)  # [B, steps + 1]
    lengths = torch.tensor([len(row.continuation) for row in rows], device=decoder.device)
    first = torch.tensor([len(row.context) - 1 for row in rows], device=decoder.device)
    sums = torch.zeros(len(rows), dtype=torch.float64, device=decoder.device)
    is_greedy = torch.ones(len(rows), dtype=torch.bool, device=decoder.device)
    experts.begin_decode(len(rows))
    for step in range(steps):
        experts.begin_step(len(rows))
        logits = decoder.decode(tokens[:, step], first + step, cache, length)
        experts.step_launched()
        wanted, is_scored = tokens[:, step + 1], step < lengths
        chosen = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0].double()
        sums += torch.where(is_scored, chosen, 0.0)
        is_greedy &= (logits.argmax(-1) == wanted) | ~is_scored
    return [Score(*row) for row in zip(sums.tolist(), is_greedy.tolist(), strict=True)]


def _fed(row: Pair, steps: int) -> list[int]:
    ids = [row.context[-1], *row.continuation]
    return ids + ids[-1:] * (steps + 1 - len(ids))
