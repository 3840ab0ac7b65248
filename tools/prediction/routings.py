"""What every layer's routing gives while a model reads text: the truth that predictions are held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tritonmoe.generation.session import allocate_cache, prefill_chunk
from tritonmoe.model.decoder import Decoder
from tritonmoe_kernels.routing import NormRouterOutput


@dataclass(frozen=True)
class Chunk:
    """A prefill step of T tokens: by layer with experts, all that its routing gave."""

    start: int  # the first token's position in its window
    routed: dict[int, NormRouterOutput]

    @property
    def num_tokens(self) -> int:
        return len(next(iter(self.routed.values())).x)


def chunks(decoder: Decoder, windows: Iterable[Sequence[int]], length: int) -> Iterator[Chunk]:
    """Run every window, of at most `length` tokens, by itself through the model, whose prefill routes truly."""
    cache = allocate_cache(decoder, 1, length)  # written anew from its start by each window
    step = prefill_chunk(decoder.device)
    found: dict[int, NormRouterOutput] = {}
    for window in windows:
        for start in range(0, len(window), step):
            ids = torch.tensor([list(window[start : start + step])], device=decoder.device)
            decoder.hooks.on_routed = found.__setitem__
            try:
                decoder.prefill_residual(ids, start, cache)
            finally:
                decoder.hooks.on_routed = None
            yield Chunk(start, dict(found))
