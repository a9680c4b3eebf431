"""`pulsetrain sweep`, whose processes are killed once at each of the places where two records of a trial are made.

    python -m tests.faults.sweep_places MARKS sweep s.yaml

MARKS is a folder, which notes the places that have been reached: "decided", of a trial's process between the pruner's
decision and the end of the run; "ended", of the coordinator between the end of a run and the state of its trial; and
"stored", after that state is stored.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pulsetrain.cli import main
from pulsetrain.sweep.coordinator import _Coordinator
from pulsetrain.sweep.reporting import SweepTrial

MARKS = Path(sys.argv[1])
should_prune, tell = SweepTrial._should_prune, _Coordinator._tell


def reach(place: str) -> None:
    """Kill this process, the first time."""
    mark = MARKS / place
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def decide(self: SweepTrial, value: float) -> bool:
    pruned = should_prune(self, value)
    if pruned:
        reach("decided")
    return pruned


def note(self: Any, trial: Any, values: tuple[float, ...], error: str, pruned: bool = False) -> None:
    if pruned:
        reach("ended")
    tell(self, trial, values, error, pruned)
    if pruned:
        reach("stored")


# in the processes of the trials, too, which import this module as their main one
SweepTrial._should_prune = decide  # type: ignore[method-assign]
_Coordinator._tell = note  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
