"""Chat messages to prompt text, by the jinja template that comes with a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.errors import InputError, TokenizerError
from tritonmoe.files import read_file
from tritonmoe.text.template_sandbox import Compiled, LimitError, RefusedError, SandboxedTemplates

logger = logging.getLogger(__name__)

MAX_SOURCE_BYTES = 1 << 20  # the largest published template has about 20 kB
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat templates of one model. A model without any is valid; only `render` then raises.

    A template is a program from the same place as the weights, so it runs in a sandbox and within limits.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = SandboxedTemplates()
        self._compiled: dict[str, Compiled] = {}

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Find the templates in `folder`; `special_tokens` (`bos_token`, ...) become variables of them."""
        return cls(_find_sources(folder), special_tokens)

    @property
    def names(self) -> tuple[str, ...]:
        """`default` and other names; empty when the model has no template."""
        return tuple(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; encode it without adding special tokens.

        `variables` reach the template by name (`enable_thinking`, `reasoning_effort`, ...) and must be JSON
        values, like everything else here. One that the template never reads is logged, as it has no effect.
        """
        wants_tools = tools is not None and "tool_use" in self._sources
        template = self._template("tool_use" if wants_tools else "default")
        if ignored := sorted(variables.keys() - template.variables):
            logger.warning("the chat template does not read %s", ", ".join(ignored))
        context = self._special_tokens | {
            "messages": _plain_messages(messages),
            "tools": _plain(tools, "tools"),
            "documents": _plain(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
            **{name: _plain(value, name) for name, value in variables.items()},
        }
        return self._run(template.program, context)

    def _template(self, name: str) -> Compiled:
        if not self._sources:
            raise InputError("this model has no chat template; give it a plain prompt instead of messages")
        if name not in self._sources:
            raise TokenizerError(
                f"this model has the chat templates {', '.join(sorted(self._sources))} but no default one; "
                "give it a plain prompt, or add the default as chat_template.jinja"
            )
        if name not in self._compiled:
            self._compiled[name] = self._environment.compile_checked(self._sources[name])
        return self._compiled[name]

    def _run(self, program: jinja2.Template, context: dict[str, Any]) -> str:
        try:
            return self._environment.render(program, context)
        except LimitError as error:
            raise TokenizerError(f"the chat template {error}; replace it or use a plain prompt") from None
        except jinja2.exceptions.SecurityError as error:
            raise TokenizerError(f"the chat template does what is forbidden: {_one_line(error)}") from None
        except RefusedError as error:
            raise InputError(f"the chat template refuses these messages: {_one_line(error)}") from None
        except MemoryError:  # no fault of the messages, and none that the limits should let happen
            raise
        except Exception as error:  # a template is a program: it can fail in every way a program can
            reason = _one_line(error) or type(error).__name__
            raise InputError(f"the chat template cannot render these messages: {reason}") from None


def _find_sources(folder: Path) -> dict[str, str]:
    """Name to source of each template; as in transformers, files win over tokenizer_config.json."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    sources = {"default": _read_source(file)} if os.path.lexists(file) else _templates_in(config)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _read_source(path)
    return sources or _templates_in(folder / "chat_template.json")


def _read_source(path: Path) -> str:
    try:
        return read_file(path, MAX_SOURCE_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise TokenizerError(f"{path}: not UTF-8 text; fetch the file again") from None
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from None


def _templates_in(path: Path) -> dict[str, str]:
    """`chat_template` of a JSON file: one source, or a list of objects with `name` and `template`."""
    value = read_json(path, TokenizerError).get("chat_template") if os.path.lexists(path) else None
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        sources = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        sources = {}
    if not sources or not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise TokenizerError(f"{path}: chat_template must be a text or a list of name and template objects")
    return sources


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages as templates expect them: no null keys, reasoning under each name they read."""
    is_list = isinstance(messages, list | tuple) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise InputError('messages must be a list of objects like {"role": "user", "content": "..."}')
    plain = []
    for message in _plain(messages, "messages"):
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        plain.append(message)
    return plain


def _plain(value: Any, where: str) -> Any:
    """A copy made of plain JSON types only: methods of other objects would be open to the template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    raise InputError(f"{where} must consist of JSON values; {type(value).__name__} is none")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
