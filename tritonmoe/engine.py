"""The public interface: load a model, continue prompts."""

from __future__ import annotations

import logging
import operator
import threading
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tritonmoe.checkpoint.architectures import load_spec
from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.checkpoint.hub import resolve_model
from tritonmoe.errors import ConfigError, InputError, is_out_of_memory
from tritonmoe.generation.check import StepCheck, make_check, read_option
from tritonmoe.generation.decode_runner import DecodeRunner
from tritonmoe.generation.row import Generation, Row
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.generation.session import CacheMemory, Session, prefill_chunk, step_bytes
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.spec import ModelSpec
from tritonmoe.placement.loader import Loading, Placement, load_decoder
from tritonmoe.text.chat_template import ChatTemplate
from tritonmoe.text.generation_config import sampling_defaults, stop_token_ids
from tritonmoe.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

EMBEDDED = "nano"
SCORED_CHUNK = 512  # tokens of a step that scores
LOGITS_COPIES = 3  # over the whole vocabulary: made, scaled, and their logarithms
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Prompt = str | Sequence[int]


class Engine:
    """A loaded model. Threads may share it: they take turns, for a whole `generate` or `score`, and for a token of a
    `stream`.

    >>> engine = Engine.from_pretrained()                        # the embedded model
    >>> engine.generate("Once upon a time").text
    >>> for piece in engine.stream("Once upon a time"): ...
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        stop_ids: frozenset[int],
        defaults: SamplingParams,
        max_context: int,
        cache_bytes: int | None = None,
        check: StepCheck | None = None,
    ) -> None:
        """`cache_bytes` is the most that KV caches may take together; None: as far as there is memory. `check` runs a
        sample of decode steps again."""
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.stop_ids = stop_ids
        self.defaults = defaults
        self.max_context = max_context
        # Runners of past calls by batch size, kept with their caches and captured steps for calls that they can serve.
        self._idle: dict[int, DecodeRunner] = {}
        self._lock = threading.RLock()  # slots, scratch and runners are one caller's at a time
        self._is_closed = False
        self._check = check
        self._caches = CacheMemory(decoder, cache_bytes, self._idle.clear)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = EMBEDDED,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_context: int | None = None,
        revision: str | None = None,
        check_weights: bool = True,
        check_memory: bool = True,
        progress: bool = False,
        placement: Placement | None = None,
        batch_size: int = 1,
        check: str | None = None,
    ) -> Engine:
        """Load a model from a folder, from a hub id (`org/name`), or the embedded one ("nano").

        `dtype` "auto" is float32 on the CPU, where it is faster, and on a GPU what the checkpoint says. `max_context`
        bounds prompt plus generated tokens, by default as the model does. `progress` shows bars on stderr. `placement`
        says where experts live and how they are fetched; by default on the device where they fit, else in host memory;
        memory is divided for `batch_size` sequences of `max_context` tokens. `check` "slots" or "reference" runs one
        decode step of 16 a second time and raises CheckError where that differs; "slots:1" all of them.
        Raises a TritonMoeError subclass whose message is one line for anything that cannot be loaded or run.
        """
        check_kind = None if check is None else read_option(check)[0]  # refused before anything is loaded
        if model == EMBEDDED:
            if revision is not None:
                raise InputError(f"--revision {revision}: the embedded model has none; name another with --model")
            folder = embedded_folder()
        else:
            folder = resolve_model(model, revision=revision)
        spec = load_spec(folder)
        target = resolve_device(device)
        if target.type == "cuda" and target.index is not None:
            torch.cuda.set_device(target)  # kernels and events go to the current one
        # Small files first: a mistake in one of them should not cost the time to load the weights.
        tokenizer = Tokenizer.from_folder(folder)
        config = read_json(folder / "config.json")
        stop_ids = stop_token_ids(folder, config, tokenizer)
        defaults = _default_params(folder)
        template = ChatTemplate.from_folder(folder, tokenizer.special_tokens)
        limit = _resolve_context(spec, max_context)
        loading = Loading(
            folder, spec, target, resolve_dtype(dtype, target, spec), check_weights, check_memory, progress
        )
        decoder, division = load_decoder(loading, placement or Placement(), limit, batch_size, check_kind)
        cache_bytes = None if division is None else division.cache_bytes
        checked = None if check is None else make_check(check, decoder)
        return cls(decoder, tokenizer, template, stop_ids, defaults, limit, cache_bytes, checked)

    def report(self) -> list[str]:
        """What happened to experts in the last generation, and what `check` has found so far, as lines to print."""
        return self.decoder.experts.report() + ([] if self._check is None else [self._check.line()])

    def close(self) -> None:
        """Give back what experts in host memory hold; the engine must not be used afterwards."""
        with self._turn():
            self._is_closed = True
            self._idle.clear()
            self.decoder.experts.close()

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Continue one prompt: a string, which gets the special tokens the tokenizer puts around a plain text,
        or token ids as they are."""
        return self.generate_batch([prompt], params)[0]

    def generate_batch(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Generation]:
        """Continue several prompts together, each as it would be alone. Ctrl-C raises `Interrupted`."""
        if isinstance(prompts, str):
            raise InputError("prompts must be several: a list of strings or of token ids; for one there is generate")
        if len(prompts) == 0:
            return []
        rows = [self._row(prompt, params) for prompt in prompts]
        try:
            with self._turn(), self._runner(rows) as runner:
                for _ in self._run(rows, runner):
                    pass
        except KeyboardInterrupt:
            raise Interrupted([row.result() for row in rows]) from None
        return [row.result() for row in rows]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, session: Session | None = None
    ) -> TextStream:
        """Continue one prompt piece by piece; with a `session`, reuse and extend its cache."""
        row = self._row(prompt, params)
        return TextStream(row, self._run_alone(row) if session is None else self._run_session(row, session))

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Natural log of the probability of each token but the first, given the ones before it."""
        ids = self._prompt_ids(token_ids)
        if len(ids) > self.max_context:
            raise InputError(f"{len(ids)} tokens do not fit in the context of {self.max_context}")
        scores: list[float] = []
        with self._turn():
            cache = self._caches.allocate(1, len(ids))
            for start in range(0, len(ids) - 1, SCORED_CHUNK):
                end = min(start + SCORED_CHUNK, len(ids) - 1)
                scores += self._score_chunk(ids, start, end, cache)
        return scores

    def _score_chunk(self, ids: list[int], start: int, end: int, cache: KVCache) -> list[float]:
        """Scores of the tokens after `start … end`, with logits of as many at once as a prefill step has memory for."""
        decoder = self.decoder
        following = torch.tensor(ids[start + 1 : end + 1], device=decoder.device)[:, None]
        inputs = torch.tensor([ids[start:end]], device=decoder.device)
        residual = decoder.prefill_residual(inputs, start, cache)
        workspace = step_bytes(decoder.spec, decoder.device, decoder.dtype, self.max_context)
        rows = max(1, workspace // (LOGITS_COPIES * 4 * decoder.spec.vocab_size))
        parts = zip(residual.split(rows), following.split(rows), strict=True)
        return [
            score
            for part, tokens in parts
            for score in decoder.logits(part).log_softmax(-1).gather(1, tokens)[:, 0].tolist()
        ]

    def session(self) -> Session:
        """An empty conversation cache for `stream`."""
        return Session(self._caches, self._new_runner, self.max_context)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation ([{"role": …, "content": …}, …]) as the model's chat template writes it."""
        text = self.chat_template.render(messages, add_generation_prompt=True, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _row(self, prompt: Prompt, params: SamplingParams | None) -> Row:
        ids = self._prompt_ids(prompt)
        if len(ids) >= self.max_context:
            raise InputError(
                f"the prompt has {len(ids)} tokens, which leaves no room in the context of {self.max_context} "
                f"(the model's limit is {self.decoder.spec.max_position}); shorten it or raise --max-context"
            )
        return Row(ids, params or self.defaults, self.tokenizer, self.stop_ids, self.max_context)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if self._is_closed:
            raise InputError("this engine is closed; load the model anew")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens=True) if prompt else []
        else:
            try:
                ids = [operator.index(i) for i in prompt]
            except TypeError:
                raise InputError("a prompt must be a string or a sequence of integer token ids") from None
        if not ids:
            raise InputError("the prompt is empty")
        vocab_size = self.decoder.spec.vocab_size
        wrong = [i for i in ids if not 0 <= i < vocab_size]
        if wrong:
            raise InputError(f"token id {wrong[0]} of the prompt is outside the model's vocabulary of {vocab_size}")
        return ids

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Nobody else runs the model meanwhile. Out of memory becomes an InputError, after which the engine can be used
        as before."""
        device = self.decoder.device
        with self._lock, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                yield
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # whose tensors would live as long as the error
                self._idle.clear()  # caches and captured steps of other calls may be in the way
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                problem = " ".join(str(error).split())[:120]
                raise InputError(f"out of memory ({problem}); {self._out_of_memory_remedy()}") from None

    def _out_of_memory_remedy(self) -> str:
        # What is resident has no layout; slots may have taken what a long prompt needs.
        slots = "" if self.decoder.experts.layout is None else "a smaller --gpu-memory or fewer --expert-slots, "
        return (
            f"use a shorter prompt, fewer sequences at once, {slots}a smaller --max-context, --max-new-tokens or "
            "--dtype, or another --device"
        )

    @contextmanager
    def _runner(self, rows: list[Row]) -> Iterator[DecodeRunner]:
        """A runner for these rows that nobody else uses meanwhile; one of an earlier call where it is large enough."""
        with self._turn():
            runner = self._idle_or_new(len(rows), max(row.max_length for row in rows))
        try:
            yield runner
        finally:
            self._idle[len(rows)] = runner

    def _idle_or_new(self, batch: int, length: int) -> DecodeRunner:
        runner = self._idle.pop(batch, None)
        if runner is not None and runner.cache.max_length >= length:
            return runner
        runner = None  # freed before its successor is allocated
        if not self._caches.is_planned:  # else those of other batch sizes go where room is short
            self._idle.clear()
        # A power of two, so that calls of similar lengths share it.
        capacity = min(self.max_context, 1 << (length - 1).bit_length())
        cache = self._caches.allocate(batch, capacity if self._caches.has_room(batch, capacity) else length)
        return self._new_runner(cache)

    def _new_runner(self, cache: KVCache) -> DecodeRunner:
        return DecodeRunner(self.decoder, cache, self.tokenizer.vocab_size, check=self._check)

    def _run_alone(self, row: Row) -> Generator[list[str], None, None]:
        with self._runner([row]) as runner:
            yield from self._run([row], runner)

    def _run_session(self, row: Row, session: Session) -> Generator[list[str], None, None]:
        user = object()
        try:
            with self._turn():
                if session.user is not None:
                    raise InputError("another stream continues this conversation; end or close that one first")
                session.user = user
                runner = session.runner(row.max_length)
                row.num_reused = row.num_cached = session.reuse(row.token_ids)
                session.token_ids = row.token_ids[: row.num_cached]
            try:
                yield from self._run([row], runner)
            finally:
                session.token_ids = row.token_ids[: row.num_cached]
        finally:
            if session.user is user:
                session.user = None

    def _run(self, rows: list[Row], runner: DecodeRunner) -> Iterator[list[str]]:
        """Prefill each row, then step all rows together; yields the new text of every row after each step."""
        with self._turn():
            self.decoder.experts.begin()
            logits = torch.cat([self._prefill(row, runner.cache.rows(i, 1)) for i, row in enumerate(rows)])
            runner.begin([row.token_ids for row in rows], [row.params for row in rows])
            runner.sample(logits)
            texts = [row.append(token) for row, token in zip(rows, runner.tokens(), strict=True)]
        yield texts
        steps = max(row.max_length - len(row.token_ids) for row in rows)
        launched = taken = 0
        while not all(row.finished for row in rows):
            with self._turn():
                # On a GPU one step ahead: it starts the next one without waiting for the host to see this one's tokens.
                while launched < min(steps, taken + 1 + runner.lookahead):
                    runner.launch()
                    launched += 1
                taken += 1
                texts = self._take(rows, runner.tokens())
            yield texts

    def _take(self, rows: list[Row], tokens: list[int]) -> list[str]:
        """Append a step's tokens to the rows that have not ended."""
        texts = []
        for row, token in zip(rows, tokens, strict=True):
            if not row.finished:
                row.num_cached = len(row.token_ids)
            texts.append("" if row.finished else row.append(token))
        return texts

    def _prefill(self, row: Row, cache: KVCache) -> torch.Tensor:
        """Run a row's uncached prompt tokens in fixed chunks; returns the logits [1, V] after the last one."""
        logits = torch.empty(0)
        chunk = prefill_chunk(self.decoder.device)
        while row.num_cached < row.num_prompt:
            start, end = row.num_cached, min(row.num_cached + chunk, row.num_prompt)
            ids = torch.tensor([row.token_ids[start:end]], device=self.decoder.device)
            logits = self.decoder.prefill(ids, start, cache)
            row.num_cached = end
        return logits


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`; `results` is what there was until then."""

    def __init__(self, results: list[Generation]) -> None:
        super().__init__("interrupted")
        self.results = results


class TextStream:
    """Iterates over the text of a generation as it appears; `result()` is what came of it, also when cut short."""

    def __init__(self, row: Row, steps: Generator[list[str], None, None]) -> None:
        self._row = row
        self._steps = steps

    def __iter__(self) -> Iterator[str]:
        try:
            for texts in self._steps:
                if texts[0]:
                    yield texts[0]
        finally:
            self._steps.close()  # now, not when collected: the session must know what its cache holds

    def result(self) -> Generation:
        return self._row.result()


def embedded_folder() -> Path:
    """The folder of the model that ships inside the package."""
    folder = Path(str(resources.files("tritonmoe") / EMBEDDED))
    if not (folder / "config.json").is_file():
        raise InputError(f"the embedded model is not in this installation ({folder}); reinstall or use --model")
    return folder


def resolve_device(device: str) -> torch.device:
    """ "auto" is the first GPU, or the CPU where there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        raise InputError(f"--device {device!r} is not known; use auto, cpu or cuda") from None
    if target.type not in ("cpu", "cuda"):
        raise InputError(f"--device {device!r} is not supported; use auto, cpu or cuda")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {device}: there is no such GPU here; use --device cpu")
    return target


def resolve_dtype(dtype: str, device: torch.device, spec: ModelSpec) -> torch.dtype:
    """ "auto" is float32 on the CPU (bfloat16 is slower there) and the checkpoint's type on a GPU."""
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else str(spec.checkpoint_dtype or "bfloat16")
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype!r} is not supported; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _resolve_context(spec: ModelSpec, max_context: int | None) -> int:
    if max_context is None:
        return spec.max_position
    if not isinstance(max_context, int) or not 2 <= max_context <= spec.max_position:
        raise InputError(f"--max-context must be from 2 to the model's {spec.max_position}, not {max_context}")
    return max_context


def _default_params(folder: Path) -> SamplingParams:
    """What generation_config.json recommends; greedy where it does not ask for sampling."""
    found = sampling_defaults(folder)
    if not found.pop("do_sample", False):
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    elif "temperature" not in found:
        found["temperature"] = 1.0
    try:
        return replace(SamplingParams(), **found)
    except InputError as error:
        name = str(error).split()[0].lstrip("-").replace("-", "_")
        raise ConfigError(f"{folder / 'generation_config.json'}: {name} is out of range: {found[name]!r}") from None
