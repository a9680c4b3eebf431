"""Submits jobs to Slurm, by submitit: batch scripts, arrays for sweeps, and requeueing."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optional import load_optional
from pulsetrain.submit.cluster_job import ClusterJob
from pulsetrain.submit.submission import Submission

__all__ = ["script", "submit"]

_WARNING = 120  # seconds before the time limit at which Slurm signals: one iteration, a validation and a save
_DAY = 24 * 60
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.,:@+-")


def script(submission: Submission, python: str | None = None) -> str:
    """The batch script as text. Nothing is written or submitted, and Slurm need not be there.

    Args:
        submission: what to submit.
        python: the interpreter; by default this one.
    """
    executor = _executor(submission, python)
    if len(submission.commands) > 1:
        executor.parameters["map_count"] = len(submission.commands)
    text: str = executor.text()
    return text


def submit(submission: Submission) -> list[str]:
    """Submit the jobs; returns their numbers, as 4711, or 4711_0 in an array.

    Raises:
        ConfigurationError: Slurm is not on this machine, or rejects the job; the message has its reason.
    """
    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise ConfigurationError(
                f"--to slurm: the program {program} was not found; run this command on a login node of the cluster, "
                "or see the batch script with --print"
            )
    executor = _executor(submission, None)
    submission.folder.mkdir(parents=True, exist_ok=True)
    errors = load_optional("--to slurm", "submitit.core.utils", "submit")
    try:
        jobs = executor.submit_array([ClusterJob(words) for words in submission.commands])
    except (errors.FailedJobError, errors.FailedSubmissionError, OSError) as error:
        for left in [*submission.folder.glob("*.pkl"), *submission.folder.glob(".submission_file_*.sh")]:
            if not left.is_symlink() and "_submitted" not in left.name:
                left.unlink()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("sbatch:")] or lines or [type(error).__name__]
        raise ConfigurationError(f"--to slurm: sbatch rejected the job: {' '.join(said)}") from error
    return [job.job_id for job in jobs]


def _executor(submission: Submission, python: str | None) -> Any:
    needs = submission.resources
    _check(submission)
    slurm = load_optional("--to slurm", "submitit.slurm.slurm", "submit")

    class Executor(slurm.SlurmExecutor):  # type: ignore[misc,name-defined]  # the package may be absent
        """Makes scripts also where Slurm is not there."""

        job_class = slurm.SlurmJob

        @classmethod
        def affinity(cls) -> int:
            return 2

        def text(self) -> str:
            return str(self._make_submission_file_text(self._submitit_command_str, ""))

    interpreter = shlex.quote(python or sys.executable)
    executor = Executor(folder=submission.folder, max_num_timeout=needs.restarts, python=interpreter)
    per_task = ["--cpus-per-task", str(needs.cpus)] if needs.cpus else []  # srun does not inherit it from sbatch
    parameters = {
        "job_name": submission.name,
        "nodes": needs.nodes,
        "ntasks_per_node": needs.processes,
        "cpus_per_task": needs.cpus,
        "gpus_per_node": needs.gpus or None,
        "time": needs.minutes or _DAY,
        "partition": needs.partition,
        "account": needs.account,
        "signal_delay_s": _WARNING,
        "stderr_to_stdout": True,
        "array_parallelism": len(submission.commands),
        # without kill-on-bad-exit=0, the first task that has stopped ends the others while they save
        "srun_args": ["--kill-on-bad-exit=0", *per_task],
        "additional_parameters": {
            "requeue": True,
            **({"mem": f"{needs.memory}M"} if needs.memory else {}),
        },
    }
    executor.update_parameters(**{name: value for name, value in parameters.items() if value is not None}, wckey=None)
    return executor


def _check(submission: Submission) -> None:
    for name in ("partition", "account"):
        value = getattr(submission.resources, name)
        if value is not None and (not value or not _LETTERS.issuperset(value)):
            raise ConfigurationError(
                f"--{name} {value!r}: has a character that a {name} of Slurm cannot have; `sinfo` and `sacctmgr` list "
                "the names"
            )
    folder = str(Path(os.path.abspath(submission.folder)))
    for letter in "%\\":  # in the names of output files, Slurm replaces %j, and \ ends that
        if letter in folder:
            raise ConfigurationError(
                f"--to slurm: the folder {folder} has a {letter} in its name, which Slurm would interpret; choose "
                "another with --run"
            )
