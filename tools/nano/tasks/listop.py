"""Operations on a list of words or numbers. Hard items chain several and show the list after each."""

from collections.abc import Callable
from random import Random

from .task import Task, answer_line
from .words import NOUNS

ITEMS = {"easy": (3, 5), "stretch": (6, 10), "hard": (8, 12)}
OPERATIONS = {"easy": (1, 1), "stretch": (1, 3), "hard": (2, 3)}
PROMPTS = (
    "Take the list: {items}. {todo}.",
    "Here is a list: {items}. {todo}.",
    "{todo}. The list is: {items}.",
)

# Phrase -> what it does. All keep a list a list, so that they can be chained in any order.
LIST_OPERATIONS: dict[str, Callable[[list[str]], list[str]]] = {
    "reverse it": lambda items: items[::-1],
    "sort it": sorted,
    "swap its ends": lambda items: [items[-1], *items[1:-1], items[0]],
    "move the first item to the end": lambda items: [*items[1:], items[0]],
    "drop the first item": lambda items: items[1:],
    "drop the last item": lambda items: items[:-1],
}
# These end a chain, because they leave one word.
CLOSING_OPERATIONS: dict[str, Callable[[list[str]], list[str]]] = {
    "name the first item": lambda items: items[:1],
    "name the last item": lambda items: items[-1:],
    "count the items": lambda items: [str(len(items))],
}
CLOSING_CHANCE = {"easy": 0.35, "stretch": 0.2, "hard": 0.2}


def draw_items(count: int, rng: Random) -> list[str]:
    """Distinct words, or distinct two-digit numbers (for which text order and number order agree)."""
    return rng.sample(NOUNS, count) if rng.random() < 0.5 else [str(n) for n in rng.sample(range(10, 100), count)]


def make(level: str, rng: Random) -> Task:
    items = draw_items(rng.randint(*ITEMS[level]), rng)
    shown = " ".join(items)
    phrases = rng.sample(sorted(LIST_OPERATIONS), rng.randint(*OPERATIONS[level]))
    if rng.random() < CLOSING_CHANCE[level]:
        phrases[-1] = rng.choice(sorted(CLOSING_OPERATIONS))
    working = []
    for phrase in phrases:
        items = (LIST_OPERATIONS | CLOSING_OPERATIONS)[phrase](items)
        working.append(" ".join(items))
    todo = ", then ".join(phrases)
    prompt = rng.choice(PROMPTS).format(items=shown, todo=todo[0].upper() + todo[1:])
    final = working.pop()
    working = [f"Now: {items}" for items in working]
    return Task("listop", level, prompt + "\n", answer_line(final, *working), final)
