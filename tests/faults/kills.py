"""Kills a run repeatedly, resumes it each time, and compares its files with those of a run that was never killed.

    python -m tests.faults.kills --kills 1000

Half of the kills come at a random moment, half at a random call to the operating system inside a save. The victims are
forked from a process that has everything imported. Prints what was done as JSON; exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch

from pulsetrain.engine import Every
from pulsetrain.engine.checkpoint import disk
from tests.faults.everything import make, outcome

FINISHED, FAILED = 0, 1  # a victim's exit status
CALLS = 200  # that a victim's saves make at most; a whole run's make about 1,000


class MortalOs:
    """The module `os` as a save sees it, until a call in it is the last of the process."""

    CALLS = ("open", "write", "fsync", "rename", "replace", "close", "mkdir", "unlink", "rmdir")

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.CALLS:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                os.killpg(0, signal.SIGKILL)
            return real(*arguments, **options)

        return call


@dataclass
class Tally:
    """What has been done."""

    kills: int = 0
    inside_saves: int = 0  # by the number of the call; others may have come inside one as well
    runs: int = 0  # that completed
    by_workers: list[int] = field(default_factory=lambda: [0, 0, 0])  # kills of runs with 0, 1 and 2 workers
    differences: list[str] = field(default_factory=list)


# how often it saves, and whether in the background: a resume has nothing, little, or a whole run to compute again
SAVES = (
    {"every": Every(iterations=1)},
    {"every": Every(iterations=5)},
    {"every": Every(iterations=3), "background": True},
)


def victim(folder: Path, workers: int, saves: dict[str, Any], dies_at_call: int | None) -> None:
    """Train, resuming from the newest checkpoint; does not return."""
    os.setpgid(0, 0)  # with its workers, so that they die together
    status = FAILED
    try:
        if dies_at_call is not None:
            disk.os = MortalOs(dies_at_call)  # type: ignore[attr-defined]
        make(folder, workers=workers, **saves).train(resume="latest")
        status = FINISHED
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def attempt(
    folder: Path,
    workers: int,
    saves: dict[str, Any],
    *,
    dies_at_call: int | None = None,
    dies_after: float | None = None,
) -> int | None:
    """One victim; its exit status, or None where it was killed.

    Args:
        dies_at_call: how many calls to the operating system its saves make before it is killed in the next.
        dies_after: seconds.
    """
    pid = os.fork()
    if pid == 0:
        victim(folder, workers, saves, dies_at_call)
    if dies_after is not None:
        time.sleep(dies_after)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # not yet in a group of its own
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def without_clock_dependent(left: dict[str, Any]) -> dict[str, Any]:
    """Without the values that depend on when a background save ended: the number of announcements."""
    return {name: value for name, value in left.items() if not name.endswith("counters/save")}


def differences(expected: dict[str, Any], left: dict[str, Any]) -> list[str]:
    """The names of differing pieces; a run killed before deleting an old checkpoint may have one checkpoint more."""
    kept = {name.split("/")[0] for name in expected if name[0].isdigit()}
    old = {name for name in left if name.split("/")[0] not in kept and name < max(kept)}
    return [name for name in sorted((expected.keys() | left) - old) if expected.get(name) != left.get(name)]


def kill(kills: int, seed: int, folder: Path) -> Tally:
    """Runs, killed and resumed until so many kills have been made and the last run has come to its end."""
    draw, tally = random.Random(seed), Tally()
    torch.set_num_threads(1)
    make(folder / "first").train()  # whatever torch loads at first use
    start = time.perf_counter()
    expected = []
    for number, saves in enumerate(SAVES):
        make(folder / f"whole_{number}", **saves).train()
        expected.append(without_clock_dependent(outcome(folder / f"whole_{number}")))
    duration = (time.perf_counter() - start) / len(SAVES)
    while tally.kills < kills and not tally.differences:
        workers, kind = tally.runs % 3, tally.runs // 3 % len(SAVES)
        saves = SAVES[kind]
        run = folder / f"run_{tally.runs}"
        run.mkdir()
        status = None
        while status is None and tally.kills < kills:
            inside = draw.random() < 0.5
            if inside:
                status = attempt(run, workers, saves, dies_at_call=draw.randrange(CALLS))
            else:
                status = attempt(run, workers, saves, dies_after=draw.uniform(0, duration))
            if status is None:
                tally.kills += 1
                tally.inside_saves += inside
                tally.by_workers[workers] += 1
        if status is None:  # all kills have been made
            status = attempt(run, workers, saves)
        tally.runs += 1
        if status == FAILED:
            tally.differences.append(f"{run.name}: the resumed run failed; the error is above")
            break
        tally.differences += differences(expected[kind], without_clock_dependent(outcome(run)))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where the runs are kept; a temporary one by default")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # noqa: TID251  # an application
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        tally = kill(arguments.kills, arguments.seed, arguments.folder or Path(temporary))
    print(json.dumps({**asdict(tally), "seconds": round(time.perf_counter() - start)}))
    return bool(tally.differences)


if __name__ == "__main__":
    sys.exit(main())
