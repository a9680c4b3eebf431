"""The timeline of a report: a row for each kind of event, and in it a line of marks for each run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from pulsetrain.report.marks import ROWS, Mark
from pulsetrain.report.reported_run import ReportedRun

__all__ = [
    "ALARM", "INK", "Plotly", "Row", "legend", "plain", "timeline_axis", "timeline_bands", "timeline_height",
    "timeline_margin", "timeline_rows", "timeline_traces",
]  # fmt: skip

Plotly: TypeAlias = dict[str, Any]  # a figure, or a part of one, in the form that plotly validates

INK, ALARM = "#1f2937", "#dc2626"
SYMBOLS = dict(zip(ROWS, ("triangle-right", "line-ns", "triangle-up", "circle", "square", "x"), strict=True))
CUSTOM = "hexagon"
KINDS = {  # of marks: plotly's symbol, a character like it, and what it means
    "completed": ("circle", "●", "completed"),
    "stopped": ("square", "■", "stopped"),
    "failed": ("x", "✖", "failed"),
    "fork": ("diamond", "◆", "forked"),
    "best": ("star", "★", "the best checkpoint so far"),
}
LONGEST = 22  # characters of a row's name
LANE, LANE_GAP, CHARACTER = 13, 14, 6  # pixels


class Row(NamedTuple):
    """A row of the timeline."""

    name: str
    symbol: str  # of marks without a kind
    marks: list[list[Mark]]  # of each run

    @property
    def is_alarm(self) -> bool:
        """Whether it is the row of the anomalies."""
        return self.symbol == SYMBOLS["anomalies"]


def timeline_rows(runs: Sequence[ReportedRun]) -> list[Row]:
    """The rows that have marks, and the first one in any case; those of users' own events are last."""
    found = [Row(name, SYMBOLS[name], [[*run.record.marks[name]] for run in runs]) for name in ROWS]
    for run, marks in zip(runs, found[0].marks, strict=True):
        if run.facts.parent is not None:
            marks.append(_fork_mark(run))
    for event in dict.fromkeys(event for run in runs for event in run.record.custom):
        name = event if len(event) <= LONGEST else f"{event[: LONGEST - 3]}..."
        found.append(Row(name, CUSTOM, [[*run.record.custom.get(event, ())] for run in runs]))
    return [found[0], *(row for row in found[1:] if any(row.marks))]


def legend(rows: Sequence[Row]) -> str:
    """What the symbols mean, of those that the name of the row does not explain."""
    kinds = {mark.kind for row in rows for marks in row.marks for mark in marks}
    meanings = [f"{character} {meaning}" for kind, (_, character, meaning) in KINDS.items() if kind in kinds]
    return "    ".join(["▶ started or resumed", *meanings])


def timeline_height(rows: Sequence[Row], runs: int) -> int:
    """In pixels."""
    return len(rows) * _lane(runs)


def timeline_margin(rows: Sequence[Row]) -> int:
    """The pixels that the names of the rows need."""
    return CHARACTER * max(len(row.name) for row in rows) + 4


def timeline_traces(runs: Sequence[ReportedRun], rows: Sequence[Row]) -> Iterator[Plotly]:
    """The marks, the line from the start of each run to its end, and the runs in the legend."""
    for number, run in enumerate(runs):
        key = {"type": "scatter", "name": plain(run.name), "legendgroup": run.name, "xaxis": "x", "yaxis": "y"}
        line = {"color": run.color, "width": 3}
        yield {**key, "mode": "lines", "x": [None], "y": [None], "line": line, "hoverinfo": "skip"}
        first, last = run.record.first_iteration or 0, run.record.iteration
        for index, row in enumerate(rows):
            level = _level(index, number, len(runs))
            if index == 0:
                life = {"mode": "lines", "x": [first, last], "y": [level, level], "line": {**line, "width": 2}}
                yield {**key, **life, "showlegend": False, "hoverinfo": "skip", "opacity": 0.35}
            if not row.marks[number]:
                continue
            at, texts, kinds = _grouped(row.marks[number])
            yield {
                **key,
                "mode": "markers",
                "showlegend": False,
                "x": at,
                "y": [level] * len(at),
                "hovertext": texts,
                "hovertemplate": "%{hovertext}  <i>at %{x:,d}</i>",
                "marker": {
                    "symbol": [KINDS[kind][0] if kind else row.symbol for kind in kinds],
                    "size": [11 if kind else 9 for kind in kinds],
                    "color": run.color,
                    "opacity": 1,
                    "line": {"color": run.color, "width": 1.5 if row.symbol == "line-ns" else 0},
                },
            }


def _grouped(marks: Sequence[Mark]) -> tuple[list[int], list[str], list[str]]:
    """The marks by iteration: iterations, texts, and kinds."""
    at, texts, kinds = [], [], []
    for iteration, same in groupby(sorted(marks, key=lambda mark: mark.iteration), key=lambda mark: mark.iteration):
        found = {str(mark): mark.kind for mark in same}
        at.append(iteration)
        texts.append(_wrapped("; ".join([*found][:12])))
        kinds.append(next(filter(None, reversed(found.values())), ""))
    return at, texts, kinds


def _fork_mark(run: ReportedRun) -> Mark:
    parent = run.facts.parent or {}
    at, changed = run.fork_iteration, parent.get("changed")
    text = f"forked from {parent.get('run')}" + (f": {'; '.join(map(str, changed))}" if changed else "")
    return Mark(at, text, at, kind="fork")


def _lane(runs: int) -> int:
    return LANE * runs + LANE_GAP


def _level(row: int, run: int, runs: int) -> float:
    """The height of a run's marks: each row of the timeline is a lane of height 1 with a line for each run."""
    return row + (LANE_GAP / 2 + (run + 0.5) * LANE) / _lane(runs)


def timeline_axis(rows: Sequence[Row], domain: list[float]) -> Plotly:
    """The axis with the names of the rows."""
    names = [f'<span style="color:{ALARM}">{row.name}</span>' if row.is_alarm else plain(row.name) for row in rows]
    return {
        "anchor": "x",
        "domain": domain,
        "range": [len(rows), 0],
        "tickvals": [index + 0.5 for index in range(len(rows))],
        "ticktext": names,
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
        "tickfont": {"size": 11, "color": INK},
    }


def timeline_bands(rows: Sequence[Row]) -> Iterator[Plotly]:
    """The background of each row."""
    for index, row in enumerate(rows):
        color = "#fef2f2" if row.is_alarm else "#f9fafb" if index % 2 == 0 else "#ffffff"
        box = {"xref": "x domain", "yref": "y", "x0": 0, "x1": 1, "y0": index, "y1": index + 1}
        yield {"type": "rect", **box, "fillcolor": color, "line": {"width": 0}, "layer": "below"}


def plain(text: str) -> str:
    """Escaped, since plotly interprets some tags and entities."""
    return escape(text, quote=False)


def _wrapped(text: str) -> str:
    short = textwrap.shorten(text, 400, placeholder=" ...") if len(text) > 400 else text
    return "<br>".join(plain(line) for line in textwrap.wrap(short, 90) or [""])
