"""Run folders: which one a run gets, how it is claimed and given back, and what it says about itself."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pulsetrain.engine.checkpoint import find_checkpoints, location_of
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.handlers import Checkpointer
from pulsetrain.handlers.run_files.run_file import write_run_file

__all__ = ["Claim", "describe_run", "has_checkpoint", "holds_run", "resolve_folder"]

PARTS = ("config.yaml", "run.json", "events", "checkpoints", "metrics.csv", "plots", "crash", "crash.txt")


def resolve_folder(pattern: str, *, resume: str | None = None, chosen: bool = True) -> Path:
    """The run's folder; `{n}` in its last part becomes the next free number.

    Resuming "latest" takes the last run of that pattern, or the first number where there is none. Resuming a
    checkpoint by its path stays in that checkpoint's own run, unless another folder was chosen.

    Args:
        pattern: a folder.
        resume: None for a new run, "latest", or a checkpoint's path or URL.
        chosen: the pattern was asked for in so many words; it is not the configuration's.

    Raises:
        RunFolderError: a new run's folder holds a run already, or is a URL; or the checkpoint is not there.
        ConfigurationError: the checkpoint's URL is of a kind that nothing here can read.
    """
    checkpoint = None if resume in (None, "latest") else location_of(str(resume))
    own = _run_of(checkpoint) if isinstance(checkpoint, Path) else None  # behind a URL there is no run folder
    if own is not None and not chosen:
        return own
    if "://" in pattern:
        raise RunFolderError(
            f"run folder {pattern}: is a URL, and a run folder lies on this machine; choose a path with --run. "
            "Checkpoints may lie elsewhere: give the URL to the Checkpointer, "
            "handlers: [{class_path: Checkpointer, init_args: {folder: URL}}]"
        )
    folder = Path(pattern)
    if "{n}" in str(folder.parent):
        raise RunFolderError(f"run folder {pattern}: '{{n}}' may stand in its last part alone")
    if "{n}" in folder.name:
        return _numbered(folder, last=resume == "latest")
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"run folder {folder}: is a file; choose another with --run")
    if resume != "latest" and holds_run(folder) and (own is None or folder.resolve() != own.resolve()):
        raise RunFolderError(
            f"run folder {folder}: holds a run already, and nothing is overwritten; go on with it by --resume latest, "
            f"or choose another with --run {_beside(folder)}"
        )
    return folder


def holds_run(folder: Path) -> bool:
    """Whether anything of a run is there."""
    return any((folder / part).exists() for part in ("config.yaml", "run.json", "events", "checkpoints", "metrics.csv"))


def has_checkpoint(trainer: Any) -> bool:
    """Whether the run has saved anything, here or at a URL; whether it is sound, its reader finds out."""
    saving = [handler for handler in trainer.handlers if isinstance(handler, Checkpointer)]
    return any(find_checkpoints(handler.manager.checkpoint_dir) for handler in saving)


class Claim:
    """A run folder, made where it is missing, and given back where the run comes to nothing.

    Args:
        folder: the folder.
        new: it must not be there yet.

    Raises:
        FileExistsError: it is, and had to be new.
        RunFolderError: it cannot be made.
    """

    def __init__(self, folder: Path, *, new: bool = False) -> None:
        self.folder = folder
        self._made: list[Path] = []  # outermost first
        self._present = {part for part in PARTS if (folder / part).exists()}
        try:
            for parent in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
                try:
                    parent.mkdir()
                except FileExistsError:  # another process was faster
                    if parent == folder:
                        raise
                else:
                    self._made.append(parent)
            if new and folder not in self._made:
                raise FileExistsError(str(folder))
        except OSError as error:
            self.give_back()
            if isinstance(error, FileExistsError) and new:
                raise
            raise RunFolderError(
                f"run folder {folder}: cannot be made: {error.strerror or error}; choose another with --run"
            ) from error

    def give_back(self) -> None:
        """Remove what the run has brought into being; whatever was there before stays."""
        if self.folder in self._made:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            for part in PARTS:
                path = self.folder / part
                if part in self._present:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.exists():
                    path.unlink()
        for parent in reversed(self._made):
            if parent != self.folder:
                try:
                    parent.rmdir()
                except OSError:  # somebody else is using it by now
                    break
        self._made = []


def describe_run(folder: Path, config: Mapping[str, Any], trainer: Any, base: Path) -> None:
    """Write config.yaml and run.json, what a reader needs to know to run it again.

    Args:
        base: where class paths are looked up first.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    try:
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        write_run_file(folder, trainer, base=str(base.resolve()))
    except OSError as error:
        raise RunFolderError(
            f"run folder {folder}: cannot be written: {error.strerror or error}; choose another with --run"
        ) from error


def _numbered(pattern: Path, *, last: bool) -> Path:
    before, _, after = pattern.name.partition("{n}")
    form = re.compile(f"{re.escape(before)}(\\d+){re.escape(after)}")
    taken = {
        int(match[1]): path
        for path in (pattern.parent.iterdir() if pattern.parent.is_dir() else ())
        if (match := form.fullmatch(path.name))
    }
    runs = [number for number, path in taken.items() if holds_run(path)]
    if last and runs:
        return taken[max(runs)]
    return pattern.with_name(f"{before}{max(taken, default=0) + 1}{after}")


def _run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, where it lies in one."""
    if not (checkpoint / "manifest.json").is_file():
        place = f"--resume {checkpoint}"
        if holds_run(checkpoint):
            raise RunFolderError(f"{place}: is a run folder; go on with it by --run {checkpoint} --resume latest")
        folder = checkpoint.parent if checkpoint.parent.is_dir() else checkpoint
        there = sorted(path.parent.name for path in folder.glob("*/manifest.json"))
        known = f"{folder} has {', '.join(there)}" if there else "a checkpoint is a folder RUN/checkpoints/NUMBER-NAME"
        raise RunFolderError(f"{place}: no checkpoint there; {known}")
    folder = checkpoint.parent
    return folder.parent if folder.name == "checkpoints" and holds_run(folder.parent) else None


def _beside(folder: Path) -> Path:
    number = 2
    while (other := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return other
