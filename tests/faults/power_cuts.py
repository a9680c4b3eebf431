"""A power cut's effect on an event log: a file of it is shorter, empty, or holds NUL where events were."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.files import log_files

Lose = Callable[[Path, random.Random], None]


def cut(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content.rstrip(b"\n\0")) + 1)])


def lose_end(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    kept = draw.randrange(len(content.rstrip(b"\n\0")) + 1)
    path.write_bytes(content[:kept] + bytes(len(content) - kept))


def lose_middle(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    used = len(content.rstrip(b"\n\0"))
    first, last = sorted((draw.randrange(used + 1), draw.randrange(used + 1)))
    path.write_bytes(content[:first] + bytes(last - first) + content[last:])


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def blank(path: Path, draw: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


LOSSES: tuple[Lose, ...] = (cut, lose_end, lose_middle, empty, blank, delete)


class Loss(NamedTuple):
    """What a power cut has done to a log."""

    name: str  # of the kind of loss and the file
    is_visible: bool  # whether a file is shorter or lacks something that was in it
    ords: frozenset[int]  # of the deterministic events that can no longer be read


def lose(folder: Path, draw: random.Random) -> Loss | None:
    """Damage one file of a run's log, or both; None where the run has none yet."""
    files = log_files(folder / "events")
    file = draw.choice([*((each,) for each in files), files])
    function = draw.choice(LOSSES)
    if not all(each.exists() for each in file):
        return None
    before, content = _ords(folder), [each.read_bytes() for each in file]
    for each in file:
        function(each, draw)
    after = [each.read_bytes() if each.exists() else b"" for each in file]
    name = f"{function.__name__} {'both' if len(file) > 1 else file[0].name}"
    # NUL and empty lines are both the tail's blank part
    is_visible = [_state(each) for each in content] != [_state(each) for each in after]
    return Loss(name, is_visible, frozenset(before - _ords(folder)))


def _state(content: bytes) -> tuple[int, bytes]:
    return len(content), content.rstrip(b"\n\0")


def _ords(folder: Path) -> set[int]:
    try:
        return {event.ord for event in EventLog(folder).read(superseded=True) if event.ord >= 0}
    except RecordingError:  # both files are gone
        return set()
