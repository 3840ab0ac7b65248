"""A conversation's KV cache, kept between turns so that only what is new is computed, and the memory of all caches."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from tritonmoe.errors import InputError
from tritonmoe.generation.decode_runner import DecodeRunner
from tritonmoe.memory import require_memory
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache, attention_bytes, kv_bytes_per_token
from tritonmoe.model.spec import ModelSpec


def prefill_chunk(device: torch.device) -> int:
    """Tokens of a prefill step. Fixed, whatever the memory, because the shape of a step decides how its sums round.

    Every chunk reads all experts: on a GPU 4,096 tokens take 2.4 times as long as 512 (docs/measurements/kernels.json).
    """
    return 4096 if device.type == "cuda" else 512


class CacheMemory:
    """Hands out KV caches within the bytes that memory was divided with; None: as far as there is memory.

    A cache counts for as long as anything refers to it. `release_idle` frees those that nobody uses at the moment.
    """

    def __init__(self, decoder: Decoder, planned_bytes: int | None, release_idle: Callable[[], object]) -> None:
        self.decoder = decoder
        self._planned_bytes = planned_bytes
        self._release_idle = release_idle
        self._held: dict[object, int] = {}  # bytes of each cache alive; any thread may drop the last reference to one

    @property
    def is_planned(self) -> bool:
        """Whether caches are bounded, and idle ones freed when others need their room."""
        return self._planned_bytes is not None

    def has_room(self, batch: int, length: int) -> bool:
        """Whether a cache of this size can be had, if need be in place of idle ones."""
        if self._planned_bytes is None:
            return True
        needed = self._num_bytes(batch, length)
        if self._held_bytes + needed > self._planned_bytes:
            self._release_idle()
        return self._held_bytes + needed <= self._planned_bytes

    def allocate(self, batch: int, length: int) -> KVCache:
        """A cache; InputError where it does not fit beside those in use."""
        num_bytes = self._num_bytes(batch, length)
        if self._planned_bytes is not None and not self.has_room(batch, length):
            sizes = (num_bytes, self._held_bytes, self._planned_bytes)
            needed, held, planned = (f"{size / 1e9:.3g} GB" for size in sizes)
            raise InputError(
                f"out of memory: the KV cache of {batch} x {length} tokens needs {needed} beside {held} in use, and "
                f"{planned} were set aside for KV caches; use a smaller --max-context or --max-new-tokens, or a larger "
                "--gpu-memory"
            )
        cache, token = allocate_cache(self.decoder, batch, length), object()
        self._held[token] = num_bytes
        weakref.finalize(cache, self._held.pop, token).atexit = False
        return cache

    @property
    def _held_bytes(self) -> int:
        return sum(list(self._held.values()))

    def _num_bytes(self, batch: int, length: int) -> int:
        return batch * length * kv_bytes_per_token(self.decoder.spec, self.decoder.dtype)


class Session:
    """One sequence whose cache grows as needed, up to `max_length`, and survives from call to call."""

    def __init__(self, memory: CacheMemory, make_runner: Callable[[KVCache], DecodeRunner], max_length: int) -> None:
        self._memory = memory
        self._make_runner = make_runner
        self._max_length = max_length
        self._runner: DecodeRunner | None = None
        self.token_ids: list[int] = []  # whose keys and values the cache holds
        self.user: object | None = None  # whose stream has not ended

    def reuse(self, prompt_ids: list[int]) -> int:
        """How many tokens at the start of `prompt_ids` are already cached (at most all but the last)."""
        common = 0
        for old, new in zip(self.token_ids, prompt_ids[:-1], strict=False):
            if old != new:
                break
            common += 1
        return common

    def runner(self, length: int) -> DecodeRunner:
        """A runner whose cache has at least `length` positions and still holds what `token_ids` says."""
        old = None if self._runner is None else self._runner.cache
        if self._runner is not None and old is not None and old.max_length >= length:
            return self._runner
        # Exactly what a single prompt needs; a conversation grows by doubling.
        wanted = length if old is None else max(length, min(2 * old.max_length, self._max_length))
        if old is not None and not self._memory.has_room(1, length):
            self._runner = old = None  # there is no room for both: the conversation is computed anew
            self.token_ids = []
        grown = self._memory.allocate(1, wanted if self._memory.has_room(1, wanted) else length)
        if old is not None:
            for new, past in zip(grown.keys + grown.values, old.keys + old.values, strict=True):
                new[:, :, : old.max_length] = past
        # Last, so that an interrupt leaves the old one with `token_ids` still true of it.
        self._runner = self._make_runner(grown)
        return self._runner


def allocate_cache(decoder: Decoder, batch: int, length: int) -> KVCache:
    """A KV cache, after a check that it fits; InputError says what it needs and which option makes it smaller."""
    spec, device, dtype = decoder.spec, decoder.device, decoder.dtype
    needed = batch * length * kv_bytes_per_token(spec, dtype) + step_bytes(spec, device, dtype, length)
    what = f"the KV cache of {batch} x {length} tokens and attention over it"
    require_memory(needed, device, what, "a smaller --max-context or --max-new-tokens")
    return KVCache.allocate(spec, batch, length, device, dtype)


def step_bytes(spec: ModelSpec, device: torch.device, dtype: torch.dtype, length: int) -> int:
    """The largest tensors of a prefill step: all scores of the reference's attention, or a GPU's expert outputs."""
    tokens = min(prefill_chunk(device), length)
    if device.type != "cuda":
        return attention_bytes(spec, tokens, length)
    widest = max(
        layer.moe.num_experts_per_tok * (spec.hidden_size + layer.moe.intermediate_size)
        for layer in spec.layers
        if layer.moe is not None
    )
    return tokens * (widest + 8 * spec.hidden_size) * dtype.itemsize
