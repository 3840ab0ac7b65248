"""A conversation's KV cache, kept between turns so that only what is new is computed."""

from __future__ import annotations

import torch

from tritonmoe.kv_cache import KVCache, attention_bytes, kv_bytes_per_token
from tritonmoe.memory import require_memory
from tritonmoe.spec import ModelSpec

# Fixed, and independent of memory: the shape of a prefill step decides how its sums round.
PREFILL_CHUNK = 512


class Session:
    """One sequence whose cache grows as needed, up to `max_length`, and survives from call to call."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, max_length: int) -> None:
        self._spec, self._device, self._dtype = spec, device, dtype
        self._max_length = max_length
        self._cache: KVCache | None = None
        self.token_ids: list[int] = []  # whose keys and values the cache holds

    def reuse(self, prompt_ids: list[int]) -> int:
        """How many tokens at the start of `prompt_ids` are already cached (at most all but the last)."""
        common = 0
        for old, new in zip(self.token_ids, prompt_ids[:-1], strict=False):
            if old != new:
                break
            common += 1
        return common

    def cache(self, length: int) -> KVCache:
        """A cache of at least `length` positions that still holds what was in the last one."""
        old = self._cache
        if old is not None and old.max_length >= length:
            return old
        # Exactly what a single prompt needs; a conversation grows by doubling.
        capacity = length if old is None else max(length, min(2 * old.max_length, self._max_length))
        grown = allocate_cache(self._spec, 1, capacity, self._device, self._dtype)
        if old is not None:
            for new, past in zip(grown.keys + grown.values, old.keys + old.values, strict=True):
                new[:, :, : old.max_length] = past
        self._cache = grown  # last, so that an interrupt leaves the old one with `token_ids` still true of it
        return grown


def allocate_cache(spec: ModelSpec, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> KVCache:
    """A KV cache, after a check that it fits; InputError says what it needs and which option makes it smaller."""
    needed = batch * length * kv_bytes_per_token(spec, dtype) + attention_bytes(spec, PREFILL_CHUNK, length)
    what = f"the KV cache of {batch} x {length} tokens and attention over it"
    require_memory(needed, device, what, "a smaller --max-context or --max-new-tokens")
    return KVCache.allocate(spec, batch, length, device, dtype)
