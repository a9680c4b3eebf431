"""`pulsetrain where`: shows where each process of a run stands, and which one the others wait for."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence

from pulsetrain.cli.reports import OK, until_closed
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording.diff.result import describe_event, spans
from pulsetrain.engine.recording.where import Position, positions, stragglers

__all__ = ["run"]

_FEW = 16  # processes that are each shown separately


def run(arguments: argparse.Namespace) -> int:
    """Print the positions; returns the exit status."""
    found = positions(arguments.folder)
    last = stragglers(found)
    with until_closed():
        if arguments.format == "json":
            print(json.dumps([_as_dict(each, each in last) for each in found]))
        else:
            print("\n".join(map(plain, _lines(found, last))))
    return OK


def _lines(found: Sequence[Position], last: Sequence[Position]) -> list[str]:
    lines = []
    for group in _groups(found, last):
        each, who = group[0], "rank" if len(group) == 1 else "ranks"
        when = "the run has ended" if each.ended else f"{_ago(group)}, {each.activity}"
        lines.append(f"{who} {spans([one.rank for one in group])}  {describe_event(each.event)}: {when}")
        if each.stall is not None and not each.ended:
            lines += [f"          {frame}" for frame in each.stall.stack[:5]]
    if not last:
        lines.append("every process has ended its run")
    elif len(found) > 1:
        lines.append(_who_lags(found, last))
    return lines


def _groups(found: Sequence[Position], last: Sequence[Position]) -> Iterable[list[Position]]:
    """Those that are shown together: of many processes, the ones with the same event and place in the code."""
    groups: dict[object, list[Position]] = {}
    for each in found:
        is_shown = len(found) <= _FEW or (len(last) <= _FEW and each in last)
        same = each.rank if is_shown else (describe_event(each.event), each.activity, each.ended, each.place)
        groups.setdefault(same, []).append(each)
    return groups.values()


def _ago(group: Sequence[Position]) -> str:
    now = time.time()
    ages = [max(now - each.event.t / 1e9, 0.0) for each in group]
    least, most = (f"{age:,.0f}" for age in (min(ages), max(ages)))
    return f"{least} s ago" if least == most else f"{least} to {most} s ago"


def _who_lags(found: Sequence[Position], last: Sequence[Position]) -> str:
    names = spans([each.rank for each in last])
    who = f"rank {names}" if len(last) == 1 else f"ranks {names}"
    if len(last) == len(found):
        return "all processes are equally far"
    if len(last) == len([each for each in found if not each.ended]):
        return f"{who}: not ended, unlike the others"
    return f"{who}: the others wait for it" if len(last) == 1 else f"{who}: not as far as the others"


def _as_dict(position: Position, is_last: bool) -> dict[str, object]:
    event, stall = position.event, position.stall
    return {
        "rank": position.rank,
        "engine": event.engine,
        "event": event.event,
        "epoch": event.epoch,
        "iteration": event.iteration,
        "time": event.t / 1e9,
        "activity": position.activity,
        "stack": [] if stall is None else stall.stack,
        "ended": position.ended,
        "waited_for": is_last,
    }
