"""Short children's stories: a random world of hero, friend and thing, told through a plot of plots.toml."""

import re
import tomllib
from pathlib import Path
from random import Random
from typing import NamedTuple

GRAMMAR = tomllib.loads(Path(__file__).with_name("plots.toml").read_text())
WORDS, FRAME, PLOTS = GRAMMAR["words"], GRAMMAR["frame"], GRAMMAR["plot"]

PRONOUNS = {
    "female": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
    "male": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
}

_INNERMOST_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")


class Character(NamedTuple):
    name: str
    kind: str
    gender: str

    def fields(self, prefix: str) -> dict[str, str]:
        """The pronouns as template fields: `he`, `He`, ... or with the prefix "f_" `f_he`, `F_he`, ..."""
        pronouns = PRONOUNS[self.gender]
        plain = {prefix + key: word for key, word in pronouns.items()}
        return plain | {key[0].upper() + key[1:]: word.capitalize() for key, word in plain.items()}


class Story(NamedTuple):
    text: str
    plot: str
    hero: Character
    friend: Character


def draw_character(rng: Random, unlike: Character | None = None) -> Character:
    """A girl, a boy or an animal; neither the name nor the animal of another one."""
    gender = rng.choice(("female", "male"))
    human = "girl" if gender == "female" else "boy"
    names = WORDS["girls" if gender == "female" else "boys"]
    kind = human if rng.random() < 0.5 else rng.choice(WORDS["animals"])
    name = rng.choice(names)
    if unlike and (name == unlike.name or (kind == unlike.kind and kind in WORDS["animals"])):
        return draw_character(rng, unlike)
    return Character(name, kind, gender)


def draw_fields(plot: dict, hero: Character, friend: Character, rng: Random) -> dict[str, str]:
    """Every template field of the story's world. They stay the same while the story is told."""
    noun = rng.choice(WORDS["things"][plot["thing"]])
    home = rng.choice(WORDS["homes"])
    return {
        "hero": hero.name,
        "friend": friend.name,
        "hero_kind": hero.kind,
        "friend_kind": friend.kind,
        "trait": rng.choice(WORDS["traits"]),
        "thing_noun": noun,
        "thing": noun if plot["thing"] == "food" else f"{rng.choice(WORDS['colours'])} {noun}",
        "home": home,
        "home_first": home[0].upper() + home[1:],
        "time": rng.choice(WORDS["times"]),
        "time_winter": rng.choice(WORDS["winter_times"]),
        **hero.fields(""),
        **friend.fields("f_"),
    }


def expand(template: str, fields: dict[str, str], rng: Random) -> str:
    """Choose among the alternatives, from the innermost out, then fill the fields in."""
    while "[" in template:
        template = _INNERMOST_ALTERNATIVES.sub(lambda match: rng.choice(match[1].split("|")), template)
    return _ARTICLE_BEFORE_VOWEL.sub(r"\1n ", template.format_map(fields))


def tell(rng: Random) -> Story:
    """One random story in a single paragraph."""
    plot = rng.choice(PLOTS)
    hero = draw_character(rng)
    friend = draw_character(rng, unlike=hero)
    fields = draw_fields(plot, hero, friend, rng)
    parts = [rng.choice(FRAME["friends"])]
    if plot["thing"] != "food":  # food is made or carried within the plot
        parts.append(rng.choice(FRAME["things"]))
        rng.shuffle(parts)
    parts = [rng.choice(FRAME["openings"]), *parts, plot["beats"][0]]
    told = [expand(part, fields, rng) for part in parts]
    for part in (*plot["beats"][1:], rng.choice(FRAME["endings"])):
        # Once the reader knows the thing, its colour may be left out.
        told.append(expand(part, fields | {"thing": fields[rng.choice(("thing", "thing_noun"))]}, rng))
    return Story(" ".join(told) + "\n", plot["name"], hero, friend)
