"""A conversation's KV cache, kept between turns so that only what is new is computed."""

from __future__ import annotations

import torch

from tritonmoe.kv_cache import KVCache, kv_bytes_per_token
from tritonmoe.memory import require_memory
from tritonmoe.spec import ModelSpec

MIN_CAPACITY = 256


class Session:
    """One sequence whose cache grows as needed and survives from call to call."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec, self._device, self._dtype = spec, device, dtype
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
        if self._cache is None or self._cache.max_length < length:
            capacity = max(MIN_CAPACITY, 1 << (length - 1).bit_length())
            old, self._cache = self._cache, allocate_cache(self._spec, 1, capacity, self._device, self._dtype)
            if old is not None:
                for layer in range(len(old.keys)):
                    self._cache.keys[layer][:, :, : old.max_length] = old.keys[layer]
                    self._cache.values[layer][:, :, : old.max_length] = old.values[layer]
        return self._cache


def allocate_cache(spec: ModelSpec, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> KVCache:
    """A KV cache, after a check that it fits; InputError says what it needs and which option makes it smaller."""
    needed = batch * length * kv_bytes_per_token(spec, dtype)
    require_memory(needed, device, f"the KV cache of {batch} x {length} tokens", "a smaller --max-context")
    return KVCache.allocate(spec, batch, length, device, dtype)
