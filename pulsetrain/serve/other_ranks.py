"""What the processes of other ranks than 0 have reported: anomalies, exceptions, and handlers that failed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pulsetrain.engine.errors import PulsetrainError
from pulsetrain.engine.recording import EventLog, logged_ranks
from pulsetrain.report.marks import Marks
from pulsetrain.report.run_curves import RunCurves

__all__ = ["anomalies_of_other_ranks"]

_REPORTED = frozenset({"anomaly_detected", "exception_raised", "handler_failed"})


def anomalies_of_other_ranks(folder: Path) -> Marks:
    """Their marks in the order of the iterations; of a log that cannot be read, none.

    Args:
        folder: the run folder.
    """
    found = list[tuple[int, str]]()
    for rank in logged_ranks(folder):
        with suppress(PulsetrainError, OSError):
            found += _anomalies(folder, rank) if rank else []
    marks = Marks()
    for iteration, text in sorted(found, key=lambda each: each[0]):
        marks.add(iteration, text)
    return marks


def _anomalies(folder: Path, rank: int) -> list[tuple[int, str]]:
    log = EventLog(folder, rank)
    curves = RunCurves(log.main_engine)
    for event in log.read(event=_REPORTED):  # the index knows in which blocks there are any
        curves.add(event)
    return [(mark.iteration, f"rank {rank}: {mark}") for mark in curves.marks["anomalies"]]
