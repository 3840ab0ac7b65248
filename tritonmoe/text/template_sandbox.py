"""Jinja for templates of unknown origin: cut off from Python, and limited in what one rendering may cost.

Jinja's sandbox keeps a template from files and from Python's internals. It bounds neither time nor memory: a loop may
never end, `"x" * 10 ** 10` takes ten gigabytes and `10 ** (10 ** 10)` for ever, in one call of native code that nothing
interrupts. So what can multiply is looked at before it runs (`check_work`), what comes of every operation afterwards
(`size`), and the clock each time.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tritonmoe.errors import TokenizerError, printable

MAX_SECONDS = 10.0  # a megabyte of messages renders in well under a second
MAX_CHARACTERS = 32 << 20  # of the output, and of any value; about ten times a context of a million tokens
MAX_ITEMS = 1 << 18  # of any value, in lists and objects: what looks at each of them still ends soon
MAX_TOTAL = 1 << 30  # of all values that one rendering makes
MAX_WORK = 1 << 28  # characters that one operation may touch: under a second
MAX_INTEGER = 1 << 4096
BUDGET = "_budget"  # the variable that carries the limits into a rendering
# What may take the product of its operands, where integers are widths or counts. All else takes their sum.
MULTIPLIES = frozenset(
    """
    * % batch center expandtabs format format_map indent join ljust replace rfind rindex rjust round rpartition
    rsplit slice tojson translate truncate zfill
    """.split()
)
WIDTH = re.compile(r"\d{6}")  # within a format


class LimitError(jinja2.TemplateRuntimeError):
    """The template took too long or wrote too much."""


class RefusedError(jinja2.TemplateRuntimeError):
    """The template called `raise_exception`."""


class Compiled(NamedTuple):
    program: jinja2.Template
    variables: frozenset[str]  # what the template reads from outside


class Budget:
    """What is left to one rendering."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._characters = MAX_TOTAL

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise LimitError(f"runs for more than {MAX_SECONDS:g} s")

    def spend(self, value: Any) -> Any:
        """`value`, unless it or all that was made so far is too large."""
        self._characters -= size(value)
        if self._characters < 0:
            raise LimitError(f"makes more than {MAX_TOTAL} characters or items altogether")
        return value

    def drained(self, value: Any) -> Any:
        """A list in place of an iterator, whose length nobody knows."""
        if not isinstance(value, Iterator) or isinstance(value, LoopContext):
            return value
        found: list[Any] = []
        room = MAX_CHARACTERS
        for item in value:
            room -= size(item)
            found.append(item)
            if room < 0 or len(found) > MAX_ITEMS:
                raise LimitError(f"makes more than {MAX_CHARACTERS} characters or {MAX_ITEMS} items, one after another")
        return self.spend(found)


def size(value: Any, limit: int = MAX_CHARACTERS, counts: bool = False) -> int:
    """Characters and items in `value`, in what it holds too, each as often as it is held; LimitError above `limit`.

    With `counts` integers are as large as their values."""
    total, num_items, rest = 0, 0, [value]
    while rest:
        item = rest.pop()
        num_items += 1
        total += 1
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, int):
            total += min(abs(item), limit) if counts else item.bit_length() // 3  # its digits
        elif isinstance(item, list | tuple):
            rest += item
        elif isinstance(item, _SafeNamespace):
            rest.append(item._Namespace__attrs)  # type: ignore[reportAttributeAccessIssue]  # all it has
        elif isinstance(item, Mapping):
            rest += item.keys()
            rest += item.values()
        if total > limit or num_items + len(rest) > MAX_ITEMS:
            raise LimitError(f"makes a value of more than {limit} characters or {MAX_ITEMS} items")
    return total


def check_work(name: str, receiver: Any, arguments: Any) -> None:
    """LimitError where an operation on `receiver` could touch too much."""
    if name not in MULTIPLIES:
        return
    if isinstance(receiver, int | float):
        length = 64
    elif isinstance(receiver, str | list | tuple):
        length = size(receiver)
        if name in ("%", "format", "format_map") and isinstance(receiver, str) and WIDTH.search(receiver):
            raise LimitError("formats to a width of six digits")
    else:
        return
    if length * size(arguments, MAX_WORK, counts=True) > MAX_WORK:
        raise LimitError(f"does more than {MAX_WORK} steps at once, in {name!r}")


