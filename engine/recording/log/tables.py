"""Events as a table of pandas or Arrow, if these are installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.optional import load_optional
from pulsetrain.engine.recording.log.non_finite import NON_FINITE, parse_non_finite
from pulsetrain.engine.recording.log.records import Json, LoggedEvent

if TYPE_CHECKING:
    import pandas
    import pyarrow

__all__ = ["columns", "to_arrow", "to_pandas"]

_PLAIN = ("seq", "t", "ord", "engine", "event", "epoch", "iteration", "error", "open")
_NESTED = ("payload", "output", "metrics")  # `observed` is part of the payload by then


def to_pandas(events: Iterable[LoggedEvent]) -> pandas.DataFrame:
    """A DataFrame with a row for each event and the columns of `columns`; `t` is a time in UTC.

    All of it is in memory: select the events you need by `EventLog.read(engine=, event=, where=, ...)`.

    Raises:
        ConfigurationError: pandas is not installed.
    """
    pandas: Any = load_optional("to_pandas()", "pandas", "pandas")
    frame = pandas.DataFrame(columns(events))
    frame["t"] = pandas.to_datetime(frame["t"].astype("int64"), unit="ns", utc=True)
    return frame


def to_arrow(events: Iterable[LoggedEvent]) -> pyarrow.Table:
    """A pyarrow.Table with a row for each event and the columns of `columns`; `t` is a time in UTC.

    A column with values of several types holds their JSON text.

    Raises:
        ConfigurationError: pyarrow is not installed.
    """
    from json import dumps

    pyarrow: Any = load_optional("to_arrow()", "pyarrow", "arrow")
    arrays = {}
    for name, values in columns(events).items():
        if name == "t":
            arrays[name] = pyarrow.array(values, pyarrow.timestamp("ns", tz="UTC"))
            continue
        try:
            arrays[name] = pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):
            arrays[name] = pyarrow.array([None if value is None else dumps(value) for value in values])
    return pyarrow.table(arrays)


def columns(events: Iterable[LoggedEvent]) -> dict[str, list[Json]]:
    """The events' values by column; None if an event has no value there.

    Nested values have their own columns, such as "output.loss", "payload.metrics.val/loss" and "lr.0". The strings
    "NaN", "Infinity" and "-Infinity" become floats if all other values of their column are numbers. Other lists stay
    lists.

    >>> found = columns([LoggedEvent(output={"loss": 0.5}), LoggedEvent(output={"loss": "Infinity"})])
    >>> found["output.loss"]
    [0.5, inf]
    """
    found: dict[str, list[Json]] = {name: [] for name in _PLAIN}
    count = 0
    for event in events:
        for name in _PLAIN:
            found[name].append(getattr(event, name))
        for name, value in _values(event):
            column = found.setdefault(name, [])
            column += [None] * (count - len(column))
            column[count:] = [value]
        count += 1
    for name, column in found.items():
        column += [None] * (count - len(column))
        if name not in _PLAIN:
            found[name] = _numbers(column)
    return found


def _values(event: LoggedEvent) -> Iterator[tuple[str, Json]]:
    for name in _NESTED:
        value = getattr(event, name)
        if value is not None:
            yield from _flat(name, value)
    for index, rate in enumerate(event.lr or ()):
        yield f"lr.{index}", rate


def _flat(name: str, value: Json) -> Iterator[tuple[str, Json]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    else:
        yield name, value


def _numbers(column: list[Json]) -> list[Json]:
    """The column with floats in place of "NaN" and the infinities, if it holds only numbers besides."""
    if not any(type(value) is str and value in NON_FINITE for value in column):
        return column
    numbers = [parse_non_finite(value) for value in column]
    return numbers if all(value is None or type(value) in (int, float) for value in numbers) else column
