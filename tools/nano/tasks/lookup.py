"""Look values up in a table. Hard tables are long, with keys that share words, and several values are asked."""

from itertools import product
from random import Random

from .task import Task, answer_line
from .words import ADJECTIVES, NOUNS

ROWS = {"easy": (3, 8), "stretch": (10, 20), "hard": (12, 24)}
ASKED = {"easy": (1, 1), "stretch": (1, 4), "hard": (2, 5)}
LAYOUTS = (("Table: ", "=", ", "), ("Prices: ", " is ", "; "), ("Look at this: ", " -> ", ", "))
QUESTIONS = ("What is {keys}?", "Give the value of {keys}.", "Read off {keys}.")


def draw_keys(level: str, rows: int, rng: Random) -> list[str]:
    """Single nouns, or for longer tables pairs from a small grid, where every word occurs several times."""
    if level == "easy":
        return rng.sample(NOUNS, rows)
    grid = product(rng.sample(ADJECTIVES, 6), rng.sample(NOUNS, 6))
    return rng.sample([f"{adjective} {noun}" for adjective, noun in grid], rows)


def make(level: str, rng: Random) -> Task:
    rows = rng.randint(*ROWS[level])
    keys = draw_keys(level, rows, rng)
    lowest = 10 if level == "easy" else 100
    values = rng.sample(range(lowest, 10 * lowest), rows)
    opening, link, separator = rng.choice(LAYOUTS)
    table = opening + separator.join(f"{key}{link}{value}" for key, value in zip(keys, values, strict=True))
    chosen = rng.sample(range(rows), rng.randint(*ASKED[level]))
    question = rng.choice(QUESTIONS).format(keys=", ".join(keys[i] for i in chosen))
    final = " ".join(str(values[i]) for i in chosen)
    return Task("lookup", level, f"{table}. {question}\n", answer_line(final), final)
