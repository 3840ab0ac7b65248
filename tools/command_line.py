"""What commands among the tools have in common: mistakes in one line, and exit codes as those of the engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from tritonmoe.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, TritonMoeError
from tritonmoe.generate import Parser


def run_command(run: Callable[[argparse.Namespace], object], parser: Parser, arguments: Sequence[str] | None) -> int:
    """The exit code of `run` on the parsed arguments (None: of this process); bad input is one line on stderr."""
    try:
        run(parser.parse_args(arguments))
    except TritonMoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0
