"""Write a short Python function from a spec of chained steps. Scored by running it on unit tests."""

from random import Random
from typing import NamedTuple

from .interpreter import Refused, run_function
from .task import Task, UnitTest
from .words import ADJECTIVES, NOUNS

STEPS = {"easy": (1, 2), "stretch": (3, 6), "hard": (4, 8)}
UNIT_TESTS = 4
PROMPTS = (
    "Write a Python function {signature}: {todo}.",
    "Define {signature} in Python. Steps: {todo}.",
    "Python function {signature}. It must {todo}.",
)


class Step(NamedTuple):
    """A wording, the expression over `v` (`k` and `c` are constants to draw), and the type it gives."""

    wording: str
    expression: str
    gives: str


STEPS_ON: dict[str, tuple[Step, ...]] = {
    "number": (
        Step("add {k}", "{v} + {k}", "number"),
        Step("subtract {k}", "{v} - {k}", "number"),
        Step("multiply by {k}", "{v} * {k}", "number"),
        Step("take the remainder by {k}", "{v} % {k}", "number"),
        Step("divide by {k} rounding down", "{v} // {k}", "number"),
        Step("square it", "{v} * {v}", "number"),
        Step("negate it", "-{v}", "number"),
        Step("take the absolute value", "abs({v})", "number"),
        Step("take the larger of it and {k}", "max({v}, {k})", "number"),
        Step("take the smaller of it and {k}", "min({v}, {k})", "number"),
    ),
    "list": (
        Step("sort it", "sorted({v})", "list"),
        Step("reverse it", "{v}[::-1]", "list"),
        Step("keep the even numbers", "[n for n in {v} if n % 2 == 0]", "list"),
        Step("keep the odd numbers", "[n for n in {v} if n % 2 == 1]", "list"),
        Step("keep the numbers above {k}", "[n for n in {v} if n > {k}]", "list"),
        Step("keep the numbers below {k}", "[n for n in {v} if n < {k}]", "list"),
        Step("double each number", "[n * 2 for n in {v}]", "list"),
        Step("add {k} to each number", "[n + {k} for n in {v}]", "list"),
        Step("drop the first item", "{v}[1:]", "list"),
        Step("drop the last item", "{v}[:-1]", "list"),
        Step("append {k}", "{v} + [{k}]", "list"),
        Step("take the sum", "sum({v})", "number"),
        Step("take the length", "len({v})", "number"),
    ),
    "text": (
        Step("make it upper case", "{v}.upper()", "text"),
        Step("make it lower case", "{v}.lower()", "text"),
        Step("reverse it", "{v}[::-1]", "text"),
        Step("drop the first letter", "{v}[1:]", "text"),
        Step("drop the last letter", "{v}[:-1]", "text"),
        Step('append "{c}"', '{v} + "{c}"', "text"),
        Step('put "{c}" in front', '"{c}" + {v}', "text"),
        Step("write it twice", "{v} + {v}", "text"),
        Step('count the letter "{c}"', '{v}.count("{c}")', "number"),
        Step("take the length", "len({v})", "number"),
    ),
}
# With a second argument `b`, the chain starts with one of these.
STEPS_ON_PAIR = (
    Step("add b", "a + b", "number"),
    Step("subtract b", "a - b", "number"),
    Step("multiply by b", "a * b", "number"),
    Step("take the larger of it and b", "max(a, b)", "number"),
    Step("take the smaller of it and b", "min(a, b)", "number"),
)
# Parameters and the type of the first one, which the steps work on.
SIGNATURES = (("a", "number"), ("a, b", "number"), ("x", "list"), ("x", "list"), ("s", "text"))


def draw_chain(parameters: str, kind: str, count: int, rng: Random) -> tuple[list[str], list[str]]:
    """Wordings and expressions of a chain of different steps, each working on the value before it."""
    name = parameters[0]
    wordings: list[str] = []
    expressions: list[str] = []
    used: set[Step] = set()
    for position in range(count):
        options = STEPS_ON_PAIR if position == 0 and parameters == "a, b" else STEPS_ON[kind]
        step = rng.choice([option for option in options if option not in used])
        used.add(step)
        kind = step.gives
        words = {"v": name, "k": rng.randrange(2, 30), "c": rng.choice("abcdefghijklmnopqrstuvwxyz")}
        wordings.append(step.wording.format(**words))
        expressions.append(step.expression.format(**words))
    return wordings, expressions


def source_of(signature: str, name: str, expressions: list[str]) -> str:
    *assigned, returned = expressions
    lines = [f"def {signature}:", *(f"    {name} = {expression}" for expression in assigned)]
    return "\n".join([*lines, f"    return {returned}"]) + "\n"


def draw_arguments(parameters: str, kind: str, rng: Random) -> tuple[object, ...]:
    if kind == "list":
        return ([rng.randrange(-10, 40) for _ in range(rng.randrange(4, 9))],)
    if kind == "text":
        return ("".join(rng.choice("abcdefghijklmnopqrstuvwxyzABCDE ") for _ in range(rng.randrange(6, 12))),)
    return tuple(rng.randrange(-40, 60) for _ in parameters.split(", "))


def draw_tests(source: str, parameters: str, kind: str, rng: Random) -> tuple[UnitTest, ...]:
    cases = (draw_arguments(parameters, kind, rng) for _ in range(UNIT_TESTS))
    return tuple((arguments, run_function(source, arguments)) for arguments in cases)


def make(level: str, rng: Random, with_tests: bool = True) -> Task:
    """One item. Training text needs no unit tests, and making them takes most of the time."""
    parameters, kind = rng.choice(SIGNATURES)
    wordings, expressions = draw_chain(parameters, kind, rng.randint(*STEPS[level]), rng)
    signature = f"{rng.choice(ADJECTIVES)}_{rng.choice(NOUNS)}({parameters})"
    source = source_of(signature, parameters[0], expressions)
    start = f"start with {parameters[0]}"
    prompt = rng.choice(PROMPTS).format(signature=signature, todo=", then ".join([start, *wordings])) + "\n"
    # A generator of its own for the tests: with or without them, the same random state gives the same item.
    tests = draw_tests(source, parameters, kind, Random(prompt)) if with_tests else ()
    return Task("code", level, prompt, source, source, tests)


def passes(source: str, tests: tuple[UnitTest, ...]) -> bool:
    """Whether the function in `source` returns the expected value, of the expected type, in every test."""
    for arguments, expected in tests:
        try:
            value = run_function(source, tuple(arguments))
        except Refused:
            return False
        if type(value) is not type(expected) or value != expected:
            return False
    return bool(tests)
