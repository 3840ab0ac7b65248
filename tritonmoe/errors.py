"""Every error a user can cause, and the exit codes of the command. A message is one line: what was wrong, and what
to change."""

from __future__ import annotations

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class TritonMoeError(Exception):
    """Bad input or an environment that cannot serve it; `str(error)` is one clear line for the user."""


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
