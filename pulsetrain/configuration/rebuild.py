"""Makes the trainer of a recorded run anew, from what the run's folder says of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pulsetrain.configuration.assemble import Assembly, assemble
from pulsetrain.configuration.parse import read_config
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.handlers.run_files.run_file import read_run_file

__all__ = ["base_of", "rebuild"]


def rebuild(run: Path, folder: Path, settings: Mapping[str, str] | None = None) -> Assembly:
    """The run of config.yaml, in another folder.

    Args:
        run: the folder of the recorded run.
        folder: of the new one.
        settings: values as YAML by their dotted keys, in place of the file's.

    Raises:
        RunFolderError: the run was not made from a configuration.
        PulsetrainError: a part cannot be made any more; the message names it.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise RunFolderError(
            f"{run}: has no config.yaml, so its trainer cannot be made from here: it was no run of `pulsetrain train`. "
            "From Python, pulsetrain.verify(run, build_trainer) takes a function that makes it"
        )
    return assemble(read_config(file, settings or {}), base_of(run), folder)


def base_of(folder: Path) -> Path:
    """Where class paths of a configuration in this folder are looked up first: there, or where its run was begun."""
    base = read_run_file(folder).get("base")
    return Path(base) if isinstance(base, str) and Path(base).is_dir() else folder
