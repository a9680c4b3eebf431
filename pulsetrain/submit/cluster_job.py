"""One task of a job on a cluster: runs a command in a process of its own, and stops it where the job is interrupted.

submitit pickles it into the job's folder, runs it in every task of the job, and calls `checkpoint` in the first one
before the time limit or on a preemption. It requeues the job then; the requeued one runs the same command, which
continues. The command has a process of its own, since submitit's handler of the signal runs in the middle of whatever
this process does, and a run can stop with a checkpoint only between two of its steps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from pulsetrain.engine.optional import load_optional
from pulsetrain.runs.command_end import TRAINED

__all__ = ["ClusterJob"]

_WARNED = {-signal.SIGUSR1, -signal.SIGUSR2, 128 + signal.SIGUSR1, 128 + signal.SIGUSR2}  # before a requeue
# a preemption, or a cancellation; a sweep, which is stopped by a KeyboardInterrupt, has the status of SIGINT
_ENDED = {-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT}
_PATIENCE = 1800.0  # seconds that Slurm gets to end a job to which it has sent SIGTERM


class ClusterJob:
    """The command of a job.

    Args:
        words: after `pulsetrain`.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words: tuple[str, ...] = tuple(words)
        self._process: subprocess.Popen[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"words": self.words, "_process": None}

    def __call__(self) -> int:
        """Run the command; returns its exit status where it is done.

        Raises:
            RuntimeError: the command failed.
            SystemExit: a signal has stopped it, and another task requeues the job.
        """
        # Slurm may send its warning to all processes of the job. A run stops for it. A sweep would be killed by it
        # before its trials have stopped, so it and they ignore it, and `checkpoint` stops them.
        command = [sys.executable, "-m", "pulsetrain", *self.words]
        self._process = subprocess.Popen(command, preexec_fn=None if self.words[0] == "train" else _ignore_warning)
        try:
            self._wait()
            status = self._process.wait()
        finally:
            if self._process.returncode is None:  # submitit leaves through an exception
                self._process.terminate()
        if status in TRAINED:
            return status
        if status in _WARNED:  # Slurm signals every process of the job: the command was first
            if "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_PROCID", "0") == "0":
                job_environment = load_optional("submit", "submitit.core.job_environment", "submit")
                signal.raise_signal(getattr(signal, f"SIG{job_environment.JobEnvironment.USR_SIG}"))
            raise SystemExit(128 + signal.SIGUSR1)
        if status in _ENDED:
            _wait_for_end()
            raise SystemExit(128 + signal.SIGTERM)
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise RuntimeError(f"pulsetrain {self.words[0]} ended with {how}; its error is printed above")

    def checkpoint(self) -> Any:
        """Stop the command with a checkpoint, and say what the requeued job runs. Called in a signal handler."""
        if self._process is not None and self._process.returncode is None:
            # a run that Slurm has signalled itself is stopping already, and this changes nothing
            self._process.send_signal(signal.SIGUSR1 if self.words[0] == "train" else signal.SIGTERM)
            self._wait()
        helpers = load_optional("submit", "submitit.helpers", "submit")
        return helpers.DelayedSubmission(ClusterJob(self.words))

    def _wait(self) -> None:
        """Wait for the end of the process, and leave its status to be read.

        Popen.wait holds a lock, which a signal handler that waits, too, would wait for forever.
        """
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


def _ignore_warning() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _wait_for_end() -> None:
    """After SIGTERM, stay until Slurm ends the job: it requeues one that it has preempted, not one that was cancelled.

    A job that ends before that counts as ended by itself.
    """
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        time.sleep(1)
