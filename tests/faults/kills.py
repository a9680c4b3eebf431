"""Kills a run repeatedly, resumes it each time, and compares its files with those of a run that was never killed.

    python -m tests.faults.kills --kills 1000

Half of the kills come at a random moment, half at a random call to the operating system inside a save or a rewind. The
victims are forked from a process that has everything imported; `victims` lists their kinds. Also checks what the runs,
`pulsetrain events --check` and `pulsetrain verify` say. Prints what was done as JSON; exits with 1 at the first
difference or false claim.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch

from pulsetrain.engine.checkpoint import CheckpointManager, disk
from pulsetrain.engine.recording import EventLog, LoggedEvent
from tests.faults.claims import (
    Start,
    false_claims_of_attempt,
    false_claims_of_checkpoints,
    false_claims_of_log,
    start_of,
)
from tests.faults.everything import outcome
from tests.faults.power_cuts import lose
from tests.faults.victims import SAVES, VICTIMS, Victim

FINISHED, FAILED = 0, 1  # a victim's exit status
CALLS = 200  # that a victim's saves make at most; a whole run's make about 1,000
CALLS_OF_REWIND = 40  # that a rewind makes, about
MEMORY = Path("/dev/shm")
STRUCTLOG = structlog.make_filtering_bound_logger(logging.INFO)


class MortalOs:
    """The module `os` as a save sees it, until a call in it is the last of the process."""

    CALLS = ("open", "write", "fsync", "rename", "replace", "close", "mkdir", "unlink", "rmdir")

    def __init__(self, calls: int, die: Callable[[], object] = lambda: os.killpg(0, signal.SIGKILL)) -> None:
        self._left, self._die = calls, die

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.CALLS:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                self._die()
            return real(*arguments, **options)

        return call


@dataclass
class Tally:
    """What has been done."""

    kills: int = 0
    by_victim: dict[str, int] = field(default_factory=dict)  # kills of each kind
    inside_saves: int = 0  # by the number of the call; others may have come inside one as well
    inside_rewinds: int = 0  # in the same way
    after_rewinds: int = 0  # in a process that had rewound
    by_workers: list[int] = field(default_factory=lambda: [0, 0, 0])  # kills of runs with 0, 1 and 2 workers
    runs: int = 0  # that completed
    resumed_exactly: int = 0  # resumes that said so
    named_as_unsaved: int = 0  # resumes that named what their checkpoint lacked
    log_losses: dict[str, int] = field(default_factory=dict)  # by kind and file
    logs_incomplete: int = 0  # at the end of the run: what was lost was not computed again
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """One run: its kind, how it saves, and what the same run ends with if it is never killed."""

    name: str
    victim: Victim
    saves: dict[str, Any]
    expected: dict[str, Any]
    events: dict[int, LoggedEvent]  # the deterministic ones
    duration: float  # seconds


@dataclass(frozen=True)
class Death:
    """When a victim is killed: after some seconds, or in a call to the operating system that a save makes."""

    seconds: float | None = None
    calls: int | None = None
    in_rewind: bool = False  # the calls are counted from the first rewind on


def plan(name: str, kind: int, folder: Path) -> Plan:
    """Run to the end without a kill."""
    victim, saves = VICTIMS[name], SAVES[kind]
    start = time.perf_counter()
    trainer = victim.make(folder, **saves)
    trainer.train()
    duration = time.perf_counter() - start
    assert bool(trainer.rewinds) == victim.rewinds
    assert trainer.state.stop_reason is None
    events = {event.ord: event for event in EventLog(folder).read() if event.ord >= 0}
    return Plan(name, victim, saves, without_clock_dependent(outcome(folder)), events, duration)


def die_in(death: Death) -> None:
    """Make a save's calls mortal, or those of the first rewind."""
    if death.calls is None:
        return
    mortal = MortalOs(death.calls)
    if not death.in_rewind:
        disk.os = mortal  # type: ignore[attr-defined]
        return
    delete_after = CheckpointManager.delete_after

    def armed(manager: CheckpointManager, step: int) -> Any:
        disk.os = mortal  # type: ignore[attr-defined]
        return delete_after(manager, step)

    CheckpointManager.delete_after = armed  # type: ignore[method-assign]


