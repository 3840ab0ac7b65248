"""`python -m tritonmoe.generate`: continue a prompt, or chat, on the command line.

Generated text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from tritonmoe.chat import chat
from tritonmoe.engine import EMBEDDED, Engine, TextStream
from tritonmoe.errors import InputError, TritonMoeError
from tritonmoe.generation import Generation
from tritonmoe.sampling import SamplingParams

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_CODES = """exit codes:
  0    done
  1    a fault of tritonmoe itself (please report the traceback)
  2    bad input or an environment that cannot serve it; one line on stderr says what to change
  130  interrupted by Ctrl-C
"""
SAMPLING_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the options)")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tritonmoe.generate",
        description="Continue a prompt with a Mixture-of-Experts language model, or chat with it.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("text", nargs="?", metavar="PROMPT", help="the prompt; read from stdin when piped")
    parser.add_argument("--model", default=EMBEDDED, help="a folder, a hub id, or 'nano': the embedded model (default)")
    parser.add_argument("--revision", help="a branch, tag or commit of a hub id")
    parser.add_argument("--prompt", action="append", help="the prompt; given several times: a batch")
    parser.add_argument("--prompt-file", type=Path, help="a UTF-8 file that is the prompt")
    parser.add_argument("--chat", action="store_true", help="use the chat template; without a prompt: interactive")
    parser.add_argument("--system", help="the system message (with --chat)")
    group = parser.add_argument_group("generation (defaults: what the model recommends, else greedy)")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="at most N tokens (default 256)")
    group.add_argument("--max-context", type=int, metavar="N", help="prompt and answer together (default: model)")
    group.add_argument("--stop", action="append", metavar="STRING", help="end before this text; repeatable")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="choose among the K most likely; 0: off")
    group.add_argument("--top-p", type=float, metavar="P", help="choose within this probability mass; 1: off")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest; 0: off")
    group.add_argument("--repetition-penalty", type=float, metavar="F", help="above 1 discourages repetition")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same text (default 0)")
    group = parser.add_argument_group("running")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--no-check-weights", action="store_true", help="load weights with NaN or infinite values")
    group.add_argument("--no-check-memory", action="store_true", help="load even if memory seems too small")
    group.add_argument("--no-stream", action="store_true", help="print the text once it is complete")
    group.add_argument("--json", action="store_true", help="print one JSON object (a line per prompt) instead of text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (see EXIT_CODES)."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("tritonmoe").setLevel(logging.INFO)
    try:
        return _run(build_parser().parse_args(argv))
    except TritonMoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        print(
            f"error: out of memory ({' '.join(str(error).split())[:120]}); "
            "use a smaller --max-context, --max-new-tokens or --dtype, or another --device",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _is_out_of_memory(error: Exception) -> bool:
    """torch has a type of its own for the GPU only; on the host it raises RuntimeError with this text."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _run(options: argparse.Namespace) -> int:
    _refuse_contradictions(options)
    params = _params(options, SamplingParams())  # refuse bad values before the model is loaded
    prompts = _prompts(options)
    engine = Engine.from_pretrained(
        options.model,
        dtype=options.dtype,
        device=options.device,
        max_context=options.max_context,
        revision=options.revision,
        check_weights=not options.no_check_weights,
        check_memory=not options.no_check_memory,
        progress=sys.stderr.isatty(),
    )
    params = _params(options, engine.defaults)
    if prompts is None:
        return chat(engine, params, options.system)
    inputs = [_chat_ids(engine, options.system, text) for text in prompts] if options.chat else prompts
    if len(inputs) == 1 and not options.no_stream and not options.json:
        return _stream(engine.stream(inputs[0], params))
    return _print_all(engine, inputs, params, options.json)


def _refuse_contradictions(options: argparse.Namespace) -> None:
    sources = [options.text is not None, options.prompt is not None, options.prompt_file is not None]
    if sum(sources) > 1:
        raise InputError("give the prompt once: as PROMPT, with --prompt or with --prompt-file")
    if options.system is not None and not options.chat:
        raise InputError("--system needs --chat")
    if options.chat and options.json and not any(sources) and sys.stdin.isatty():
        raise InputError("--json needs a prompt; an interactive chat prints text")


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
    elif not sys.stdin.isatty():
        prompts = [_decode(sys.stdin.buffer.read(), "stdin")]
    elif options.chat:
        return None
    else:
        raise InputError("no prompt: give PROMPT, --prompt, --prompt-file, pipe it in, or use --chat")
    for prompt in prompts:
        if not prompt:
            raise InputError("the prompt is empty")
        try:
            prompt.encode()
        except UnicodeEncodeError:  # the shell passed bytes that are not UTF-8
            raise InputError("the prompt is not valid UTF-8") from None
    return prompts


def _read_prompt_file(path: Path) -> str:
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"--prompt-file {path}: {error.strerror}") from None


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


def _stream(stream: TextStream) -> int:
    code = 0
    try:
        for text in stream:
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    print(flush=True)
    print(summary(stream.result()), file=sys.stderr)
    return code


def _print_all(engine: Engine, prompts: Sequence[Any], params: SamplingParams, as_json: bool) -> int:
    results = engine.generate_batch(prompts, params)
    for result in results:
        print(json.dumps(dataclasses.asdict(result), ensure_ascii=False) if as_json else result.text)
    sys.stdout.flush()
    if not as_json:
        for result in results:
            print(summary(result), file=sys.stderr)
    return 0


def summary(result: Generation) -> str:
    """One line of what a generation took."""
    reused = f" ({result.reused_tokens} reused)" if result.reused_tokens else ""
    first = "-" if result.ttft_ms is None else f"{result.ttft_ms:.0f} ms"
    each = "-" if result.tpot_ms is None else f"{result.tpot_ms:.1f} ms"
    return (
        f"[prompt {result.prompt_tokens} tokens{reused}, generated {len(result.token_ids)}; first token {first}, "
        f"then {each}/token; {result.tokens_per_s:.1f} tokens/s; ended by {result.finish_reason}]"
    )


if __name__ == "__main__":
    sys.exit(main())
