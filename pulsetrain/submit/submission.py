"""What is submitted: the command of each job, and what a job needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.handlers.run_files.redaction import redacted

__all__ = [
    "FOLDER",
    "Resources",
    "Submission",
    "check_words",
    "job_name",
    "memory_of",
    "minutes_of",
]

FOLDER = "submit"  # in the run folder or the sweep's: scripts, and what the jobs print
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?")
_MEMORY = re.compile(r"([1-9]\d*)([MGT])(?:i?B)?", re.IGNORECASE)
_MEBIBYTES = {"M": 1, "G": 1024, "T": 1024**2}
_LONGEST = 40  # of a job's name: Kubernetes appends numbers, and stops at 63 characters


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What each job of a submission needs."""

    processes: int = 1  # on each node
    nodes: int = 1
    gpus: int = 0  # on each node
    cpus: int | None = None  # of each process
    memory: int | None = None  # of each node, MiB
    minutes: int | None = None  # after which the job is interrupted and requeued
    partition: str | None = None
    account: str | None = None
    restarts: int = 10  # before a job that is interrupted again and again counts as failed


@dataclass(frozen=True)
class Submission:
    """One job, or an array of jobs of a sweep.

    Args:
        name: by which a scheduler lists it; see `job_name`.
        commands: of each job, the words after `pulsetrain`. A command that was interrupted continues when it is run
            again.
        folder: of scripts and of what the jobs print.
        resources: what each job needs.
        new: the folder that has to be made for it, by which of two submissions at once one gets it; None where any may
            exist.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    folder: Path
    resources: Resources
    new: Path | None = None


def job_name(text: str) -> str:
    """A name that every scheduler accepts: small letters, digits and hyphens.

    >>> job_name("runs/My run; $(rm x)"), job_name("1")
    ('runs-my-run-rm-x', 'job-1')
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"job-{name}"
    return name[:_LONGEST].strip("-")


def minutes_of(option: str, text: str) -> int:
    """Minutes of a time in one of Slurm's forms: minutes, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    >>> minutes_of("--time", "90"), minutes_of("--time", "4:00:00"), minutes_of("--time", "1-12")
    (90, 240, 2160)

    Raises:
        ConfigurationError: the text has another form, or the time is 0.
    """
    found = _TIME.fullmatch(text)
    parts = [int(each) if each else 0 for each in found.groups()] if found else []
    colons = text.count(":")
    if not parts or ("-" not in text and colons == 1):  # Slurm reads 4:00 as four minutes, and people as four hours
        raise ConfigurationError(
            f"{option} {text}: needs minutes (90), H:MM:SS (4:00:00), or D-HH:MM:SS (1-12:00:00); write 4:00:00 for "
            "4 hours"
        )
    days, first, second, third = parts
    if "-" in text:
        seconds = ((days * 24 + first) * 60 + second) * 60 + third
    elif colons:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60
    if not seconds or second > 59 or third > 59:
        raise ConfigurationError(f"{option} {text}: is not a time above 0; write 4:00:00 for 4 hours")
    return -(-seconds // 60)


def memory_of(option: str, text: str) -> int:
    """MiB of an amount of memory such as 500M, 32G or 1T, where a G has 1024 M.

    >>> memory_of("--memory", "32G")
    32768

    Raises:
        ConfigurationError: the text has another form.
    """
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{option} {text}: needs a whole number with a unit M, G or T, such as 32G")
    return int(found[1]) * _MEBIBYTES[found[2].upper()]


def check_words(words: Sequence[str]) -> None:
    """Reject a command that cannot be written down as it is.

    Raises:
        ConfigurationError: a word is a credential, or has characters such as a line break.
    """
    for word, shown in zip(words, redacted(list(words)), strict=True):
        if word != shown:
            raise ConfigurationError(
                f"{shown}: looks like a credential, and the command of a job is written into files; let the code that "
                "needs it read it from the environment of the job"
            )
        if any(ord(each) < 32 or ord(each) == 127 for each in word):
            raise ConfigurationError(
                f"{word!r}: has a control character, such as a line break, which scripts cannot hold; rename it"
            )
