"""Listing many runs: with the index, with a condition, one of them, and the first scan without an index.

    python -m benchmarks runs --runs 2000      # fewer folders

Each run has 50 epochs of 5 iterations and a validation; every tenth was killed, so that its log is not sealed. The
times of commands are those of a process from its start.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.harness.results import Row, make_parser, report
from pulsetrain.engine.recording import LoggedEvent, LogWriter

RUNS, EPOCHS, ITERATIONS = 10_000, 50, 5
SECOND = 1_000_000_000
CONFIG = """\
model: {class_path: model.Net, init_args: {hidden: 128}}
data: {class_path: data.loaders, init_args: {batch_size: 32}}
training: {max_epochs: 50, optimizer: adamw, learning_rate: %s, schedule: cosine, warmup_steps: 20, seed: 0}
"""


def write_log(folder: Path, *, ended: bool) -> None:
    """The log of a run, whose process was killed unless it has ended."""
    writer = LogWriter(folder)
    numbers = itertools.count()

    def add(event: LoggedEvent) -> None:
        event.seq = event.ord = number = next(numbers)
        event.t = 10**18 + number * SECOND
        writer.add(event)

    for epoch in range(1, EPOCHS + 1):
        for event in [*["iteration_completed"] * ITERATIONS, "validation_completed", "epoch_completed"]:
            payload = {"metrics": {"val/loss": 1 / epoch}} if event == "validation_completed" else None
            output = {"loss": 1 / epoch} if event == "iteration_completed" else None
            logged = LoggedEvent(engine="trainer", event=event, payload=payload, output=output)
            logged.epoch, logged.iteration = epoch, epoch * ITERATIONS
            add(logged)
    if ended:
        add(LoggedEvent(engine="trainer", event="completed", epoch=EPOCHS))
        writer.end()
    writer.close()


def write_runs(root: Path, count: int) -> None:
    """Copies of two runs, which differ in their settings and identities."""
    for name in ("ended", "killed"):
        write_log(root / name, ended=name == "ended")
    for number in range(count):
        folder = root / "runs" / f"run-{number:05}"
        shutil.copytree(root / ("killed" if number % 10 == 9 else "ended"), folder / "events")
        (folder / "config.yaml").write_text(CONFIG % (0.001 * (1 + number % 7)))
        facts = {"format": 1, "created": "2026-09-21T12:53:20+0000", "settings": {"max_epochs": EPOCHS}}
        (folder / "run.json").write_bytes(msgspec.json.encode(facts))


def seconds_of(*words: str, rounds: int) -> float:
    """The median time of a command, from the start of its process."""
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-m", "pulsetrain", *words], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("runs", __doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="folders [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    def rows() -> tuple[list[Row], list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            write_runs(Path(folder), options.runs)
            root = str(Path(folder, "runs"))
            first = seconds_of("runs", root, rounds=1)
            listed = seconds_of("runs", root, rounds=options.rounds)
            where = 'best["val/loss"] < 0.5 and training.learning_rate > 3e-3'
            filtered = seconds_of("runs", root, "--where", where, rounds=options.rounds)
            one = seconds_of("runs", f"{root}/run-00007", rounds=options.rounds)
        scanned = options.runs / first
        return [
            Row(name="list, s", measured=listed, kind="absolute", bound=0.5),
            Row(name="filter, s", measured=filtered, kind="absolute", bound=0.5),
            Row(name="one run, s", measured=one, kind="absolute", bound=0.2),
            Row(name="first scan, folders/s", measured=scanned, kind="absolute", bound=2000, at_least=True),
        ], []  # fmt: skip

    return report(options, f"{options.runs:,} runs", rows)


if __name__ == "__main__":
    raise SystemExit(main())
