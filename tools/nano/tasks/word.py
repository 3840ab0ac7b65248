"""Word problems: a number of things changes step by step. The working writes one equation per step."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from .task import Task, answer_line
from .words import NAMES, THINGS

STEPS = {"easy": (2, 4), "stretch": (4, 7), "hard": (5, 8)}
OPENINGS = (
    "{name} has {n} {things}.",
    "{name} starts with {n} {things}.",
    "At first {name} owns {n} {things}.",
)
QUESTIONS = (
    "How many {things} does {name} have now?",
    "How many {things} are left with {name}?",
    "Count the {things} of {name}.",
)
DISTRACTORS = (
    "{friend} has {n} {others}.",
    "{friend} sells {n} {others}.",
    "There are also {n} {others} on a shelf.",
)
DISTRACTOR_CHANCE = {"easy": 0.0, "stretch": 0.35, "hard": 0.35}


class Step(NamedTuple):
    """A sentence template, the equations that follow from it, and the number after it."""

    sentence: str
    work: str
    after: int


def gain(n: int, rng: Random) -> Step:
    k = rng.randrange(2, 30)
    sentence = rng.choice(("{name} buys {k} more.", "{name} finds {k} more.", "{friend} gives {k} to {name}."))
    return Step(sentence.replace("{k}", str(k)), f"{n}+{k}={n + k}", n + k)


def gain_bags(n: int, rng: Random) -> Step:
    bags, k = rng.randrange(2, 6), rng.randrange(2, 10)
    sentence = rng.choice(
        (
            f"{{friend}} gives {{name}} {bags} bags with {k} {{things}} each.",
            f"{{name}} buys {bags} boxes of {k} {{things}}.",
        )
    )
    return Step(sentence, f"{bags}*{k}={bags * k}; {n}+{bags * k}={n + bags * k}", n + bags * k)


def loss(n: int, rng: Random) -> Step | None:
    if n < 4:
        return None
    k = rng.randrange(1, min(n, 100))
    sentence = rng.choice(("{name} loses {k} of them.", "{name} gives {k} to {friend}.", "{name} sells {k}."))
    return Step(sentence.replace("{k}", str(k)), f"{n}-{k}={n - k}", n - k)


def doubling(n: int, rng: Random) -> Step | None:
    if n > 120:
        return None
    sentence = rng.choice(("Then the number of {things} doubles.", "{name} gets as many again."))
    return Step(sentence, f"{n}*2={2 * n}", 2 * n)


def halving(n: int, rng: Random) -> Step | None:
    if n % 2 or n < 4:
        return None
    sentence = rng.choice(("{name} keeps only half of them.", "{name} gives half of them to {friend}."))
    return Step(sentence, f"{n}/2={n // 2}", n // 2)


STEP_KINDS: tuple[Callable[[int, Random], Step | None], ...] = (
    gain,
    gain_bags,
    loss,
    loss,
    doubling,
    halving,
)


def make(level: str, rng: Random) -> Task:
    name, friend = rng.sample(NAMES, 2)
    things, others = rng.sample(THINGS, 2)
    number = rng.randrange(5, 60)
    words = {"name": name, "friend": friend, "things": things, "others": others}
    sentences, works = [rng.choice(OPENINGS).format(n=number, **words)], []
    steps = rng.randint(*STEPS[level])
    while len(works) < steps:
        step = rng.choice(STEP_KINDS)(number, rng)
        if step is None:
            continue
        if rng.random() < DISTRACTOR_CHANCE[level]:
            sentences.append(rng.choice(DISTRACTORS).format(n=rng.randrange(2, 60), **words))
        sentences.append(step.sentence.format(**words))
        works.append(step.work)
        number = step.after
    sentences.append(rng.choice(QUESTIONS).format(**words))
    final = str(number)
    return Task("word", level, " ".join(sentences) + "\n", answer_line(final, "; ".join(works)), final)
