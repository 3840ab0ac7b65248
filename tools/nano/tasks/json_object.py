"""Read or edit a small JSON object; an edit answers with the whole new object."""

import json
from random import Random

from .task import Task, answer_line
from .words import ADJECTIVES, NAMES, NOUNS

KEYS = {"easy": (3, 4), "stretch": (5, 8), "hard": (6, 10)}
EDITS = {"easy": (1, 1), "stretch": (1, 2), "hard": (2, 3)}
GET_CHANCE = {"easy": 0.3, "stretch": 0.15, "hard": 0.15}
NEST_CHANCE = {"easy": 0.0, "stretch": 0.6, "hard": 0.6}
GET_PROMPTS = ('From {object} get "{key}".', 'What is "{key}" in {object}?')
# Keys and values; as values, half of them are capitalised.
WORDS = NOUNS + ADJECTIVES + [name.lower() for name in NAMES if name != "Rose"]
EDIT_PROMPTS = ("Given {object} {todo}.", "Edit {object}: {todo}.", "Take {object} and {todo}.")


def draw_scalar(rng: Random, words: list[str]) -> object:
    """A value whose word occurs nowhere else in the object, so that copying is never ambiguous."""
    return rng.choice((rng.randrange(10, 1000), words.pop(), words.pop().capitalize()))


def draw_object(level: str, rng: Random, words: list[str]) -> dict[str, object]:
    fields = {words.pop(): draw_scalar(rng, words) for _ in range(rng.randint(*KEYS[level]))}
    if rng.random() < NEST_CHANCE[level]:
        inner = {words.pop(): draw_scalar(rng, words) for _ in range(2)}
        fields[rng.choice(list(fields))] = rng.choice((inner, list(inner)))
    return fields


def edit(fields: dict[str, object], rng: Random, words: list[str]) -> tuple[str, dict[str, object]]:
    """One random edit: its wording and the object after it, key order kept."""
    key = rng.choice(list(fields))
    kind = rng.choice(("rename", "remove", "set"))
    if kind == "rename":
        new = words.pop()
        return f'rename "{key}" to "{new}"', {new if k == key else k: v for k, v in fields.items()}
    if kind == "remove":
        return f'remove "{key}"', {k: v for k, v in fields.items() if k != key}
    value = draw_scalar(rng, words)
    return f'set "{key}" to {json.dumps(value)}', fields | {key: value}


def make(level: str, rng: Random) -> Task:
    words = rng.sample(WORDS, 48)
    fields = draw_object(level, rng, words)
    shown = json.dumps(fields)
    if rng.random() < GET_CHANCE[level]:
        key = rng.choice(list(fields))
        prompt, final = rng.choice(GET_PROMPTS).format(object=shown, key=key), json.dumps(fields[key])
    else:
        todo = []
        for _ in range(rng.randint(*EDITS[level])):
            wording, fields = edit(fields, rng, words)
            todo.append(wording)
        prompt = rng.choice(EDIT_PROMPTS).format(object=shown, todo=", then ".join(todo))
        final = json.dumps(fields)
    return Task("json", level, prompt + "\n", answer_line(final), final)
