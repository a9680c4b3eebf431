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
    """Refuse run folders that a process does not see; all ranks call this.

    A folder that cannot be written is left to its handler.

    Args:
        control: joins the ranks.
        handlers: of this rank; the folders of its Checkpointer and EventRecorder count, in their order.
        clock: seconds, never running backwards.

    Raises:
        ConfigurationError: on every rank; the message names the folder, the ranks that do not see it, and their hosts.
    """
    if not control.is_shared:
        return
    folders = _folders(handlers)
    marks = control.broadcast([_mark(each) for each in folders] if control.ranks.is_main else [])
    until = clock() + min(_PATIENCE, control.timeout / 2)
    seen = [
        mark is None or _sees(folder / mark, until, clock) for folder, mark in zip(folders, marks, strict=False)
    ]  # a rank without these handlers needs no folder
    everyone = control.gather((socket.gethostname(), [str(each) for each in folders], seen))
    if control.ranks.is_main:
        for folder, mark in zip(folders, marks, strict=True):
            if mark is not None:
                with suppress(OSError):
                    (folder / mark).unlink()
    main_host, names, _ = everyone[0]
    for at, name in enumerate(names):
        blind = [(rank, *each[:2]) for rank, each in enumerate(everyone) if at < len(each[2]) and not each[2][at]]
        if blind:
            theirs = blind[0][2][at]
            raise ConfigurationError(
                f"the run folder {name} of rank 0 on {main_host} is not the same folder everywhere: "
                f"{', '.join(f'rank {rank} on {host}' for rank, host, _ in blind)} cannot see what rank 0 writes there"
                f"{'' if theirs == name else f', since it has {theirs}'}; put it on storage that all hosts share, and "
                "name it by an absolute path"
            )


def _folders(handlers: Iterable[object]) -> list[Path]:
    found = [each.folder for each in handlers if isinstance(each, Checkpointer) and isinstance(each.folder, Path)]
    found += [each.folder.parent for each in handlers if isinstance(each, EventRecorder)]
    return list(dict.fromkeys(each.resolve() for each in found))


def _mark(folder: Path) -> str | None:
    """The name of a new file in the folder; None where it cannot be written."""
    name = f".seen-{uuid.uuid4().hex}"  # a name that no host has looked for before
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch(exist_ok=False)
    except OSError:
        return None
    return name


def _sees(file: Path, until: float, clock: Callable[[], float]) -> bool:
    while not file.exists():
        if clock() >= until:
            return False
        time.sleep(_POLL)
    return True
