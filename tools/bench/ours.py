"""This engine as a `Stepper`: chunked prefill row by row, then the captured decode step."""

from __future__ import annotations

import torch

from tritonmoe.generation.decode_runner import DecodeRunner
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.generation.session import allocate_cache, prefill_chunk
from tritonmoe.model.decoder import Decoder


class Ours:
    """Greedy decoding of prompts [B, context], with a cache for `new_tokens` more."""

    def __init__(self, decoder: Decoder, prompts: torch.Tensor, new_tokens: int) -> None:
        self.device = decoder.device
        self.batch, self.context = prompts.shape
        self._decoder, self._prompts = decoder, prompts
        self.cache = allocate_cache(decoder, self.batch, self.context + new_tokens)
        self._runner = DecodeRunner(decoder, self.cache, decoder.spec.vocab_size)
        self._params = [SamplingParams(max_new_tokens=new_tokens)] * self.batch
        self.first_tokens: list[int] = []

    def warm_up(self) -> None:
        self._prefill_row(0, min(self.context, prefill_chunk(self.device)))

    def prefill(self) -> torch.Tensor:
        logits = torch.cat([self._prefill_row(row, self.context) for row in range(self.batch)])
        self.first_tokens = logits.argmax(-1).tolist()
        return logits

    def _prefill_row(self, row: int, length: int) -> torch.Tensor:
        cache, logits, chunk = self.cache.rows(row, 1), torch.empty(0), prefill_chunk(self.device)
        for start in range(0, length, chunk):
            ids = self._prompts[row : row + 1, start : min(start + chunk, length)]
            logits = self._decoder.prefill(ids, start, cache)
        return logits

    def restart(self) -> None:
        prompts = self._prompts.tolist()
        histories = [[*prompt, token] for prompt, token in zip(prompts, self.first_tokens, strict=True)]
        self._runner.begin(histories, self._params)

    def launch(self) -> None:
        self._runner.launch()

    def tokens(self) -> list[int]:
        return self._runner.tokens()
