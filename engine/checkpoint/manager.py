"""Saves checkpoints and deletes old ones, only after a newer one is durable and announced."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import IO, NamedTuple, Protocol

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.checkpoint.choice import best_of, latest_of, load_checkpoint
from pulsetrain.engine.checkpoint.files import files_of
from pulsetrain.engine.checkpoint.formats import IN_PIECES, Form, check_form, piece_file, state_file, stored_pieces
from pulsetrain.engine.checkpoint.locations import Location, location_of
from pulsetrain.engine.checkpoint.manifest import BEST, DELETED, FileEntry, seal, unseal
from pulsetrain.engine.checkpoint.plain import Plain, plain
from pulsetrain.engine.checkpoint.reader import (
    damage_of,
    find_checkpoints,
    history_of,
    size_of,
    step_of,
)
from pulsetrain.engine.errors import CheckpointError, ConfigurationError, RunFolderError
from pulsetrain.engine.logs import get_logger

__all__ = ["CheckpointManager", "Others", "check_name"]


class _History(NamedTuple):
    """What is known of the checkpoints that were ever saved in a folder, deleted ones included."""

    ordinal: int  # of the last one
    last_step: int  # the largest
    names: list[str]  # of the folders of that step

    def followed_by(self, step: int, name: str) -> dict[str, object]:
        """The entries of the next checkpoint's manifest."""
        names = self.names if step <= self.last_step else []
        if step >= self.last_step:
            names = [*names, name]
        return {"ordinal": self.ordinal + 1, "last_step": max(step, self.last_step), "names": names}


class Others(Protocol):
    """The processes that write pieces of a checkpoint's tensors."""

    def opened(self) -> None:
        """The checkpoint's folder is there, so that they may write."""

    def written(self) -> Mapping[str, FileEntry]:
        """Wait until they have written their files.

        Raises:
            OSError: one of them could not.
        """


