"""The flight recorder: a log that survives kill -9, its readers, replay, and comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulsetrain.engine.recording.diff.check import EventCheck
from pulsetrain.engine.recording.diff.compare import diff
from pulsetrain.engine.recording.diff.result import Divergence, LogDiff
from pulsetrain.engine.recording.log.reader import EventLog, logged_ranks, read_ranks
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.engine.recording.log.scan import Damage
from pulsetrain.engine.recording.log.writer import LogWriter

if TYPE_CHECKING:
    from pulsetrain.engine.recording.replay.playback import Replay, Stop
else:  # imported when they are used: a replay is an engine, which needs torch
    from pulsetrain.engine.lazy_names import lazy_names

    _, __getattr__, __dir__ = lazy_names(__name__, {"pulsetrain.engine.recording.replay.playback": ("Replay", "Stop")})

__all__ = [
    "Damage", "Divergence", "EventCheck", "EventLog", "LogDiff", "LogWriter", "LoggedEvent", "Replay", "Stop", "diff",
    "logged_ranks", "read_ranks",
]  # fmt: skip
