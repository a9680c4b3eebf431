"""Runs one job of a machine's queue, and notes how it has ended.

    python -m pulsetrain.submit.queue_runner FOLDER ID DESCRIPTOR

The descriptor is of the job's lock, which this process and the job's own hold as long as one of them is there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pulsetrain.runs.command_end import STOPPED, TRAINED
from pulsetrain.submit.local_queue import LocalQueue, QueuedJob

__all__ = ["run_job"]

_LONGEST_STOP = 120.0  # seconds to finish an iteration, a validation and a save


def run_job(queue: LocalQueue, job: QueuedJob, descriptor: int) -> None:
    """Run the job's command to its end.

    Args:
        queue: the queue.
        job: one that the queue has started.
        descriptor: of the job's lock.
    """
    Path(job.output).parent.mkdir(parents=True, exist_ok=True)
    with open(job.output, "ab", buffering=0) as output:
        output.write(f"pulsetrain: job {job.id}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        try:
            process = subprocess.Popen(
                [job.python, "-m", "pulsetrain", *job.words], cwd=job.directory, env=_environment(queue, job),
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(descriptor,),
            )  # fmt: skip
        except OSError as error:  # such as a folder that was deleted
            output.write(f"pulsetrain: error: {error}\n".encode())
            queue.end(job.id, "failed", None)
            return
        signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
        status = _wait(queue, job, process)
    if status in TRAINED:
        queue.end(job.id, "done", status)
    elif status < 0 or status in STOPPED:
        queue.interrupt(job.id, status)
    else:
        queue.end(job.id, "failed", status)


def _wait(queue: LocalQueue, job: QueuedJob, process: subprocess.Popen[bytes]) -> int:
    """Wait for the end; a job that is cancelled is stopped, first with a checkpoint."""
    asked: float | None = None
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            if queue.job(job.id).state == "cancelling":
                if asked is None:
                    asked = time.monotonic()
                    process.terminate()
                elif time.monotonic() - asked > _LONGEST_STOP:
                    process.kill()


def _environment(queue: LocalQueue, job: QueuedJob) -> dict[str, str]:
    names = queue.devices or []
    environment = dict(os.environ)
    visible = [names[device] for device in job.assigned if device < len(names) and names[device]]
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    threads = max(1, (os.cpu_count() or 1) // max(1, len(names)))
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    # how long the launcher of several processes waits for them to stop, less than this one waits for the launcher
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(_LONGEST_STOP) - 10))
    return environment


if __name__ == "__main__":
    _queue = LocalQueue(Path(sys.argv[1]))
    run_job(_queue, _queue.job(int(sys.argv[2])), int(sys.argv[3]))
