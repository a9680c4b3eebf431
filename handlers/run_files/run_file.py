"""run.json: what a run is, for whoever reads its folder later."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from pulsetrain.engine.environment import describe_environment
from pulsetrain.handlers.metric_values.event_values import EventValues
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["RUN_FILE", "describe_run", "note_start", "read_run_file", "write_run_file"]

RUN_FILE = "run.json"
FORMAT = 1


def describe_run(engine: Any) -> dict[str, Any]:
    """Plain values: what the run was made with, as far as the engine knows it."""
    config, backend = getattr(engine, "config", None), getattr(engine, "backend", None)
    device, environment = getattr(backend, "device", "cpu"), getattr(backend, "environment", dict)
    settings = {each.name: getattr(config, each.name) for each in fields(config)} if is_dataclass(config) else None
    values, facts = EventValues(), dict[str, Any]()
    values.put(facts, "seed", getattr(engine, "seed", None))
    values.put(facts, "command", sys.argv)
    values.put(facts, "settings", settings)
    values.settle()
    return {
        "format": FORMAT,
        "id": uuid.uuid4().hex,
        "created": _now(),
        "seed": facts["seed"],
        "environment": describe_environment(device, environment()),
        "git": _git_state(),
        "command": facts["command"],
        "settings": facts["settings"],
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
    facts = {**describe_run(engine), **more}
    with _alone(folder):
        _write(folder, facts)


def note_start(folder: Path, engine: Any, iteration: int, rank: int = 0) -> None:
    """A run begins or goes on: say so in run.json, which is made where it is missing.

    Args:
        folder: the run folder, which is there.
        engine: what runs.
        iteration: behind which it goes on; 0 for its beginning.
        rank: of this process; rank 0 writes for all.

    Raises:
        OSError: it cannot be written.
    """
    if rank:
        return
    facts = describe_run(engine)
    start = {"at": _now(), "iteration": iteration, "pid": os.getpid(), "command": facts["command"], "git": facts["git"]}
    left_out = getattr(getattr(engine, "position", None), "left_out_since", None)
    if left_out:  # batches, by a run that has gone back
        start["left_out"] = [list(each) for each in left_out]
    with _alone(folder):
        there = read_run_file(folder)
        if there and there.get("environment") != facts["environment"]:
            start["environment"] = facts["environment"]
        facts |= there
        starts = facts["starts"] if isinstance(facts["starts"], list) else []
        _write(folder, {**facts, "starts": [*starts, start]})


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process changes the file meanwhile, where the folder's file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile would go on holding it
        os.close(descriptor)


def read_run_file(folder: Path) -> dict[str, Any]:
    """What run.json says; empty where it is missing, or is none."""
    try:
        found = msgspec.json.decode((folder / RUN_FILE).read_bytes())
    except (OSError, ValueError):  # no JSON, or no UTF-8
        return {}
    return found if isinstance(found, dict) else {}


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
