"""Makes the trainer of a recorded run again, from the configuration in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from pulsetrain.configuration.assemble import Assembly, assemble
from pulsetrain.configuration.parse import read_config, redacted_options
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.recording.log.files import NamedPath
from pulsetrain.engine.recording.log.run_file import newer_format, read_run_file

__all__ = ["base_of", "config_file", "rebuild"]


def rebuild(run: str | os.PathLike[str], folder: Path, settings: Mapping[str, str] | None = None) -> Assembly:
    """Assemble the run's config.yaml, with another run folder.

    Args:
        run: the folder of the recorded run.
        folder: the run folder of the new trainer.
        settings: values as YAML text, by dotted key, that replace those of the file.

    Raises:
        RunFolderError: the run was not made from a configuration, or by a newer version.
        PulsetrainError: a part cannot be made any more; the message names it.
    """
    file = config_file(run, "pulsetrain.verify(run, build_trainer) takes a function that makes it")
    if newer := newer_format(read_run_file(Path(run))):
        raise RunFolderError(f"{run}: {newer}")
    config = read_config(file, settings or {})
    if missing := redacted_options(config):
        names = ", ".join(missing)
        raise RunFolderError(
            f"{file}: credentials are not kept in run folders; give {names} again: `pulsetrain fork` takes "
            f"--{missing[0]}=VALUE, and pulsetrain.verify() in Python a function that makes the trainer"
        )
    return assemble(config, base_of(Path(run)), folder)


def config_file(run: str | os.PathLike[str], instead: str) -> NamedPath:
    """The run's config.yaml.

    Args:
        run: the folder of the recorded run.
        instead: what can be done in Python without this file.

    Raises:
        RunFolderError: the run was not made from a configuration.
    """
    file = NamedPath(Path(run, "config.yaml"), str(Path(str(run), "config.yaml")))
    if not file.path.is_file():
        raise RunFolderError(
            f"{run}: has no config.yaml, so the command line cannot make its trainer: `pulsetrain train` did not start "
            f"this run. From Python, {instead}"
        )
    return file


def base_of(folder: Path) -> Path:
    """The folder in which class paths are looked up first: where the run was started, or the configuration's own."""
    base = read_run_file(folder).get("base")
    if base is None:
        base = _base_of_sweep(folder.parent if folder.name == "front" else folder)
    return Path(base) if isinstance(base, str) and Path(base).is_dir() else folder


def _base_of_sweep(folder: Path) -> str | None:
    """That of the configuration which a sweep varies, whose best.yaml, or front/0000.yaml, is asked about."""
    try:
        saved = load_yaml((folder / "sweep.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    is_saved = isinstance(saved, dict) and "base" in saved  # users write files of this name, too, without that entry
    config = saved.get("config") if is_saved else None
    if not isinstance(config, str) or not Path(config).is_absolute() or Path(config).parent == folder.resolve():
        return None
    return str(base_of(Path(config).parent))
