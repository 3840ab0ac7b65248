"""Which experts decode steps use: a random router may send every token to the same few."""

from __future__ import annotations

import torch

from bench.ours import Ours
from tritonmoe.model.decoder import Decoder

PROBED_STEPS = 4


def probe(decoder: Decoder, ours: Ours, tokens: list[list[int]]) -> list[dict[str, float]]:
    """For each MoE layer: distinct experts per step, on average, and over all of the first PROBED_STEPS steps.

    `tokens` are those that the steps sampled. Runs the steps again, one by one, over the same cache.
    """
    inputs = [ours.first_tokens, *tokens][: min(PROBED_STEPS, len(tokens))]
    found: dict[int, list[set[int]]] = {}
    decoder.hooks.on_route = lambda layer, ids: found.setdefault(layer, []).append(set(ids.flatten().tolist()))
    try:
        for i, step_tokens in enumerate(inputs):
            position = ours.context + i
            ids = torch.tensor(step_tokens, device=decoder.device)
            decoder.decode(ids, torch.full_like(ids, position), ours.cache, position + 1)
    finally:
        decoder.hooks.on_route = None
    return [
        {"per_step": sum(len(ids) for ids in layer) / len(layer), "over_all": len(set().union(*layer))}
        for layer in found.values()
    ]