def note_messages(path: Path) -> None:
    """Append each log message to a file at once: the process may be killed after it."""
    file = path.open("a", buffering=1)

    def note(logger: Any, level: str, event: dict[str, Any]) -> Any:
        file.write(json.dumps({**event, "level": level}, default=str) + "\n")
        raise structlog.DropEvent

    structlog.configure(processors=[note], wrapper_class=STRUCTLOG)  # noqa: TID251  # an application


def victim(plan: Plan, folder: Path, said: Path, workers: int, death: Death) -> None:
    """Train, resuming from the newest checkpoint; does not return."""
    os.setpgid(0, 0)  # with its workers, so that they die together
    status = FAILED
    try:
        note_messages(said)
        die_in(death)
        options = {"workers": workers} if plan.victim.has_workers else {}
        plan.victim.make(folder, **options, **plan.saves).train(resume="latest")
        status = FINISHED
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def attempt(plan: Plan, folder: Path, said: Path, workers: int, death: Death) -> int | None:
    """One victim; its exit status, or None where it was killed."""
    said.write_bytes(b"")
    pid = os.fork()
    if pid == 0:
        victim(plan, folder, said, workers, death)
    if death.seconds is not None:
        time.sleep(death.seconds)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # not yet in a group of its own
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def messages(said: Path) -> list[dict[str, Any]]:
    """The lines that were written whole."""
    return [json.loads(line) for line in said.read_text().split("\n")[:-1]]


def without_clock_dependent(left: dict[str, Any]) -> dict[str, Any]:
    """Without the values that depend on when a background save ended: the number of announcements."""
    return {name: value for name, value in left.items() if not name.endswith("counters/save")}


def differences(expected: dict[str, Any], left: dict[str, Any]) -> list[str]:
    """The names of differing pieces; a run killed before deleting an old checkpoint may have one checkpoint more."""
    kept = {name.split("/")[0] for name in expected if name[0].isdigit()}
    old = {name for name in left if name.split("/")[0] not in kept and name < max(kept)}
    return [name for name in sorted((expected.keys() | left) - old) if expected.get(name) != left.get(name)]


def newest(left: dict[str, Any]) -> dict[str, Any]:
    """With the newest checkpoint of each iteration alone, under its number.

    How often one was made of the same iteration depends on what a kill left of a rewind, which is made again.
    """
    newest: dict[str, tuple[int, str]] = {}
    for name in {name.split("/")[0] for name in left if name[0].isdigit()}:
        step, _, rest = name.partition("-")
        newest[step] = max(newest.get(step, (0, "")), (int(rest.partition("~")[2] or 1), name))
    names = {name: step for step, (_, name) in newest.items()}
    found = {}
    for path, value in left.items():
        first, _, rest = path.partition("/")
        if not path[0].isdigit():
            found[path] = value
        elif first in names:
            found[f"{names[first]}/{rest}"] = value
    return found


