"""The table of this machine's queue, and waiting for its jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from pulsetrain.cli.reports import FAILED, OK, STOPPED, until_closed
from pulsetrain.engine.plain_text import plain
from pulsetrain.submit.local_queue import ENDED, LocalQueue, QueuedJob
from pulsetrain.submit.queue_process import ensure_running

__all__ = ["follow", "print_status"]

_SHOWN = 20  # of the jobs that have ended, the newest


def print_status(queue: LocalQueue, cancel: int | None) -> int:
    """Print the queue, after cancelling a job if one is named; restarts a queue whose process was killed."""
    if cancel is not None:
        job = queue.cancel(cancel)
        print(f"job {job.id}: {job.state}")
        ensure_running(queue)
        return OK
    restarted = ensure_running(queue)
    jobs = queue.jobs()
    ended = [job.id for job in jobs if job.state in ENDED]
    hidden = set(ended[:-_SHOWN])
    rows: list[tuple[str, ...]] = [("job", "state", "devices", "interruptions", "time", "name", "output")]
    rows += [_row(job) for job in jobs if job.id not in hidden]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    with until_closed():
        for row in rows:
            print(plain("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip()))
        if hidden:
            print(f"and {len(hidden)} earlier job(s) that have ended")
    if restarted:
        print("pulsetrain: the queue had stopped, and continues", file=sys.stderr)
    return OK


def follow(queue: LocalQueue, numbers: Sequence[int]) -> int:
    """Wait until the jobs have ended, and print how; restarts the queue if its process is killed meanwhile."""
    left = list(numbers)
    try:
        while left:
            time.sleep(0.2)
            ensure_running(queue)
            for job in [queue.job(number) for number in left]:
                if job.state in ENDED:
                    left.remove(job.id)
                    print(f"job {job.id}: {job.state}", flush=True)
    except KeyboardInterrupt:
        print("\npulsetrain: the jobs continue; `pulsetrain submit --to local --status` shows them", file=sys.stderr)
        return STOPPED
    return OK if all(queue.job(number).state == "done" for number in numbers) else FAILED


def _row(job: QueuedJob) -> tuple[str, ...]:
    devices = ",".join(map(str, job.assigned)) if job.assigned else f"needs {job.devices}"
    if job.state in ENDED:
        devices = "-"
    since = job.submitted if job.state == "waiting" or job.started is None else job.started
    seconds = max(0, int((time.time() if job.ended is None or job.state == "waiting" else job.ended) - since))
    took = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    state = f"{job.state} ({job.status})" if job.state == "failed" and job.status is not None else job.state
    return str(job.id), state, devices, str(job.interruptions), took, job.name, job.output
