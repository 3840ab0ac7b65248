"""What a model's files say about generating with it: the tokens that end an answer, and sampling settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tritonmoe.errors import TokenizerError
from tritonmoe.text.tokenizer import Tokenizer, read_optional_json

logger = logging.getLogger(__name__)

# gpt-oss ends an answer with <|return|>, <|endoftext|> or <|call|>. Some published files lack the last one,
# others add <|end|>, which only closes a channel: stopping there cuts the answer off after its analysis.
HARMONY_STOPS = frozenset({200002, 199999, 200012})
HARMONY_END = 200007


def stop_token_ids(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends an answer: all that any file names, since no one file is complete for every model.

    An id outside the vocabulary can never be generated, so it is dropped with a warning rather than refused.
    It is an error when no other id is left: generation would never stop. Empty when no file names an id.
    """
    path = folder / "generation_config.json"
    sections = {str(path): read_optional_json(path), "config.json": config}
    if isinstance(config.get("text_config"), dict):
        sections["config.json: text_config"] = config["text_config"]
    named = set().union(*(_id_set(section.get("eos_token_id"), where) for where, section in sections.items()))
    if tokenizer.eos_token is not None and (eos := tokenizer.token_to_id(tokenizer.eos_token)) is not None:
        named.add(eos)
    sizes = (section.get("vocab_size") for section in sections.values())  # may be padded beyond the tokenizer
    size = max([tokenizer.vocab_size, *(size for size in sizes if isinstance(size, int))])
    usable = {token_id for token_id in named if token_id < size}
    if any(section.get("model_type") == "gpt_oss" for section in sections.values()):
        usable = (usable | {token_id for token_id in HARMONY_STOPS if token_id < size}) - {HARMONY_END}
    if outside := sorted(token_id for token_id in named if token_id >= size):
        if not usable:
            raise TokenizerError(
                f"{folder}: eos_token_id {outside} lies outside the vocabulary of {size} tokens, so "
                "generation would never stop; correct generation_config.json"
            )
        logger.warning("%s: eos_token_id %s lies outside the vocabulary, ignored", folder, outside)
    return frozenset(usable)


def _id_set(value: Any, where: str) -> set[int]:
    """`eos_token_id` is absent, one id or a list of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise TokenizerError(f"{where}: eos_token_id must be a token id or a list of them, not {value!r}")
    return set(ids)


def _is_number(value: Any) -> bool:
    """A number of a size that means something here; JSON also allows NaN, infinity and endless integers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


SAMPLING_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "do_sample": (lambda value: isinstance(value, bool), "true or false"),
    "temperature": (lambda value: _is_number(value) and value >= 0, "a number of at least 0"),
    "top_k": (
        lambda value: _is_number(value) and isinstance(value, int) and value >= -1,
        "an integer of at least 0, or -1",
    ),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and up to 1"),
    "min_p": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: _is_number(value) and value > 0, "a number above 0"),
}


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The sampling settings in `generation_config.json`; a key is absent where the file gives no value."""
    path = folder / "generation_config.json"
    given = {name: value for name, value in read_optional_json(path).items() if name in SAMPLING_RULES}
    defaults = {name: value for name, value in given.items() if value is not None}
    for name, value in defaults.items():
        is_valid, meaning = SAMPLING_RULES[name]
        if not is_valid(value):
            raise TokenizerError(f"{path}: {name} must be {meaning}, not {value!r}")
    if defaults.get("top_k") == -1:  # how some tools write "off"
        defaults["top_k"] = 0
    return defaults
