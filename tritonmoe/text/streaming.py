"""Text as it appears: streaming detokenisation, and stop strings across the borders of pieces."""

from __future__ import annotations

from collections.abc import Iterable

from tritonmoe.errors import InputError
from tritonmoe.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders show for bytes that are not (yet) valid UTF-8


class IncrementalDecoder:
    """Turns ids into text one at a time; what `push` and `flush` return adds up to `decode` of all ids.

    Each call decodes a short window: the last id shown in full, which gives decoders their context (a leading
    space depends on it), and the ids after it. Text that more ids may still change is held back: bytes of an
    unfinished character, and a run of `<0xNN>` tokens, which decoders judge as a whole.
    """

    MAX_WINDOW = 16  # only streams of invalid UTF-8 get longer
    UNDECIDED = 4  # a character has at most 4 bytes and a token at least 1: older ids cannot change any more

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that were returned

    def push(self, token_id: int) -> str:
        """The text that is final now and was not before; often one word, sometimes empty."""
        if token_id in self._skipped_ids or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_token_ids:
            return ""
        text = self._tokenizer.decode(self._window)
        final = text.removesuffix(REPLACEMENT)  # an unfinished character is exactly one of these, at the end
        fresh = final[self._num_shown :]
        self._num_shown = len(final)
        if final == text:
            self._window = [token_id]
            self._num_shown = len(self._tokenizer.decode(self._window))
        elif len(self._window) > self.MAX_WINDOW:
            self._shorten_window(text)
        return fresh

    def flush(self) -> str:
        """What is still held back, as it stands. The next `push` starts a new text."""
        text = self._tokenizer.decode(self._window)[self._num_shown :]
        self._window, self._num_shown = [], 0
        return text

    def _shorten_window(self, text: str) -> None:
        """Drop decided ids if the text can be split there, that is, not within a character."""
        old, recent = self._window[: -self.UNDECIDED], self._window[-self.UNDECIDED :]
        old_text = self._tokenizer.decode(old)
        if old_text + self._tokenizer.decode(recent) == text:
            self._window = recent
            self._num_shown -= len(old_text)


class StopStringMatcher:
    """Cuts a stream of text before the first stop string, however the text is divided into pieces.

    The first is the one completed first, and of those completed together the longest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if not all(self._stops):
            raise InputError("a stop string is empty; remove it or write the text to stop at")
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that certainly precedes any stop string, and whether one was found (then for good)."""
        if self._stopped:
            return "", True
        self._held += text
        found = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            self._stopped = True
            emit, self._held = self._held[: min(found)[1]], ""
            return emit, True
        keep = self._num_ambiguous()
        emit, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return emit, False

    def flush(self) -> str:
        """The text held back as a possible beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_ambiguous(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
