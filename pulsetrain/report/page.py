"""The page around the figure: a card for each run with its ending, the best values, settings and environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from pulsetrain.engine.durations import duration
from pulsetrain.engine.metric_words import mode_of
from pulsetrain.engine.recording.diff.result import describe_event
from pulsetrain.engine.recording.diff.sides import Side
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.report.curve import Curve
from pulsetrain.report.facts import ABSENT, Row, compared, settings_of
from pulsetrain.report.reported_run import ReportedRun
from pulsetrain.report.style import document

__all__ = ["page_of"]

SHOWN_DAMAGE = 12
SHORT = 8  # rows of best values: a longer table is folded
STATES = {"completed": "completed", "stopped": "stopped", "failed": "failed", "open": "not ended"}


def page_of(runs: Sequence[ReportedRun], chart: str) -> str:
    """The whole page.

    Args:
        runs: the runs.
        chart: the figure as HTML, with the script that draws it.
    """
    title = f"Report: {', '.join(run.name for run in runs)}"
    made = f"{datetime.now().astimezone():%Y-%m-%d %H:%M}"
    sections = [
        *_damage(runs),
        f'<div class="cards">{"".join(_card(run, runs) for run in runs)}</div>',
        *_best(runs),
        *_processes(runs),
        *_texts(runs),
        f'<section class="chart"><p class="hint">{HINT}</p>{chart}</section>',
        _table("Configuration", runs, compared(settings_of([run.facts for run in runs]))),
        _table("Environment", runs, compared([run.facts.environment for run in runs])),
    ]
    header = f'<h1>{escape(title)}</h1><p class="made">written {made}</p>'
    return document(title, header, "\n".join(sections))


HINT = (
    "Drag over any chart to zoom all charts; double-click to reset. Click a run in the legend to hide it; double-click "
    "it to show only that run."
)


def _damage(runs: Sequence[ReportedRun]) -> Iterator[str]:
    found = [(run.name, damage) for run in runs for damage in run.damage]
    if found:
        items = "".join(f"<li><b>{escape(name)}</b>: {escape(damage)}</li>" for name, damage in found[:SHOWN_DAMAGE])
        if len(found) > SHOWN_DAMAGE:
            items += f"<li>and {len(found) - SHOWN_DAMAGE:,} more parts</li>"
        yield f'<div class="damage"><b>The log is damaged; these parts are missing below:</b><ul>{items}</ul></div>'


def _card(run: ReportedRun, runs: Sequence[ReportedRun]) -> str:
    record, facts = run.record, run.facts
    state, why = record.ending or ("open", "still running, killed, or the log was cut off")
    at = f"epoch {record.epoch:,}, iteration {record.iteration:,}"
    rows = [("ended" if record.ending else "last event", f"{at}: {why}" if record.ending else f"{at}; {why}")]
    if record.times is not None:
        first, last = (datetime.fromtimestamp(each / 1e9, UTC).astimezone() for each in record.times)
        rows.append(("time", f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}, {_duration(record.times)}"))
    if facts.starts > 1:
        rows.append(("started", f"{facts.starts} times"))
    if facts.parent is not None:
        rows.append(("parent", _lineage(facts.parent, runs)))
    rows.append(
        ("events", f"{len(record.log):,}, of which {len(Side(record.log)):,} are deterministic (see pulsetrain diff)")
    )
    rows.append(("folder", record.log.run.name))
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return (
        f'<article style="border-top-color:{run.color}"><h2><i style="background:{run.color}"></i>'
        f'{escape(run.name)} <span class="{state}">{STATES[state]}</span></h2><dl>{listed}</dl></article>'
    )


def _lineage(parent: Mapping[str, Json], runs: Sequence[ReportedRun]) -> str:
    """The run that this one was forked from; by its name in the report if it has one."""
    folder, by_id = str(parent["run"]), {run.facts.id: run.name for run in runs if run.facts.id}
    by_folder = {str(run.record.folder.resolve()): run.name for run in runs}
    name = by_id.get(str(parent.get("id"))) or by_folder.get(folder, folder)  # it may have been moved
    iteration = parent.get("iteration")
    at = f" at iteration {iteration:,}" if isinstance(iteration, int) else ""
    settings = parent.get("changed")
    changed = f"; changed: {'; '.join(map(str, settings))}" if isinstance(settings, list) and settings else ""
    return f"forked from {name}{at}{changed}"


def _best(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """A table of the best value of each validation and rollout metric; the best of all runs is marked."""
    validated = dict.fromkeys(name for run in runs for name in run.record.validated)
    names = validated | dict.fromkeys(name for run in runs for name in run.record.rolled_out)
    rows = []
    for name in names:
        for which in _directions(name, runs):
            found = [_extreme(run.record.curves.get(name), which) for run in runs]
            values = [value for value, _ in filter(None, found)]
            if not values:
                continue
            top = min(values) if which == "lowest" else max(values)
            cells = "".join(_best_cell(each, top, len(runs)) for each in found)
            rows.append(f'<tr><th scope="row">{escape(name)} <small>{which}</small></th>{cells}</tr>')
    if rows:
        title = "Best validation values" if len(names) == len(validated) else "Best values"
        yield _folded(title, _grid(_heads(runs), rows, "best"), open=len(rows) <= SHORT)


def _processes(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Of each run of several processes: a table of them, and what they say together."""
    heads = "".join(f'<th scope="col">{each}</th>' for each in ("host", "last event", "", "step", "waiting for data"))
    for run in runs:
        found = run.processes
        if found is None:
            continue
        rows = []
        for each in found.each:
            last = ABSENT if each.position is None else describe_event(each.position.event)
            times = _milliseconds(each.step), _milliseconds(each.loading)
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in (each.host or ABSENT, last, each.state, *times))
            marked = " class=differs" if each.is_waited_for or each.position is None else ""
            rows.append(f'<tr{marked}><th scope="row">rank {each.rank}</th>{cells}</tr>')
        alarms = {"first error": found.error, "diverged": found.diverged}
        alarms |= {} if found.agree else {"logs": found.agreement}
        agreed = f"<dt>logs</dt><dd>{escape(found.agreement)}</dd>" if found.agree else ""
        listed = agreed + "".join(
            f"<dt>{name}</dt><dd class=failed>{escape(text)}</dd>" for name, text in alarms.items() if text
        )
        title = "Processes" if len(runs) == 1 else f"Processes of {escape(run.name)}"
        yield _folded(title, f'{_grid(heads, rows)}<dl class="processes">{listed}</dl>')


