"""Finding checkpoints, checking them against their manifests, loading them. Nothing here writes or deletes."""

from __future__ import annotations

import os
import re
from pickle import UnpicklingError
from typing import Any

from pulsetrain.engine.checkpoint.digesting import digest_of
from pulsetrain.engine.checkpoint.files import files_of
from pulsetrain.engine.checkpoint.formats import read_state
from pulsetrain.engine.checkpoint.locations import Place, place_of
from pulsetrain.engine.checkpoint.manifest import FOLDER, FORMATS, MANIFEST, STATES, is_checkpoint_name, parse_manifest
from pulsetrain.engine.errors import CheckpointError

__all__ = ["check_checkpoint", "damage_of", "find_checkpoints", "load_checkpoint", "ordinal_of", "size_of", "step_of"]


def find_checkpoints(folder: str | os.PathLike[str]) -> list[Place]:
    """The checkpoints in a folder, damaged ones too, in the order of their writing, the oldest first.

    Those whose manifest cannot be read stand before the others, by their step: nothing says when they were written.
    Behind a URL, a folder without a manifest is no checkpoint.
    """
    place = place_of(folder)
    found = [place / name for name in files_of(place).subfolders(place) if is_checkpoint_name(name)]
    return sorted(found, key=_age)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint after checking it against its manifest; tensors come to the CPU. Nothing is written.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, of a newer format or holds code; the message says which.
    """
    folder = place_of(path)
    number = _checked(folder)["format"]
    file = folder / STATES[number]
    try:
        with files_of(folder).open(file) as opened:
            loaded = read_state(opened, number)
    except Exception as error:  # whatever a file holds that is no checkpoint of ours
        # without torch's advice, which is to load it with weights_only=False
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"{named[1]}, which is" if named else "what is"
        why = f"it holds {what} no plain value, and was not run" if isinstance(error, UnpicklingError) else str(error)
        raise CheckpointError(f"{file}: cannot be loaded: {why}; load another checkpoint") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file}: holds a {type(loaded).__name__}, which is no checkpoint; load another one")
    return loaded


def check_checkpoint(path: str | os.PathLike[str]) -> None:
    """Compare every file with the manifest, and the manifest with its own digest.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """
    _checked(place_of(path))


def damage_of(folder: Place) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        check_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return None


def ordinal_of(folder: Place) -> int | None:
    """The checkpoint's place in the order of writing; its step where it was written before there were ordinals."""
    try:
        ordinal: int = _read_manifest(folder).get("ordinal", step_of(folder))
    except (CheckpointError, OSError):
        return None
    return ordinal


def size_of(folder: Place) -> int:
    """Bytes of a checkpoint's files, as its manifest tells them.

    Raises:
        OSError: there is no manifest, or it cannot be read.
        CheckpointError: it is damaged, or of a newer format.
    """
    with files_of(folder).open(folder / MANIFEST) as opened:
        text = opened.read()
    try:
        manifest = parse_manifest(text)
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST}: damaged: {error}") from None
    _refuse_newer(folder, manifest)
    return len(text) + sum(int(entry["bytes"]) for entry in manifest["files"].values())


def step_of(folder: Place) -> int:
    """What the checkpoint is numbered by."""
    return _number(folder)[0]


def _checked(folder: Place) -> dict[str, Any]:
    """The manifest, which every file of the checkpoint agrees with."""
    try:
        manifest = _read_manifest(folder)
    except FileNotFoundError:
        known = ", ".join(each.name for each in find_checkpoints(folder.parent)) or "none"
        raise CheckpointError(f"{folder}: no checkpoint there ({MANIFEST} is missing); present: {known}") from None
    _refuse_newer(folder, manifest)
    for name, expected in manifest["files"].items():
        file = folder / name
        try:
            size = files_of(folder).size(file)
            with files_of(folder).open(file) as opened:
                digest = digest_of(opened)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None
        if size != expected["bytes"]:
            raise CheckpointError(f"{file}: {size} bytes, the manifest says {expected['bytes']}: cut or damaged")
        if digest != expected["sha256"]:
            raise CheckpointError(f"{file}: its digest is not the manifest's: damaged; load an older checkpoint")
    return manifest


def _refuse_newer(folder: Place, manifest: dict[str, Any]) -> None:
    if manifest["format"] not in FORMATS:
        raise CheckpointError(
            f"{folder}: format {manifest['format']}, this version reads up to {FORMATS[-1]}; update pulsetrain"
        )


def _read_manifest(folder: Place) -> dict[str, Any]:
    try:
        with files_of(folder).open(folder / MANIFEST) as opened:
            return parse_manifest(opened.read())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: damaged: {error}") from None


def _age(folder: Place) -> tuple[bool, int, int, int, str]:
    ordinal = ordinal_of(folder)
    return (ordinal is not None, ordinal or 0, *_number(folder))


def _number(folder: Place) -> tuple[int, int, str]:
    parts = FOLDER.fullmatch(folder.name)
    assert parts is not None  # find_checkpoints lets no other through
    return int(parts["step"]), int(parts["again"] or 1), folder.name
