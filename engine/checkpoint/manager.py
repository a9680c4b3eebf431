"""Saves checkpoints and keeps the right ones: a new one is durable and announced before an older one is deleted."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pulsetrain.engine.checkpoint.files import files_of
from pulsetrain.engine.checkpoint.formats import FORMS, Form, check_form, state_writer
from pulsetrain.engine.checkpoint.locations import Place, place_of
from pulsetrain.engine.checkpoint.manifest import BEST, STATES, is_checkpoint_name, seal, unseal
from pulsetrain.engine.checkpoint.plain import plain
from pulsetrain.engine.checkpoint.reader import (
    damage_of,
    find_checkpoints,
    load_checkpoint,
    ordinal_of,
    size_of,
    step_of,
)
from pulsetrain.engine.errors import CheckpointError, ConfigurationError, RunFolderError
from pulsetrain.engine.logs import get_logger

__all__ = ["CheckpointManager", "check_name"]


class CheckpointManager:
    """Saves, finds and loads checkpoints in one folder; needs no engine.

    One manager at a time may save there, any number may read: reading deletes nothing. What a crash left
    half-written does not count, and is removed by `clean`, which the first `save` calls.

    Args:
        checkpoint_dir: made where it is missing; or a URL that fsspec knows, such as "s3://bucket/runs/a". Paths
            that are returned are then `CheckpointUrl`, strings with a path's `name`, `parent` and `/`.
        keep_last_n: how many of the newest stay; the best one stays as well.

    Raises:
        ConfigurationError: keep_last_n is no whole number of at least 1, or no such URL is known.
        RunFolderError: the folder cannot be made.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str], keep_last_n: int = 3) -> None:
        if not isinstance(keep_last_n, int) or isinstance(keep_last_n, bool) or keep_last_n < 1:
            raise ConfigurationError(f"CheckpointManager({keep_last_n=}): needs a whole number of at least 1")
        self.checkpoint_dir = place_of(checkpoint_dir)
        self.keep_last_n = keep_last_n
        self._files = files_of(self.checkpoint_dir)
        self._cleaned = False
        try:
            self._files.make(self.checkpoint_dir)
        except OSError as error:
            raise RunFolderError(f"CheckpointManager({str(checkpoint_dir)!r}): cannot be used: {error}") from error

    def save(
        self,
        checkpoint: Mapping[str, Any],
        name: str = "checkpoint",
        is_best: bool = False,
        *,
        step: int | None = None,
        keep: Iterable[Place] = (),
        announce: Callable[[Place], object] | None = None,
        form: Form = "torch",
    ) -> Place:
        """Write a checkpoint; when this returns it is durable.

        Args:
            checkpoint: dicts, lists and tuples of tensors, strings, bytes, numbers and None. numpy's scalars become
                numbers, its arrays tensors.
            name: labels the folder; a name used again makes a new folder.
            is_best: point `get_best` at it.
            step: what the folder is numbered by; by default one more than the largest there.
            keep: older checkpoints that stay whatever `keep_last_n` says.
            announce: called with the checkpoint once it, and that it is the best, is durable, before older ones are
                deleted. What it raises is passed on, and none is deleted.
            form: of the file with the state; "torch", or "safetensors", whose arrays other tools read by their paths
                in the checkpoint. In that one a list of many floats is an array, too.

        Raises:
            ConfigurationError: the name has other characters than letters, digits, `_`, `.`, `+` and `-`, or there is
                no such form.
            CheckpointError: the checkpoint holds what could not be loaded again; it says where. Nothing was written.
            OSError: it, or that it is the best, could not be made durable; earlier checkpoints are as they were.
        """
        check_name("save", name)
        check_form("save", form)
        write, number = state_writer(plain(checkpoint), form), FORMS[form]
        if not self._cleaned:
            self.clean()  # before anything is written: the disk may be full of it
        present = find_checkpoints(self.checkpoint_dir)
        if step is None:
            step = max((step_of(folder) for folder in present), default=-1) + 1
        ordinal = 1 + max((ordinal_of(folder) or 0 for folder in present), default=0)
        labels = {"format": number, "step": step, "name": name, "ordinal": ordinal}
        target, file = self.target(name, step), STATES[number]
        self._files.commit(target, file, write, lambda written: seal({**labels, "files": {file: written}}))
        if is_best:
            self._files.replace(self.checkpoint_dir / BEST, seal({"checkpoint": target.name}))
        if announce is not None:
            announce(target)
        self._prune({target.name, *(each.name for each in keep)})
        return target

    def target(self, name: str, step: int) -> Place:
        """The folder that the next checkpoint of this name and step gets."""
        target, again = self.checkpoint_dir / f"{step:09d}-{name}", 1
        while self._files.taken(target):
            again += 1
            target = self.checkpoint_dir / f"{step:09d}-{name}~{again}"
        return target

    def clean(self) -> None:
        """Remove what a crash left half-written or half-deleted.

        For a writer alone: what another manager is just writing looks the same.
        """
        try:
            self._files.clean(self.checkpoint_dir)
        except OSError as error:  # it takes room, and does not count
            get_logger("engine").warning("what a crash left is not removed", reason=str(error))
        self._cleaned = True

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """`load_checkpoint`, which needs no manager."""
        return load_checkpoint(path)

    def size(self, path: Place) -> int:
        """Bytes of a checkpoint's files, as its manifest tells them."""
        return size_of(path)

    def valid(self) -> list[Place]:
        """The checkpoints that are complete and undamaged, oldest first."""
        return [folder for folder in find_checkpoints(self.checkpoint_dir) if damage_of(folder) is None]

    def get_latest(self) -> Place | None:
        """The last written checkpoint that is complete and undamaged, or None; says which others it passed over.

        Those whose manifest cannot be read may be newer or older than it: they are named as well.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        looked_at: list[Place] | None = None
        while (folders := find_checkpoints(self.checkpoint_dir)) != looked_at:
            looked_at = folders
            unplaced = [folder for folder in folders if ordinal_of(folder) is None]
            for folder in (*reversed(unplaced), *reversed(folders[len(unplaced) :])):
                damage = damage_of(folder)
                if damage is None:
                    return folder
                if self._files.taken(folder):  # else a writer has deleted it since; look again for what it has written
                    get_logger("engine").warning("checkpoint passed over", reason=damage)
        if folders:
            raise CheckpointError(
                f"{self.checkpoint_dir}: every checkpoint there is damaged ({len(folders)} of them, the newest "
                f"{folders[-1].name}); remove the folder to start from the beginning"
            )
        return None

    def get_best(self) -> Place | None:
        """The checkpoint last saved as the best, or None. Whether it is undamaged, loading it finds out.

        Raises:
            CheckpointError: the note of which it is, is damaged.
        """
        pointer = self.checkpoint_dir / BEST
        try:
            with self._files.open(pointer) as opened:
                content = opened.read()
        except FileNotFoundError:
            return None
        try:
            name = content.decode("utf-8").strip()  # the name alone, as it was written once
            if not is_checkpoint_name(name):
                name = str(unseal(content)["checkpoint"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{pointer}: damaged: {error}; choose among valid() and remove it, or save another as the best"
            ) from None
        return self.checkpoint_dir / name if name in self._files.subfolders(self.checkpoint_dir) else None

    def delete_behind(self, step: int) -> None:
        """Delete the checkpoints of later steps, the best one too: of a run that goes back, they are its past no more.

        Raises:
            OSError: they cannot be deleted.
        """
        self._files.delete([folder for folder in find_checkpoints(self.checkpoint_dir) if step_of(folder) > step])

    def _prune(self, keep: set[str]) -> None:
        try:
            best = self.get_best()
            old = find_checkpoints(self.checkpoint_dir)[: -self.keep_last_n]
            self._files.delete([folder for folder in old if folder.name not in keep and folder != best])
        except (OSError, CheckpointError) as error:  # the new checkpoint is there all the same
            get_logger("engine").warning("older checkpoints not deleted", reason=str(error))


def check_name(place: str, name: str) -> None:
    """Whether a checkpoint's folder can be called so.

    Raises:
        ConfigurationError: it cannot.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigurationError(f"{place}({name=}): use letters, digits, '_', '.', '+' and '-' only")
