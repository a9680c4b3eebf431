"""Conditions on events as text, such as 'metrics["val/loss"] < 2': parsed and interpreted, never run as Python."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from difflib import get_close_matches

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording.log.non_finite import parse_non_finite
from pulsetrain.engine.recording.log.records import Json, LoggedEvent

__all__ = ["FIELDS", "predicate"]

Value = Callable[[LoggedEvent], Json]

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
_SYNTAX = "fields, constants, comparisons, and, or, not, arithmetic, [...], in, abs(), len(), isnan()"


def predicate(text: str) -> Callable[[LoggedEvent], bool]:
    """Compile a condition, for `EventLog.read(where=...)`.

    A condition consists of an event's fields, constants, comparisons (including `is None`), `and`, `or`, `not`,
    arithmetic, subscripts, `in`, `abs`, `len` and `isnan`. The strings "NaN" and "Infinity" count as the floats that
    they name. A missing value is None; a comparison with None, or of values without an order, is false.

    >>> diverged = predicate('output["loss"] > 4 or isnan(output["loss"])')
    >>> diverged(LoggedEvent(output={"loss": "NaN"})), diverged(LoggedEvent(output={"loss": 0.5}))
    (True, False)

    Raises:
        ConfigurationError: the text is not such a condition; a caret shows where.
    """
    text = text.strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # about invalid escape sequences
            parsed = ast.parse(text, mode="eval")
        condition = _compile(parsed.body)
        condition(LoggedEvent())  # raises now if it is nested too deeply
    except _UnsupportedError as unsupported:
        raise unsupported.located(text) from None
    except SyntaxError as error:
        column = error.offset - 1 if error.offset else len(text)  # no offset: the text ends too early
        raise _error(text, error.msg, error.lineno or 1, column) from None
    except ValueError as error:  # a NUL
        raise _error(text, str(error), 1, 0) from None
    except (RecursionError, MemoryError):
        raise _error(text[:_SHOWN], "nested too deeply", 1, 0) from None
    return lambda event: bool(condition(event))


class _UnsupportedError(Exception):
    """An expression that is valid Python, but not allowed in a condition."""

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


def _compile(node: ast.expr) -> Value:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as constant):
            number = parse_non_finite(constant)
            return lambda event: number
        case ast.Name(id=name):
            if name not in FIELDS:
                near = get_close_matches(name, FIELDS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"events have {', '.join(FIELDS)}"
                raise _UnsupportedError(node, f"no field {name!r}; {hint}")
            return lambda event: parse_non_finite(getattr(event, name))
        case ast.Tuple(elts=items) | ast.List(elts=items):
            values = [_compile(item) for item in items]
            return lambda event: [value(event) for value in values]
        case ast.Subscript(value=container, slice=index):
            return _applied(operator.getitem, _compile(container), _compile(index))
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
            return _applied(operator.neg if type(sign) is ast.USub else operator.pos, _compile(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            apply = _ARITHMETIC[type(op)]  # of numbers: + raises for strings and lists, which could be multiplied
            return _applied(lambda x, y: apply(+x, +y), _compile(left), _compile(right))
        case ast.Compare():
            return _comparisons(node)
        case ast.Call(func=ast.Name(id="abs" | "len" | "isnan" as name), args=[argument], keywords=[]):
            return _applied(_FUNCTIONS[name], _compile(argument))
        case ast.Attribute(value=ast.Name(id=name), attr=key) if name in FIELDS:
            raise _UnsupportedError(node, f'a field of {name} is written {name}["{key}"]')
    raise _UnsupportedError(node, f"not supported; a condition may use {_SYNTAX}")


def _applied(apply: Callable[..., Json], first: Value, second: Value | None = None) -> Value:
    """The function of the operands' values, None where it has none; the strings of non-finite floats are floats."""

    def of_one(event: LoggedEvent) -> Json:
        try:
            return parse_non_finite(apply(first(event)))
        except (TypeError, LookupError, ArithmeticError):
            return None

    def of_two(event: LoggedEvent) -> Json:
        assert second is not None
        try:
            return parse_non_finite(apply(first(event), second(event)))
        except (TypeError, LookupError, ArithmeticError):
            return None

    return of_one if second is None else of_two


def _comparisons(node: ast.Compare) -> Value:
    sides = [node.left, *node.comparators]
    values = [_compile(side) for side in sides]
    tests = [_comparison(op, *sides[at : at + 2]) for at, op in enumerate(node.ops)]

    def compare(event: LoggedEvent) -> bool:
        left = values[0](event)
        for test, value in zip(tests, values[1:], strict=True):
            right = value(event)
            try:
                if not test(left, right):
                    return False
            except TypeError:  # None, values without an order, no container, or an item that cannot be a key
                return False
            left = right
        return True

    return compare


def _comparison(op: ast.cmpop, left: ast.expr, right: ast.expr) -> Callable[[Json, Json], bool]:
    if type(op) in _COMPARISONS:
        return _COMPARISONS[type(op)]
    asks_for_none = any(isinstance(side, ast.Constant) and side.value is None for side in (left, right))
    if isinstance(op, ast.Is | ast.IsNot) and not asks_for_none:
        raise _UnsupportedError(right, "`is` compares with None only; use ==")
    if isinstance(op, ast.Eq | ast.Is):
        return lambda x, y: _equal(x, y) and (asks_for_none or x is not None)
    return lambda x, y: not _equal(x, y) and (asks_for_none or (x is not None and y is not None))


def _equal(x: object, y: object) -> bool:
    return x == y or (x != x and y != y)  # NaN equals NaN here
