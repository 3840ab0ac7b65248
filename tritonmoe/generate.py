"""`python -m tritonmoe.generate`: continue a prompt, or chat, on the command line.

Generated text goes to stdout, everything else to stderr. This file knows the options and the exit codes; torch is
imported, by `console.py`, only once they are understood: it takes a second, in which Ctrl-C must work too.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tritonmoe import signals
from tritonmoe.errors import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    InputError,
    TritonMoeError,
    is_out_of_memory,
    printable,
)
from tritonmoe.files import discard_stdout
from tritonmoe.offload.policy import CHOICES, PRESET_NAMES

EXIT_CODES = """exit codes:
  0    done
  1    a fault of tritonmoe itself (please report the traceback), or what --check found
  2    bad input or an environment that cannot serve it; one line on stderr says what to change
  130  interrupted by Ctrl-C
  143  terminated (SIGTERM)
"""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the options)")


class _Shown(logging.Formatter):
    """Warnings name keys and files of a model, which must not steer the terminal either."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m tritonmoe.generate",
        description="Continue a prompt with a Mixture-of-Experts language model, or chat with it.",
        epilog=EXIT_CODES + "\n`python -m tritonmoe.doctor` tests this machine and says what it can run.\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("text", nargs="?", metavar="PROMPT", help="the prompt; read from stdin when piped")
    parser.add_argument("--model", default="nano", help="a folder, a hub id, or 'nano': the embedded model (default)")
    parser.add_argument("--revision", help="a branch, tag or commit of a hub id")
    parser.add_argument("--prompt", action="append", help="the prompt; given several times: a batch")
    parser.add_argument(
        "--prompt-file", type=Path, help="a UTF-8 file that is the prompt, but for a newline at its end"
    )
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
    group.add_argument(
        "--expert-dtype",
        default="published",
        metavar="FORM",
        help="keep experts as published (default); in bf16, fp16, fp32, fp8, int8, mxfp4 or int4, quantised as they "
        "are read; auto: in as few bits as the memory asks for",
    )
    group.add_argument(
        "--dense-dtype",
        default="published",
        metavar="FORM",
        help="keep attention, shared experts and the head as published (default), or in fp8 or int8",
    )
    group.add_argument(
        "--embedding", choices=("device", "host"), default="device", help="where the table of embeddings is kept"
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--gpu-memory", metavar="SIZE", help="to use: 10GiB, 80%% of what is free, auto: all of it")
    group.add_argument("--expert-slots", metavar="N|P%", help="experts to hold on the device, of all layers")
    group.add_argument(
        "--policy",
        choices=PRESET_NAMES,
        help="where experts live and which run (default: resident if it fits, else exact)",
    )
    group.add_argument("--no-check-weights", action="store_true", help="load weights with NaN or infinite values")
    group.add_argument("--no-check-memory", action="store_true", help="load even if memory seems too small")
    group.add_argument(
        "--check",
        metavar="slots|reference[:N]",
        help="run one decode step of N (default 16) again and stop where it differs: to the bit with each expert "
        "fetched anew, or within a tolerance in float32 on the CPU",
    )
    group.add_argument("--no-stream", action="store_true", help="print the text once it is complete")
    group.add_argument("--json", action="store_true", help="print one JSON object (a line per prompt) instead of text")
    group = parser.add_argument_group("experts in host memory (defaults: those of --policy)")
    group.add_argument(
        "--predict",
        choices=[name for name in CHOICES["predictor"] if name != "oracle"],
        help="foretell the experts of later layers, and prefetch them",
    )
    group.add_argument(
        "--lookahead",
        type=int,
        metavar="L",
        help="layers to foretell, 1 to 3; 2 is faster where nearly all experts are found in their slots; what is "
        "executed speculatively is always the next one's",
    )
    group.add_argument("--candidates", type=int, metavar="M", help="experts to prefetch beyond those a token needs")
    group.add_argument("--execute", choices=CHOICES["execute"], help="which experts run; routed is exact")
    group.add_argument("--gate", choices=CHOICES["gate"], help="whose weights speculated experts get")
    group.add_argument("--miss-tolerance", type=float, metavar="T", help="do without missing experts of a lesser share")
    group.add_argument("--miss-fill", choices=CHOICES["miss_fill"], help="what stands in for them")
    group.add_argument("--cache-bias", type=float, metavar="B", help="added to logits of experts in slots; not exact")
    group.add_argument("--eviction", choices=CHOICES["eviction"], help="which slot to give up first")
    group.add_argument("--prefetch", choices=CHOICES["prefetch"], help="auto stops it for layers where it loses")
    group.add_argument("--measure", action="store_true", help="compare executed guesses with the true routers")
    group.add_argument("--default-vectors", type=Path, metavar="FILE", help="made by tools/calibrate.py")
    group.add_argument("--estimator", type=Path, metavar="FILE", help="made by tools/train_estimator.py")
    group.add_argument("--hybrid", type=Path, metavar="FILE", help="made by tools/calibrate.py --choose-hybrid")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record routing, predictions and fetches as .npz for tools/replay.py; with resident experts, too: routing",
    )
    return parser


def command() -> int:
    """`main` as a process of its own: nothing but the exit follows."""
    try:
        return main()
    finally:
        signals.leave_to_system()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (see EXIT_CODES)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Shown("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("tritonmoe").setLevel(logging.INFO)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a sign for it
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as arguments: what is not Unicode is refused where it is used
    try:
        with signals.raised():
            options = build_parser().parse_args(argv)
            return _import_run()(options)
    except TritonMoeError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        discard_stdout()  # the reader has gone (`| head`), which is its right
        return 0
    except OSError as error:
        if error.filename is not None:  # not the output: a file nobody expected to fail
            raise
        discard_stdout()
        return _fail(f"the output cannot be written: {error.strerror}")
    except (RuntimeError, MemoryError, ImportError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(
            f"out of memory ({' '.join(str(error).split())[:120]}); "
            "use a smaller --max-context, --max-new-tokens or --dtype, or another --device"
        )


def _import_run() -> Callable[[argparse.Namespace], int]:
    """`console.run`, and with it torch."""
    with signals.ending_at_once():
        from tritonmoe.console import run
    return run


def _fail(message: str, code: int = EXIT_BAD_INPUT) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(command())
