"""What the command line does with its options: read the prompt, load the model, print what it generates."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from tritonmoe.chat import chat, emit
from tritonmoe.engine import Engine, Interrupted, TextStream
from tritonmoe.errors import EXIT_INTERRUPTED, CheckError, InputError
from tritonmoe.generation.row import Generation
from tritonmoe.generation.sampling import MIN_TEMPERATURE, SamplingParams
from tritonmoe.offload.trace import TraceRecorder
from tritonmoe.placement.loader import Placement

SAMPLING_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
FILTERS = ("top_k", "top_p", "min_p")
POLICY_OPTIONS = (
    "predict", "lookahead", "candidates", "execute", "gate", "miss_tolerance", "miss_fill", "cache_bias", "eviction",
    "prefetch",
)  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Returns the exit code; raises a TritonMoeError for what the user must change."""
    _refuse_contradictions(options)
    _params(options, SamplingParams())  # bad values are refused before the model is loaded
    prompts = _prompts(options)
    recorder = None if options.trace is None else TraceRecorder(options.trace)
    engine = Engine.from_pretrained(
        options.model,
        dtype=options.dtype,
        device=options.device,
        max_context=options.max_context,
        revision=options.revision,
        check_weights=not options.no_check_weights,
        check_memory=not options.no_check_memory,
        progress=_is_terminal(sys.stderr),
        placement=_placement(options),
        batch_size=1 if prompts is None else len(prompts),
        check=options.check,
    )
    params = _params(options, engine.defaults)
    _refuse_idle_filters(options, params)
    with nullcontext() if recorder is None else recorder.attach(engine.decoder):
        return _answer(engine, options, prompts, params)


def _answer(engine: Engine, options: argparse.Namespace, prompts: list[str] | None, params: SamplingParams) -> int:
    if prompts is None:
        return chat(engine, params, options.system)
    inputs = [_chat_ids(engine, options.system, text) for text in prompts] if options.chat else prompts
    if len(inputs) == 1 and not options.no_stream and not options.json:
        return _stream(engine, engine.stream(inputs[0], params))
    return _print_all(engine, inputs, params, options.json)


def _placement(options: argparse.Namespace) -> Placement:
    given = {name: getattr(options, name) for name in POLICY_OPTIONS if getattr(options, name) is not None}
    overrides = {"predictor" if name == "predict" else name: value for name, value in given.items()}
    return Placement(
        options.policy, options.gpu_memory, options.expert_slots, options.default_vectors, options.estimator,
        options.hybrid, options.measure, overrides, options.expert_dtype, options.dense_dtype, options.embedding,
    )  # fmt: skip


def _is_terminal(stream: TextIO | None) -> bool:
    """A standard stream is None where the shell closed it."""
    return stream is not None and stream.isatty()


def _refuse_contradictions(options: argparse.Namespace) -> None:
    sources = [options.text is not None, options.prompt is not None, options.prompt_file is not None]
    if sum(sources) > 1:
        raise InputError("give the prompt once: as PROMPT, with --prompt or with --prompt-file")
    if options.system is not None and not options.chat:
        raise InputError("--system needs --chat")
    if options.chat and options.json and not any(sources) and _is_terminal(sys.stdin):
        raise InputError("--json needs a prompt; an interactive chat prints text")
    for name, texts in (("--system", [options.system or ""]), ("--stop", options.stop or [])):
        for text in texts:
            _require_utf8(text, name)


def _refuse_idle_filters(options: argparse.Namespace, params: SamplingParams) -> None:
    """An option without effect is a misunderstanding: filters choose among candidates, greedy has none."""
    given = [name for name in FILTERS if getattr(options, name) is not None]
    if given and params.temperature < MIN_TEMPERATURE:
        raise InputError(
            f"--{given[0].replace('_', '-')} has no effect on greedy decoding; give a --temperature above 0"
        )


def _params(options: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    given = {name: getattr(options, name) for name in SAMPLING_OPTIONS if getattr(options, name) is not None}
    return dataclasses.replace(defaults, **given, stop=tuple(options.stop or ()))


def _prompts(options: argparse.Namespace) -> list[str] | None:
    """The prompts from wherever they are given; None for an interactive chat."""
    if options.text is not None:
        prompts = [options.text]
    elif options.prompt is not None:
        prompts = options.prompt
    elif options.prompt_file is not None:
        prompts = [_read_prompt_file(options.prompt_file)]
    elif sys.stdin is not None and not sys.stdin.isatty():
        prompts = [_without_newline(_decode(sys.stdin.buffer.read(), "stdin"))]
    elif options.chat and sys.stdin is not None:
        return None
    else:
        raise InputError("no prompt: give PROMPT, --prompt, --prompt-file, pipe it in, or use --chat")
    for prompt in prompts:
        if not prompt:
            raise InputError("the prompt is empty")
        _require_utf8(prompt, "the prompt")
    return prompts


def _require_utf8(text: str, what: str) -> None:
    """Bytes of the shell that are not UTF-8 arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} is not valid UTF-8") from None


def _read_prompt_file(path: Path) -> str:
    try:
        return _without_newline(_decode(path.read_bytes(), str(path)))
    except OSError as error:
        raise InputError(f"--prompt-file {path}: {error.strerror}") from None


def _without_newline(text: str) -> str:
    """Without the one that `echo` and editors put at the end."""
    return text.removesuffix("\n").removesuffix("\r")


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 (byte {error.start}); convert it first") from None


def _chat_ids(engine: Engine, system: str | None, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return engine.chat_prompt(messages)


def _stream(engine: Engine, stream: TextStream) -> int:
    code = 0
    try:
        for text in stream:
            emit(text)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except CheckError:
        print(flush=True)  # what is said of it begins a line
        raise
    print(flush=True)
    print(summary(stream.result()), *engine.report(), sep="\n", file=sys.stderr)
    return code


def _print_all(engine: Engine, prompts: Sequence[Any], params: SamplingParams, as_json: bool) -> int:
    code = 0
    try:
        results = engine.generate_batch(prompts, params)
    except Interrupted as interrupted:
        code, results = EXIT_INTERRUPTED, interrupted.results
    for result in results:
        emit(json.dumps(dataclasses.asdict(result), ensure_ascii=False) if as_json else result.text, end="\n")
    if not as_json:
        for result in results:
            print(summary(result), file=sys.stderr)
        for line in engine.report():
            print(line, file=sys.stderr)
    return code


def summary(result: Generation) -> str:
    """One line of what a generation took."""
    reused = f" ({result.reused_tokens} reused)" if result.reused_tokens else ""
    first = "-" if result.ttft_ms is None else f"{result.ttft_ms:.0f} ms"
    each = "-" if result.tpot_ms is None else f"{result.tpot_ms:.1f} ms"
    return (
        f"[prompt {result.prompt_tokens} tokens{reused}, generated {len(result.token_ids)}; first token {first}, "
        f"then {each}/token; {result.tokens_per_s:.1f} tokens/s; ended by {result.finish_reason}]"
    )
