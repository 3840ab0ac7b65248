"""Chat messages to prompt text, by the jinja template that comes with a model."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tritonmoe.config_reader import read_json
from tritonmoe.errors import InputError, TokenizerError

logger = logging.getLogger(__name__)

MAX_SECONDS = 10.0  # a megabyte of messages renders in well under a second
MAX_CHARACTERS = 32 << 20  # about ten times a context of a million tokens
DEADLINE = "_deadline"  # the variable that carries the time limit into a rendering
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat templates of one model. A model without any is valid; only `render` then raises.

    A template is a program from the same place as the weights. It runs in jinja's sandbox, which keeps it
    from files and from Python's internals. Its output is limited, and so is its time, checked at every pass
    of a loop and call of a macro. What one expression costs is not: `"a" * 10 ** 10` takes ten gigabytes.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _Environment()
        self._compiled: dict[str, _Compiled] = {}

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

    def _template(self, name: str) -> _Compiled:
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
        pieces: list[str] = []
        num_characters = 0
        try:
            for piece in program.generate(context | {DEADLINE: time.monotonic() + MAX_SECONDS}):
                pieces.append(piece)
                num_characters += len(piece)
                if num_characters > MAX_CHARACTERS:
                    raise _LimitError(f"writes more than {MAX_CHARACTERS} characters")
        except _LimitError as error:
            raise TokenizerError(f"the chat template {error}; replace it or use a plain prompt") from None
        except jinja2.exceptions.SecurityError as error:
            raise TokenizerError(f"the chat template does what is forbidden: {_one_line(error)}") from None
        except _RefusedError as error:
            raise InputError(f"the chat template refuses these messages: {_one_line(error)}") from None
        except Exception as error:  # a template is a program: it can fail in every way a program can
            reason = _one_line(error) or type(error).__name__
            raise InputError(f"the chat template cannot render these messages: {reason}") from None
        return "".join(pieces)


def _find_sources(folder: Path) -> dict[str, str]:
    """Name to source of each template; as in transformers, files win over tokenizer_config.json."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    sources = {"default": _read_source(file)} if file.exists() else _templates_in(config)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _read_source(path)
    return sources or _templates_in(folder / "chat_template.json")


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TokenizerError(f"{path}: not UTF-8 text; fetch the file again") from None
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from None


def _templates_in(path: Path) -> dict[str, str]:
    """`chat_template` of a JSON file: one source, or a list of objects with `name` and `template`."""
    value = read_json(path, TokenizerError).get("chat_template") if path.exists() else None
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


class _LimitError(jinja2.TemplateRuntimeError):
    """The template took too long or wrote too much."""


class _RefusedError(jinja2.TemplateRuntimeError):
    """The template called `raise_exception`."""


class _Compiled(NamedTuple):
    program: jinja2.Template
    variables: frozenset[str]  # what the template reads from outside


class _GenerationTag(Extension):
    """`{% generation %}` marks what to train on; for rendering it is only a scope."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[reportIncompatibleVariableOverride]  # jinja's own annotation lacks ClassVar

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _SafeNamespace(Namespace):
    """`namespace()` without underscored names, through which a template could reach Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # no named `self`: it may be an attribute's name
        self, *positional = args
        values = dict(*positional, **attributes)
        for name in values:
            _SafeNamespace._check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _SafeNamespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


class _SafeDict:
    """`dict(...)` and `dict.fromkeys(...)`, without the methods of the class that change their argument."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, does not escape HTML: models are trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja set up as transformers sets it up, with a time limit on what it runs."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _SafeNamespace,
            "dict": _SafeDict(),
        }

    def compile_checked(self, source: str) -> _Compiled:
        """The template with a time check at the start of each loop pass and macro call."""
        try:
            tree = self.parse(source)
            variables = frozenset(meta.find_undeclared_variables(tree))
            for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
                check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
                block.body.insert(0, nodes.ExprStmt(check, lineno=block.lineno))
            program = self.from_string(tree.set_environment(self))  # type: ignore[arg-type]  # a tree is accepted
            return _Compiled(program, variables)
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            raise TokenizerError(f"the chat template is broken at {where}") from None
        except Exception as error:  # what jinja accepts, Python's compiler may still refuse or find too deep
            raise TokenizerError(f"the chat template cannot be compiled: {_one_line(error)}") from None

    @jinja2.pass_context
    def check_time(self, context: jinja2.runtime.Context) -> None:
        # `parent` holds what `render` passed; what the template assigns, and could hide it, is elsewhere.
        if time.monotonic() > context.parent[DEADLINE]:
            raise _LimitError(f"runs for more than {MAX_SECONDS:g} s")
