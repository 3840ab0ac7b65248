"""A sequence of random tokens, timed through prefill and decoding: routing is that of tokens that nothing predicts."""

from __future__ import annotations

import time

import torch

from bench.measure import synchronize
from tritonmoe.generation.decode_runner import DecodeRunner
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.generation.session import allocate_cache, prefill_chunk
from tritonmoe.model.decoder import Decoder

# Untimed, at most: they compile, capture, fill slots as decoding does, and show the engine what prefetching brings.
WARM_STEPS = 96
LEAST_STEPS = 8  # are timed however long they take
PREFILL_SECONDS = 3.0  # no further prefill where those so far took this long
SEED = 0


class RandomText:
    """A prompt of `context` tokens and up to `steps` after it, each drawn beforehand instead of sampled.

    What is not prefilled of the prompt has random keys and values.
    """

    def __init__(self, decoder: Decoder, context: int, steps: int) -> None:
        self._decoder, self._context, self._steps = decoder, context, steps
        length = context + WARM_STEPS + steps
        cache = allocate_cache(decoder, 1, length)
        generator = torch.Generator(decoder.device).manual_seed(SEED)
        for tensor in cache.keys + cache.values:
            tensor.normal_(generator=generator)
        vocab_size = decoder.spec.vocab_size
        self._tokens = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(SEED)).tolist()
        self._runner = DecodeRunner(decoder, cache, vocab_size)
        self._params = SamplingParams(max_new_tokens=length)
        self._decoded = 0

    def begin(self) -> None:
        """Decode from the end of the prompt on."""
        self._decoded = 0
        self._runner.begin([self._tokens[: self._context + 1]], [self._params])

    def prefill_ms(self, count: int) -> float:
        """By the clock, from the first `count` tokens of the prompt to the token after them."""
        ids = torch.tensor([self._tokens[:count]], device=self._decoder.device)
        chunk = prefill_chunk(self._decoder.device)
        logits = torch.empty(0)
        synchronize(self._decoder.device)
        began = time.perf_counter()
        for start in range(0, count, chunk):
            logits = self._decoder.prefill(ids[:, start : min(start + chunk, count)], start, self._runner.cache)
        logits.argmax().item()
        return 1e3 * (time.perf_counter() - began)

    def warm_up(self, seconds: float) -> None:
        """Decode untimed until slots and captured steps are as they stay."""
        self._decode(WARM_STEPS, LEAST_STEPS // 2, seconds)

    def step_ms(self, seconds: float) -> list[float]:
        """By the clock, from the launch of a step to its token on the host, step by step."""
        return self._decode(self._steps, LEAST_STEPS, seconds)

    def _decode(self, most: int, least: int, seconds: float) -> list[float]:
        times: list[float] = []
        while len(times) < most and (len(times) < least or sum(times) < 1e3 * seconds):
            times.append(self._step())
        return times

    def _step(self) -> float:
        """One step whose input is the next token drawn beforehand, whatever was sampled in the last one."""
        self._runner.feed([self._tokens[self._context + self._decoded]])
        self._decoded += 1
        synchronize(self._decoder.device)
        began = time.perf_counter()
        self._runner.launch()
        self._runner.tokens()
        return 1e3 * (time.perf_counter() - began)
