"""Write the texts that a sibling's estimator is trained on and its hybrid choice made on, from its own training text.

estimator.txt: passages of the training text, none of them held out, and worked items, in turn. choose.txt: held-out
text and worked items, none of those of estimator.txt. No item is one of the tests.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from lzma import LZMAError
from pathlib import Path

from command_line import run_command

from nano.corpus import is_held_out, passages, read_works
from nano.tasks import training_items
from tritonmoe.errors import InputError
from tritonmoe.generate import Parser

PARTS = 40  # prose and items alternate so many times
ESTIMATOR_SEED, CHOICE_SEED = 777, 888  # of items


def prose(path: str, characters: int) -> Iterator[str]:
    """Passages of whole works that are not held out, until there are so many characters."""
    total = 0
    for work in read_works(path):
        for passage in passages(work):
            if not is_held_out(passage):
                total += len(passage)
                yield passage
        if total > characters:
            return


def write_texts(options: Namespace) -> None:
    try:
        text = list(prose(options.text, options.characters))
        held_out = "\n".join(read_works(options.valid))[: options.held_out_characters]
    except (OSError, LZMAError, UnicodeDecodeError) as error:
        raise InputError(f"--text and --valid are UTF-8 text, .txt or .txt.xz: {error}") from None
    options.out.mkdir(parents=True, exist_ok=True)
    items = [task.text for task in training_items(options.items, ESTIMATOR_SEED)]
    parts = ("\n".join((*text[i::PARTS], *items[i::PARTS])) for i in range(PARTS))
    (options.out / "estimator.txt").write_text("\n".join(parts), encoding="utf-8")
    seen = set(items)
    chosen = (task.text for task in training_items(options.choice_items, CHOICE_SEED) if task.text not in seen)
    (options.out / "choose.txt").write_text("\n".join((held_out, *chosen)), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="estimator_texts.py", description=__doc__)
    parser.add_argument("--text", required=True, metavar="FILE", help="training text, .txt or .txt.xz")
    parser.add_argument("--valid", required=True, metavar="FILE", help="held-out text")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--characters", type=int, default=9_000_000, metavar="N", help="of prose (%(default)s)")
    parser.add_argument("--items", type=int, default=60_000, metavar="N", help="worked items (default: %(default)s)")
    parser.add_argument("--held-out-characters", type=int, default=60_000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--choice-items", type=int, default=500, metavar="N", help="(default: %(default)s)")
    return run_command(write_texts, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
