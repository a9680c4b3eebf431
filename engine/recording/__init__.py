"""The flight recorder: a log that survives kill -9, its readers, replay, and comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulsetrain.engine.recording.diff.check import EventCheck as EventCheck
    from pulsetrain.engine.recording.diff.compare import diff as diff
    from pulsetrain.engine.recording.diff.result import Divergence as Divergence
    from pulsetrain.engine.recording.diff.result import LogDiff as LogDiff
    from pulsetrain.engine.recording.log.reader import (
        EventLog as EventLog,
    )
    from pulsetrain.engine.recording.log.reader import (
        logged_ranks as logged_ranks,
    )
    from pulsetrain.engine.recording.log.reader import (
        read_ranks as read_ranks,
    )
    from pulsetrain.engine.recording.log.records import LoggedEvent as LoggedEvent
    from pulsetrain.engine.recording.log.scan import Damage as Damage
    from pulsetrain.engine.recording.log.writer import LogWriter as LogWriter
    from pulsetrain.engine.recording.replay.playback import Replay as Replay
    from pulsetrain.engine.recording.replay.playback import Stop as Stop
else:  # imported when they are used: a replay is an engine, which needs torch, and listing runs compares no logs
    from pulsetrain.engine.lazy_names import lazy_names
    from pulsetrain.engine.recording import diff  # empty; loaded here, as Python then binds the package to its name

    del diff  # the function of that name

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pulsetrain.engine.recording.diff.check": ("EventCheck",),
            "pulsetrain.engine.recording.diff.compare": ("diff",),
            "pulsetrain.engine.recording.diff.result": ("Divergence", "LogDiff"),
            "pulsetrain.engine.recording.log.reader": ("EventLog", "logged_ranks", "read_ranks"),
            "pulsetrain.engine.recording.log.records": ("LoggedEvent",),
            "pulsetrain.engine.recording.log.scan": ("Damage",),
            "pulsetrain.engine.recording.log.writer": ("LogWriter",),
            "pulsetrain.engine.recording.replay.playback": ("Replay", "Stop"),
        },
    )