def _texts(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """The latest texts of each run, such as sampled completions with their rewards."""
    for run in runs:
        rows = [
            f'<tr><th scope="row">{escape(name)} <small>at {iteration:,}</small></th><td>{escape(text)}</td></tr>'
            for name, (iteration, text) in run.record.texts.items()
        ]
        if rows:
            title = "Texts" if len(runs) == 1 else f"Texts of {escape(run.name)}"
            yield _folded(title, _grid("<th></th>", rows, "texts"), open=len(rows) <= SHORT)


def _milliseconds(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{1e3 * seconds:,.1f} ms"


def _best_cell(found: tuple[float, int] | None, top: float, runs: int) -> str:
    if found is None:
        return f"<td>{ABSENT}</td>"
    value, at = found
    mark = ' class="top"' if runs > 1 and value == top else ""
    return f"<td{mark}>{value:.6g} <small>at {at:,}</small></td>"


def _directions(name: str, runs: Sequence[ReportedRun]) -> tuple[str, ...]:
    """Which values are the best, as the runs have decided; by the name if none has."""
    modes = {mode_of(name, run.facts.modes) for run in runs if name in run.record.curves}
    if len(modes) == 1 and None not in modes:
        return ("lowest",) if modes == {"min"} else ("highest",)
    return ("lowest", "highest")


def _extreme(curve: Curve | None, which: str) -> tuple[float, int] | None:
    if curve is None:
        return None
    return curve.least if which == "lowest" else curve.greatest


def _table(title: str, runs: Sequence[ReportedRun], rows: Sequence[Row]) -> str:
    if not rows:
        return f'<section><h2>{title}</h2><p class="hint">Not in the run folder.</p></section>'
    differing = sum(row.differs for row in rows)
    equal = f"all {len(rows)} are equal"
    difference = f"{differing} of {len(rows)} differ and are listed first" if differing else equal
    note = f" <small>{difference}</small>" if len(runs) > 1 else ""
    body = [
        f'<tr{" class=differs" if row.differs else ""}><th scope="row">{escape(row.key)}</th>'
        + "".join(f"<td>{escape(value)}</td>" for value in row.values)
        + "</tr>"
        for row in rows
    ]
    return _folded(title + note, _grid(_heads(runs), body))


def _folded(title: str, content: str, open: bool = True) -> str:
    shown = " open" if open else ""
    return f"<section><details{shown}><summary><h2>{title}</h2></summary>{content}</details></section>"


def _grid(heads: str, rows: Sequence[str], kind: str = "settings") -> str:
    head, body = f"<thead><tr><th></th>{heads}</tr></thead>", f"<tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="{kind}">{head}{body}</table></div>'


def _heads(runs: Sequence[ReportedRun]) -> str:
    return "".join(f'<th scope="col"><i style="background:{run.color}"></i>{escape(run.name)}</th>' for run in runs)


def _duration(times: tuple[int, int]) -> str:
    if times[1] < times[0]:
        return "unknown: the system clock was set back"
    return duration((times[1] - times[0]) / 1e9)
