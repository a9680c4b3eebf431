"""Conditions on events as text, such as 'metrics["val/loss"] < 2': read, never run as a program."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording.log.non_finite import NON_FINITE
from pulsetrain.engine.recording.log.records import LoggedEvent

__all__ = ["predicate"]

Value = Callable[[LoggedEvent], Any]

FIELDS = LoggedEvent.__struct_fields__
_SHOWN = 60  # characters before and behind a fault
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_KNOWN = "fields, constants, comparisons, and, or, not, arithmetic, [...], in, abs(), len(), isnan()"


def predicate(text: str) -> Callable[[LoggedEvent], bool]:
    """The condition that a text states, for `EventLog.read(where=...)`.

    It may hold an event's fields, constants, comparisons (`is None` among them), `and`, `or`, `not`, arithmetic,
    subscripts, `in`, `abs`, `len` and `isnan`. "NaN" and "Infinity" are the numbers that they name. What is not there
    is None; a comparison with it is false, and so is one of values that have no order.

    Raises:
        ConfigurationError: the text is no such condition; a caret shows where.
    """
    text = text.strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            parsed = ast.parse(text, mode="eval")
        wanted = _compile(parsed.body)
        wanted(LoggedEvent())  # how deeply it is nested shows here at the latest
    except _RefusedError as refused:
        raise refused.told(text) from None
    except SyntaxError as error:
        column = error.offset - 1 if error.offset else len(text)  # none where the end came too soon
        raise _error(text, error.msg, error.lineno or 1, column) from None
    except ValueError as error:  # a NUL
        raise _error(text, str(error), 1, 0) from None
    except (RecursionError, MemoryError):
        raise _error(text[:_SHOWN], "nested too deeply", 1, 0) from None
    return lambda event: bool(wanted(event))


class _RefusedError(Exception):
    """A part of a condition that Python knows, and conditions do not."""

    def __init__(self, node: ast.expr, reason: str) -> None:
        self.node, self.reason = node, reason

    def told(self, text: str) -> ConfigurationError:
        line = text.splitlines()[self.node.lineno - 1]
        column = len(line.encode()[: self.node.col_offset].decode(errors="ignore"))
        return _error(text, self.reason, self.node.lineno, column)


def _error(text: str, reason: str, line: int, column: int) -> ConfigurationError:
    lines = text.splitlines() or [""]
    shown = lines[min(line, len(lines)) - 1]
    column = min(column, len(shown))
    start = max(0, column - _SHOWN)
    return ConfigurationError(f"where: {reason}\n  {shown[start : column + _SHOWN]}\n  {' ' * (column - start)}^")


def _compile(node: ast.expr) -> Value:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as constant):
            value = _number(constant)
            return lambda event: value
        case ast.Name(id=name):
            if name not in FIELDS:
                near = get_close_matches(name, FIELDS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"events have {', '.join(FIELDS)}"
                raise _RefusedError(node, f"no field {name!r}; {hint}")
            return lambda event: _number(getattr(event, name))
        case ast.Tuple(elts=items) | ast.List(elts=items):
            values = [_compile(item) for item in items]
            return lambda event: [value(event) for value in values]
        case ast.Subscript(value=container, slice=index):
            return _subscript(_compile(container), _compile(index))
        case ast.BoolOp(op=ast.And(), values=items):
            values = [_compile(item) for item in items]
            return lambda event: all(value(event) for value in values)
        case ast.BoolOp(op=ast.Or(), values=items):
            values = [_compile(item) for item in items]
            return lambda event: any(value(event) for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _compile(operand)
            return lambda event: not value(event)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return _arithmetic(operator.mul, _compile(operand), lambda event: -1 if type(sign) is ast.USub else 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _arithmetic(_ARITHMETIC[type(op)], _compile(left), _compile(right))
        case ast.Compare():
            return _comparisons(node)
        case ast.Call(func=ast.Name(id="abs" | "len" | "isnan" as name), args=[argument], keywords=[]):
            return _call(name, _compile(argument))
        case ast.Attribute(value=ast.Name(id=name), attr=key) if name in FIELDS:
            raise _RefusedError(node, f'a field of {name} is written {name}["{key}"]')
    raise _RefusedError(node, f"not understood; there are {_KNOWN}")


def _number(value: Any) -> Any:
    return NON_FINITE.get(value, value) if type(value) is str else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _subscript(container: Value, index: Value) -> Value:
    def get(event: LoggedEvent) -> Any:
        try:
            return _number(container(event)[index(event)])
        except (KeyError, IndexError, TypeError):
            return None

    return get


def _arithmetic(apply: Callable[[Any, Any], Any], left: Value, right: Value) -> Value:
    def compute(event: LoggedEvent) -> Any:
        x, y = left(event), right(event)
        if not _is_number(x) or not _is_number(y):
            return None
        try:
            return apply(x, y)
        except (ZeroDivisionError, OverflowError):
            return None

    return compute


def _call(name: str, argument: Value) -> Value:
    def call(event: LoggedEvent) -> Any:
        value = argument(event)
        if name == "len":
            return len(value) if isinstance(value, str | list | dict) else None
        if not _is_number(value):
            return None
        return abs(value) if name == "abs" else value != value  # isnan

    return call


def _comparisons(node: ast.Compare) -> Value:
    sides = [node.left, *node.comparators]
    values = [_compile(side) for side in sides]
    tests = [_comparison(op, *sides[at : at + 2]) for at, op in enumerate(node.ops)]

    def compare(event: LoggedEvent) -> bool:
        left = values[0](event)
        for test, value in zip(tests, values[1:], strict=True):
            right = value(event)
            if not test(left, right):
                return False
            left = right
        return True

    return compare


def _comparison(op: ast.cmpop, left: ast.expr, right: ast.expr) -> Callable[[Any, Any], bool]:
    if type(op) in _ORDER:
        return _ordered(_ORDER[type(op)])
    asks_for_none = any(isinstance(side, ast.Constant) and side.value is None for side in (left, right))
    match op:
        case ast.Is() | ast.IsNot() if not asks_for_none:
            raise _RefusedError(right, "`is` is for None alone; use ==")
        case ast.Eq() | ast.Is():
            return lambda x, y: _equal(x, y) and (asks_for_none or x is not None)
        case ast.NotEq() | ast.IsNot():
            return lambda x, y: not _equal(x, y) and (asks_for_none or (x is not None and y is not None))
        case ast.In():
            return lambda x, y: _contains(y, x) is True
        case _:
            return lambda x, y: _contains(y, x) is False


def _ordered(apply: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(x: Any, y: Any) -> bool:
        try:
            return apply(x, y)
        except TypeError:  # None, or values that have no order
            return False

    return compare


def _equal(x: Any, y: Any) -> bool:
    return bool(x == y) or (x != x and y != y)  # "NaN" is itself


def _contains(container: Any, item: Any) -> bool | None:
    try:
        return item in container
    except TypeError:  # None, a number, or no key
        return None
