"""Runs decode steps of a batch over one KV cache: on a GPU each step, sampling included, is captured and replayed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from tritonmoe.errors import InputError
from tritonmoe.generation.check import Step, StepCheck
from tritonmoe.generation.sampling import NOT_FINITE, SamplingParams, sample
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.step_graph import StepGraph
from tritonmoe.waiting import STEP_TIMEOUT_S, await_until

MAX_UNREAD = 3  # draws whose tokens were not taken yet, each in a buffer of its own


class DecodeRunner:
    """The sequences of one batch, advancing by a token at a time.

    `begin`, then `sample` with the logits of the prefill, then `launch` for every further token. Each of the last two
    enqueues one token per row, which `tokens` hands out in order; on a GPU `launch` does not wait, unless the host has
    to decide in the middle of a step. A row that has ended keeps advancing with the others, so that the shape of the
    step, and with it the rounding of the other rows, stays the same; what it computes beyond the cache is not stored.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        vocab_size: int,
        capture: bool = True,
        check: StepCheck | None = None,
    ) -> None:
        """`vocab_size` is the number of ids that may be drawn; embeddings can be padded past it. `check` runs some
        steps again."""
        self.cache = cache
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._check = check
        if check is not None:
            check.watch(self.batch)
        self._steps = _DeviceSteps(self, capture) if decoder.device.type == "cuda" else _HostSteps(self)

    @property
    def batch(self) -> int:
        return self.cache.keys[0].shape[0]

    @property
    def lookahead(self) -> int:
        """How many steps are worth launching before the tokens of the last one are known."""
        return self._steps.lookahead

    def begin(self, histories: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        """Take up B sequences, of which all tokens are in the cache, or all but the last one where `launch` is next."""
        if not len(histories) == len(params) == self.batch:
            raise ValueError(f"{len(histories)} sequences, {len(params)} parameters for a batch of {self.batch}")
        self._decoder.experts.begin_decode(self.batch)
        self._steps.begin(histories, params)

    def sample(self, logits: torch.Tensor) -> None:
        """Draw the next token of every row from logits [B, V] float32."""
        self._steps.sample(logits)

    def feed(self, token_ids: Sequence[int]) -> None:
        """Have the next step run these tokens, one per row, instead of those drawn last."""
        self._steps.feed(token_ids)

    def launch(self) -> None:
        """Run the last token of every row through the model and draw the next one."""
        self._decoder.experts.begin_step(self.batch)
        check = self._check
        inputs = None if check is None or not check.is_due() else self._steps.inputs()
        self._steps.launch()
        self._decoder.experts.step_launched()
        if check is not None and inputs is not None:
            check.verify(Step(*inputs, self.cache, self._steps.logits))

    def tokens(self) -> list[int]:
        """The tokens of the earliest draw that was not handed out yet; InputError if its logits were not finite."""
        return self._steps.tokens()


class _HostSteps:
    """Step by step, sampling on the host."""

    lookahead = 0

    def __init__(self, runner: DecodeRunner) -> None:
        self._decoder, self._cache, self._vocab_size = runner._decoder, runner.cache, runner._vocab_size
        self._histories: list[list[int]] = []
        self._params: list[SamplingParams] = []
        self._drawn: deque[list[int]] = deque()
        self.logits = torch.empty(0)  # of the last step

    def begin(self, histories: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        self._histories, self._params = [list(history) for history in histories], list(params)
        self._drawn.clear()

    def sample(self, logits: torch.Tensor) -> None:
        drawn = []
        logits = logits[:, : self._vocab_size]
        for row, params, history in zip(logits, self._params, self._histories, strict=True):
            drawn.append(sample(row, params, history, len(history)))
            history.append(drawn[-1])
        self._drawn.append(drawn)

    def feed(self, token_ids: Sequence[int]) -> None:
        for history, token in zip(self._histories, token_ids, strict=True):
            history[-1] = token

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Of the next step: token ids and positions [B], and what bounds these."""
        device = self._decoder.device
        token_ids = torch.tensor([history[-1] for history in self._histories], device=device)
        positions = torch.tensor([len(history) - 1 for history in self._histories], device=device)
        return token_ids, positions, min(self._cache.max_length, max(map(len, self._histories)))

    def launch(self) -> None:
        token_ids, positions, length = self.inputs()
        self.logits = self._decoder.decode(token_ids, positions, self._cache, length)
        self.sample(self.logits)

    def tokens(self) -> list[int]:
        return self._drawn.popleft()


class _DeviceSteps:
    """Token ids, positions and sampling parameters live in device memory; a step is captured once and replayed."""

    def __init__(self, runner: DecodeRunner, capture: bool) -> None:
        from tritonmoe.generation.device_sampling import BatchSampler

        self._decoder, self._cache, self._vocab_size = runner._decoder, runner.cache, runner._vocab_size
        batch, device = runner.batch, self._decoder.device
        self._token_ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self._positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self._result = torch.zeros(batch, dtype=torch.int64, device=device)
        self._sampler = BatchSampler([SamplingParams()] * batch, self._vocab_size, device)
        self._may_capture = capture
        # By whether every row is greedy, which needs no sorting. None: the step has run, and can be captured now.
        self._graphs: dict[bool, StepGraph | None] = {}
        self._layout = self._decoder.experts.layout  # what the captured steps rely on
        self._landing = deque(torch.empty(batch, dtype=torch.int64, pin_memory=True) for _ in range(MAX_UNREAD))
        self._drawn: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._keeps_logits = runner._check is not None
        self._logits: dict[bool, torch.Tensor] = {}  # of the last step, by kind of graph, whose memory it is

    @property
    def logits(self) -> torch.Tensor:
        return self._logits[self._sampler.is_greedy]

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        return self._token_ids.clone(), self._positions.clone(), None

    @torch.inference_mode()
    def begin(self, histories: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        self._token_ids.copy_(torch.tensor([history[-1] for history in histories]))
        self._positions.copy_(torch.tensor([len(history) - 1 for history in histories]))
        self._sampler.load(params)
        for row, history in enumerate(histories):
            self._sampler.remember(row, history)
        self._drawn.clear()

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor) -> None:
        self._draw(logits)
        self._fetch()

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int]) -> None:
        self._token_ids.copy_(torch.tensor(token_ids))

    @torch.inference_mode()
    def launch(self) -> None:
        if self._layout != self._decoder.experts.layout:
            self._graphs.clear()
            self._layout = self._decoder.experts.layout
        kind = self._sampler.is_greedy
        graph = self._graphs.get(kind) if self._capture else None
        if graph is None and kind in self._graphs and self._capture:
            graph = self._graphs[kind] = self._captured()
        if graph is not None:
            graph.replay()
        else:  # the first time: whatever is compiled or allocated on first use happens outside the capture
            self._step()
            self._graphs[kind] = None
        self._fetch()

    @property
    def _capture(self) -> bool:
        """Whoever records a trace, meanwhile, wants every launch to be made."""
        return self._may_capture and self._decoder.experts.is_capturable

    @property
    def lookahead(self) -> int:
        """A step that needs the host in between would hold up the tokens of the one before."""
        return 1 if self._capture and not self._decoder.experts.needs_host else 0

    def tokens(self) -> list[int]:
        landed, event = self._drawn.popleft()
        await_until(event.query, "a decode step", STEP_TIMEOUT_S, details=self._decoder.experts.outstanding)
        drawn = landed.tolist()
        if min(drawn) < 0:
            raise InputError(NOT_FINITE)
        return drawn

    def _step(self) -> None:
        logits = self._decoder.decode(self._token_ids, self._positions, self._cache)
        if self._keeps_logits:
            self._logits[self._sampler.is_greedy] = logits
        self._draw(logits)

    def _draw(self, logits: torch.Tensor) -> None:
        self._positions.add_(1)
        drawn = self._sampler.sample(logits[:, : self._vocab_size], self._positions)
        self._token_ids.copy_(drawn.tokens)
        self._result.copy_(drawn.tokens.masked_fill(~drawn.is_finite, -1))

    def _fetch(self) -> None:
        """Copy the result to the host, behind the step and ahead of the next one, which overwrites it."""
        assert len(self._drawn) < MAX_UNREAD, "take the tokens of earlier steps first"
        landing = self._landing[0]
        self._landing.rotate(-1)
        landing.copy_(self._result, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._drawn.append((landing, event))

    def _captured(self) -> StepGraph:
        graph, experts = StepGraph(), self._decoder.experts
        experts.step_graph = graph
        try:
            graph.capture(self._step, experts.abandon_step)
        finally:
            experts.step_graph = None
        return graph
