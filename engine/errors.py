"""Errors that name the place, the argument, its value, the rule and the remedy; each is also the builtin it refines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Self

__all__ = [
    "ArgumentTypeError",
    "CheckpointError",
    "ConfigurationError",
    "MetricNotFoundError",
    "PeerFailed",
    "PulsetrainError",
    "RecordingError",
    "RunFolderError",
    "did_you_mean",
    "nearest",
    "raised_by",
    "refused",
    "shortened",
    "unknown_name",
]

UNKNOWN: Final = ...  # a value that a message leaves out


def _shown(value: object) -> str:
    """A value as Python writes it; a class by its name, also in a list."""
    if value is UNKNOWN:
        return "..."
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_shown(each)}' for key, each in value.items())}}}"
    return repr(value)


def _text(rule: str, place: str, arguments: Mapping[str, object], show: Callable[[object], str]) -> str:
    given = []
    for argument, value in arguments.items():
        text = argument if value is UNKNOWN else f"{argument}={show(value)}"
        if f"{{{argument}}}" in rule:
            rule = rule.replace(f"{{{argument}}}", text)
        else:
            given.append(text)
    listed = ", ".join(given)
    head = f"{place}({listed})" if place else listed
    return f"{head}: {rule}" if head else rule


class PulsetrainError(Exception):
    """Base of the errors that a user can fix; the command line prints them without a traceback.

    An error that knows its argument can be worded again, under the name by which the user knows that argument.

    Args:
        rule: what is wrong and what to do. `{name}` in it is one of the arguments.
        place: the class or function that rejects the argument.
        arguments: the argument with its value, and others that take part; the rule mentions them, or they are listed
            after the first. A value of `...` is left out of the message.

    >>> error = ConfigurationError("is above {peak}", "Cosine", floor=0.5, peak=0.1)
    >>> print(error)
    Cosine(floor=0.5): is above peak=0.1
    >>> error.argument, error.value
    ('floor', 0.5)
    >>> print(error.reworded(lambda name, value: (f"training.{name}", value)))
    training.floor=0.5: is above training.peak=0.1
    """

    rule: str
    place: str
    arguments: dict[str, object]

    def __init__(self, rule: str = "", place: str = "", /, **arguments: object) -> None:
        self.rule, self.place, self.arguments = rule, place, arguments
        super().__init__(_text(rule, place, arguments, _shown))

    @property
    def argument(self) -> str | None:
        """The name of the rejected argument; None where the error is about something else."""
        return next(iter(self.arguments), None)

    @property
    def value(self) -> object:
        """The rejected value."""
        return next(iter(self.arguments.values()), None)

    def reworded(
        self,
        rename: Callable[[str, object], tuple[str, object]],
        show: Callable[[object], str] | None = None,
        place: str = "",
    ) -> Self:
        """The same error with another place and other names for the arguments; it can be reworded again.

        Args:
            rename: gives the new name and value for the name and value of an argument. Mappings that get the same name
                become one.
            show: gives the text of a value; by default as Python writes it.
            place: in place of the error's own.
        """
        arguments: dict[str, object] = {}
        names: dict[str, str] = {}
        for argument, value in self.arguments.items():
            name, given = rename(argument, value)
            before = arguments.get(name)
            if isinstance(before, dict) and isinstance(given, dict):
                given = {**before, **given}
            arguments[name], names[argument] = given, name
        rule = re.sub(r"\{([^{}]+)\}", lambda found: f"{{{names.get(found[1], found[1])}}}", self.rule)
        error = self.with_text(_text(rule, place, arguments, show or _shown))
        error.rule, error.place, error.arguments = rule, place, arguments
        return error

    def with_text(self, text: str) -> Self:
        """The same error with another text; arguments and notes stay."""
        error = type(self)(text)
        error.arguments = self.arguments
        for note in getattr(self, "__notes__", ()):
            error.add_note(note)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return (
            type(self),
            self.args,
            {**vars(self), "arguments": {name: _picklable(each) for name, each in self.arguments.items()}},
        )


class ConfigurationError(PulsetrainError, ValueError):
    """A value that cannot be used."""


class ArgumentTypeError(PulsetrainError, TypeError):
    """A value of the wrong type."""


class MetricNotFoundError(PulsetrainError, ValueError):
    """A handler waits for a metric that is never reported."""


class RunFolderError(PulsetrainError, OSError):
    """A run folder that cannot be used: it holds another run, or cannot be written."""


class RecordingError(PulsetrainError, RuntimeError):
    """An event log that is damaged, has an unknown format, or lacks what was asked for."""


class CheckpointError(PulsetrainError, RuntimeError):
    """A checkpoint that is damaged, incomplete or does not fit."""


class PeerFailed(PulsetrainError, RuntimeError):  # noqa: N818  # the name says what happened, and to whom
    """Another process of the run has failed, or has not come to where all processes meet."""


def unknown_name(place: str, argument: str, value: object, choices: Iterable[str]) -> ConfigurationError:
    """The error for a name that is not among the choices, with the nearest one as the remedy.

    >>> print(unknown_name("create_optimizer", "name", "adamv", ["adamw", "sgd"]))
    create_optimizer(name='adamv'): unknown; choose one of adamw, sgd; did you mean 'adamw'?
    """
    choices = sorted(choices)
    rule = f"unknown; choose one of {', '.join(choices)}{did_you_mean(value, choices)}"
    return ConfigurationError(rule, place, **{argument: value})


def refused(owner: object, rule: str, *arguments: str) -> ConfigurationError:
    """The error for an argument that the owner keeps under its name, and others that take part.

    >>> from fractions import Fraction
    >>> print(refused(Fraction(1, 2), "is below {denominator}", "numerator", "denominator"))
    Fraction(numerator=1): is below denominator=2
    """
    return ConfigurationError(rule, type(owner).__name__, **{name: getattr(owner, name) for name in arguments})


@contextmanager
def raised_by(
    place: str, rename: Callable[[str, object], tuple[str, object]] = lambda argument, value: (argument, value)
) -> Iterator[None]:
    """Within the block, an error names this place in place of the function that rejects the argument.

    >>> with raised_by("DPOStrategy"):
    ...     raise ConfigurationError("needs a positive number", "dpo_loss", beta=-1)
    Traceback (most recent call last):
    pulsetrain.engine.errors.ConfigurationError: DPOStrategy(beta=-1): needs a positive number

    Args:
        place: the class or function to which the user gave the arguments.
        rename: as of `PulsetrainError.reworded`.
    """
    try:
        yield
    except PulsetrainError as error:
        raise error.reworded(rename, place=place).with_traceback(error.__traceback__) from error.__cause__


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """The end of a message that names the nearest choice, whatever its case; "" where none is near."""
    near = nearest(name, choices)
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest(name: object, choices: Iterable[str], most: int = 1) -> list[str]:
    """The choices that are most like a name, whatever their case, the nearest first.

    >>> nearest("Val/loss", ["train/loss", "val/loss", "epoch"], 2)
    ['val/loss', 'train/loss']
    """
    from difflib import get_close_matches  # here: it is for errors alone

    lower = {choice.lower(): choice for choice in choices}
    return [lower[each] for each in get_close_matches(str(name).lower(), lower, n=most)]


def shortened(value: object) -> object:
    """The value, or its class where its text is long, takes several lines or is an address, for a message.

    >>> shortened([1, 2]), shortened(list(range(100)))
    ([1, 2], <class 'list'>)
    """
    text = repr(value)
    return value if len(text) < 60 and "\n" not in text and " object at 0x" not in text else type(value)


def _picklable(value: object) -> object:
    import pickle  # here: it is for errors alone

    try:
        pickle.dumps(value)
    except Exception:  # pickle raises whatever the object's own methods raise
        return repr(value)
    return value
