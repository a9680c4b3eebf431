"""run.json: what a run was made with, and each of its starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from torch import nn

from pulsetrain.engine import Engine, Topology, is_training_run
from pulsetrain.engine.backends.module_view import reading_once
from pulsetrain.engine.distributed.launcher import slurm_job
from pulsetrain.engine.environment import describe_environment
from pulsetrain.engine.metrics import infer_mode, names_of
from pulsetrain.engine.recording.log.run_file import RUN_FILE, RUN_FORMAT, read_run_file
from pulsetrain.handlers.attachment.engine_queries import attribute, device_of, settings_of
from pulsetrain.handlers.metric_values.event_values import EventValues
from pulsetrain.handlers.run_files.redaction import redacted
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["RunFacts", "note_start", "run_facts", "write_run_file"]

RunFacts: TypeAlias = dict[str, Any]  # plain JSON


def run_facts(engine: Engine) -> RunFacts:
    """What the run was made with, as far as the engine knows, without credentials.

    >>> facts = run_facts(Engine(lambda engine, batch: None))
    >>> facts["seed"], facts["handlers"], facts["starts"]
    (None, [], [])
    """
    environment: dict[str, object] = engine.backend.environment() if is_training_run(engine) else {}
    handlers: Sequence[object] = engine.handlers if is_training_run(engine) else ()
    values, facts = EventValues(), RunFacts()
    values.put(facts, "seed", attribute(engine, "seed", object))
    values.put(facts, "command", sys.argv)
    values.put(facts, "settings", settings_of(engine))
    values.settle()
    described = {
        "format": RUN_FORMAT,
        "id": uuid.uuid4().hex,
        "created": _now(),
        "seed": facts["seed"],
        "environment": describe_environment(device_of(engine) or "cpu", environment),
        "parallel": _parallel_of(engine),
        "git": _git_state(),
        "command": facts["command"],
        "settings": facts["settings"],
        "weights": _weights_of(engine.model) if is_training_run(engine) else {},
        "handlers": [type(handler).__name__ for handler in handlers],
        "starts": [],
    }
    return {**redacted(described), "modes": _modes_of(engine)}  # a metric may have the name of a secret


def _parallel_of(engine: Engine) -> dict[str, object]:
    """How processes share the model out: the fields of the backend's topology that are not as usual."""
    topology = getattr(engine.backend, "topology", None) if is_training_run(engine) else None
    if not isinstance(topology, Topology):
        return {}
    given = {each.name: (getattr(topology, each.name), each.default) for each in fields(topology)}
    return {name: value for name, (value, usual) in given.items() if value != usual}


def _modes_of(engine: Engine) -> dict[str, str]:
    """Whether smaller ("min") or larger ("max") values of each metric are better, as the run's handlers have it."""
    if not is_training_run(engine):
        return {}
    metrics = engine.val_metrics
    asked: dict[str, object] = dict.fromkeys(names_of(metrics))
    for handler in engine.handlers:
        name, mode = getattr(handler, "metric", None), getattr(handler, "mode", None)
        if isinstance(name, str):
            asked[name] = mode if mode in ("min", "max") else asked.get(name)
    modes = {name: mode or infer_mode(name, metrics) for name, mode in asked.items()}
    return {name: str(mode) for name, mode in modes.items() if mode is not None}


def _weights_of(model: nn.Module) -> dict[str, int]:
    """How many values the parameters and buffers hold, by their type."""
    counts: Counter[str] = Counter()
    with reading_once(model):
        for tensor in (*model.parameters(), *model.buffers()):
            counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return dict(counts)


def write_run_file(folder: Path, engine: Engine, **more: object) -> None:
    """Write run.json, replacing an existing one.

    Args:
        folder: the run folder, which exists and which this process owns.
        engine: the run's engine.
        more: further facts, plain values.

    Raises:
        OSError: the file cannot be written.
    """
    facts = {**run_facts(engine), **more}
    facts["id"] = read_run_file(folder).get("id", facts["id"])
    _write(folder, facts)


def note_start(folder: Path, engine: Engine, iteration: int, rank: int = 0, run: str = "") -> None:
    """Add the start of a run, or its resumption, to run.json, which is created if missing.

    Args:
        folder: the run folder, which exists and which this process owns.
        engine: the run's engine.
        iteration: the last one before the run resumes; 0 if the run starts.
        rank: of this process; rank 0 writes for all.
        run: the run's id, for a new file.

    Raises:
        OSError: the file cannot be written.
    """
    if rank:
        return
    facts = run_facts(engine) | ({"id": run} if run else {})
    start = {"at": _now(), "iteration": iteration, "pid": os.getpid(), "command": facts["command"], "git": facts["git"]}
    if slurm_job():
        start["slurm_job"] = slurm_job()
    if is_training_run(engine) and engine.rewinds:
        start["rewinds"] = engine.rewinds
        start["left_out"] = [list(each) for each in engine.data.left_out_since]
    if is_training_run(engine) and engine.processes:
        start["processes"] = _listed(engine.processes)
    there = read_run_file(folder)
    if there and there.get("environment") != facts["environment"]:
        start["environment"] = facts["environment"]
    facts |= there
    starts = facts["starts"] if isinstance(facts["starts"], list) else []
    _write(folder, {**facts, "starts": [*starts, start]})


def _listed(processes: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The processes by rank; the environment of one only if it is not that of the first: there may be thousands."""
    usual = processes[0].get("environment")
    return [
        {name: value for name, value in each.items() if not rank or name != "environment" or value != usual}
        for rank, each in enumerate(processes)
    ]


def _write(folder: Path, facts: RunFacts) -> None:
    replace_file(folder / RUN_FILE, msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _git_state() -> dict[str, str | bool] | None:
    """The commit of the working directory, and whether tracked files differ from it; None without a commit."""
    # without locks, which would fail a commit that is being made at the same time
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid")), "(initial)")
    if commit == "(initial)":
        return None
    return {"commit": commit, "changed": not all(line.startswith("#") for line in lines)}
