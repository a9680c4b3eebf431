"""Kills sweeps and starts them again: they end with the trials and the results of a sweep that was never killed.

    python -m tests.faults.sweeps --trials 64 --kills 20 --seed 0
    python -m tests.faults.sweeps --sampler population --trials 24 --kills 10
    python -m tests.faults.sweeps --pruner asha --trials 16 --kills 20

At random moments either the whole process group is killed (SIGKILL), the coordinator alone, or one process of a trial.
Compared bit for bit: the trials' settings, states and values, and of each run its deterministic events, its metrics and
the whole state of its last checkpoint. Prints what was done as JSON; exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pulsetrain.sweep.results import read_results
from tests.faults.everything import outcome as run_outcome
from tests.faults.kills import without_clock_dependent

ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def net(width: int = 4):
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, 1))

def loaders(rows: int = 40):
    inputs = torch.randn(rows, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=20)
"""
CONFIG = """
model: {class_path: tiny.net, init_args: {width: 4}}
data: tiny.loaders
strategy: {class_path: SupervisedStrategy, init_args: {loss: mse}}
training: {max_epochs: 6, learning_rate: 1e-2, optimizer: sgd, seed: 3, device: cpu}
handlers: [{class_path: Checkpointer, init_args: {every: {iterations: 7}}}, EventRecorder, CSVLogger]
"""


PRUNERS: dict[str, dict[str, Any]] = {
    "none": {},
    "median": {"n_startup_trials": 2},
    "asha": {"min_resource": 1, "reduction_factor": 2},
    "hyperband": {"min_resource": 1, "max_resource": 6, "reduction_factor": 2},
}


def write_sweep(folder: Path, trials: int, workers: int = 2, sampler: str = "grid", pruner: str = "none") -> None:
    """The files of a sweep over a grid of so many combinations, or of a population of six."""
    (folder / "tiny.py").write_text(MODEL)
    (folder / "base.yaml").write_text(CONFIG)
    if sampler == "population":
        generations = trials // 6
        (folder / "base.yaml").write_text(CONFIG.replace("max_epochs: 6", f"max_epochs: {2 * generations}"))
        population = {
            "config": "base.yaml", "sampler": sampler, "metric": "val/loss", "workers": workers, "population": 6,
            "generations": generations, "interval": 20,
            "space": {"training.learning_rate": {"low": 1e-3, "high": 1e-1, "log": True}},
        }  # fmt: skip
        (folder / "sweep.yaml").write_text(json.dumps(population))
        return
    rates = [round(0.001 * (1 + index), 6) for index in range(trials // 2)]
    sweep: dict[str, Any] = {
        "config": "base.yaml", "sampler": "grid", "metric": "val/loss", "workers": workers,
        "space": {"training.learning_rate": rates, "model.init_args.width": [4, 6]},
    }  # fmt: skip
    if pruner != "none":  # its decisions depend on the order in which several workers report
        # from the study's name, by default that of the folder, Hyperband derives the bracket of each trial
        sweep |= {"workers": 1, "pruner": {"name": pruner, **PRUNERS[pruner]}, "study": "pruned"}
    (folder / "sweep.yaml").write_text(json.dumps(sweep))


def start(folder: Path, into: str) -> subprocess.Popen[bytes]:
    """The command, in a process group of its own."""
    words = [sys.executable, "-m", "pulsetrain", "sweep", str(folder / "sweep.yaml"), "--folder", str(folder / into)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = (folder / f"{into}.txt").open("ab")
    with output:
        return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True)


def processes_of(group: int) -> list[int]:
    """The processes of a group, as /proc lists them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) == group:
            found.append(int(path.parent.name))
    return found


def kill(process: subprocess.Popen[bytes], draw: random.Random) -> str:
    """Kill the group, the coordinator, or one other process of it; returns which."""
    kind = draw.choice(("group", "coordinator", "other"))
    if kind == "group":
        os.killpg(process.pid, signal.SIGKILL)
    elif kind == "coordinator":
        process.kill()
    else:
        others = [each for each in processes_of(process.pid) if each != process.pid]
        if others:
            try:
                os.kill(draw.choice(others), signal.SIGKILL)
            except ProcessLookupError:  # it has ended just now
                pass
    return kind


def outcome(folder: Path) -> dict[str, Any]:
    """What a sweep has ended with; nothing that depends on the clock or on the order in which trials ended."""
    found: dict[str, Any] = {}
    for trial in read_results(folder).trials:
        key = f"{trial.number:04d}"
        found[key] = (trial.state, dict(trial.params), {name: value.hex() for name, value in trial.values.items()})
        left = without_clock_dependent(run_outcome(trial.folder))
        last = max(name.partition("/")[0] for name in left if name[0].isdigit())
        found |= {
            f"{key}/{name}": value
            for name, value in left.items()
            if not name[0].isdigit() or name.startswith(f"{last}/")
        }
    return found


def run(
    trials: int, kills: int, seed: int, folder: Path, sampler: str = "grid", pruner: str = "none"
) -> dict[str, Any]:
    """A sweep that is not killed, and one that is; what was done, and the differences."""
    draw, begun = random.Random(seed), time.perf_counter()
    write_sweep(folder, trials, sampler=sampler, pruner=pruner)
    assert start(folder, "whole").wait() == 0, (folder / "whole.txt").read_text()
    seconds = time.perf_counter() - begun
    done = {"group": 0, "coordinator": 0, "other": 0}
    status, starts = None, 0
    process = start(folder, "killed")
    while sum(done.values()) < kills:
        try:
            status = process.wait(timeout=draw.uniform(0.5, 1.5) * (4 + seconds / kills))
            break  # it has ended before all kills were made
        except subprocess.TimeoutExpired:
            kind = kill(process, draw)
            done[kind] += 1
            if kind != "other":
                process.wait()
                process = start(folder, "killed")
                starts += 1
    status = process.wait()
    differences = [f"the sweep ended with status {status}"] if status else []
    expected, left = outcome(folder / "whole"), outcome(folder / "killed")
    differences += [name for name in sorted(expected.keys() | left) if expected.get(name) != left.get(name)]
    return {
        "trials": len(read_results(folder / "killed").trials),
        "kills": done, "starts": starts, "compared": len(expected),
        "differences": differences[:20], "seconds": round(time.perf_counter() - begun),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampler", choices=("grid", "population"), default="grid")
    parser.add_argument("--pruner", choices=tuple(PRUNERS), default="none", help="of a grid, with one worker")
    arguments = parser.parse_args()
    if arguments.sampler == "population" and arguments.pruner != "none":
        parser.error("--pruner: is for a grid")
    if arguments.sampler == "population" and arguments.trials % 6:
        parser.error("--trials: a population has six members; give a multiple")
    with tempfile.TemporaryDirectory() as folder:
        done = run(arguments.trials, arguments.kills, arguments.seed, Path(folder), arguments.sampler, arguments.pruner)
    print(json.dumps(done))
    return (
        bool(done["differences"]) or done["trials"] != arguments.trials or sum(done["kills"].values()) < arguments.kills
    )


if __name__ == "__main__":
    sys.exit(main())
