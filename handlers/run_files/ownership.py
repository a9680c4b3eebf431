"""One run owns a run folder: it takes the folder before its first write there, and releases it when it ends.

A file in the folder names the owner and keeps others out; see `OwnerFile`. Reading a run takes nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pulsetrain.engine import LAST, Engine, EventBus, Events, Phase, is_training_run
from pulsetrain.engine.checkpoint import Location
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.events.subscription import FIRST
from pulsetrain.engine.recording.replay.engine import ReplayBus
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.engine_queries import handlers_of, is_run_end
from pulsetrain.handlers.run_files.earlier_run import holds_run
from pulsetrain.handlers.run_files.owner_file import OWNER_FILE, OwnerFile

__all__ = ["OWNER_FILE", "FolderUse", "holds_another_run", "release", "release_idle", "take", "take_all"]

_ENDS = Events.COMPLETED | Events.TERMINATE | Events.EXCEPTION_RAISED


@dataclass
class _Held:
    """A folder that this process owns."""

    owner: weakref.ref[Any]  # a bus, or what made the folder for one
    file: OwnerFile | None  # None where it cannot be written


_held: dict[Path, _Held] = {}
_runs: dict[Path, weakref.ref[Any]] = {}  # whose run is in the folder
_uses: weakref.WeakSet[FolderUse] = weakref.WeakSet()


def take(folder: Path, owner: object, place: str = "", *, wait: bool = False) -> None:
    """Take the folder for the owner, which may own it already.

    Within a process a folder passes to the next owner once none of the first one's engines runs. Where several
    processes train together, the main one takes it for all.

    Args:
        folder: created if it is missing.
        owner: the bus of the run, or what makes the folder for it. When it is deleted, the folder is released.
        place: the handler's class name, for the message.
        wait: until no other process owns the folder.

    Raises:
        RunFolderError: another process owns it, or a run of this process that has not ended.
    """
    if isinstance(owner, ReplayBus) or not ranks().is_main:  # a replay shows a run, and is none
        return
    path = folder.resolve()
    held = _held.get(path)
    current = held.owner() if held is not None else None
    if current is owner:
        return
    if _is_busy(current):
        rule = "another run of this process is writing there; wait for its end, or choose another folder"
        raise RunFolderError(rule, place or "run", folder=str(folder))
    if held is not None:
        _release(path, held.owner)
    reference = weakref.ref(owner, lambda gone: _release(path, gone))
    _held[path] = _Held(reference, _owned(path, folder, place, wait))
    if _run_in(path) is not owner and not holds_run(path):
        _runs[path] = reference


def release(owner: object) -> None:
    """Release the folders of this owner."""
    for path, held in [*_held.items()]:
        if held.owner() is owner:
            _release(path, held.owner)


def release_idle(bus: EventBus) -> None:
    """Release the folders of this bus, unless a run on it is in progress or paused."""
    if not _is_busy(bus):
        release(bus)


def take_all(engine: Engine, *, wait: bool = False, restart: bool = False) -> None:
    """Take the folders of all handlers of the engine, before its run reads or writes anything there.

    Args:
        engine: whose handlers.
        wait: until no other process owns a folder.
        restart: whether the run in the folders is continued from its beginning.

    Raises:
        RunFolderError: a folder has another owner.
    """
    for use in handlers_of(engine, Events.STARTED, FolderUse):
        use.take(wait=wait, belongs=restart)


def holds_another_run(place: str, folder: Location) -> RunFolderError:
    """The error for a new run in a folder that has one."""
    rule = (
        "already holds a run, which is not overwritten; continue it with train(resume='latest'), which needs a "
        "Checkpointer, or choose another folder"
    )
    return RunFolderError(rule, place, folder=str(folder))


class FolderUse:
    """A handler's use of a run folder: takes the folder before the handler writes there in a run.

    A run that begins in a folder where another one has recorded something is refused. After a fork, the handlers of a
    run in progress are detached in the child: the parent's run continues.

    Args:
        place: the handler's class name, for messages.
        attachment: of the handler, which is being attached.
        folder: returns the run folder; a URL is not locked.
        leave: called in a forked process, which must not write.
    """

    leave: Callable[[], object]

    def __init__(
        self,
        place: str,
        attachment: Attachment,
        folder: Callable[[], Location],
        leave: Callable[[], object] = lambda: None,
    ) -> None:
        self._place, self._attachment, self._folder, self.leave = place, attachment, folder, leave
        self._left = False  # this is a copy in a process that was forked from the run's
        if isinstance(attachment.bus, ReplayBus) or not ranks().is_main:
            return
        _uses.add(self)
        begins = Events.STARTED | Events.CHECKPOINT_LOADED
        attachment.subscribe(begins, self._on_begin, phase=Phase.COMPUTE, order=FIRST)
        attachment.subscribe(_ENDS, self._on_end, phase=Phase.PERSIST, order=LAST)

    @property
    def path(self) -> Path | None:
        """The folder; None for a URL."""
        folder = self._folder()
        return folder if isinstance(folder, Path) else None

    def take(self, *, wait: bool = False, belongs: bool = False) -> None:
        """Take the folder for the bus that the handler is attached to.

        Args:
            wait: until no other process owns it.
            belongs: whether the bus continues the run in it.

        Raises:
            RunFolderError: it has another owner.
        """
        path, bus = self.path, self._attachment.bus
        if self._left:
            rule = (
                "belongs to the run of the process that this one was forked from, and only that process writes there; "
                "save there, or make another trainer with another folder"
            )
            raise RunFolderError(rule, self._place, folder=str(self._folder()))
        if path is None or bus is None:
            return
        take(path, bus, self._place, wait=wait)
        if belongs and not isinstance(bus, ReplayBus):
            _runs[path.resolve()] = weakref.ref(bus)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Own the folder in a block, for what is written outside of a run.

        Raises:
            RunFolderError: it has another owner.
        """
        path, bus = self.path, self._attachment.bus
        owns = path is None or _owner_of(path.resolve()) is bus
        self.take()
        try:
            yield
        finally:
            if not owns and bus is not None:
                release_idle(bus)

    def detach_in_child(self) -> None:
        """After a fork, if the run owns the folder: the handler receives no event in this process, and cannot save."""
        path, bus = self.path, self._attachment.bus
        owns = _is_busy(bus) if path is None else _owner_of(path.resolve()) is bus  # a URL has no owner
        if bus is not None and owns:
            self._left = True
            self._attachment.cancel()
            self.leave()

    def _on_begin(self, engine: Engine, event: Any) -> None:
        bus, path = engine.bus, self.path
        self.take(belongs=event.type == Events.CHECKPOINT_LOADED.value)
        if event.type != Events.STARTED.value or path is None or engine.state.iteration > 0:
            return
        if is_training_run(engine):
            if engine.is_resuming:
                return
        elif any(map(is_training_run, bus.engines)) or _runs_inside(engine):
            return  # of a run inside another one, or of an evaluator
        if _run_in(path.resolve()) is not bus:
            release(bus)
            raise holds_another_run(self._place, path)

    def _on_end(self, engine: Engine, event: Any) -> None:
        left = event.type == Events.TERMINATE.value and engine.should_terminate is False  # a loop written by hand
        if not _runs_inside(engine) and (left or is_run_end(engine, event)):
            release(engine.bus)


