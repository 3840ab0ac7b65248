"""What commands among the tools have in common: mistakes in one line, exit codes as those of the engine, and policies
written in one word."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tritonmoe.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, InputError, TritonMoeError
from tritonmoe.generate import Parser
from tritonmoe.offload.policy import OPTIONS

# As on the command line, or as fields of a policy.
POLICY_OPTIONS = {option.removeprefix("--").replace("-", "_"): field for field, option in OPTIONS.items()}
POLICY_OPTIONS |= {field: field for field in OPTIONS}


def split_policy(text: str) -> tuple[str, dict[str, Any]]:
    """A preset and what `resolve` is to change of it: "exact", or "router-pf+gate=routed" with options of the command
    line; InputError for what is no option."""
    preset, *parts = text.split("+")
    overrides: dict[str, Any] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        field = POLICY_OPTIONS.get(name.replace("-", "_"))
        if not equals or field is None:
            raise InputError(f"policy {text}: {part!r} is no option of a policy; write router-pf+gate=routed")
        overrides[field] = _value(value)
    return preset, overrides


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
