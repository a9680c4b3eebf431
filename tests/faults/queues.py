"""Kills a machine's queue and its jobs at random: every job ends as one that was never killed.

    python -m tests.faults.queues --jobs 6 --kills 12 --seed 0

Half of the jobs need one of two devices, half need both. At random moments the queue's process is killed (SIGKILL), or
everything: the queue, the processes that run the jobs, and the runs. Then `--status` starts it again. Compared: the
validation losses of every run with those of a run that was not killed, and that no device was given to two jobs at
once. Prints what was done as JSON; exits with 1 at a difference.
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

from pulsetrain.submit.local_queue import ENDED, LocalQueue
from tests.support.training_jobs import losses, processes_with, write_run


def command(folder: Path, *words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PULSETRAIN_QUEUE": str(folder / "queue")}
    words = (sys.executable, "-m", "pulsetrain", *words)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def kill(folder: Path, kind: str) -> int:
    """Kill the queue's process or everything; returns how many processes."""
    found = set(processes_with(str(folder)))
    if kind == "queue":
        found &= set(processes_with("queue_process"))
    for process in found:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:  # it has ended just now
            pass
    return len(found)


def run(jobs: int, kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """What was done, and the differences."""
    draw, begun = random.Random(seed), time.perf_counter()
    write_run(folder, pause=0.02)
    command(folder, "train", "base.yaml", "--run", "straight", "--data.init_args.pause=0")
    expected = losses(folder / "straight")
    queue = LocalQueue(folder / "queue")
    queue.devices = ["", ""]
    for index in range(jobs):
        words = ["train", "base.yaml", f"--folder=run-{index}", "--resume=latest", "--wait"]
        queue.add(
            [words], name=f"run-{index}", directory=folder, python=sys.executable, output=folder / "output",
            devices=1 + index % 2, restarts=1000,
        )  # fmt: skip
    done = {"queue": 0, "everything": 0}
    differences: list[str] = []
    command(folder, "submit", "--to", "local", "--status")
    next_kill = time.monotonic() + draw.uniform(2, 8)
    while any(job.state not in ENDED for job in queue.jobs()):
        taken = [device for job in queue.jobs(ended=False) for device in job.assigned]
        if len(taken) != len(set(taken)):
            differences.append(f"a device was given to two jobs: {taken}")
        if sum(done.values()) < kills and time.monotonic() > next_kill:
            kind = draw.choice(("queue", "everything"))
            done[kind] += kill(folder, kind) > 0
            command(folder, "submit", "--to", "local", "--status")
            next_kill = time.monotonic() + draw.uniform(2, 8)
        time.sleep(0.05)
    for job in queue.jobs():
        if job.state != "done" or losses(folder / job.name) != expected:
            differences.append(f"{job.name}: {job.state}")
    return {
        "jobs": jobs, "kills": done, "interruptions": sum(job.interruptions for job in queue.jobs()),
        "differences": differences[:20], "seconds": round(time.perf_counter() - begun),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = run(arguments.jobs, arguments.kills, arguments.seed, Path(folder))
    print(json.dumps(done))
    return bool(done["differences"])


if __name__ == "__main__":
    sys.exit(main())
