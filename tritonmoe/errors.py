"""Every error a user can cause, and the exit codes of the command. A message is one line: what was wrong, and what
to change."""

from __future__ import annotations

EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
MAX_MESSAGE = 1000  # characters: a path and what a file says, not a whole file
EXIT_TERMINATED = 143  # 128 + SIGTERM


class TritonMoeError(Exception):
    """Bad input or an environment that cannot serve it; `str(error)` is one clear line for the user."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


def printable(text: str, limit: int = MAX_MESSAGE) -> str:
    """`text` as one line of at most `limit` characters that a terminal only shows.

    Names and contents of files from anywhere are quoted in messages; raw, they could move the cursor, rename the
    window or write to the clipboard.
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]} … {text[3 - limit // 2 :]}"
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
    return shown if len(shown) <= limit else f"{shown[: limit // 2]} … {shown[3 - limit // 2 :]}"


class ConfigError(TritonMoeError):
    """A config.json that is malformed, contradicts itself, or asks for something not supported."""


class CheckpointError(TritonMoeError):
    """Weights that are missing, doubled, misshapen, unknown, truncated or not finite."""


class TokenizerError(TritonMoeError):
    """A tokenizer, chat template or generation config that cannot be read or used."""


class HubError(TritonMoeError):
    """A model that could not be found or downloaded."""


class InputError(TritonMoeError):
    """A prompt or an option that cannot be used."""


class TransferError(TritonMoeError):
    """Something on the way between host memory and the device that failed, or did not end in time."""


class CheckError(TritonMoeError):
    """A decode step that --check found to be wrong: a fault of tritonmoe, or of the machine."""

    exit_code = EXIT_FAULT


# On the host: torch, C++, Python's threads, and the loader of shared libraries while they are imported.
OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "can't start new thread", "failed to map segment")


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a type of its own for the GPU (a RuntimeError); on the host only the text tells."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(part in text for part in OUT_OF_MEMORY)
    )
