"""How a command of pulsetrain that another process has started ended: by its status, and by what it has printed."""

from __future__ import annotations

import re
import signal

__all__ = ["STOPPED", "TRAINED", "error_in"]

TRAINED = (0, 4)  # 4: the last checkpoint could not be saved
STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
"""By a signal, with a checkpoint; the same command continues."""

_ERROR = re.compile(r"^pulsetrain: (?:rank \d+: )?error: (.*)$", re.MULTILINE)


def error_in(output: str) -> str:
    r"""The error that a command has printed last; else its last line.

    >>> error_in("pulsetrain: rank 1: error: no data\ndone"), error_in("Killed"), error_in("")
    ('no data', 'Killed', 'it left no output')
    """
    errors = _ERROR.findall(output)
    return errors[-1] if errors else (output.strip().splitlines() or ["it left no output"])[-1]
