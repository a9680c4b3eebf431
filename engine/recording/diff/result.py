"""The result of comparing two logs, as values and as a printed report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from pulsetrain.engine.plain_text import format_count
from pulsetrain.engine.recording.diff.fields import ABSENT
from pulsetrain.engine.recording.diff.growth import Growth
from pulsetrain.engine.recording.log.records import Json, LoggedEvent

__all__ = ["Divergence", "LogDiff", "Missing", "describe_event", "field_table", "format_pair", "spans"]

_WIDTH = 40  # characters of a value in the report
_ROWS = 20  # of each table in the report


@dataclass(frozen=True)
class Divergence:
    """The first event that is in both logs and differs."""

    ord: int  # its number among the deterministic events, from 0
    a: LoggedEvent
    b: LoggedEvent
    fields: dict[str, tuple[Json, Json]]  # the fields that differ, such as "output.loss", with both values


@dataclass(frozen=True)
class Missing:
    """A range of events that one log lacks."""

    side: str  # "a" or "b": the one that lacks them
    first: int  # ord
    last: int
    event: LoggedEvent | None = None  # the first missing event; given for the first range only


@dataclass(frozen=True)
class LogDiff:
    """The differences of two logs; false if there are none, a report as text."""

    a: Path
    b: Path
    agreed: int  # deterministic events that agree before the first difference
    divergence: Divergence | None
    missing: tuple[Missing, ...]
    unread: int  # events of one log that the other may have lost: it is damaged, or was thinned
    environment: tuple[str, ...]  # how run.json differs, as "threads: 2 -> 1": a possible cause, not a difference
    damage: tuple[str, ...]  # of both logs, as far as they were read
    _measure: Callable[[], tuple[Growth, ...]] = field(repr=False, compare=False)
    fork: str | None = None  # a sentence, if one of the runs was forked from the other

    def __bool__(self) -> bool:
        return self.divergence is not None or bool(self.missing)

    def __str__(self) -> str:
        return self.report()

    @cached_property
    def growth(self) -> tuple[Growth, ...]:
        """How the values drift apart after the divergence; the first access reads the rest of both logs."""
        return self._measure()

    def report(self, *, growth: bool = True) -> str:
        """The comparison as text.

        Args:
            growth: include how the difference grows, for which the rest of both logs is read.
        """
        lines = [*([self.fork] if self.fork is not None else []), self._verdict()]
        if self.divergence is not None:
            lines.append(f"first difference: event {self.divergence.ord:,}, {describe_event(self.divergence.a)}")
            lines += field_table(self.divergence.fields, str(self.a), str(self.b))
        for each in self.missing[:_ROWS]:
            lines.append(f"missing in {self.a if each.side == 'a' else self.b}: {self._extent(each)}")
        if len(self.missing) > _ROWS:
            lines.append(f"and {len(self.missing) - _ROWS:,} more ranges")
        if self.unread:
            lines.append(f"not compared: {format_count(self.unread, 'event')} that one log has lost or thinned out")
        lines += [f"environment differs: {each}" for each in self.environment]
        lines += [f"damage: {each}" for each in self.damage]
        if growth:
            lines += _growth_table(self.growth)
        return "\n".join(lines)

    def _extent(self, missing: Missing) -> str:
        """How many events are missing, and which, if the numbers of the events say that."""
        count = format_count(missing.last - missing.first + 1, "event")
        if self.divergence is not None and self.divergence.ord < missing.first:  # the events before may differ in kind
            return f"{count}, as counted after the first difference"
        first = f"; the first is {describe_event(missing.event)}" if missing.event else ""
        return f"{count}, {missing.first:,} to {missing.last:,}{first}"

    def as_dict(self, *, growth: bool = True) -> dict[str, Json]:
        """The comparison as plain values for JSON; a field that is absent on a side is left out there.

        Args:
            growth: as in `report`.
        """
        found: dict[str, Json] = {
            "equal": not self,
            "a": str(self.a),
            "b": str(self.b),
            "agreed": self.agreed,
            "divergence": None,
            "missing": msgspec.to_builtins(self.missing),
            "unread": self.unread,
            "environment": list(self.environment),
            "fork": self.fork,
            "damage": list(self.damage),
        }
        if self.divergence is not None:
            sides = {
                name: {side: value for side, value in zip("ab", values, strict=True) if value is not ABSENT}
                for name, values in self.divergence.fields.items()
            }
            events = {"a": msgspec.to_builtins(self.divergence.a), "b": msgspec.to_builtins(self.divergence.b)}
            found["divergence"] = {"ord": self.divergence.ord, "fields": sides, **events}
        if growth:
            found["growth"] = {
                each.name: [
                    {"first": first, "last": last, "largest": value if value < float("inf") else "Infinity"}
                    for (first, last), value in each.largest.items()
                ]
                for each in self.growth
            }
        return found

    def _verdict(self) -> str:
        if self.divergence is not None:
            return f"{self.a} and {self.b} differ after {format_count(self.agreed, 'event')} that agree"
        if self.missing:
            return f"{self.a} and {self.b} agree in {self.agreed:,} deterministic events, but do not hold the same ones"
        return f"{self.a} and {self.b} agree: {self.agreed:,} deterministic events"


def describe_event(event: LoggedEvent) -> str:
    """The event in words.

    >>> describe_event(LoggedEvent(engine="trainer", event="started"))
    "trainer's started at epoch 0, iteration 0"
    """
    return f"{event.engine}'s {event.event} at epoch {event.epoch}, iteration {event.iteration}"


def spans(ranks: Iterable[int]) -> str:
    """Ranks in their order, as text: three or more that follow each other as the first and the last.

    >>> spans([0, 1]), spans([0, 1, 2, 5, 7, 8, 9])
    ('0, 1', '0 to 2, 5, 7 to 9')
    """
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][-1] == rank - 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    return ", ".join(f"{each[0]} to {each[-1]}" if len(each) > 2 else ", ".join(map(str, each)) for each in found)


def field_table(fields: Mapping[str, tuple[Json, Json]], a: str, b: str) -> Iterator[str]:
    """The lines of a table of fields with both sides' values."""
    rows = [("", a, b, "")]
    for name, (x, y) in fields.items():
        rows.append((name, *format_pair(x, y), _apart(x, y)))
    yield from _aligned(rows[: _ROWS + 1])
    if len(rows) > _ROWS + 1:
        yield f"  and {len(rows) - _ROWS - 1:,} more fields"


