"""Finds checkpoints, checks them against their manifests, and loads them. Nothing here writes or deletes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pickle import UnpicklingError
from typing import IO

from pulsetrain.engine.checkpoint.digests import digest_of
from pulsetrain.engine.checkpoint.files import files_of
from pulsetrain.engine.checkpoint.formats import IN_PIECES, read_state, stored_pieces
from pulsetrain.engine.checkpoint.locations import Location, location_of
from pulsetrain.engine.checkpoint.manifest import (
    FOLDER,
    FORMATS,
    MANIFEST,
    STATES,
    Manifest,
    is_checkpoint_name,
    parse_manifest,
)
from pulsetrain.engine.checkpoint.pieces import whole
from pulsetrain.engine.checkpoint.plain import Plain
from pulsetrain.engine.errors import CheckpointError, did_you_mean

__all__ = [
    "check_checkpoint", "damage_of", "find_checkpoints", "history_of", "ordinal_of", "read_checkpoint", "size_of",
    "step_of",
]  # fmt: skip


def find_checkpoints(folder: str | os.PathLike[str]) -> list[Location]:
    """The checkpoints in a folder, damaged ones included, in the order in which they were written, oldest first.

    Those with an unreadable manifest come first, by their step: when they were written is unknown. At a URL, a folder
    without a manifest is not a checkpoint.

    >>> import tempfile
    >>> from pulsetrain.engine.checkpoint import CheckpointManager
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     manager = CheckpointManager(folder)
    ...     saved = [manager.save({}, name) for name in ("first", "second")]
    ...     [checkpoint.name for checkpoint in find_checkpoints(folder)]
    ['000000000-first', '000000001-second']
    """
    location = location_of(folder)
    found = [location / name for name in files_of(location).subfolders(location) if is_checkpoint_name(name)]
    return sorted(found, key=_age)


def read_checkpoint(folder: Location, *, in_pieces: Collection[str] = (), checked: bool = False) -> dict[str, Plain]:
    """The state in a checkpoint's folder; see `load_checkpoint`.

    Args:
        folder: of the checkpoint.
        in_pieces: entries whose tensors are left on the disk, as `StoredTensor`, if several processes wrote them.
        checked: another process has compared all files with the manifest just now; this one compares those that it
            reads from, when it does.
    """
    manifest, files = _manifest_of(folder), files_of(folder)
    number = manifest["format"]
    file = folder / STATES[number]
    names = manifest["files"] if number == IN_PIECES else ()
    for name in manifest["files"] if not checked else [STATES[number]]:
        _check_file(folder, name, manifest)
    try:
        opened_by: dict[Callable[[], IO[bytes]], str] = {partial(files.open, folder / name): name for name in names}
        pieces = stored_pieces(opened_by)
        if checked:
            checking = {each: _checking(each, folder, name, manifest) for each, name in opened_by.items()}
            pieces = {
                name: [replace(piece, open=checking[piece.open]) for piece in found] for name, found in pieces.items()
            }
        with files.open(file) as opened:
            loaded = read_state(opened, number, pieces)
        if pieces:
            loaded = {name: value if name in in_pieces else whole(value) for name, value in loaded.items()}
    except Exception as error:  # torch raises many kinds for a file that is not ours
        # without torch's advice, which is to load the file with weights_only=False
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = named[1] if named else "an object"
        why = f"it holds {what}, which loading would run as code" if isinstance(error, UnpicklingError) else str(error)
        raise CheckpointError(f"{file}: cannot be loaded: {why}; load another checkpoint") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file}: holds a {type(loaded).__name__}, not a dict; load another checkpoint")
    return loaded


def check_checkpoint(path: str | os.PathLike[str]) -> None:
    """Compare every file with the manifest, and the manifest with its own digest.

    >>> import tempfile
    >>> from pulsetrain.engine.checkpoint import CheckpointManager
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = CheckpointManager(folder).save({"epoch": 3})
    ...     check_checkpoint(path)
    ...     size = (path / "state.pt").write_bytes(b"another file")
    ...     check_checkpoint(path)
    Traceback (most recent call last):
    pulsetrain.engine.errors.CheckpointError: ...

    Raises:
        CheckpointError: as `load_checkpoint`.
    """
    folder = location_of(path)
    manifest = _manifest_of(folder)
    for name in manifest["files"]:
        _check_file(folder, name, manifest)


def damage_of(folder: Location) -> str | None:
    """How a checkpoint is damaged, or None."""
    try:
        check_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return None


def ordinal_of(folder: Location) -> int | None:
    """The checkpoint's number in the order of writing; its step if it is older than ordinals; None if unreadable."""
    try:
        return _read_manifest(folder).get("ordinal", step_of(folder))
    except (CheckpointError, OSError):
        return None


