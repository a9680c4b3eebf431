"""Whether all processes of a run see the same run folder: the main one saves there, and all resume from it."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.handlers import Checkpointer, EventRecorder

__all__ = ["check_shared_folders"]

_PATIENCE = 20.0  # seconds: a host may remember for so long that a folder is not there
_POLL = 0.1


def check_shared_folders(
    control: ControlGroup, handlers: Iterable[object], clock: Callable[[], float] = time.monotonic
) -> None:
    """Refuse run folders of the main process that another one does not see; all ranks call this.

    A folder that cannot be written is left to its handler.

    Args:
        control: joins the ranks.
        handlers: of this rank; the folders of the main one's Checkpointer and EventRecorder count.
        clock: seconds, never running backwards.

    Raises:
        ConfigurationError: on every rank; the message names the folder, the ranks that do not see it, and their hosts.
    """
    if not control.is_shared:
        return
    marks = control.broadcast(_marks(handlers) if control.ranks.is_main else [])
    until = clock() + min(_PATIENCE, control.timeout / 2)
    everyone = control.gather((socket.gethostname(), [_sees(mark, until, clock) for mark in marks]))
    if control.ranks.is_main:
        for mark in marks:
            with suppress(OSError):
                mark.unlink()
    for at, mark in enumerate(marks):
        blind = [f"rank {rank} on {host}" for rank, (host, seen) in enumerate(everyone) if not seen[at]]
        if blind:
            raise ConfigurationError(
                f"the run folder {mark.parent} of rank 0 on {everyone[0][0]} is not the same folder everywhere: "
                f"{', '.join(blind)} cannot see what rank 0 writes there; put it on storage that all hosts share under "
                "one path"
            )


def _marks(handlers: Iterable[object]) -> list[Path]:
    """New files in the run folders."""
    found = [each.folder for each in handlers if isinstance(each, Checkpointer) and isinstance(each.folder, Path)]
    found += [each.folder.parent for each in handlers if isinstance(each, EventRecorder)]
    marks = []
    for folder in dict.fromkeys(each.resolve() for each in found):
        mark = folder / f".seen-{uuid.uuid4().hex}"  # a name that no host has looked for before
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch(exist_ok=False)
            marks.append(mark)
    return marks


def _sees(file: Path, until: float, clock: Callable[[], float]) -> bool:
    while not file.exists():
        if clock() >= until:
            return False
        time.sleep(_POLL)
    return True
