"""Run folders: which one a run gets, how it is claimed and released, and the description written into it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pulsetrain.configuration.yaml_text import dump_yaml
from pulsetrain.engine.checkpoint import find_checkpoints, resolve
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.handlers import Checkpointer
from pulsetrain.handlers.run_files.ownership import release, take
from pulsetrain.handlers.run_files.redaction import redacted
from pulsetrain.handlers.run_files.run_file import write_run_file

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = ["Claim", "SharedClaim", "has_checkpoint", "holds_run", "resolve_folder", "run_of", "write_description"]

PARTS = ("config.yaml", "run.json", "events", "checkpoints", "metrics.csv", "plots", "crash", "crash.txt")


def resolve_folder(pattern: str, *, resume: str | None = None, chosen: bool = True) -> Path:
    """The run's folder; `{n}` in its last part becomes the next free number.

    Resuming "latest" means the last run of that pattern, or the first number where there is none. A checkpoint that is
    resumed by its path stays in its own run, unless another folder was chosen.

    Args:
        pattern: a folder.
        resume: None for a new run, "latest", or a checkpoint's path or URL.
        chosen: whether the user asked for this pattern; False where it is the configuration's.

    Raises:
        RunFolderError: a new run's folder already holds a run, or is a URL; or the checkpoint does not exist.
        ConfigurationError: no installed package reads URLs of the checkpoint's kind.
    """
    checkpoint = None if resume in (None, "latest") else resolve(str(resume))
    own = run_of(checkpoint) if isinstance(checkpoint, Path) else None  # a URL has no run folder
    if own is not None and not chosen:
        return own
    if "://" in pattern:
        raise RunFolderError(
            f"run folder {pattern}: is a URL, and a run folder is on this machine; choose a path with --run. "
            "Checkpoints may be elsewhere: give the URL to the Checkpointer, "
            "handlers: [{class_path: Checkpointer, init_args: {folder: URL}}]"
        )
    folder = Path(pattern)
    if "{n}" in str(folder.parent):
        raise RunFolderError(f"run folder {pattern}: '{{n}}' is allowed only in its last part")
    if "{n}" in folder.name:
        return _numbered(folder, last=resume == "latest")
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"run folder {folder}: is a file; choose another with --run")
    if resume != "latest" and holds_run(folder) and (own is None or folder.resolve() != own.resolve()):
        raise RunFolderError(
            f"run folder {folder}: already holds a run, which is not overwritten; resume it by --resume latest, "
            f"or choose another with --run {_beside(folder)}"
        )
    return folder


def holds_run(folder: Path) -> bool:
    """Whether the folder has any file of a run."""
    return any((folder / part).exists() for part in ("config.yaml", "run.json", "events", "checkpoints", "metrics.csv"))


def has_checkpoint(trainer: Trainer) -> bool:
    """Whether the run has saved a checkpoint, here or at a URL; loading it finds out whether it is sound."""
    checkpointers = [handler for handler in trainer.handlers if isinstance(handler, Checkpointer)]
    return any(find_checkpoints(handler.manager.checkpoint_dir) for handler in checkpointers)


class Claim:
    """A run folder, made where it is missing, and released where the run fails before it has learned anything.

    It is owned from now on; the trainer's handlers take it over.

    Args:
        folder: the folder.
        new: whether the folder must not exist yet.
        wait: until no other process owns it.

    Raises:
        FileExistsError: the folder exists, and had to be new.
        RunFolderError: the folder cannot be made, or another process owns it.
    """

    def __init__(self, folder: Path, *, new: bool = False, wait: bool = False) -> None:
        self.folder = folder
        self._made: list[Path] = []  # outermost first
        self._present = set(PARTS)  # until the folder is owned, nothing in it is this run's
        try:
            for parent in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
                try:
                    parent.mkdir()
                except FileExistsError:  # another process made it first
                    if parent == folder:
                        raise
                else:
                    self._made.append(parent)
            if new and folder not in self._made:
                raise FileExistsError(str(folder))
        except OSError as error:
            self.release()
            if isinstance(error, FileExistsError) and new:
                raise
            raise RunFolderError(
                f"run folder {folder}: cannot be made: {error.strerror or error}; choose another with --run"
            ) from error
        take(folder, self, wait=wait)
        self._present = {part for part in PARTS if (folder / part).exists()}

    def release(self) -> None:
        """Remove what the run has made; what was there before stays."""
        release(self)
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
                    with suppress(OSError):  # the disk has become read-only: the error that ended the run says so
                        path.unlink()
        for parent in reversed(self._made):
            if parent != self.folder:
                try:
                    parent.rmdir()
                except OSError:  # another process uses it by now
                    break
        self._made = []


class SharedClaim:
    """A run folder that the main process of several has claimed, in the other ones, which keep nothing there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def release(self) -> None:
        """The main process releases it."""


def write_description(folder: Path, config: Mapping[str, object], trainer: Trainer, base: Path) -> None:
    """Write config.yaml and run.json, from which the run can be repeated; they keep no credentials.

    Args:
        base: the folder in which class paths are looked up first.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    try:
        text = dump_yaml(redacted(dict(config)))
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


def run_of(checkpoint: Path) -> Path | None:
    """The run folder of a checkpoint; None where it is not in one."""
    if not (checkpoint / "manifest.json").is_file():
        given = f"--resume {checkpoint}"
        if holds_run(checkpoint):
            raise RunFolderError(f"{given}: is a run folder without a checkpoint; start it again by --resume latest")
        folder = checkpoint.parent if checkpoint.parent.is_dir() else checkpoint
        found = sorted(path.parent.name for path in folder.glob("*/manifest.json"))
        known = f"{folder} has {', '.join(found)}" if found else "a checkpoint is a folder RUN/checkpoints/NUMBER-NAME"
        raise RunFolderError(f"{given}: is not a checkpoint; {known}")
    folder = checkpoint.parent
    return folder.parent if folder.name == "checkpoints" and holds_run(folder.parent) else None


def _beside(folder: Path) -> Path:
    number = 2
    while (other := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return other
