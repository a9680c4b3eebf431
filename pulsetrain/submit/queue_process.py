"""The process of a machine's queue: starts waiting jobs in order, as soon as enough devices are free.

    python -m pulsetrain.submit.queue_process FOLDER

It ends when no job is left. Killed and started again it continues: jobs that run stay, and those that were killed
together with it wait again, each at its place in the order.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.submit.local_queue import LocalQueue, QueuedJob, taken_lock

__all__ = ["QueueProcess", "ensure_running"]

_PAUSE = 0.2  # seconds
_RETRY = 5.0  # seconds, while the queue's file cannot be written
_started: list[subprocess.Popen[bytes]] = []  # by this process, which does not wait for them


def ensure_running(queue: LocalQueue) -> bool:
    """Start the queue's process, apart from this one, unless it is there or no job is left; True if it was started."""
    if not queue.jobs(ended=False) or queue.is_running:
        return False
    with (queue.folder / "queue.txt").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pulsetrain.submit.queue_process", str(queue.folder)],
            cwd=queue.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    _started[:] = [each for each in (*_started, process) if each.poll() is None]
    return True


class QueueProcess:
    """Starts the jobs of a queue.

    Args:
        queue: the queue.
    """

    def __init__(self, queue: LocalQueue) -> None:
        self._queue = queue
        self._runners: list[subprocess.Popen[bytes]] = []  # those that this process has started
        self._trouble = ""  # what was wrong last, if it still is

    def run(self) -> None:
        """Run until no job is left; nothing if another process does."""
        while True:
            held = taken_lock(self._queue.lock)
            if held is None:
                return
            try:
                self._queue.note_environment()
                while self._step_or_wait():
                    time.sleep(_PAUSE)
            finally:
                os.close(held)
            # a job that was added before the lock was released, by a command that saw this process
            if not self._queue.jobs(ended=False):
                return

    def _step_or_wait(self) -> bool:
        """The same as `step`; while the file of the queue cannot be written, such as on a full disk, it waits."""
        try:
            left, self._trouble = self.step(), ""
        except (ConfigurationError, OSError) as error:
            if not self._queue.file.exists():  # it was deleted
                raise
            if str(error) != self._trouble:
                print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {error}", file=sys.stderr, flush=True)
            self._trouble = str(error)
            time.sleep(_RETRY)
            return True
        return left

    def step(self) -> bool:
        """Look once at all jobs, and start those that can be started; whether a job is left."""
        self._runners = [each for each in self._runners if each.poll() is None]
        for job in self._queue.jobs(ended=False):
            if job.state in ("running", "cancelling"):
                self._check(job)
        left = self._queue.jobs(ended=False)
        taken = {device for job in left for device in job.assigned}
        free = [device for device in range(len(self._queue.devices or ())) if device not in taken]
        for job in left:
            if job.state == "waiting":
                if job.devices > len(free):  # in order: a job that needs many devices is not overtaken by small ones
                    break
                self._start(job, free[: job.devices])
                del free[: job.devices]
        return bool(left)

    def _check(self, job: QueuedJob) -> None:
        """A job whose processes have ended without a note was killed."""
        held = taken_lock(self._queue.lock_of(job.id))
        if held is not None:
            self._queue.interrupt(job.id, None)  # changes nothing if the note was written just now
            os.close(held)

    def _start(self, job: QueuedJob, devices: list[int]) -> None:
        held = taken_lock(self._queue.lock_of(job.id))
        if held is None:  # processes of it have outlived the one that has noted its interruption
            return
        try:
            if self._queue.start(job.id, devices):
                # the lock passes on to the process, which inherits the open file
                words = ["-m", "pulsetrain.submit.queue_runner", str(self._queue.folder), str(job.id), str(held)]
                runner = subprocess.Popen([job.python, *words], pass_fds=(held,), start_new_session=True)
                self._runners.append(runner)
        except OSError:  # the interpreter is not there any more
            self._queue.end(job.id, "failed", None)
        finally:
            os.close(held)


if __name__ == "__main__":
    QueueProcess(LocalQueue(Path(sys.argv[1]))).run()
