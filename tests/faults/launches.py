"""Ends launched runs of two processes, 20 times in each way, and checks how they ended.

    python -m tests.faults.launches --times 20

SIGTERM to the launcher, to one process or to all three: the status is 143, and the newest checkpoint is of the
iteration where the run ended. A process that is killed: all are started again within 30 s, and the run is finished.
Prints what was done as JSON; exits with 1 if anything differs.
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
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.recording import EventLog
from tests.support.programs_command_line import CONFIG, DATA, MODEL

WAIT = 60.0  # seconds for the first checkpoint
RESTART = 30.0  # seconds until the run has trained further after a kill
SAVING = "--handlers=[EventRecorder, {class_path: Checkpointer, init_args: {every: {iterations: 5}}}]"


class Program(NamedTuple):
    """A launcher and the processes that it has started."""

    launcher: subprocess.Popen[str]
    run: Path

    @property
    def ranks(self) -> list[int]:
        """The pids of the processes."""
        pid = self.launcher.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def launched(folder: Path, epochs: int) -> Iterator[Program]:
    """A run that has saved its first checkpoint."""
    command = [sys.executable, "-m", "pulsetrain", "train", "config.yaml", "--run=run", SAVING, "--launch.nproc=2"]
    launcher = subprocess.Popen(
        [*command, f"--training.max_epochs={epochs}"], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + WAIT
        while not any((folder / "run").glob("checkpoints/*/manifest.json")):
            if time.monotonic() > deadline or launcher.poll() is not None:
                raise TimeoutError(f"no checkpoint after {WAIT:.0f} s")
            time.sleep(0.05)
        yield Program(launcher, folder / "run")
    finally:
        try:
            os.killpg(launcher.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def terminated(program: Program, pids: list[int], dice: random.Random) -> str:
    """What is wrong after SIGTERM to these processes; empty if nothing is."""
    time.sleep(dice.uniform(0.0, 0.5))
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    text, _ = program.launcher.communicate(timeout=60)
    if program.launcher.returncode != 143:
        return f"status {program.launcher.returncode}: {text[-500:]}"
    last = [each.iteration for each in EventLog(program.run).read(engine="trainer", event="completed")]
    latest = CheckpointManager(program.run / "checkpoints").get_latest()
    saved = None if latest is None else load_checkpoint(latest)["counters"]["iteration"]
    return "" if [saved] == last else f"ended at {last}, saved at {saved}"


def killed(program: Program, dice: random.Random) -> str:
    """What is wrong after a process was killed; empty if nothing is."""
    time.sleep(dice.uniform(0.0, 0.5))
    log = program.run / "events" / "tail.jsonl"
    before, begun = set(program.ranks), time.monotonic()
    os.kill(dice.choice(sorted(before)), signal.SIGKILL)
    while True:
        if time.monotonic() > begun + RESTART:
            return f"not started again within {RESTART:.0f} s"
        now = set(program.ranks)
        if len(now) == 2 and not now & before and log.exists() and log.stat().st_mtime > time.time() - 0.5:
            break
        if program.launcher.poll() is not None:
            break
        time.sleep(0.05)
    text, _ = program.launcher.communicate(timeout=120)
    if program.launcher.returncode != 0 or "starting 2 again from the newest checkpoint" not in text:
        return f"status {program.launcher.returncode}: {text[-500:]}"
    trained = [each.iteration for each in EventLog(program.run).read(engine="trainer", event="iteration_completed")]
    return "" if trained == list(range(1, len(trained) + 1)) else "iterations are missing in the log, or twice there"


WAYS: dict[str, tuple[int, Callable[[Program, random.Random], str]]] = {
    "SIGTERM to the launcher": (100_000, lambda program, dice: terminated(program, [program.launcher.pid], dice)),
    "SIGTERM to one process": (100_000, lambda program, dice: terminated(program, [dice.choice(program.ranks)], dice)),
    "SIGTERM to all": (
        100_000,
        lambda program, dice: terminated(program, [program.launcher.pid, *program.ranks], dice),
    ),
    "a process is killed": (200, killed),
}


def main() -> int:
    """Launch, end, and print what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, wrong, good = random.Random(options.seed), [], {}
    for way, (epochs, end) in WAYS.items():
        good[way] = 0
        for _ in range(options.times):
            with tempfile.TemporaryDirectory() as folder:
                for name, text in {"model.py": MODEL, "data.py": DATA, "config.yaml": CONFIG}.items():
                    Path(folder, name).write_text(textwrap.dedent(text), encoding="utf-8")
                with launched(Path(folder), epochs) as program:
                    said = end(program, dice)
            good[way] += not said
            wrong += [f"{way}: {said}"] if said else []
    print(json.dumps({"times": options.times, "as expected": good, "faults": wrong}, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