class Run:
    """A run that is killed and resumed until it ends.

    Args:
        plan: what is expected of it.
        folder: its own.
        workers: of its loader, where it may have some.
        tally: counts what is done.
    """

    def __init__(self, plan: Plan, folder: Path, workers: int, tally: Tally) -> None:
        self.plan, self.folder, self.workers, self.tally = plan, folder, workers, tally
        self.said = folder.with_name(f"{folder.name}.said")
        self.log_was_cut = self.lacked = False
        folder.mkdir()

    def attempt(self, death: Death) -> int | None:
        """One victim, and whether what it said is true."""
        start, tally = start_of(self.folder), self.tally
        status = attempt(self.plan, self.folder, self.said, self.workers, death)
        said = messages(self.said)
        if status is None:
            self._count(death, said)
        self._judge(start, said)
        if status == FAILED:
            tally.differences.append(f"{self._name}: the resumed run failed; the error is above")
        return status

    def lose_log(self, draw: random.Random) -> None:
        """Cut power after the kill, each second time."""
        loss = lose(self.folder, draw) if draw.random() < 0.5 else None
        if loss is not None:
            self.log_was_cut |= loss.is_visible
            self.tally.log_losses[loss.name] = self.tally.log_losses.get(loss.name, 0) + 1

    def finish(self) -> None:
        """Compare what the run has left with the files of the run that was never killed."""
        plan, tally = self.plan, self.tally
        left = without_clock_dependent(outcome(self.folder))
        found = (
            differences(newest(plan.expected), newest(left))
            if plan.victim.rewinds
            else differences(plan.expected, left)
        )
        incomplete = {f"log/{event.ord:09d}" for event in EventLog(self.folder).read() if event.open}
        missing = [name for name in found if name.startswith("log/") and (name not in left or name in incomplete)]
        differing = [name for name in found if name not in missing]
        claims = [*false_claims_of_checkpoints(plan.victim, self.folder)]
        events_differ = any(name.startswith("log/") for name in differing)
        claims += false_claims_of_log(plan.victim, self.folder, plan.saves, plan.events, events_differ)
        wrong = [*([] if self.log_was_cut else missing), *([] if self.lacked else differing)]
        tally.logs_incomplete += bool(missing)
        tally.differences += [f"{self._name}: {each}" for each in (*wrong, *claims)]
        tally.runs += 1

    @property
    def _name(self) -> str:
        return f"{self.folder.name}, {self.plan.name}"

    def _count(self, death: Death, said: list[dict[str, Any]]) -> None:
        tally, name = self.tally, self.plan.name
        tally.kills += 1
        tally.by_victim[name] = tally.by_victim.get(name, 0) + 1
        tally.inside_rewinds += death.in_rewind
        tally.inside_saves += death.calls is not None and not death.in_rewind
        tally.after_rewinds += any(line["event"] == "the run returns to a checkpoint" for line in said)
        tally.by_workers[self.workers] += 1

    def _judge(self, start: Start, said: list[dict[str, Any]]) -> None:
        victim, tally = self.plan.victim, self.tally
        claims = false_claims_of_attempt(victim, start, said, log_was_cut=self.log_was_cut, lacked=self.lacked)
        tally.differences += [f"{self._name}: {claim}" for claim in claims]
        tally.resumed_exactly += any("exactly" in line["event"] for line in said)
        named = any(line["event"].startswith("the checkpoint lacks state") for line in said)
        tally.named_as_unsaved += named
        self.lacked |= named


def draw_death(plan: Plan, draw: random.Random) -> Death:
    kind = draw.random()
    if plan.victim.rewinds and kind < 1 / 3:
        return Death(calls=draw.randrange(CALLS_OF_REWIND), in_rewind=True)
    if kind < 1 / 2:
        return Death(calls=draw.randrange(CALLS))
    return Death(seconds=draw.uniform(0, plan.duration / 2))


def kill(kills: int, seed: int, folder: Path, names: list[str]) -> Tally:
    """Runs, killed and resumed until so many kills have been made and the last run has come to its end.

    Args:
        kills: in all, of each kind about as many.
        seed: of the random kills.
        folder: for the runs.
        names: of the kinds of victims.
    """
    draw, tally = random.Random(seed), Tally(by_victim=dict.fromkeys(names, 0))
    torch.set_num_threads(1)
    for name in names:
        VICTIMS[name].make(folder / f"first_{name}", **SAVES[0]).train()  # whatever torch loads at first use
    plans = {name: [plan(name, kind, folder / f"whole_{name}_{kind}") for kind in range(len(SAVES))] for name in names}
    runs = dict.fromkeys(names, 0)
    while tally.kills < kills and not tally.differences:
        name = min(names, key=tally.by_victim.__getitem__)
        number = runs[name]
        runs[name] += 1
        chosen = plans[name][number // 3 % len(SAVES)]
        workers = number % 3 if chosen.victim.has_workers else 0
        run = Run(chosen, folder / f"run_{name}_{number}", workers, tally)
        status = None
        while status is None and tally.kills < kills:
            status = run.attempt(draw_death(chosen, draw))
            if status is None and chosen.victim.loses_log:
                run.lose_log(draw)
        if status is None:  # all kills have been made
            status = run.attempt(Death())
        if status == FINISHED:
            run.finish()
        if not tally.differences:
            shutil.rmtree(run.folder)
        if not sum(runs.values()) % 20:
            print(f"{tally.kills} kills", file=sys.stderr, flush=True)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where the runs are kept; a temporary one by default")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS), help="kinds; by default all")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # noqa: TID251  # an application
    start = time.perf_counter()
    # in memory where that is possible: a killed process loses nothing that it has written, synced or not
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as temporary:
        tally = kill(arguments.kills, arguments.seed, arguments.folder or Path(temporary), arguments.victims)
    print(json.dumps({**asdict(tally), "seconds": round(time.perf_counter() - start)}))
    return bool(tally.differences)


if __name__ == "__main__":
    sys.exit(main())
