"""Errors that name the place, the value, the rule and the remedy. Each is also the builtin type it refines."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "MetricNotFoundError",
    "PulsetrainError",
    "RecordingError",
    "RunFolderError",
    "unknown_name",
]


class PulsetrainError(Exception):
    """Base of the errors that a user can mend; the command line prints them without a traceback."""


class ConfigurationError(PulsetrainError, ValueError):
    """A configuration value that cannot be used."""


class MetricNotFoundError(PulsetrainError, ValueError):
    """A handler waits for a metric that never comes."""


class RunFolderError(PulsetrainError, OSError):
    """A run folder that cannot be used: it holds another run, or cannot be written."""


class RecordingError(PulsetrainError, RuntimeError):
    """An event log that is damaged, of another format, or lacks what is asked of it."""


class CheckpointError(PulsetrainError, RuntimeError):
    """A checkpoint that is damaged, incomplete or does not fit."""


def unknown_name(place: str, argument: str, value: object, choices: Iterable[str]) -> ConfigurationError:
    """The error for a name that is not among the choices, with the nearest one as the remedy."""
    choices = sorted(choices)
    near = get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigurationError(f"{place}({argument}={value!r}): unknown; choose one of {', '.join(choices)}{hint}")
