"""Run a small Python function without `exec`: a tree walker over a whitelist of syntax, with a step budget.

Enough for what `code` items ask: assignments to names, one `return`, arithmetic, comparisons, calls of a few
pure builtins and methods, subscripts, list displays and list comprehensions. Anything else raises `Refused`,
and so do results that grow too large: sizes are checked before the operation, so no input can exhaust time or
memory.
"""

import ast
import operator
from collections.abc import Callable
from typing import Any

Value = Any  # whatever the evaluated source computes; an operation that does not suit it raises
Environment = dict[str, Value]

MAX_STEPS = 20_000
MAX_LENGTH = 10_000
MAX_NUMBER = 10**15

BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
UNARY = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
FUNCTIONS: dict[str, Callable[..., Value]] = {
    f.__name__: f for f in (abs, bool, int, len, list, max, min, reversed, set, sorted, str, sum)
}
METHODS = {
    "upper",
    "lower",
    "split",
    "strip",
    "count",
    "index",
    "startswith",
    "endswith",
    "title",
    "capitalize",
}


class Refused(Exception):
    """The source uses something that is not allowed, or took too long or grew too large."""


class Interpreter:
    """Evaluates the body of one function; one instance per call."""

    def __init__(self) -> None:
        self.steps = 0

    def call(self, function: ast.FunctionDef, arguments: tuple[Value, ...]) -> Value:
        names = [argument.arg for argument in function.args.args]
        if len(names) != len(arguments):
            raise Refused("wrong number of arguments")
        environment = dict(zip(names, arguments, strict=True))
        for statement in function.body:
            match statement:
                case ast.Return(value=ast.expr() as value):
                    return self.evaluate(value, environment)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    environment[name] = self.evaluate(value, environment)
                case _:
                    raise Refused(type(statement).__name__)
        return None

    def evaluate(self, node: ast.expr, environment: Environment) -> Value:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Refused("too many steps")
        return self.bounded(self.compute(node, environment))

    def compute(self, node: ast.expr, environment: Environment) -> Value:
        def value(child: ast.expr) -> Value:
            return self.evaluate(child, environment)

        match node:
            case ast.Constant(value=bool() | int() | str() | None):
                return node.value
            case ast.Name(id=name) if name in environment:
                return environment[name]
            case ast.List(elts=items):
                return [value(item) for item in items]
            case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
                return UNARY[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                return self.binary(op, value(left), value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARE:
                return COMPARE[type(op)](value(left), value(right))
            case ast.BoolOp(op=op, values=[left, right]):
                first = value(left)
                return value(right) if bool(first) == isinstance(op, ast.And) else first
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return value(body) if value(test) else value(orelse)
            case ast.Subscript(value=container, slice=ast.Slice(lower=lower, upper=upper, step=step)):
                return value(container)[slice(*(part and value(part) for part in (lower, upper, step)))]
            case ast.Subscript(value=container, slice=index):
                return value(container)[value(index)]
            case ast.ListComp():
                return self.comprehension(node, environment)
            case ast.Call(keywords=[]):
                return self.function_call(node, environment)
        raise Refused(type(node).__name__)

    def binary(self, op: ast.operator, left: Value, right: Value) -> Value:
        # Only numbers are multiplied or divided: "a" * 10**9 or "%999999999d" % 1 would be built before any
        # check.
        numbers = isinstance(left, int) and isinstance(right, int)
        if not (numbers or isinstance(op, ast.Add)):
            raise Refused("operator needs numbers")
        return BINARY[type(op)](left, right)

    def comprehension(self, node: ast.ListComp, environment: Environment) -> list[Value]:
        match node.generators:
            case [ast.comprehension(target=ast.Name(id=name), iter=source, ifs=conditions, is_async=0)]:
                items = []
                for item in self.evaluate(source, environment):
                    inner = environment | {name: item}
                    if all(self.evaluate(condition, inner) for condition in conditions):
                        items.append(self.evaluate(node.elt, inner))
                return items
        raise Refused("comprehension")

    def function_call(self, node: ast.Call, environment: Environment) -> Value:
        arguments = [self.evaluate(argument, environment) for argument in node.args]
        match node.func:
            case ast.Name(id=name) if name in FUNCTIONS:
                result = FUNCTIONS[name](*arguments)
                return list(result) if name == "reversed" else result
            case ast.Attribute(value=owner, attr=name) if name in METHODS:
                return getattr(self.evaluate(owner, environment), name)(*arguments)
            case ast.Attribute(value=ast.Constant(value=str(separator)), attr="join"):
                return separator.join(*arguments)
        raise Refused("call")

    @staticmethod
    def bounded(value: Value) -> Value:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise Refused("number too large")
        if isinstance(value, str | list | set) and len(value) > MAX_LENGTH:
            raise Refused("value too long")
        return value


def parse_function(source: str) -> ast.FunctionDef:
    """The first function of a text: its `def` line and the indented lines that follow it."""
    lines = iter(source.splitlines())
    kept = [line for line in lines if line.startswith("def ")][:1]
    for line in source[source.find(kept[0]) :].splitlines()[1:] if kept else ():
        if not line.startswith((" ", "\t")):
            break
        kept.append(line)
    try:
        body = ast.parse("\n".join(kept)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused("not Python") from error
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        raise Refused("no function")
    return body[0]


def run_function(source: str, arguments: tuple[Value, ...]) -> Value:
    """Call the first function of `source`. Raises `Refused` for whatever goes wrong."""
    try:
        return Interpreter().call(parse_function(source), arguments)
    except Refused:
        raise
    except Exception as error:  # the evaluated source may raise anything that its operations raise
        raise Refused(f"{type(error).__name__}: {error}") from error
