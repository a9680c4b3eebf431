"""One save by all processes of which each holds a part of the model: it is there as a whole afterwards, or not at all.

Each writes its own file. They agree by what they post, without a collective, so that threads can do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pulsetrain.engine.checkpoint.manifest import FileEntry
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.errors import CheckpointError, PeerFailed

__all__ = ["SharedSave"]

T = TypeVar("T")
_Refusal = tuple[bool, str]  # whether it was the disk, and the text of the error


class SharedSave:
    """The part that this process has in a save.

    Args:
        control: joins the processes.
        key: of this save, the same in all processes and of no other save.
    """

    def __init__(self, control: ControlGroup, key: str) -> None:
        self._control, self._key = control, key
        self._has_ended = False

    def lead(self, save: Callable[[], T]) -> T:
        """In the main process: save, with this as the `others`; it calls `durable` once the checkpoint is there."""
        with self._control.alive(self._key):
            try:
                return save()
            except BaseException as error:
                if not self._has_ended:
                    self._post("opened", _described(error))  # if it has come before that
                    present = isinstance(error, Exception) and not isinstance(error, PeerFailed)
                    self._end(_described(error), wait=present)
                raise

    def opened(self) -> None:
        """In the main process: the folder is there, so that the others may write."""
        self._post("opened", None)

    def written(self) -> dict[str, FileEntry]:
        """In the main process: what the others have written.

        Raises:
            OSError: one could not write.
            CheckpointError: another error occurred in one.
        """
        entries: dict[str, FileEntry] = {}
        refusals: list[tuple[int, _Refusal]] = []
        for rank in range(1, self._control.ranks.world_size):
            files, refusal = self._posted("written", rank)
            entries |= files
            if refusal is not None:
                refusals.append((rank, refusal))
        for rank, refusal in refusals:
            _obey(refusal, f"rank {rank}: ")
        return entries

    def durable(self) -> None:
        """In the main process: the checkpoint is there."""
        self._end(None)

    def follow(self, write: Callable[[], Mapping[str, FileEntry]]) -> Mapping[str, FileEntry]:
        """In another process: write its part, and wait for the rest; returns what it has written.

        Raises:
            OSError: one of the processes could not write; the checkpoint is not there.
            CheckpointError: another error occurred in one.
        """
        with self._control.alive(self._key):
            opened = self._posted("opened", 0)
            if opened is not None:
                self._post("read", None)
                _obey(opened)
            files: Mapping[str, FileEntry] = {}
            refusal: _Refusal | None = None
            try:
                files = write()
            except Exception as error:  # raised in all processes, by what the main one posts
                refusal = _described(error)
            except BaseException as error:  # Ctrl-C: this process leaves at once
                self._post("written", (files, _described(error)))
                self._post("read", None)
                raise
            self._post("written", (files, refusal))
            ended = self._posted("ended", 0)
            self._post("read", None)
            _obey(ended)
            return files

    def _end(self, refusal: _Refusal | None, *, wait: bool = True) -> None:
        self._has_ended = True
        self._post("ended", refusal)
        for rank in range(1, self._control.ranks.world_size) if wait else ():  # the store may end with this process
            self._posted("read", rank)

    def _post(self, stage: str, value: object) -> None:
        self._control.post(f"{self._key}/{stage}", value)

    def _posted(self, stage: str, rank: int) -> Any:
        return self._control.posted(f"{self._key}/{stage}", rank, "a save", alive=self._key)


def _described(error: BaseException) -> _Refusal:
    return isinstance(error, OSError), str(error) or type(error).__name__


def _obey(refusal: _Refusal | None, who: str = "") -> None:
    """Raise what another process has raised."""
    if refusal is not None:
        raise (
            OSError(f"{who}{refusal[1]}")
            if refusal[0]
            else CheckpointError(f"{who or 'the main process: '}{refusal[1]}")
        )
