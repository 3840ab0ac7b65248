"""One prompt being continued, and what comes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.text.streaming import IncrementalDecoder, StopStringMatcher
from tritonmoe.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt. Times run from the moment the request was made.

    `token_ids` are the generated ids, a final stop token included; `text` is without it and without a stop string.
    `tpot_ms` is (end - first token) / (tokens - 1), None for a single token; `tokens_per_s` is all generated
    tokens over the whole time, prefill included.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    tokens_per_s: float
    seed: int


class Row:
    """The state of one sequence of a batch: its tokens, its text, and whether it has ended."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        max_length: int,
    ) -> None:
        self.params = params
        self.token_ids = list(prompt_ids)
        self.num_prompt = len(prompt_ids)
        self.num_reused = 0  # tokens whose keys and values an earlier turn left in the cache
        self.num_cached = 0  # tokens whose keys and values are in the cache now
        self.finish_reason: FinishReason | None = None
        self._stop_ids = stop_ids
        self.max_length = min(max_length, self.num_prompt + params.max_new_tokens)  # prompt plus generated tokens
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopStringMatcher(params.stop)
        self._text: list[str] = []
        self._started = time.perf_counter()
        self._first = self._last = self._started

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_id: int) -> str:
        """Take the next token; returns the text that may be shown because of it."""
        self._last = time.perf_counter()
        if len(self.token_ids) == self.num_prompt:
            self._first = self._last
        self.token_ids.append(token_id)
        if token_id in self._stop_ids:
            return self._finish("stop")
        text, matched = self._matcher.push(self._decoder.push(token_id))
        self._text.append(text)
        if matched:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_length:
            return text + self._finish("length")
        return text

    def _finish(self, reason: FinishReason) -> str:
        """End here: text held back as the start of a stop string or of a character was none."""
        self.finish_reason = reason
        text, matched = self._matcher.push(self._decoder.flush())
        text = text if matched else text + self._matcher.flush()
        self._text.append(text)
        return text

    def result(self) -> Generation:
        """What there is so far; a row that has not ended counts as interrupted."""
        if self.finish_reason is None:
            self._finish("interrupted")
        assert self.finish_reason is not None
        ids = self.token_ids[self.num_prompt :]
        seconds = self._last - self._started
        return Generation(
            text="".join(self._text),
            token_ids=ids,
            finish_reason=self.finish_reason,
            prompt_tokens=self.num_prompt,
            reused_tokens=self.num_reused,
            ttft_ms=(self._first - self._started) * 1e3 if ids else None,
            tpot_ms=(self._last - self._first) * 1e3 / (len(ids) - 1) if len(ids) > 1 else None,
            tokens_per_s=len(ids) / seconds if ids and seconds > 0 else 0.0,
            seed=self.params.seed,
        )
