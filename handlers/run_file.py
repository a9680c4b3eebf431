"""run.json: what a run is, for whoever reads its folder later."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.environment import describe_environment
from handlers.event_values import EventValues
from handlers.run_folder import replace_file

__all__ = ["RUN_FILE", "describe_run", "note_start", "read_run_file", "write_run_file"]

RUN_FILE = "run.json"
FORMAT = 1


def describe_run(engine: Any) -> dict[str, Any]:
    """Plain values: what the run was made with, as far as the engine knows it."""
    config, device = getattr(engine, "config", None), getattr(getattr(engine, "backend", None), "device", "cpu")
    settings = {each.name: getattr(config, each.name) for each in fields(config)} if is_dataclass(config) else None
    facts: dict[str, Any] = {}
    EventValues().put(facts, "settings", settings)
    return {
        "format": FORMAT,
        "id": uuid.uuid4().hex,
        "created": _now(),
        "seed": getattr(engine, "seed", None),
        "environment": describe_environment(device),
        "git": _git_state(),
        "command": sys.argv,
        **facts,
        "handlers": [type(handler).__name__ for handler in getattr(engine, "handlers", ())],
        "starts": [],
    }


def write_run_file(folder: Path, engine: Any, **more: Any) -> None:
    """Write run.json, over one that is there.

    Args:
        more: facts beside those that the engine knows, plain values.

    Raises:
        OSError: it cannot be written.
    """
    _write(folder, {**describe_run(engine), **more})


def read_run_file(folder: Path) -> dict[str, Any]:
    """What run.json says; empty where it cannot be read."""
    try:
        found = msgspec.json.decode((folder / RUN_FILE).read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def note_start(folder: Path, engine: Any, iteration: int) -> None:
    """A run begins or goes on: say so in run.json, which is made where it is missing.

    Args:
        iteration: behind which it goes on; 0 for its beginning.

    Raises:
        OSError: it cannot be written.
    """
    facts = describe_run(engine)
    there = read_run_file(folder)
    start = {"at": _now(), "iteration": iteration, "pid": os.getpid(), "command": facts["command"], "git": facts["git"]}
    if there:
        if there.get("environment") != facts["environment"]:
            start["environment"] = facts["environment"]
        facts = {**facts, **there}
    _write(folder, {**facts, "starts": [*facts["starts"], start]})


def _write(folder: Path, facts: dict[str, Any]) -> None:
    replace_file(folder / RUN_FILE, msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _git_state() -> dict[str, Any] | None:
    """The commit of the folder that the process runs in, and whether files differ from it; None where there is none."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit.strip(), "changed": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    return done.stdout
