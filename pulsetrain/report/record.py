"""The curves and marks of one recorded run, read from its log in one pass."""

from __future__ import annotations

from pathlib import Path

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording import EventLog
from pulsetrain.report.curve import Curve
from pulsetrain.report.run_curves import EACH_ITERATION, RATES, RunCurves

__all__ = ["EACH_ITERATION", "RATES", "RunRecord"]


class RunRecord(RunCurves):
    """The curves and marks of a run, and how it ended.

    Args:
        log: the run's log; superseded events are left out.

    Raises:
        RecordingError: the log holds no event.
    """

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.folder: Path = log.run_folder
        if not log.engines:
            damaged = f"; damaged: {log.damage[0]}" if log.damage else ""
            raise RecordingError(
                f"{log.label}: the log holds no event{damaged}; name a run that has started with an EventRecorder"
            )
        super().__init__(log.main_engine)
        for event in log.read(event=[name for name in log.event_types() if self.reads(name)]):
            self.add(event)
        self.curves: dict[str, Curve] = self.shown()
        for curve in self.curves.values():
            curve.settle()

    @property
    def damage(self) -> list[str]:
        """The damaged parts of the log."""
        return [str(damage) for damage in self.log.damage]
