"""By how many processes a run was trained, and how many may repeat it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording.log.reader import logged_ranks
from pulsetrain.engine.recording.log.run_file import read_run_file

__all__ = ["Stretch", "check_processes", "processes_after", "processes_of", "virtual_ranks_of"]


class Stretch(NamedTuple):
    """Iterations that were trained by one number of processes."""

    first: int
    last: int | None  # None for the last stretch
    processes: int

    def __str__(self) -> str:
        return f"iterations {self.first:,} to {'the end' if self.last is None else f'{self.last:,}'}"


def processes_of(run: Path) -> list[Stretch]:
    """By how many processes which iterations were trained, in their order; what was computed again counts once.

    It is in run.json; without that file, the number is that of the logs.

    Args:
        run: the run folder.
    """
    starts = read_run_file(run).get("starts")
    counts: list[tuple[int, int]] = []  # after which iteration, and how many
    for start in starts if isinstance(starts, list) else ():
        if not isinstance(start, Mapping):
            continue
        after, count = start.get("iteration") or 0, len(start.get("processes") or ()) or 1
        while counts and counts[-1][0] >= after:
            counts.pop()
        if not counts or counts[-1][1] != count:
            counts.append((after, count))
    counts = counts or [(0, len(logged_ranks(run)))]
    ends = [after for after, _ in counts[1:]]
    return [Stretch(after + 1, end, count) for (after, count), end in zip(counts, [*ends, None], strict=True)]


def processes_after(run: Path, iteration: int) -> int:
    """By how many processes the run was trained after this iteration.

    Args:
        run: the run folder.
        iteration: of a checkpoint.
    """
    return [each.processes for each in processes_of(run) if each.first <= iteration + 1][-1]


def virtual_ranks_of(run: Path) -> int | None:
    """How many virtual ranks a run has, whose results do not depend on the number of processes; None without them.

    Args:
        run: the run folder.
    """
    environment = read_run_file(run).get("environment")
    found = environment.get("virtual") if isinstance(environment, Mapping) else None
    return found if isinstance(found, int) and found > 0 else None


def check_processes(run: str | os.PathLike[str], first: int, last: int | None, here: int) -> list[int]:
    """Refuse to repeat iterations by more or fewer processes than have trained them, unless virtual ranks share them.

    Args:
        run: the run folder.
        first: the first iteration.
        last: the last one; None for all that follow.
        here: the number of processes.

    Returns:
        The numbers of processes that have trained these iterations.

    Raises:
        ConfigurationError: it differs, or differs between these iterations; the message has both numbers and a command.
    """
    found = [
        each
        for each in processes_of(Path(run))
        if (each.last is None or each.last >= first) and (last is None or each.first <= last)
    ]
    virtual = virtual_ranks_of(Path(run))
    if virtual is not None:
        if virtual % here:
            raise ConfigurationError(
                f"verify({run}): {_processes(here)} cannot share the run's {virtual} virtual ranks evenly; start "
                f"{found[-1].processes}: {_command(run, found[-1].processes)}"
            )
        return [each.processes for each in found]
    for before, after in pairwise(found):
        raise ConfigurationError(
            f"verify({run}): {before} were trained by {_processes(before.processes)}, and {after} by "
            f"{_processes(after.processes)}, which cannot be repeated together; choose iterations of one number by "
            "from_iteration and to_iteration (--from, --to)"
        )
    for each in found:
        if each.processes != here:
            raise ConfigurationError(
                f"verify({run}): the run was trained by {_processes(each.processes)}, and {_processes(here)} would "
                f"repeat it, with other shares of each batch; start {each.processes}: {_command(run, each.processes)}"
            )
    return [each.processes for each in found]


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _command(run: str | os.PathLike[str], count: int) -> str:
    command = shlex.join(["pulsetrain", "verify", str(run)])
    if count == 1:
        return command
    return f"{command} --launch.nproc {count}, or torchrun --nproc_per_node {count} -m {command}"