def _growth_table(growth: Sequence[Growth]) -> Iterator[str]:
    if not growth:
        return
    bounds = sorted({bounds for each in growth for bounds in each.largest})
    heads = [f"{first:,}" if first == last else f"{first:,}-{last:,}" for first, last in bounds]
    rows = [("", *heads)]
    by_size = sorted(growth, key=lambda each: -max(each.largest.values()))
    for each in by_size[:_ROWS]:
        rows.append((each.name, *(f"{each.largest[b]:.3g}" if b in each.largest else "-" for b in bounds)))
    yield "largest difference, by iterations after the first one:"
    yield from _aligned(rows)
    if len(growth) > _ROWS:
        yield f"  and {len(growth) - _ROWS:,} more values"


def _aligned(rows: Sequence[Iterable[str]]) -> Iterator[str]:
    rows = [list(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        yield ("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))).rstrip()


def format_pair(x: Json, y: Json) -> tuple[str, str]:
    """Two values as JSON; of long ones, 40 characters around the first that differs.

    >>> format_pair({"names": ["a long list", "of names", "one"]}, {"names": ["a long list", "of names", "two"]})
    ('...ist","of names","one"]}', '...ist","of names","two"]}')
    """
    texts = _as_text(x), _as_text(y)
    equal = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(equal - _WIDTH // 2, 0) if max(map(len, texts)) > _WIDTH else 0
    return _shortened(texts[0], start), _shortened(texts[1], start)


def _as_text(value: Json) -> str:
    return str(value) if value is ABSENT else msgspec.json.encode(value).decode()


def _shortened(text: str, start: int) -> str:
    rest = f"...{text[start + 3 :]}" if start > 3 else text
    return rest if len(rest) <= _WIDTH else rest[: _WIDTH - 3] + "..."


def _apart(x: object, y: object) -> str:
    return f"{abs(x - y):.3g} apart" if type(x) is float and type(y) is float else ""
