"""The flight recorder's log: written through kill -9, read lazily, replayed, compared."""

from engine.recording.check import EventCheck
from engine.recording.diff import diff
from engine.recording.diff_result import Divergence, LogDiff
from engine.recording.lines import LoggedEvent
from engine.recording.log import EventLog, read_ranks
from engine.recording.replay import Replay, Stop
from engine.recording.scan import Damage
from engine.recording.writer import LogWriter

__all__ = [
    "Damage", "Divergence", "EventCheck", "EventLog", "LogDiff", "LogWriter", "LoggedEvent", "Replay", "Stop", "diff",
    "read_ranks",
]  # fmt: skip
