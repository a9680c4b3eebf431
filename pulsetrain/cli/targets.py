"""Where `pulsetrain export` writes: paths that would change a run or other files are rejected, none is left half."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["check_target", "replacing"]

EVENT_FILE = "events.out.tfevents"  # how the names of TensorBoard's files begin


def check_target(into: Path, folder: Path, form: str, force: bool) -> None:
    """Reject a path that would change the run, or overwrite files of another program.

    Raises:
        ConfigurationError: it would; or something is there, and `force` is false.
    """
    run = folder.resolve()
    if into.resolve() == run or run in into.resolve().parents:
        raise ConfigurationError(
            f"--into {into}: is in the run folder {folder}, which is only read; choose another path"
        )
    if not into.exists() and not into.is_symlink():
        return
    if not force:
        raise ConfigurationError(f"--into {into}: already exists; choose another path, or overwrite it with --force")
    if form == "tensorboard":
        others = [path.name for path in into.iterdir() if not path.name.startswith(EVENT_FILE)] if into.is_dir() else ""
        if not into.is_dir() or others:
            what = f"also holds {others[0]}" if others else "is not a folder"
            raise ConfigurationError(
                f"--into {into}: {what}, and --force replaces only event files; choose another path"
            )
    elif not into.is_file():
        raise ConfigurationError(f"--into {into}: is not a file, and --force replaces only files; choose another path")


@contextmanager
def replacing(into: Path) -> Iterator[Path]:
    """A path beside the target that replaces it once everything is written, and is deleted where writing fails.

    It has the target's name: the ending says whether the file is compressed.

    Raises:
        ConfigurationError: the target's folder does not exist.
    """
    if not into.parent.is_dir():
        raise ConfigurationError(f"--into {into}: there is no folder {into.parent}; create it first")
    with tempfile.TemporaryDirectory(prefix=".export-", dir=into.parent) as beside:
        partial = Path(beside) / into.name
        yield partial
        if into.is_dir():
            shutil.rmtree(into)
        os.replace(partial, into)