def _is_busy(owner: object) -> bool:
    return any(engine.is_running or engine.is_paused for engine in getattr(owner, "engines", ()))


def _runs_inside(engine: Engine) -> bool:
    """Whether the run of this engine is inside that of another one."""
    return any(each.is_running for each in engine.bus.engines if each is not engine)


def _owned(path: Path, folder: Path, place: str, wait: bool) -> OwnerFile | None:
    """The folder's owner file; None where it cannot be written, which the handler will report."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        return OwnerFile(path, place, str(folder), wait=wait)
    except RunFolderError:
        raise
    except OSError:
        return None


def _release(path: Path, reference: weakref.ref[Any]) -> None:
    held = _held.get(path)
    if held is None or held.owner is not reference:
        return
    del _held[path]
    if held.file is not None:
        held.file.release()


def _owner_of(path: Path) -> object | None:
    held = _held.get(path)
    return held.owner() if held is not None else None


def _run_in(path: Path) -> object | None:
    reference = _runs.get(path)
    return reference() if reference is not None else None


def _leave_in_child() -> None:
    """A forked process owns nothing; its copies of the descriptors would keep the locks after the parent's end."""
    for use in [*_uses]:
        use.detach_in_child()
    for held in _held.values():
        if held.file is not None:
            held.file.leave()
    _held.clear()


os.register_at_fork(after_in_child=_leave_in_child)