def _budget(context: Context) -> Budget:
    """The limits of this rendering, after a look at the clock."""
    # `parent` holds what `render` passed; what the template assigns, and could hide it, is elsewhere.
    budget = context.parent[BUDGET]
    budget.check_time()
    return budget


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the limits."""
    kind = getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    @wraps(function)
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        value = budget.drained(value)
        check_work(name, value, (args, kwargs))
        passed = () if kind is None else (_PASSED[kind.name](context),)
        return budget.spend(function(*passed, value, *args, **kwargs))

    return run


_PASSED: dict[str, Callable[[Context], Any]] = {
    "context": lambda context: context,
    "eval_context": lambda context: context.eval_ctx,
    "environment": lambda context: context.environment,
}


class SandboxedTemplates(ImmutableSandboxedEnvironment):
    """Jinja set up as transformers sets it up, with limits on what it runs."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters = {name: _limited(name, function) for name, function in self.filters.items()}
        self.finalize = self.written
        for name in ("wordwrap", "urlize", "striptags"):  # slow beyond any limit on long texts, and of no use here
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _SafeNamespace,
            "dict": _SafeDict(),
        }

    def compile_checked(self, source: str) -> Compiled:
        """The template with a look at the clock at the start of each loop pass and macro call, and at the size of each
        text and list that it puts together."""
        try:
            tree = self.parse(source)
            variables = frozenset(meta.find_undeclared_variables(tree))
            for block in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
                block.body.insert(0, nodes.ExprStmt(_hook("check_time", lineno=block.lineno), lineno=block.lineno))
            _replace_made_values(tree)
            program = self.from_string(tree.set_environment(self))  # type: ignore[arg-type]  # a tree is accepted
            return Compiled(program, variables)
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            raise TokenizerError(f"the chat template is broken at {where}") from None
        except Exception as error:  # what jinja accepts, Python's compiler may still refuse or find too deep
            raise TokenizerError(f"the chat template cannot be compiled: {printable(str(error))}") from None

    def render(self, program: jinja2.Template, variables: dict[str, Any]) -> str:
        """The output of a program; LimitError where that is too long or takes too much."""
        pieces: list[str] = []
        num_characters = 0
        for piece in program.generate(variables | {BUDGET: Budget()}):
            pieces.append(piece)
            num_characters += len(piece)
            if num_characters > MAX_CHARACTERS:
                raise LimitError(f"writes more than {MAX_CHARACTERS} characters")
        return "".join(pieces)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # what a macro or a block has written
        found = list(pieces)
        if sum(map(len, found)) > MAX_CHARACTERS:
            raise LimitError(f"writes more than {MAX_CHARACTERS} characters")
        return "".join(found)

    @staticmethod
    @jinja2.pass_context
    def check_time(context: Context) -> None:
        _budget(context)

    @staticmethod
    @jinja2.pass_context
    def written(context: Context, value: Any) -> Any:  # of every {{ value }}
        return _budget(context).spend(value)

    @staticmethod
    @jinja2.pass_context
    def joined(context: Context, *parts: Any) -> str:  # a ~ b
        _budget(context).spend(parts)
        return "".join(map(str, parts))

    @staticmethod
    @jinja2.pass_context
    def made(context: Context, value: Any) -> Any:  # [a, b]: it may hold another one many times over
        return _budget(context).spend(value)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """No bytes: some of their codecs take the square of the length, and none is of use in a prompt."""
        return attr not in ("encode", "to_bytes") and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        numbers = [value for value in (left, right) if isinstance(value, int | float)]
        if any(isinstance(value, int) and abs(value) >= MAX_INTEGER for value in numbers):
            raise LimitError("calculates with numbers of more than a thousand digits")
        if len(numbers) < 2:  # as many times the text, whichever way round
            check_work(operator, *((right, left) if numbers and left is numbers[0] else (left, right)))
        elif (
            operator == "**"
            and isinstance(right, int)
            and isinstance(left, int)
            and left.bit_length() * right > 1 << 16
        ):
            raise LimitError(f"raises to the power of {right}")
        return budget.spend(super().call_binop(context, operator, left, right))

    def call(
        __self, __context: Context, __obj: Any, *args: Any, **kwargs: Any
    ) -> Any:  # jinja's names: templates have all others
        budget = _budget(__context)
        args = tuple(map(budget.drained, args))
        method = getattr(__obj, "__wrapped__", __obj)  # jinja puts a function of its own around `format`
        check_work(getattr(method, "__name__", ""), getattr(method, "__self__", None), (args, kwargs))
        return budget.spend(super().call(__context, __obj, *args, **kwargs))


def _hook(name: str, *arguments: nodes.Expr, lineno: int) -> nodes.Call:
    method = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(method, list(arguments), [], None, None, lineno=lineno)


def _replace_made_values(node: nodes.Node) -> None:
    """Put every literal list and object that is read, and every `~`, in the care of a method above."""
    for name, child in node.iter_fields():
        found = child if isinstance(child, list) else [child]
        for i, item in enumerate(found):
            if not isinstance(item, nodes.Node):
                continue
            _replace_made_values(item)
            if isinstance(item, nodes.Concat):
                item = _hook("joined", *item.nodes, lineno=item.lineno)
            elif isinstance(item, nodes.List | nodes.Dict | nodes.Tuple) and getattr(item, "ctx", "load") == "load":
                item = _hook("made", item, lineno=item.lineno)
            found[i] = item
        if not isinstance(child, list):
            setattr(node, name, found[0])


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
    raise RefusedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
