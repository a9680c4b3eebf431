"""Chooses a checkpoint: the latest or the best of a folder, or what a path names."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from pulsetrain.engine.checkpoint.files import files_of
from pulsetrain.engine.checkpoint.locations import Location, location_of
from pulsetrain.engine.checkpoint.manifest import BEST, MANIFEST, is_checkpoint_name, unseal
from pulsetrain.engine.checkpoint.plain import Plain
from pulsetrain.engine.checkpoint.reader import damage_of, find_checkpoints, ordinal_of, read_checkpoint
from pulsetrain.engine.errors import CheckpointError, nearest
from pulsetrain.engine.logs import get_logger

__all__ = ["best_of", "latest_of", "load_checkpoint", "resolve"]

LATEST = "latest"
_NAMED = "pass a checkpoint's folder, a run folder (for its latest checkpoint), or RUN/best"


def load_checkpoint(
    path: str | os.PathLike[str], *, in_pieces: Collection[str] = (), checked: bool = False
) -> dict[str, Plain]:
    """Read a checkpoint after checking it against its manifest; tensors are on the CPU.

    >>> import tempfile
    >>> from pulsetrain.engine.checkpoint import CheckpointManager
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = CheckpointManager(folder).save({"epoch": 3, "rates": [0.1, 0.01]})
    ...     load_checkpoint(path), load_checkpoint(f"{folder}/latest")
    ({'epoch': 3, 'rates': [0.1, 0.01]}, {'epoch': 3, 'rates': [0.1, 0.01]})

    Args:
        path: whatever `resolve` takes.
        in_pieces: entries whose tensors are left on the disk, as `StoredTensor`, if several processes wrote them: a
            process that needs a part of one reads that alone.
        checked: another process has compared all files with the manifest just now; this one compares those that it
            reads from, when it does.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, of a newer format or holds code; the message says which.
    """
    return read_checkpoint(resolve(path), in_pieces=in_pieces, checked=checked)


def resolve(path: str | os.PathLike[str]) -> Location:
    """The checkpoint that a path names.

    Args:
        path: a checkpoint's folder; or `best` or `latest` in a run folder or in its folder `checkpoints`; or one of
            these folders, for its latest checkpoint.

    Raises:
        CheckpointError: there is none of that kind, or the file that names the best one is damaged.
    """
    folder = location_of(path)
    if is_checkpoint_name(folder.name) or _has_manifest(folder):
        return folder
    holders = [(folder, LATEST), (folder / "checkpoints", LATEST)]  # first: a run folder may itself be called `best`
    if folder.name in (BEST, LATEST):
        holders += [(folder.parent, folder.name), (folder.parent / "checkpoints", folder.name)]
    for each, which in holders:
        if find_checkpoints(each):
            found = best_of(each) if which == BEST else latest_of(each)
            if found is None:
                raise CheckpointError(f"{folder}: no checkpoint in {each} was saved as the best; name one, or 'latest'")
            return found
    if folder.parent.name in (BEST, LATEST) or is_checkpoint_name(folder.parent.name) or _has_manifest(folder.parent):
        raise CheckpointError(f"{folder}: a checkpoint is a folder; name {folder.parent}, without {folder.name!r}")
    if folder.name in (BEST, LATEST):
        if isinstance(folder, Path) and not folder.parent.exists():
            raise CheckpointError(f"{folder}: there is no folder {folder.parent}; `pulsetrain runs` lists the runs")
        raise CheckpointError(
            f"{folder}: there is no checkpoint in {folder.parent}; name the run folder, too, as "
            f"RUN/checkpoints/{folder.name}"
        )
    files = files_of(folder)
    if isinstance(folder, Path) and folder.is_file():
        raise CheckpointError(
            f"{folder}: is a file, and a checkpoint is a folder; {_NAMED}, or load weights of another program into the "
            "model by load_safetensors or torch's load_state_dict"
        )
    if not files.exists(folder):
        near = nearest(folder.name, (LATEST, BEST))
        hint = f"; did you mean {str(folder.parent / near[0])!r}?" if near else ""
        raise CheckpointError(f"{folder}: does not exist; {_NAMED}{hint}")
    return folder  # which reading refuses


def _has_manifest(folder: Location) -> bool:
    try:
        with files_of(folder).open(folder / MANIFEST):
            return True
    except OSError:
        return False


def latest_of(folder: Location) -> Location | None:
    """See `CheckpointManager.get_latest`."""
    checked: list[Location] | None = None
    while (folders := find_checkpoints(folder)) != checked:
        checked = folders
        unordered = [each for each in folders if ordinal_of(each) is None]
        for each in (*reversed(unordered), *reversed(folders[len(unordered) :])):
            damage = damage_of(each)
            if damage is None:
                return each
            if files_of(folder).exists(each):  # else its writer has deleted it meanwhile: list the folder again
                get_logger("engine").warning("damaged checkpoint skipped", reason=damage)
    if folders:
        raise CheckpointError(
            f"{folder}: every checkpoint there is damaged ({len(folders)} of them, the newest "
            f"{folders[-1].name}); remove the folder to start from the beginning"
        )
    return None


def best_of(folder: Location) -> Location | None:
    """See `CheckpointManager.get_best`."""
    pointer = folder / BEST
    try:
        with files_of(folder).open(pointer) as opened:
            content = opened.read()
    except FileNotFoundError:
        return None
    try:
        name = content.decode("utf-8").strip()  # an early version wrote the bare name
        if not is_checkpoint_name(name):
            name = str(unseal(content)["checkpoint"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{pointer}: damaged: {error}; choose one of valid() and remove the file, or save another as the best"
        ) from None
    return folder / name if name in files_of(folder).subfolders(folder) else None
