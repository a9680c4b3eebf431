"""The flight recorder: a log that survives kill -9, its readers, replay, and comparison."""

from pulsetrain.engine.recording.diff.check import EventCheck
from pulsetrain.engine.recording.diff.compare import diff
from pulsetrain.engine.recording.diff.result import Divergence, LogDiff
from pulsetrain.engine.recording.log.reader import EventLog, read_ranks
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.log.scan import Damage
from pulsetrain.engine.recording.log.writer import LogWriter
from pulsetrain.engine.recording.replay.playback import Replay, Stop

__all__ = [
    "Damage", "Divergence", "EventCheck", "EventLog", "LogDiff", "LogWriter", "LoggedEvent", "Replay", "Stop", "diff",
    "read_ranks",
]  # fmt: skip
