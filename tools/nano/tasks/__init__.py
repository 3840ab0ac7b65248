"""Eight families of exact-match tasks, each with an easy and a hard form, made without limit from a seed.

Whether a prompt belongs to the test split depends on its hash alone (`is_test`), so a training set of any
size and seed is disjoint from every test set.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from . import add, code, json_object, listop, lookup, path, where, word
from .task import EASY, HARD, STRETCH, TEST_LEVELS, TRAINING_SHARES, Task, is_test

__all__ = [
    "EASY", "FAMILIES", "HARD", "STRETCH", "TEST_LEVELS", "Task", "is_test", "read_test_file", "sample", "score",
    "test_items",
    "training_items", "write_test_files",
]  # fmt: skip

FAMILIES: dict[str, Callable[[str, Random], Task]] = {
    "add": add.make,
    "word": word.make,
    "lookup": lookup.make,
    "listop": listop.make,
    "json": json_object.make,
    "where": where.make,
    "code": code.make,
    "path": path.make,
}
_TRAINING_FAMILIES = list((FAMILIES | {"code": partial(code.make, with_tests=False)}).values())
_LEVELS, _SHARES = list(TRAINING_SHARES), list(TRAINING_SHARES.values())


def sample(family: str, level: str, rng: Random) -> Task:
    """One random item, of either split."""
    return FAMILIES[family](level, rng)


def training_items(count: int, seed: int) -> Iterator[Task]:
    """`count` random items of all families whose prompts are outside the test split."""
    rng = Random(seed)
    while count:
        task = rng.choice(_TRAINING_FAMILIES)(rng.choices(_LEVELS, _SHARES)[0], rng)
        if not is_test(task.prompt):
            count -= 1
            yield task


def test_items(family: str, level: str, count: int) -> list[Task]:
    """The first `count` distinct test items: always the same ones, and a prefix of any longer list."""
    rng = Random(f"test {family} {level}")
    found: dict[str, Task] = {}
    while len(found) < count:
        task = sample(family, level, rng)
        if is_test(task.prompt):
            found.setdefault(task.prompt, task)
    return list(found.values())


def write_test_files(folder: Path, count: int = 500) -> None:
    """One JSON-lines file per family and level, such as `add-easy.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        for level in TEST_LEVELS:
            rows = [
                {"prompt": task.prompt, "final": task.final, "answer": task.answer, "tests": task.tests}
                for task in test_items(family, level, count)
            ]
            (folder / f"{family}-{level}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_test_file(path: Path) -> list[Task]:
    """The items of a file that `write_test_files` wrote; its name says family and level."""
    family, level = path.stem.split("-")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Task(family, level, row["prompt"], row["answer"], row["final"], tuple((tuple(a), v) for a, v in row["tests"]))
        for row in rows
    ]


def score(task: Task, generated_text: str) -> bool:
    """Whether a generated continuation ends in the right final answer (code: passes its unit tests)."""
    text = generated_text.split("<|endoftext|>")[0]
    if task.family == "code":
        return code.passes(text, task.tests)
    _, found, rest = text.rpartition("Answer: ")
    return bool(found) and rest.split("\n")[0] == task.final