class CheckpointManager:
    """Saves, finds and loads checkpoints in one folder; needs no engine.

    Only one manager at a time may save in a folder; any number may read, and reading deletes nothing. Checkpoints that
    a crash left half-written are ignored, and removed by `clean`, which the first `save` calls.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> manager = CheckpointManager(folder.name, keep_last_n=2)
    >>> for step in (10, 20, 30):
    ...     path = manager.save({"step": step}, step=step)
    >>> [each.name for each in manager.valid()]
    ['000000020-checkpoint', '000000030-checkpoint']
    >>> manager.load(manager.get_latest())
    {'step': 30}
    >>> folder.cleanup()

    Args:
        checkpoint_dir: created if it is missing; or a URL that fsspec knows, such as "s3://bucket/runs/a". Returned
            paths are then `CheckpointUrl`, strings with a path's `name`, `parent` and `/`.
        keep_last_n: how many of the newest checkpoints to keep; the best one is kept as well.

    Raises:
        ConfigurationError: keep_last_n is not a whole number of at least 1, or fsspec does not know the URL.
        RunFolderError: the folder cannot be created.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str], keep_last_n: int = 3) -> None:
        check_whole_number("CheckpointManager", "keep_last_n", keep_last_n)
        self.checkpoint_dir: Location = location_of(checkpoint_dir)
        self.keep_last_n = keep_last_n
        self._refusal: str | None = None
        self._files = files_of(self.checkpoint_dir)
        self._cleaned = False
        try:
            self._files.make(self.checkpoint_dir)
        except OSError as error:
            rule = f"cannot be used: {error}; choose another folder, make room on its disk, or fix its permissions"
            raise RunFolderError(f"CheckpointManager({str(checkpoint_dir)!r}): {rule}") from error

    def save(
        self,
        checkpoint: Mapping[str, object],
        name: str = "checkpoint",
        is_best: bool = False,
        *,
        step: int | None = None,
        keep: Iterable[Location] = (),
        announce: Callable[[Location], object] | None = None,
        form: Form = "torch",
        prune: bool = True,
        unsaved: Mapping[str, list[str]] | None = None,
        others: Others | None = None,
        target: Location | None = None,
    ) -> Location:
        """Write a checkpoint; it is durable when this returns.

        Args:
            checkpoint: dicts, lists and tuples of tensors, strings, bytes, numbers and None. numpy scalars are saved
                as numbers, numpy arrays as tensors.
            name: label in the folder's name; using a name twice makes two folders.
            is_best: make `get_best` return it.
            step: number in the folder's name; by default one more than the largest.
            keep: older checkpoints to keep regardless of `keep_last_n`.
            announce: called with the checkpoint once it is durable, also as the best, and before older ones are
                deleted. If it raises, the error propagates and nothing is deleted.
            form: file format of the state: "torch", or "safetensors", whose arrays other tools can read by their paths
                in the checkpoint. With "safetensors", long lists of floats are arrays, too.
            prune: delete older checkpoints at the end; if not, call `prune` later.
            unsaved: names of state that the checkpoint lacks, for its manifest.
            others: processes that write pieces of the state's tensors, by `write_pieces`.
            target: the folder, as `target` gave it.

        Raises:
            ConfigurationError: the name has characters other than letters, digits, `_`, `.`, `+` and `-`, or there is
                no such form.
            CheckpointError: the checkpoint holds a value that could not be loaded again; the message says where.
                Nothing was written.
            OSError: the checkpoint, or its mark as the best, could not be made durable; earlier ones are unchanged.
            RunFolderError: it refuses to write, see `refuse`.
        """
        self._check_refusal()
        check_name("save", name)
        check_form("save", form)
        file = state_file(plain(checkpoint), form)
        if not self._cleaned:
            self.clean()  # before anything is written: the disk may be full of it
        history = self._history()
        if step is None:
            step = max((step_of(folder) for folder in find_checkpoints(self.checkpoint_dir)), default=-1) + 1
        target = self.target(name, step) if target is None else target
        labels = {"format": file.format, "step": step, "name": name, **history.followed_by(step, target.name)}
        lacking = {why: names for why, names in (unsaved or {}).items() if names}
        if lacking:
            labels["unsaved"] = lacking
        try:
            self._files.begin(target)
            if others is not None:
                others.opened()
            entries = {file.name: self._files.write(target, file.name, file.write)}
            if others is not None:
                entries |= others.written()
            if file.format == IN_PIECES:
                file.check(stored_pieces(partial(self._written, target, name) for name in entries))
            self._files.commit(target, seal({**labels, "files": entries}))
        except BaseException:
            self._files.abandon(target)
            raise
        if is_best:
            self.set_best(target.name)
        if announce is not None:
            announce(target)
        if prune:
            self.prune([target, *keep])
        return target

    def _written(self, target: Location, name: str) -> IO[bytes]:
        """Open a file of a checkpoint that is not complete.

        Raises:
            OSError: it is not there.
        """
        try:
            return self._files.reopen(target, name)
        except FileNotFoundError as error:
            raise OSError(
                f"{target / name}: another process has written it, and this one does not see it; all of them need the "
                "same folder, on storage that they share"
            ) from error

    def write_pieces(self, checkpoint: Mapping[str, object], target: Location, rank: int) -> dict[str, FileEntry]:
        """Write the pieces that this process has of a checkpoint, which the main process saves with `others`.

        Args:
            checkpoint: the same as in the main process, but for the pieces.
            target: the checkpoint's folder.
            rank: of this process.

        Returns:
            The file's name, size and digest.
        """
        name = f"rank-{rank:05d}.safetensors"
        return {name: self._files.write(target, name, piece_file(plain(checkpoint)))}

    def target(self, name: str, step: int) -> Location:
        """The folder that the next checkpoint of this name and step will use: one that none has had before."""
        history, plain = self._history(), f"{step:09d}-{name}"
        target, repeat = self.checkpoint_dir / plain, 0
        if step < history.last_step:  # reached before, by a line that was abandoned: its names are not all known
            repeat = history.ordinal
        elif step == history.last_step:
            repeat = sum(each == plain or each.startswith(f"{plain}~") for each in history.names)
        if repeat:
            target = self.checkpoint_dir / f"{plain}~{repeat + 1}"
        while self._files.exists(target):  # one whose manifest cannot be read
            repeat += 1
            target = self.checkpoint_dir / f"{plain}~{repeat + 1}"
        return target

    def refuse(self, why: str | None) -> None:
        """Refuse to write and delete, as in a process that was forked from a run's; None allows it again."""
        self._refusal = why

    def _check_refusal(self) -> None:
        if self._refusal is not None:
            raise RunFolderError(f"{self.checkpoint_dir}: {self._refusal}; choose another folder")

    def _history(self) -> _History:
        """What is known of the checkpoints that were ever saved here."""
        known = [_History(*history_of(folder)) for folder in find_checkpoints(self.checkpoint_dir)]
        try:
            with self._files.open(self.checkpoint_dir / DELETED) as opened:
                deleted = unseal(opened.read())
            known.append(_History(deleted["ordinal"], deleted["last_step"], deleted["names"]))
        except (OSError, ValueError, KeyError):  # no rewind has deleted any
            pass
        last = max((each.last_step for each in known), default=-1)
        names = {name for each in known if each.last_step == last for name in each.names}
        return _History(max((each.ordinal for each in known), default=0), last, sorted(names))

    def set_best(self, name: str) -> None:
        """Let `get_best` return the checkpoint whose folder has this name.

        Raises:
            OSError: the file that names it could not be written.
        """
        self._check_refusal()
        self._files.replace(self.checkpoint_dir / BEST, seal({"checkpoint": name}))

    def clean(self) -> None:
        """Remove what a crash left half-written or half-deleted.

        Only for the manager that saves: what another manager is writing at the moment looks the same.
        """
        try:
            self._files.clean(self.checkpoint_dir)
        except OSError as error:  # the leftovers use disk space, but readers ignore them
            get_logger("engine").warning("leftovers of a crash could not be removed", reason=str(error))
        self._cleaned = True

    def load(self, path: str | os.PathLike[str]) -> dict[str, Plain]:
        """Same as `load_checkpoint`, which needs no manager."""
        return load_checkpoint(path)

    def size(self, path: Location) -> int:
        """Size of a checkpoint's files in bytes, according to its manifest."""
        return size_of(path)

    def valid(self) -> list[Location]:
        """The complete and undamaged checkpoints, oldest first."""
        return [folder for folder in find_checkpoints(self.checkpoint_dir) if damage_of(folder) is None]

    def get_latest(self) -> Location | None:
        """The last written checkpoint that is complete and undamaged, or None; logs which ones it skipped.

        Checkpoints whose manifest cannot be read may be newer or older; they are logged as well.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        return latest_of(self.checkpoint_dir)

    def get_best(self) -> Location | None:
        """The checkpoint last saved as the best, or None; it is not checked for damage until it is loaded.

        Raises:
            CheckpointError: the file that names it is damaged.
        """
        return best_of(self.checkpoint_dir)

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, the best one included: a run that went back has not reached them.

        Raises:
            OSError: they cannot be deleted.
        """
        self._check_refusal()
        history = self._history()
        self._files.replace(self.checkpoint_dir / DELETED, seal(history._asdict()))
        self._files.delete([folder for folder in find_checkpoints(self.checkpoint_dir) if step_of(folder) > step])

    def prune(self, keep: Iterable[Location]) -> None:
        """Delete all checkpoints but the newest `keep_last_n`, the best, and these; a failure is a warning."""
        self._check_refusal()
        kept = {each.name for each in keep}
        try:
            best = self.get_best()
            old = find_checkpoints(self.checkpoint_dir)[: -self.keep_last_n]
            self._files.delete([folder for folder in old if folder.name not in kept and folder != best])
        except (OSError, CheckpointError) as error:  # the new checkpoint was saved all the same
            get_logger("engine").warning("older checkpoints not deleted", reason=str(error))


def check_name(caller: str, name: str) -> None:
    """Raise if a checkpoint's folder cannot have this name.

    Args:
        caller: function or class to name in the message.
        name: the name.

    Raises:
        ConfigurationError: it has other characters than letters, digits, `_`, `.`, `+` and `-`.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigurationError("use letters, digits, '_', '.', '+' and '-' only", caller, name=name)
