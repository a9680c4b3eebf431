"""`pulsetrain where`: shows where each process of a run stands, and which one the others wait for."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from pulsetrain.cli.reports import OK, until_closed
from pulsetrain.engine.recording.diff.result import describe_event
from pulsetrain.engine.recording.where import Position, positions, stragglers

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Print the positions; returns the exit status."""
    found = positions(arguments.folder)
    last = stragglers(found)
    with until_closed():
        if arguments.format == "json":
            print(json.dumps([_as_dict(each, each in last) for each in found]))
        else:
            print("\n".join(_lines(found, last)))
    return OK


def _lines(found: Sequence[Position], last: Sequence[Position]) -> list[str]:
    now = time.time()
    lines = []
    for each in found:
        event = each.event
        when = "the run has ended" if each.ended else f"{max(now - event.t / 1e9, 0.0):,.0f} s ago, {each.activity}"
        lines.append(f"rank {each.rank}  {describe_event(event)}: {when}")
        if each.stall is not None and not each.ended:
            lines += [f"          {frame}" for frame in each.stall.stack[:5]]
    if not last:
        lines.append("every process has ended its run")
    elif len(found) > 1:
        lines.append(_who_lags(found, last))
    return lines


def _who_lags(found: Sequence[Position], last: Sequence[Position]) -> str:
    names = ", ".join(str(each.rank) for each in last)
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
