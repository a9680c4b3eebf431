"""Conditions as text, such as 'metrics["val/loss"] < 2': parsed and interpreted, never run as Python."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from typing import Any

from pulsetrain.engine.errors import ConfigurationError, did_you_mean
from pulsetrain.engine.recording.log.non_finite import parse_non_finite
from pulsetrain.engine.recording.log.records import Json, LoggedEvent

__all__ = ["FIELDS", "SYNTAX", "Names", "Predicate", "UnsupportedError", "Value", "field_of_event", "predicate"]

Value = Callable[[Any], Json]
Names = Callable[[ast.Name | ast.Attribute], Value]
"""How the value of a name is read; it raises UnsupportedError for one that does not exist."""

FIELDS = LoggedEvent.__struct_fields__
_SHOWN = 60  # characters before and after an error
_ARITHMETIC: dict[type, Callable[[Json, Json], Json]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Callable[[Json, Json], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_FUNCTIONS: dict[str, Callable[[Json], Json]] = {"abs": abs, "len": len, "isnan": lambda x: abs(x) != abs(x)}
SYNTAX = "fields, constants, comparisons, and, or, not, arithmetic, [...], in, abs(), len(), isnan()"


class Predicate:
    """A condition that counts on how many events it could not be computed, for another reason than a missing value.

    Args:
        condition: computes it.
        errors: to which the condition appends what it could not compute.
    """

    seen: int
    matched: int
    failed: int

    def __init__(self, condition: Value, errors: list[Exception]) -> None:
        self._condition, self._errors = condition, errors
        self.seen = self.matched = self.failed = 0  # events
        self.error: Exception | None = None  # the last one

    def __call__(self, event: Any) -> bool:
        self._errors.clear()
        matches = bool(self._condition(event))
        self.seen += 1
        self.matched += matches
        if self._errors:
            self.failed += 1
            self.error = self._errors[0]
        return matches

    @property
    def failure(self) -> Exception | None:
        """Why no event matched, if the condition could be computed on none of them."""
        return self.error if self.failed == self.seen and not self.matched else None


def field_of_event(node: ast.Name | ast.Attribute) -> Value:
    """The field of an event with this name.

    Raises:
        UnsupportedError: events have no such field.
    """
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id in FIELDS:
            raise UnsupportedError(node, f'a field of {node.value.id} is written {node.value.id}["{node.attr}"]')
        raise UnsupportedError(node, f"not supported; a condition may use {SYNTAX}")
    name = node.id
    if name not in FIELDS:
        hint = did_you_mean(name, FIELDS) or f"; events have {', '.join(FIELDS)}"
        raise UnsupportedError(node, f"no field {name!r}{hint}")
    return lambda event: parse_non_finite(getattr(event, name))


def predicate(text: str, names: Names = field_of_event, example: object = None) -> Predicate:
    """Compile a condition, for `EventLog.read(where=...)`.

    A condition consists of an event's fields, constants, comparisons (including `is None`), `and`, `or`, `not`,
    arithmetic, subscripts, `in`, `abs`, `len` and `isnan`. The strings "NaN" and "Infinity" count as the floats that
    they name. A missing value is None; a comparison with None, or of values without an order, is false.

    >>> diverged = predicate('output["loss"] > 4 or isnan(output["loss"])')
    >>> diverged(LoggedEvent(output={"loss": "NaN"})), diverged(LoggedEvent(output={"loss": 0.5}))
    (True, False)

    Args:
        text: the condition.
        names: reads the names in it; by default an event's fields.
        example: what the condition is tried on; by default an event without values.

    Raises:
        ConfigurationError: the text is not such a condition; a caret shows where.
    """
    text = text.strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # about invalid escape sequences
            parsed = ast.parse(text, mode="eval")
        errors: list[Exception] = []
        condition = _compile(parsed.body, errors, names)
        condition(LoggedEvent() if example is None else example)  # raises now if it is nested too deeply
    except UnsupportedError as unsupported:
        raise unsupported.located(text) from None
    except SyntaxError as error:
        column = error.offset - 1 if error.offset else len(text)  # no offset: the text ends too early
        raise _error(text, error.msg, error.lineno or 1, column) from None
    except ValueError as error:  # a NUL
        raise _error(text, str(error), 1, 0) from None
    except (RecursionError, MemoryError):
        raise _error(text[:_SHOWN], "nested too deeply", 1, 0) from None
    return Predicate(condition, errors)


class UnsupportedError(Exception):
    """An expression that is valid Python, but not allowed in a condition."""

    reason: str
    node: ast.expr

    def __init__(self, node: ast.expr, reason: str) -> None:
        self.node, self.reason = node, reason

    def located(self, text: str) -> ConfigurationError:
        line = text.splitlines()[self.node.lineno - 1]
        column = len(line.encode()[: self.node.col_offset].decode(errors="ignore"))
        return _error(text, self.reason, self.node.lineno, column)


def _error(text: str, reason: str, line: int, column: int) -> ConfigurationError:
    lines = text.splitlines() or [""]
    shown = lines[min(line, len(lines)) - 1]
    column = min(column, len(shown))
    start = max(0, column - _SHOWN)
    return ConfigurationError(f"where: {reason}\n  {shown[start : column + _SHOWN]}\n  {' ' * (column - start)}^")


def _compile(node: ast.expr, errors: list[Exception], names: Names) -> Value:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as constant):
            number = parse_non_finite(constant)
            return lambda event: number
        case ast.Name() | ast.Attribute():
            return names(node)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            values = [_compile(item, errors, names) for item in items]
            return lambda event: [value(event) for value in values]
        case ast.Subscript(value=container):
            return _applied(
                errors, operator.getitem, _compile(container, errors, names), _compile_index(node, errors, names)
            )
        case ast.BoolOp(op=ast.And(), values=items):
            values = [_compile(item, errors, names) for item in items]
            return lambda event: all(value(event) for value in values)
        case ast.BoolOp(op=ast.Or(), values=items):
            values = [_compile(item, errors, names) for item in items]
            return lambda event: any(value(event) for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _compile(operand, errors, names)
            return lambda event: not value(event)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return _applied(
                errors, operator.neg if type(sign) is ast.USub else operator.pos, _compile(operand, errors, names)
            )
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            apply = _ARITHMETIC[type(op)]  # of numbers: + raises for strings and lists, which could be multiplied
            return _applied(
                errors, lambda x, y: apply(+x, +y), _compile(left, errors, names), _compile(right, errors, names)
            )
        case ast.Compare():
            return _comparisons(node, errors, names)
        case ast.Call(func=ast.Name(id="abs" | "len" | "isnan" as name), args=[argument], keywords=[]):
            return _applied(errors, _FUNCTIONS[name], _compile(argument, errors, names))
    raise UnsupportedError(node, f"not supported; a condition may use {SYNTAX}")


def _compile_index(node: ast.Subscript, errors: list[Exception], names: Names) -> Value:
    """The index of a subscript; the error for a key without quotes shows them."""
    try:
        return _compile(node.slice, errors, names)
    except UnsupportedError:
        if not all(isinstance(part, ast.Name | ast.Load | ast.BinOp | ast.Div) for part in ast.walk(node.slice)):
            raise
        key = ast.unparse(node.slice).replace(" / ", "/")  # as in val/loss
        rule = f'the key {key} has no quotes; did you mean {ast.unparse(node.value)}["{key}"]?'
        raise UnsupportedError(node.slice, rule) from None


def _applied(errors: list[Exception], apply: Callable[..., Json], *operands: Value) -> Value:
    """The function of the operands' values, None where it has none; the strings of non-finite floats are floats."""

    def call(event: LoggedEvent) -> Json:
        values = [operand(event) for operand in operands]
        try:
            return parse_non_finite(apply(*values))
        except (TypeError, LookupError, ArithmeticError) as error:
            if not isinstance(error, LookupError) and None not in values:  # else a value is missing
                errors.append(error)
            return None

    return call


