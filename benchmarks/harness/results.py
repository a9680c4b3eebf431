"""What every benchmark reports: rows of one shape, as a table and as JSON, and which of their bounds hold."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.harness.machine import Load, Watch, describe_machine, own_seconds_until_now

__all__ = [
    "HOLDS", "MISSED", "NOT_MEASURED", "UNBOUNDED", "Kind", "Report", "Row", "make_parser", "number", "ratios",
    "report", "status", "table",
]  # fmt: skip

Kind = Literal["ratio", "absolute", "size"]

HOLDS, MISSED, NOT_MEASURED, UNBOUNDED = "holds", "missed", "not measured", ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure and its bound.

    A ratio compares two measurements of one run, which took turns; so the machine's load affects both. An absolute
    figure is a time or a rate, and is compared with its bound only on an idle machine. If that is slower than the one
    that the bounds were set on, a bound can hold but not be missed. A size (bytes, memory) does not depend on the load.
    """

    name: str
    measured: float  # the median of the rounds; NaN if the run does not determine it
    kind: Kind
    unit: str = ""
    least: float | None = None
    most: float | None = None
    bound: float | None = None
    goal: float | None = None  # a stricter value than the bound, which is shown and not checked: not reached yet
    at_least: bool = False  # whether bound and goal are the smallest good values; otherwise they are the largest
    also: Mapping[str, float] = field(default_factory=dict)  # further columns of the table, without bounds

    def verdict(self, load: Load, slack: float = 1.0) -> str:
        """Whether the bound holds.

        Args:
            load: of the machine, meanwhile.
            slack: how many times a ratio may exceed its bound.
        """
        if self.bound is None:
            return UNBOUNDED
        factor = slack if self.kind == "ratio" else 1.0
        return self._compared(self.bound / factor if self.at_least else self.bound * factor, load)

    @property
    def limit(self) -> str:
        """The bound with its direction; empty if there is none."""
        return "" if self.bound is None else f"{self._direction} {self.bound:,.9g}"

    def open_goal(self, load: Load) -> str:
        """The goal with what is known of it, unless it was reached; else empty."""
        verdict = HOLDS if self.goal is None else self._compared(self.goal, load)
        return "" if verdict == HOLDS else f"goal {self._direction} {self.goal:,.9g} {verdict}"

    @property
    def _direction(self) -> str:
        return ">=" if self.at_least else "<="

    def _compared(self, value: float, load: Load) -> str:
        absolute = self.kind == "absolute"
        if math.isnan(self.measured) or (absolute and not load.is_idle):
            return NOT_MEASURED
        if self.measured >= value if self.at_least else self.measured <= value:
            return HOLDS
        return NOT_MEASURED if absolute and load.is_slow else MISSED


@dataclass(frozen=True, kw_only=True)
class Report:
    """The rows of one run of a benchmark."""

    benchmark: str
    title: str
    command: str
    rows: Sequence[Row]
    load: Load
    notes: Sequence[str] = ()
    date: str = ""
    machine: str = ""

    def verdicts(self, slack: float = 1.0) -> list[tuple[Row, str]]:
        """Each row with its verdict."""
        return [(row, row.verdict(self.load, slack)) for row in self.rows]

    def to_json(self) -> str:
        """One JSON object in one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is not a report.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            rows = [Row(**row) for row in values.pop("rows")]
            return cls(**{**values, "load": Load(**values.pop("load")), "rows": rows})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not the report of a benchmark: {error}") from error


def status(verdicts: Sequence[str]) -> int:
    """The exit status: 0 all bounds hold, 1 a bound is missed, 3 none is missed but some were not measured."""
    return 1 if MISSED in verdicts else 3 if NOT_MEASURED in verdicts else 0


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The median, least and most of the ratios of the rounds: the values of a Row."""
    found = [ours / peer for ours, peer in zip(mine, theirs, strict=True)]
    return {"measured": statistics.median(found), "least": min(found), "most": max(found)}


def make_parser(benchmark: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`, for a benchmark's further options."""
    first, _, rest = (doc or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {benchmark}",
        description=first + rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(benchmark=benchmark)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def report(
    options: argparse.Namespace,
    title: str,
    measure: Callable[[], tuple[Sequence[Row], Sequence[str]]],
    helpers: Callable[[], float] = lambda: 0.0,
) -> int:
    """Measure, print, and return the exit status.

    Args:
        options: parsed by a parser from `make_parser`.
        title: what the rows have in common, such as the size of the log.
        measure: returns the rows, and notes such as which frameworks are absent.
        helpers: returns the processor time, in seconds, of processes that nobody waits for, such as a browser's.
    """
    watch = Watch(own_seconds=lambda: own_seconds_until_now() + helpers())
    rows, notes = measure()
    words = [word for word in sys.argv[1:] if word != "--json"]
    made = Report(
        benchmark=options.benchmark,
        title=title,
        command=shlex.join(["python", "-m", "benchmarks", options.benchmark, *words]),
        rows=list(rows),
        load=watch.load(),
        notes=list(notes),
        date=time.strftime("%Y-%m-%d"),
        machine=describe_machine(),
    )
    print(made.to_json() if options.json else table(made))
    return status([verdict for _, verdict in made.verdicts()])


def table(found: Report, rows: Sequence[str] | None = None) -> str:
    """The rows in columns of text, then notes and load; `rows` selects some by their names, in this order."""
    chosen = found.verdicts()
    if rows is not None:
        by_name = {row.name: (row, verdict) for row, verdict in chosen}
        chosen = [by_name[name] for name in rows if name in by_name]
    extra = list(dict.fromkeys(name for row, _ in chosen for name in row.also))
    spread = any(row.least is not None for row, _ in chosen)
    bounded = any(row.bound is not None or row.goal is not None for row, _ in chosen)
    heads = [found.title, "measured", *(["least", "most"] if spread else []), *extra]
    lines = [[*heads, *(["bound", ""] if bounded else [])]]
    for row, verdict in chosen:
        cells = [f"{row.name}, {row.unit}" if row.unit else row.name, number(row.measured)]
        cells += [number(row.least), number(row.most)] if spread else []
        cells += [number(row.also.get(name)) for name in extra]
        said = "" if verdict == HOLDS else verdict
        goal = row.open_goal(found.load)
        goal = goal.removesuffix(verdict).rstrip() if said else goal
        lines.append([*cells, *([row.limit, "  ".join(filter(None, [said, goal]))] if bounded else [])])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [_aligned(line, widths) for line in lines]
    return "\n".join([*text, *found.notes, str(found.load)])


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if number == 0 else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


def number(value: float | None) -> str:
    """A figure as the tables show it."""
    if value is None:
        return ""
    if math.isnan(value):
        return "?"
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text and float(value).is_integer() else text
