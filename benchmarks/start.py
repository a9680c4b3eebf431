"""How long the command line and the imports take.

    python -m benchmarks start               # prints a table and exits with 1 if a bound is missed
    python benchmarks/start.py --json        # the same as one JSON object

Each figure is the median of rounds in which all take turns, each in a new process with its files in the page cache. The
commands read the log of a small run. The last row is a ratio: what importing our Engine takes, to importing torch and
pytorch-ignite's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pulsetrain import EventRecorder
from pulsetrain.engine import Engine

HELP, READ, RATIO = 0.3, 0.7, 1.05  # seconds, seconds, and times as long
PEER, OWN = "import torch, ignite.engine", "from pulsetrain.engine import Engine"
COMMANDS: dict[str, tuple[list[str], float]] = {
    "--help": (["--help"], HELP),
    "--version": (["--version"], HELP),
    "completion bash": (["completion", "bash"], HELP),
    "a wrong command": (["nonsense"], HELP),
    "events": (["events", "run", "--event", "epoch_completed"], READ),
    "diff": (["diff", "run", "run"], READ),
    "export": (["export", "run", "--format", "csv", "--force"], READ),
    "replay": (["replay", "run", "--handler", "step_limit:iterations=50"], READ),
}


def seconds(words: list[str], folder: Path) -> float:
    """The wall-clock time of a process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=False)
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, list[float]]:
    """The seconds of each process in each round."""
    processes = {name: ["-m", "pulsetrain", *words] for name, (words, _) in COMMANDS.items()}
    processes |= {code: ["-c", code] for code in (PEER, OWN)}
    found: dict[str, list[float]] = {name: [] for name in processes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = Engine(lambda engine, batch: {"loss": 1 / batch}, name="trainer")
        EventRecorder(folder / "run").attach(engine)
        engine.run(range(1, 101), max_epochs=2)
        for number in range(rounds + 1):  # the first fills the page cache
            for name, words in processes.items():
                took = seconds(words, folder)
                if number:
                    found[name].append(took)
    return found


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    found = measure(arguments.rounds)
    rows = {name: (statistics.median(found[name]), bound) for name, (_, bound) in COMMANDS.items()}
    ratios = [own / peer for own, peer in zip(found[OWN], found[PEER], strict=True)]
    rows[f"{OWN} / {PEER}"] = statistics.median(ratios), RATIO
    if arguments.json:
        print(
            json.dumps({name: {"measured": value, "bound": bound} for name, (value, bound) in rows.items()}, indent=2)
        )
    else:
        print(f"{'seconds of':<72}{'measured':>10}{'at most':>10}")
        for name, (value, bound) in rows.items():
            print(f"{name:<72}{value:>10.3f}{bound:>10.2f}{'' if value <= bound else '   missed'}")
        print(f"the machine's load before: {load:.1f}")
    return int(any(value > bound for value, bound in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