def _comparisons(node: ast.Compare, errors: list[Exception], names: Names) -> Value:
    sides = [node.left, *node.comparators]
    values = [_compile(side, errors, names) for side in sides]
    tests = [_comparison(op, *sides[at : at + 2]) for at, op in enumerate(node.ops)]

    def compare(event: LoggedEvent) -> bool:
        left = values[0](event)
        for test, value in zip(tests, values[1:], strict=True):
            right = value(event)
            try:
                if not test(left, right):
                    return False
            except TypeError as error:  # None, values without an order, no container, or an item that cannot be a key
                if left is not None and right is not None:
                    errors.append(error)
                return False
            left = right
        return True

    return compare


def _comparison(op: ast.cmpop, left: ast.expr, right: ast.expr) -> Callable[[Json, Json], bool]:
    if type(op) in _COMPARISONS:
        return _COMPARISONS[type(op)]
    asks_for_none = any(isinstance(side, ast.Constant) and side.value is None for side in (left, right))
    if isinstance(op, ast.Is | ast.IsNot) and not asks_for_none:
        raise UnsupportedError(right, "`is` compares with None only; use ==")
    if isinstance(op, ast.Eq | ast.Is):
        return lambda x, y: _equal(x, y) and (asks_for_none or x is not None)
    return lambda x, y: not _equal(x, y) and (asks_for_none or (x is not None and y is not None))


def _equal(x: object, y: object) -> bool:
    return x == y or (x != x and y != y)  # NaN equals NaN here
