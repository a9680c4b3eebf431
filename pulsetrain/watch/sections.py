"""What is shown of a run, as lines of plain text: its state, its processes, and what happened."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pulsetrain.engine.plain_text import format_count, plain
from pulsetrain.engine.recording.diff.result import spans
from pulsetrain.report.run_curves import RATES
from pulsetrain.runs.live_rank import LiveRank
from pulsetrain.watch.braille import draw
from pulsetrain.watch.texts import bar, event_line, number, size, timespan
from pulsetrain.watch.watched import Watched, curve_names

__all__ = ["as_text", "curve_title", "mark_lines", "process_lines", "progress_line", "speed_line"]

_BAR = 16  # characters
_PICTURE = 60, 6  # characters of a curve in a text
_LEAST_PICTURE = 30
_EVENTS, _MARKS = 12, 8  # that a text has at most
_AGE = 5.0  # seconds without an event, after which that is shown


def progress_line(watched: Watched) -> str:
    """The state of the run, how far it is, and how long it will take."""
    run = watched.run
    if run.updated is None:
        return f"{watched.name}  {'unreadable' if run.damage else 'waiting'}"
    found = run.progress
    state = "being read" if run.status is None else run.status.value
    parts = [watched.name, state + (f": {plain(run.reason)}" if run.reason else "")]
    if found.share is not None:
        parts.append(f"{bar(found.share, _BAR)} {found.share:.0%}")
    parts.append(f"epoch {found.epoch:,}" + (f"/{found.total_epochs:,}" if found.total_epochs else ""))
    parts.append(f"iteration {found.iteration:,}" + (f"/{found.total_iterations:,}" if found.total_iterations else ""))
    if run.seconds_left is not None:
        parts.append(f"{timespan(run.seconds_left)} left")
    return "  ".join(parts)


def speed_line(watched: Watched) -> str:
    """How fast the run is; "" if that is not known."""
    run, main, parts = watched.run, watched.run.main, []
    if main is None:
        return ""
    if main.iterations_per_second is not None:
        parts.append(f"{main.iterations_per_second:,.4g} it/s")
    parts += [f"{main.measured[name]:,.4g} {name.partition('_')[0]}/s" for name in RATES if name in main.measured]
    if main.memory is not None:
        parts.append(f"{size(main.memory[1])} on the {main.memory[0]}")
    age = time.time() - (run.updated or 0.0)
    if watched.is_running and age > _AGE and main.last is not None:
        parts.append(f"no event for {timespan(age)}: {plain(main.position.activity)}")
    return ", ".join(parts)


def process_lines(watched: Watched) -> list[str]:
    """A line for each process: where it is, its speed and its memory; then those that the others wait for."""
    run = watched.run
    if not run.ranks:
        return []
    waited_for = run.stragglers
    late = {each.rank for each in waited_for}
    lines = [f"{'rank':>4} {'iteration':>9} {'it/s':>7} {'step':>8} {'batch':>8} {'memory':>8}"]
    lines += [
        _process_line(live) + ("  <- the others wait" if rank in late else "") for rank, live in run.ranks.items()
    ]
    if late:
        lines += [f"waiting for rank {spans(sorted(late))}: {each.activity}" for each in waited_for[:1]]
        lines += [plain(f"  {each.place}") for each in waited_for[:1] if each.place]
    return lines


def _process_line(live: LiveRank) -> str:
    rate, step, loading = live.iterations_per_second, live.step_seconds, live.loading_seconds
    speed = "-" if rate is None else f"{rate:.3g}"
    times = ["-" if each is None else f"{each * 1e3:,.3g} ms" for each in (step, loading)]
    memory = "-" if live.memory is None else size(live.memory[1])
    return f"{live.rank:>4} {live.iteration:>9,} {speed:>7} {times[0]:>8} {times[1]:>8} {memory:>8}"


def mark_lines(watched: Watched, row: str, limit: int) -> list[str]:
    """The newest marks of a row, such as "checkpoints", the newest one first."""
    several = len(watched.run.ranks) > 1 and row == "anomalies"
    lines = []
    for rank, mark in reversed(watched.run.marks(row)[-limit:]):
        text = str(mark)
        if row == "checkpoints":
            text = text.removeprefix("checkpoint ").replace(" saved,", ",", 1)
        lines.append(plain(f"{mark.iteration:>8,}  {f'rank {rank}: ' if several else ''}{text}"))
    return lines


def curve_title(watched: Watched, name: str) -> str:
    """The name of a curve, and its newest value."""
    curve = watched.run.curves.get(name)
    return plain(name) + ("" if curve is None else f"  {number(curve.last[1])}")


def as_text(watched: Watched, columns: int = 0) -> Iterator[str]:
    """Everything about a run, for `--once`.

    Args:
        watched: the run.
        columns: the width of the terminal, where lines are cut, except for the progress and what is wrong; 0 if the
            text does not go to a terminal.
    """
    yield from watched.problems
    yield progress_line(watched)
    for line in _lines(watched, max(columns, _LEAST_PICTURE) if columns else _PICTURE[0]):
        yield line if not columns or len(line) <= columns else f"{line[: columns - 1]}…"


def _lines(watched: Watched, width: int) -> Iterator[str]:
    run = watched.run
    if run.status is None:
        return
    yield f"  {speed_line(watched)}".rstrip()
    yield from ("", *process_lines(watched))
    curves = run.curves
    for name in curve_names([watched]):
        yield from ("", curve_title(watched, name))
        for cells in draw([curves[name].points(4 * width)], width, _PICTURE[1]):
            yield "".join(cell.character for cell in cells).rstrip()
    for row in ("checkpoints", "anomalies"):
        lines = mark_lines(watched, row, _MARKS)
        if lines:
            yield from ("", f"{row}, the newest first:", *lines)
    matches = list(run.matches if run.has_condition else run.newest)
    shown = matches[-_EVENTS:]
    kind = "matching event" if run.has_condition else "event"
    yield from ("", f"newest {format_count(len(shown), kind)}:")
    for found in shown:
        yield event_line(found, with_rank=len(run.ranks) > 1)
