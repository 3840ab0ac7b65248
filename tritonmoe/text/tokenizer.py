"""Text to token ids and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.errors import InputError, TokenizerError
from tritonmoe.files import parse_json, read_file

MAX_TOKENIZER_BYTES = 256 << 20  # the largest published tokenizer.json has 33 MB
MAX_GROWTH = 4096  # characters that a normalizer or decoder may make of one; published ones make at most 8


class Tokenizer:
    """A `tokenizer.json` together with the special tokens that the files beside it name.

    `special_tokens` maps each name (`bos_token`, `eos_token`, `image_token`, ...) to its text.
    `vocab_size` is one more than the highest id; ids below it may still be unused.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> None:
        # Files may carry the truncation length of a training run, which would silently cut long prompts.
        backend.no_truncation()
        backend.no_padding()
        # A special token that is only an ordinary vocabulary entry would be split when a template writes it.
        known = (text for text in special_tokens.values() if backend.token_to_id(text) is not None)
        backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in known])
        self._backend = backend
        self.special_tokens = special_tokens
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.byte_token_ids = frozenset(self._find_byte_tokens())

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json`, and `tokenizer_config.json` and `special_tokens_map.json` where present."""
        backend, special_tokens = _read_backend(folder), _read_special_tokens(folder)
        with _native(f"{folder / 'tokenizer.json'}: not a usable tokenizer"):
            return cls(backend, special_tokens)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def token_to_id(self, token: str) -> int | None:
        """The id of exactly this token, or None."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None for an id without a token."""
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`.

        `add_special_tokens` adds what the tokenizer's post-processor adds, such as BOS: wanted for a plain
        prompt, not for a rendered chat template, which writes these tokens itself.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the prompt is not valid Unicode at character {error.start}; pass it encoded as UTF-8"
            ) from None
        with _native("the tokenizer cannot encode the prompt"):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`. An id without a token (the padding of an embedding table) has no text."""
        with _native("the tokenizer cannot decode what was generated"):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _find_byte_tokens(self) -> Iterable[int]:
        """The ids of `<0x00>` to `<0xFF>` where the decoder turns them into bytes rather than shows them."""
        for byte in range(256):
            token = f"<0x{byte:02X}>"
            token_id = self.token_to_id(token)
            if token_id is not None and self.decode([token_id]) != token:
                yield token_id


@contextmanager
def _native(what: str) -> Iterator[None]:
    """TokenizerError for whatever the library raises: bare Exception, and for a panic, which malformed parts of a
    tokenizer.json cause only once they are used, a BaseException that is neither KeyboardInterrupt nor SystemExit."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, TokenizerError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TokenizerError(f"{what} ({reason}); fetch tokenizer.json again") from None


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    try:
        text = read_file(path, MAX_TOKENIZER_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise TokenizerError(
            f"{path}: no such file; repositories with only a sentencepiece, tiktoken or tekken vocabulary "
            "are not supported, save the tokenizer as tokenizer.json first"
        ) from None
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TokenizerError(f"{path}: not UTF-8 text; fetch the file again") from None
    with _native(f"{path}: not a usable tokenizer"):
        _check_growth(parse_json(text.encode()), path)
        return tokenizers.Tokenizer.from_str(text)


def _check_growth(values: Any, path: Path) -> None:
    """Refuse steps that multiply a text: eight that make a hundred letters of one end the process, out of memory."""
    for part in ("normalizer", "decoder"):
        growth, steps = 1, [values.get(part)] if isinstance(values, dict) else []
        while steps and growth <= MAX_GROWTH:
            step = steps.pop()
            if isinstance(step, dict):
                steps += [item for value in step.values() if isinstance(value, list) for item in value]
                added = (step.get(name) for name in ("content", "prepend"))
                growth *= max([1, *(len(text) for text in added if isinstance(text, str))])
        if growth > MAX_GROWTH:
            raise TokenizerError(f"{path}: its {part} makes more than {MAX_GROWTH} characters of one")


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty where there is no such file."""
    return read_json(path, TokenizerError) if os.path.lexists(path) else {}


def _read_special_tokens(folder: Path) -> dict[str, str]:
    """Name to text of every special token, with the precedence of transformers."""
    config = read_optional_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # else the map is a leftover of an older export
        config |= read_optional_json(folder / "special_tokens_map.json")
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")  # a list of these has no names
    named |= extra if isinstance(extra, dict) else {}
    return {name: text for name, value in named.items() if (text := _token_text(value)) is not None}


def _token_text(value: Any) -> str | None:
    """A token is a string or an added-token object; other values, like that of `add_bos_token`, are none."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
