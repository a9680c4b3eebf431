"""Checks of arguments; each error names the place, the argument, the value and the rule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from numbers import Real
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeGuard, TypeVar, cast

from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError, did_you_mean, shortened, unknown_name
from pulsetrain.engine.notebook import shorten_traceback

__all__ = [
    "answer_unknown_keywords",
    "answers_unknown_keywords",
    "check_bool",
    "check_choice",
    "check_number",
    "check_positive",
    "check_type",
    "check_whole_number",
    "is_number",
    "is_whole",
    "remedies_of",
]

Method = TypeVar("Method", bound=Callable[..., Any])

_REMEDIES: Final = "remedies"  # the attribute of a class's __init__


def is_whole(value: object) -> TypeGuard[int]:
    """Whether the value is an int and not a bool.

    >>> is_whole(3), is_whole(True), is_whole(3.0)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a finite int or float, and not a bool.

    >>> is_number(3), is_number(0.5), is_number(True), is_number(math.nan)
    (True, True, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def check_type(place: str, argument: str, value: object, kinds: Any, needs: str) -> None:
    """Reject anything but an instance of the kinds, which are what `isinstance` takes.

    Raises:
        ArgumentTypeError: not an instance.

    >>> check_type("Garbage", "every", 100, slice, "a slice, such as slice(1)")
    Traceback (most recent call last):
    ...
    pulsetrain.engine.errors.ArgumentTypeError: Garbage(every=100): needs a slice, such as slice(1)
    """
    if not isinstance(value, kinds):
        raise ArgumentTypeError(f"needs {needs}", place, **{argument: shortened(value)})


def check_whole_number(
    place: str, argument: str, value: object, at_least: int = 1, below: int | None = None, *, or_none: bool = False
) -> None:
    """Reject anything but an integer in the range; booleans are not integers here.

    Args:
        place: the class or function that has the argument, for the message.
        argument: its name.
        value: what was passed.
        at_least: the smallest integer allowed.
        below: the smallest integer that is too large.
        or_none: whether None is allowed too.

    Raises:
        ConfigurationError: not such an integer.

    >>> check_whole_number("Checkpointer", "keep_last", 0)
    Traceback (most recent call last):
    ...
    pulsetrain.engine.errors.ConfigurationError: Checkpointer(keep_last=0): needs a whole number of at least 1
    """
    if (or_none and value is None) or (is_whole(value) and value >= at_least and (below is None or value < below)):
        return
    bound = "" if below is None else f" and below {below}"
    raise ConfigurationError(f"needs a whole number of at least {at_least}{bound}", place, **{argument: value})


def check_number(place: str, argument: str, value: object, at_least: float = 0.0, below: float = math.inf) -> None:
    """Reject anything but a finite number in the range.

    Raises:
        ConfigurationError: not such a number.
    """
    if isinstance(value, Real) and not isinstance(value, bool) and at_least <= float(value) < below:
        return
    wanted = f"finite number of at least {at_least:g}"
    if below < math.inf:
        wanted = f"number of at least {at_least:g} and below {below:g}"
    raise ConfigurationError(f"needs a {wanted}", place, **{argument: value})


def check_bool(place: str, argument: str, value: object) -> None:
    """Reject anything but True and False.

    Raises:
        ConfigurationError: neither.
    """
    if not isinstance(value, bool):
        raise ConfigurationError("needs True or False", place, **{argument: value})


def check_positive(place: str, argument: str, value: object, below: float = math.inf, *, or_none: bool = False) -> None:
    """Reject anything but a finite number above 0, or None where that is allowed.

    Raises:
        ConfigurationError: not such a number.
    """
    if or_none and value is None:
        return
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < below:
        bound = "" if below == math.inf else f" below {below:g}"
        raise ConfigurationError(f"needs a positive number{bound}", place, **{argument: value})


def check_choice(place: str, argument: str, value: object, choices: Iterable[str]) -> None:
    """Reject anything but one of the names.

    Raises:
        ConfigurationError: another name; the message lists the choices.

    >>> check_choice("BestModel", "mode", "best", ("min", "max"))
    Traceback (most recent call last):
    ...
    pulsetrain.engine.errors.ConfigurationError: BestModel(mode='best'): unknown; choose one of max, min
    """
    choices = list(choices)
    if value not in choices:
        raise unknown_name(place, argument, value, choices)


def answer_unknown_keywords(kind: type, remedies: Mapping[str, str] = MappingProxyType({})) -> None:
    """Let the class's own __init__ answer a keyword that it does not have with the nearest one, or with a remedy.

    >>> class Pen:
    ...     def __init__(self, color="black"): ...
    >>> answer_unknown_keywords(Pen, {"paint": "pass color=..."})
    >>> Pen(colour="red")
    Traceback (most recent call last):
    ...
    pulsetrain.engine.errors.ArgumentTypeError: Pen(colour='red'): is not an argument; did you mean 'color'?

    Args:
        kind: a class that defines __init__. If that takes any keyword, it is left as it is.
        remedies: keyword -> what to write in place of it.

    Raises, when an object is made: ArgumentTypeError.
    """
    make: Callable[..., None] = vars(kind)["__init__"]
    known = _accepted(make)
    if known is None:
        return

    @wraps(make)
    def __init__(self: object, *args: Any, **keywords: Any) -> None:  # noqa: N807
        try:
            if not keywords.keys() <= known:
                inherits = type(self).__init__ is __init__
                _refuse_unknown((type(self) if inherits else kind).__name__, keywords, known, remedies)
            make(self, *args, **keywords)
        except Exception as error:
            shorten_traceback(error)
            raise

    setattr(__init__, _REMEDIES, remedies)
    setattr(kind, "__init__", __init__)  # noqa: B010  # type checkers know the signature of the class


def remedies_of(kind: object) -> Mapping[str, str]:
    """The remedies for unknown keywords of a class, by keyword; none for any other object."""
    remedies: Mapping[str, str] = getattr(getattr(kind, "__init__", None), _REMEDIES, {})
    return remedies


def answers_unknown_keywords(
    place: Callable[[Any], str], remedies: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Method], Method]:
    """Let a method answer a keyword that it does not have with the nearest one, or with a remedy.

    >>> class Pen:
    ...     @answers_unknown_keywords(lambda pen: f"{type(pen).__name__}.draw", {"paint": "pass color=..."})
    ...     def draw(self, color="black"): ...
    >>> Pen().draw(paint="red")
    Traceback (most recent call last):
    ...
    pulsetrain.engine.errors.ArgumentTypeError: Pen.draw(paint='red'): is not an argument; pass color=...

    Args:
        place: the name of the method of an object, for the message.
        remedies: keyword -> what to write in place of it.

    Raises, when the method is called: ArgumentTypeError.
    """

    def decorate(method: Method) -> Method:
        known = _accepted(method) or frozenset()

        @wraps(method)
        def answer(self: Any, *args: Any, **keywords: Any) -> Any:  # what the method returns
            if not keywords.keys() <= known:
                try:
                    _refuse_unknown(place(self), keywords, known, remedies)
                except ArgumentTypeError as error:
                    shorten_traceback(error)
                    raise
            return method(self, *args, **keywords)

        return cast(Method, answer)

    return decorate


def _accepted(function: Callable[..., object]) -> frozenset[str] | None:
    """The names of the parameters after the first; None if it takes any keyword."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    return frozenset(list(parameters)[1:])


def _refuse_unknown(
    place: str, keywords: Mapping[str, object], known: frozenset[str], remedies: Mapping[str, str]
) -> NoReturn:
    name = next(name for name in keywords if name not in known)
    remedy = f"; {remedies[name]}" if name in remedies else did_you_mean(name, known)
    raise ArgumentTypeError(f"is not an argument{remedy}", place, **{name: keywords[name]})
