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

__all__ = ["CheckpointManager"]

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
            step = max((_number(folder)[0] for folder in self._folders()), default=-1) + 1
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
        """Read a checkpoint after checking it against its manifest; tensors come to the CPU.

        Raises:
            CheckpointError: it is missing, incomplete, damaged or of a newer format; the message says which.
        """
        folder = Path(path)
        self.check(folder)
        loaded: dict[str, Any] = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
        return loaded

    def check(self, path: str | os.PathLike[str]) -> None:
        """Compare every file with the manifest.

        Raises:
            CheckpointError: as `load`.
        """
        folder = Path(path)
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
            if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
                raise ValueError("it has no list of files")
            version = manifest["format"]
        except FileNotFoundError:
            known = ", ".join(each.name for each in self._folders()) or "none"
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

    def valid(self) -> list[Path]:
        """The checkpoints that pass `check`, oldest first."""
        return [folder for folder in self._folders() if self._is_valid(folder)]

    def get_latest(self) -> Path | None:
        """The newest checkpoint that passes `check`, or None."""
        return next((folder for folder in reversed(self._folders()) if self._is_valid(folder)), None)

    def get_best(self) -> Path | None:
        """The checkpoint last saved as the best, or None."""
        try:
            folder = self.checkpoint_dir / (self.checkpoint_dir / _BEST).read_text().strip()
        except FileNotFoundError:
            return None
        return folder if folder.is_dir() else None

    def _is_valid(self, folder: Path) -> bool:
        try:
            self.check(folder)
        except CheckpointError:
            return False
        return True

    def _folders(self) -> list[Path]:
        found = (path for path in self.checkpoint_dir.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name))
        return sorted(found, key=_number)

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
        folders = self._folders()
        best = self.get_best()
        for folder in folders[: -self.keep_last_n]:
            if folder not in keep and folder != best:
                # renamed first: a deletion cut short leaves no folder that looks like a checkpoint
                doomed = folder.with_name(f"{_PARTIAL}{folder.name}.deleted")
                os.rename(folder, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _number(folder: Path) -> tuple[int, int, str]:
    parts = _FOLDER.fullmatch(folder.name)
    assert parts is not None  # _folders lets no other through
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
