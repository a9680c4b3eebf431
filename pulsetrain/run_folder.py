"""Run folders: which one a run gets, and what it says about itself there."""

from __future__ import annotations

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch
import yaml

from engine.errors import RunFolderError

__all__ = ["describe_run", "holds_run", "resolve_folder"]

PACKAGES = ("pulsetrain", "torch", "pytorch-ignite", "blinker", "msgspec", "numpy")


def resolve_folder(pattern: str, *, resume: bool) -> Path:
    """The run's folder; `{n}` in its last part becomes the next free number, or when resuming the last one taken.

    Raises:
        RunFolderError: a new run's folder holds a run already, or there is none to resume.
    """
    folder = Path(pattern)
    if "{n}" in folder.name:
        before, _, after = folder.name.partition("{n}")
        form = re.compile(f"{re.escape(before)}(\\d+){re.escape(after)}")
        taken = [
            int(match[1])
            for path in (folder.parent.iterdir() if folder.parent.is_dir() else ())
            if (match := form.fullmatch(path.name))
        ]
        number = max(taken, default=0) + (not resume)
        if number == 0:
            raise RunFolderError(f"--resume: there is no run {folder} to go on with; leave --resume out to start one")
        return folder.with_name(f"{before}{number}{after}")
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"run folder {folder}: is a file; choose another with --run")
    if not resume and holds_run(folder):
        raise RunFolderError(
            f"run folder {folder}: holds a run already, and nothing is overwritten; go on with it by --resume latest, "
            f"or choose another with --run {folder}-2"
        )
    return folder


def holds_run(folder: Path) -> bool:
    """Whether anything of a run is there."""
    return any((folder / part).exists() for part in ("config.yaml", "run.json", "events", "checkpoints", "metrics.csv"))


def describe_run(folder: Path, config: dict[str, Any], trainer: Any) -> None:
    """Write config.yaml and run.json, what a reader needs to know to run it again."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    facts = {
        "format": 1,
        "seed": trainer.seed,
        "device": str(trainer.backend.device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "command": sys.argv,
        "handlers": [type(handler).__name__ for handler in trainer.handlers],
    }
    (folder / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=2))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