def history_of(folder: Location) -> tuple[int, int, list[str]]:
    """What a checkpoint knows of those before it: its ordinal, their largest step, and the names used at that step.

    Without a readable manifest, or with one that does not say, what follows from its own name.
    """
    step = step_of(folder)
    try:
        manifest = _read_manifest(folder)
    except (CheckpointError, OSError):
        return 0, step, [folder.name]
    return manifest.get("ordinal", step), manifest.get("last_step", step), manifest.get("names", [folder.name])


def size_of(folder: Location) -> int:
    """Size of a checkpoint's files in bytes, according to its manifest.

    Raises:
        OSError: the manifest is missing.
        CheckpointError: the manifest is damaged, or of a newer format.
    """
    manifest = _read_manifest(folder)
    _refuse_newer(folder, manifest)
    written = files_of(folder).size(folder / MANIFEST)
    return written + sum(int(entry["bytes"]) for entry in manifest["files"].values())


def step_of(folder: Location) -> int:
    """The step in the checkpoint's name."""
    return _number(folder)[0]


def _manifest_of(folder: Location) -> Manifest:
    try:
        manifest = _read_manifest(folder)
    except FileNotFoundError:
        names = [each.name for each in find_checkpoints(folder.parent)]
        known = ", ".join(names) or "none; a checkpoint is a folder RUN/checkpoints/NUMBER-NAME"
        hint = did_you_mean(folder.name, names)
        raise CheckpointError(
            f"{folder}: no checkpoint there ({MANIFEST} is missing); present: {known}{hint}"
        ) from None
    _refuse_newer(folder, manifest)
    return manifest


def _check_file(folder: Location, name: str, manifest: Manifest) -> None:
    """Compare a file with what the manifest says of it."""
    file, expected = folder / name, manifest["files"][name]
    try:
        size = files_of(folder).size(file)
        with files_of(folder).open(file) as opened:
            digest = digest_of(opened)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}; load another checkpoint") from None
    if size != expected["bytes"]:
        raise CheckpointError(
            f"{file}: has {size} bytes, and the manifest says {expected['bytes']}: cut or damaged; "
            "load another checkpoint"
        )
    if digest != expected["sha256"]:
        raise CheckpointError(f"{file}: its digest differs from the manifest's: damaged; load another checkpoint")


def _checking(
    open_file: Callable[[], IO[bytes]], folder: Location, name: str, manifest: Manifest
) -> Callable[[], IO[bytes]]:
    """The function, which compares the file with the manifest before it opens it for the first time."""
    compared = name == STATES[manifest["format"]]  # has been read as a whole

    def opened() -> IO[bytes]:
        nonlocal compared
        if not compared:
            _check_file(folder, name, manifest)
            compared = True
        return open_file()

    return opened


def _refuse_newer(folder: Location, manifest: Manifest) -> None:
    if manifest["format"] not in FORMATS:
        raise CheckpointError(
            f"{folder}: has format {manifest['format']}, and this version reads up to {FORMATS[-1]}; update pulsetrain"
        )


def _read_manifest(folder: Location) -> Manifest:
    try:
        with files_of(folder).open(folder / MANIFEST) as opened:
            return parse_manifest(opened.read())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: damaged: {error}; load another checkpoint") from None


def _age(folder: Location) -> tuple[bool, int, int, int, str]:
    ordinal = ordinal_of(folder)
    return (ordinal is not None, ordinal or 0, *_number(folder))


def _number(folder: Location) -> tuple[int, int, str]:
    parts = FOLDER.fullmatch(folder.name)
    assert parts is not None  # find_checkpoints returns no other names
    return int(parts["step"]), int(parts["repeat"] or 1), folder.name
