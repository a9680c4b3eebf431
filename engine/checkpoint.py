"""Checkpoints on disk: each complete or absent, never half; none is ever overwritten.

The order of writing: a temporary folder, its files, fsync, a manifest with every file's size and digest, fsync,
rename, fsync of the parent; then the pointer to the best one; only then older ones are deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from engine.errors import CheckpointError, RunFolderError
from engine.logs import get_logger

__all__ = ["CheckpointManager", "check_checkpoint", "find_checkpoints", "load_checkpoint"]

FORMAT = 1
_STATE, _MANIFEST, _BEST, _PARTIAL = "state.pt", "manifest.json", "best", ".partial-"
_FOLDER = re.compile(r"(?P<step>\d{9,})-(?P<name>[\w.+-]+?)(?:~(?P<again>\d+))?")


class CheckpointManager:
    """Saves, finds and loads checkpoints in one folder; needs no engine. One writer at a time.

    Args:
        checkpoint_dir: made where it is missing. What a crash left half-written there is removed.
        keep_last_n: how many of the newest stay; the best one stays as well.

    Raises:
        ValueError: keep_last_n is below 1.
        RunFolderError: the folder cannot be made or written.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str], keep_last_n: int = 3) -> None:
        if keep_last_n < 1:
            raise ValueError(f"CheckpointManager({keep_last_n=}): needs to keep at least 1")
        self.checkpoint_dir = Path(checkpoint_dir)
        self.keep_last_n = keep_last_n
        try:
            self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            for leftover in self.checkpoint_dir.glob(f"{_PARTIAL}*"):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()
        except OSError as error:
            raise RunFolderError(f"CheckpointManager({str(checkpoint_dir)!r}): cannot be used: {error}") from error

    def save(
        self,
        checkpoint: Mapping[str, Any],
        name: str = "checkpoint",
        is_best: bool = False,
        *,
        step: int | None = None,
        keep: Iterable[Path] = (),
    ) -> Path:
        """Write a checkpoint; when this returns it is durable.

        Args:
            checkpoint: tensors and plain containers of them, strings and numbers.
            name: labels the folder; a name used again makes a new folder.
            is_best: point `get_best` at it.
            step: what the folder is numbered by; by default one more than the newest.
            keep: older checkpoints that stay whatever `keep_last_n` says.

        Raises:
            ValueError: the name has other characters than letters, digits, `_`, `.`, `+` and `-`.
            OSError: it could not be written; earlier checkpoints are as they were.
        """
        if not re.fullmatch(r"[\w.+-]+", name):
            raise ValueError(f"save({name=}): use letters, digits, '_', '.', '+' and '-' only")
        if step is None:
            step = max((_number(folder)[0] for folder in find_checkpoints(self.checkpoint_dir)), default=-1) + 1
        target, again = self.checkpoint_dir / f"{step:09d}-{name}", 1
        while target.exists():
            again += 1
            target = self.checkpoint_dir / f"{step:09d}-{name}~{again}"
        partial = self.checkpoint_dir / f"{_PARTIAL}{target.name}"
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt that failed
        partial.mkdir()
        try:
            self._write(partial, checkpoint, step, name)
            os.rename(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync_folder(self.checkpoint_dir)
        if is_best:
            self._point_best(target)
        self._prune({target, *keep})
        return target

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """`load_checkpoint`, which needs no manager."""
        return load_checkpoint(path)

    def valid(self) -> list[Path]:
        """The checkpoints that are complete and undamaged, oldest first."""
        return [folder for folder in find_checkpoints(self.checkpoint_dir) if _damage(folder) is None]

    def get_latest(self) -> Path | None:
        """The newest checkpoint that is complete and undamaged, saying which newer ones it passed over; or None.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        folders = find_checkpoints(self.checkpoint_dir)
        for folder in reversed(folders):
            damage = _damage(folder)
            if damage is None:
                return folder
            get_logger("engine").warning("checkpoint passed over", reason=damage)
        if folders:
            raise CheckpointError(
                f"{self.checkpoint_dir}: every checkpoint there is damaged ({len(folders)} of them, the newest "
                f"{folders[-1].name}); remove the folder to start from the beginning"
            )
        return None

    def get_best(self) -> Path | None:
        """The checkpoint last saved as the best, or None."""
        try:
            folder = self.checkpoint_dir / (self.checkpoint_dir / _BEST).read_text().strip()
        except FileNotFoundError:
            return None
        return folder if folder.is_dir() else None

    def _write(self, folder: Path, checkpoint: Mapping[str, Any], step: int, name: str) -> None:
        state = folder / _STATE
        with state.open("wb") as file:
            torch.save(dict(checkpoint), file)
            file.flush()
            os.fsync(file.fileno())
        files = {_STATE: {"bytes": state.stat().st_size, "sha256": _digest(state)}}
        manifest = {"format": FORMAT, "step": step, "name": name, "files": files}
        _write_text(folder / _MANIFEST, json.dumps(manifest, indent=2))
        _sync_folder(folder)

    def _point_best(self, target: Path) -> None:
        pointer = self.checkpoint_dir / f"{_PARTIAL}{_BEST}.file"
        _write_text(pointer, target.name + "\n")
        os.replace(pointer, self.checkpoint_dir / _BEST)
        _sync_folder(self.checkpoint_dir)

    def _prune(self, keep: set[Path]) -> None:
        folders = find_checkpoints(self.checkpoint_dir)
        best = self.get_best()
        for folder in folders[: -self.keep_last_n]:
            if folder not in keep and folder != best:
                # renamed first: a deletion cut short leaves no folder that looks like a checkpoint
                doomed = folder.with_name(f"{_PARTIAL}{folder.name}.deleted")
                os.rename(folder, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, damaged ones too, oldest first."""
    found = (path for path in folder.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name))
    return sorted(found, key=_number)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint after checking it against its manifest; tensors come to the CPU. Nothing is written.

    Raises:
        CheckpointError: it is missing, incomplete, damaged or of a newer format; the message says which.
    """
    folder = Path(path)
    check_checkpoint(folder)
    loaded: dict[str, Any] = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
    return loaded


def check_checkpoint(folder: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
            raise ValueError("it has no list of files")
        version = manifest["format"]
    except FileNotFoundError:
        present = find_checkpoints(folder.parent) if folder.parent.is_dir() else []
        known = ", ".join(each.name for each in present) or "none"
        raise CheckpointError(f"{folder}: no checkpoint there ({_MANIFEST} is missing); present: {known}") from None
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / _MANIFEST}: damaged: {error}") from None
    if version != FORMAT:
        raise CheckpointError(f"{folder}: format {version}, this version reads {FORMAT}; update pulsetrain")
    for name, expected in manifest["files"].items():
        file = folder / name
        try:
            size, digest = file.stat().st_size, _digest(file)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None
        if size != expected["bytes"]:
            raise CheckpointError(f"{file}: {size} bytes, the manifest says {expected['bytes']}: cut or damaged")
        if digest != expected["sha256"]:
            raise CheckpointError(f"{file}: its digest is not the manifest's: damaged; load an older checkpoint")


def _damage(folder: Path) -> str | None:
    try:
        check_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return None


def _number(folder: Path) -> tuple[int, int, str]:
    parts = _FOLDER.fullmatch(folder.name)
    assert parts is not None  # find_checkpoints lets no other through
    return int(parts["step"]), int(parts["again"] or 1), folder.name


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
