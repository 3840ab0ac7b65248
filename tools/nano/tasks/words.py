"""The word lists of words.toml."""

import tomllib
from pathlib import Path

_LISTS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())

NAMES: list[str] = _LISTS["names"].split()
THINGS: list[str] = _LISTS["things"].split()  # counted, in the plural
NOUNS: list[str] = _LISTS["nouns"].split()
ADJECTIVES: list[str] = _LISTS["adjectives"].split()
PLACES: list[str] = _LISTS["places"].split()
CARRIED: list[str] = _LISTS["carried"].split()
