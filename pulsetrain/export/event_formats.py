"""Events as text: as lines of a table, of JSON or of CSV, and the words for errors, rows and counts."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice

import msgspec

from pulsetrain.engine.errors import unknown_name
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.log.records import Json

__all__ = ["FORMATS", "check_field", "field_value", "format_rows", "values_of"]

_FIELDS = LoggedEvent.__struct_fields__
_VALUES = ("output", "metrics", "payload", "lr", "error")
_TABLE = ("seq", "t", "engine", "event", "epoch", "iteration", "values")
_CSV = ("seq", "t", "ord", "engine", "event", "epoch", "iteration", "payload", "output", "metrics", "lr", "error")
_SAMPLE = 100  # rows that decide a table's widths: it is printed while it is read
_encode = msgspec.json.encode

Fields = Sequence[str] | None


def check_field(name: str) -> None:
    """Raise if no event can have this field, or this part of one, such as output.loss.

    Raises:
        ConfigurationError: there is no such field.
    """
    if name.partition(".")[0] not in _FIELDS:
        raise unknown_name("pulsetrain events", "--fields", name, _FIELDS)


def format_rows(rows: Sequence[object], limit: int = 16) -> str:
    """Rows of a batch, shortened.

    >>> format_rows([4, 2, 7], limit=2)
    'rows 4, 2 and 1 more'
    """
    more = f" and {len(rows) - limit} more" if len(rows) > limit else ""
    return f"rows {', '.join(map(str, rows[:limit]))}{more}"


def as_table(events: Iterator[LoggedEvent], fields: Fields, at_once: bool) -> Iterator[str]:
    """Aligned columns under a header; nothing if there are no events.

    Args:
        events: the events.
        fields: the columns; None for position, time and values.
        at_once: yield each line as soon as its event is read, with the widths of the first.
    """
    names = fields or _TABLE
    rows = ([_cell(event, name) for name in names] for event in events)
    sample = list(islice(rows, 1 if at_once else _SAMPLE))
    if not sample:
        return
    widths = [max(len(row[at]) for row in [names, *sample]) for at in range(len(names))]
    for row in (names, *sample):
        yield _line(row, widths)
    for row in rows:
        widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]
        yield _line(row, widths)


def as_json(events: Iterator[LoggedEvent], fields: Fields, at_once: bool) -> Iterator[str]:
    """One JSON object per line: the event, or the chosen fields."""
    for event in events:
        chosen = event if fields is None else {name: field_value(event, name) for name in fields}
        yield _encode(chosen).decode() + "\n"


def as_csv(events: Iterator[LoggedEvent], fields: Fields, at_once: bool) -> Iterator[str]:
    """A header, and one row per event; nested values as JSON."""
    names = fields or _CSV
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="\n")
    writer.writerow(names)
    yield line.getvalue()
    for event in events:
        line.seek(0)
        line.truncate()
        writer.writerow([_text(field_value(event, name)) for name in names])
        yield line.getvalue()


FORMATS: dict[str, Callable[[Iterator[LoggedEvent], Fields, bool], Iterator[str]]] = {
    "table": as_table,
    "json": as_json,
    "csv": as_csv,
}


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(padded).rstrip() + "\n"


def _cell(event: LoggedEvent, name: str) -> str:
    if name == "t":
        return datetime.fromtimestamp(event.t / 1e9, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    if name == "values":
        text = values_of(event)
    else:
        text = _text(field_value(event, name))
    return text if text.isprintable() else _encode(text).decode()


def values_of(event: LoggedEvent) -> str:
    """What the event carries.

    >>> values_of(LoggedEvent(output={"loss": 0.5}, lr=[0.1]))
    'output={"loss":0.5} lr=[0.1]'
    """
    values = {each: getattr(event, each) for each in _VALUES}
    return " ".join(f"{each}={_text(value)}" for each, value in values.items() if value is not None)


def _text(value: Json) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _encode(value).decode()


def field_value(event: LoggedEvent, name: str) -> Json:
    """A field, or a part of one; None if the event has none.

    >>> field_value(LoggedEvent(payload={"metrics": {"val/loss": 0.5}}), "payload.metrics.val/loss")
    0.5
    """
    field, _, rest = name.partition(".")
    value = getattr(event, field)
    return _part(value, rest) if rest else value


def _part(value: Json, path: str) -> Json:
    """The part at "a.b" of nested values; a key may contain dots itself."""
    if isinstance(value, list):
        index, _, rest = path.partition(".")
        if not index.isdecimal() or int(index) >= len(value):
            return None
        return _part(value[int(index)], rest) if rest else value[int(index)]
    if not isinstance(value, dict):
        return None
    if path in value:
        return value[path]
    at = path.find(".")
    while at >= 0:
        if path[:at] in value and (found := _part(value[path[:at]], path[at + 1 :])) is not None:
            return found
        at = path.find(".", at + 1)
    return None
