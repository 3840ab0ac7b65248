"""Follow links from word to word. The links are shuffled, and other chains lie among them as distractors."""

from itertools import pairwise
from random import Random

from .task import Task, answer_line
from .words import NOUNS

LINKS = {"easy": (4, 8), "stretch": (10, 18), "hard": (12, 22)}
HOPS = {"easy": (2, 4), "stretch": (4, 8), "hard": (5, 10)}
OPENINGS = ("Links: ", "The signs say: ", "Map: ")
COUNTED = ("Start at {start} and follow {hops} links.", "Where do {hops} links from {start} lead?")
TO_THE_END = ("Start at {start} and go to the end.", "Where does the way from {start} end?")


def make(level: str, rng: Random) -> Task:
    links = rng.randint(*LINKS[level])
    hops = min(rng.randint(*HOPS[level]), links)
    # Two chains over distinct words: the one asked about, and one of all the remaining links.
    words = rng.sample(NOUNS, links + 2)
    to_the_end = rng.random() < 0.5
    length = hops if to_the_end else rng.randint(hops, links)
    asked, rest = words[: length + 1], words[length + 1 :]
    pairs = [(a, b) for chain in (asked, rest) for a, b in pairwise(chain)]
    rng.shuffle(pairs)
    question = rng.choice(TO_THE_END if to_the_end else COUNTED).format(start=asked[0], hops=hops)
    prompt = rng.choice(OPENINGS) + ", ".join(f"{a} to {b}" for a, b in pairs) + f". {question}\n"
    working = "Way: " + "; ".join(f"{a} to {b}" for a, b in pairwise(asked[: hops + 1]))
    return Task("path", level, prompt, answer_line(asked[hops], working), asked[hops])
