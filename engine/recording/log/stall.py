"""Where a process stands that records no event for a while: its stack, beside its log, for `pulsetrain where`."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from pulsetrain.engine.recording.log.files import log_files

__all__ = ["Stall", "StallWatch", "read_stall"]

_DEEP = 12  # frames, of the innermost ones
_OWN = "/engine/distributed/collectives.py:"  # whose innermost frame is one that waits
_INTERVAL = 2.0  # seconds: a stack is written after two of them without an event


class Stall(NamedTuple):
    """A process that stands still."""

    seq: int  # of the last event before
    stack: list[str]  # of the main thread, innermost first, as "FILE:LINE FUNCTION"

    @property
    def waits(self) -> bool:
        """Whether the process waits for others, inside a collective."""
        is_own = bool(self.stack) and _OWN in self.stack[0].replace("\\", "/")  # not a decision that others wait for
        return is_own or any(_is_collective(each) for each in self.stack[:3])


class StallWatch:
    """A thread that writes the main thread's stack if no event comes; events themselves cost nothing more.

    Args:
        folder: the log's.
        rank: of this process.
        last: the number of the last event.
        interval: seconds between two looks.
    """

    def __init__(self, folder: Path, rank: int, last: Callable[[], int], interval: float = _INTERVAL) -> None:
        self._path, self._last, self._interval = _path(folder, rank), last, interval
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pulsetrain-stall-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The run has ended."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        before = written = -1
        while not self._ended.wait(self._interval):
            seq = self._last()
            if seq == before != written and self._write(seq):
                written = seq
            before = seq

    def _write(self, seq: int) -> bool:
        frame = sys._current_frames().get(self._main)  # noqa: SLF001  # documented, in spite of its name
        text = json.dumps({"seq": seq, "stack": _stack(frame)})
        part = self._path.with_suffix(".part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(self._path)
        except OSError:  # a full disk: the log says as much
            return False
        return True


def read_stall(folder: Path, rank: int) -> Stall | None:
    """What the process has left last; None if there is nothing, or nothing that can be read."""
    try:
        found = json.loads(_path(folder, rank).read_text(encoding="utf-8"))
        return Stall(int(found["seq"]), [str(each) for each in found["stack"]])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(folder: Path, rank: int) -> Path:
    return log_files(folder, rank)[1].with_name(f"stall.rank{rank}.json")


def _stack(frame: FrameType | None) -> list[str]:
    found: list[str] = []
    while frame is not None and len(found) < _DEEP:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found


def _is_collective(place: str) -> bool:
    place = place.replace("\\", "/")
    return "/torch/distributed/" in place or "/torch/autograd/graph.py" in place
