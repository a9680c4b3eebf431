"""`verify` and `diff` see a whole run: all its attempts, in whichever order their checkpoints were chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pulsetrain import Trainer, diff, verify
from pulsetrain.engine import Events
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import TimeLimit
from tests.support.runs_verified import build

STOP = 14


class Killed(Exception):  # noqa: N818  # not an error of the run
    """Ends a process here, without another save."""


def stopping(folder: Path, *at: int, observed: bool = False) -> Trainer:
    """A run that a handler ends at these iterations."""
    made = build(folder)
    for each in at:
        made.on(Events.ITERATION_COMPLETED(once=each))(
            lambda engine: engine.terminate(reason="mine", observed=observed)
        )
    return made


def tampering(made: Trainer, at: int) -> Trainer:
    @made.on(Events.ITERATION_COMPLETED(once=at))
    def tamper(engine: Trainer) -> None:
        with torch.no_grad():
            next(iter(engine.model.parameters())).mul_(-100)

    return made


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The last iteration of the run."""
    made = build(tmp_path_factory.mktemp("whole"))
    made.train()
    return int(made.state.iteration)


@pytest.mark.parametrize("at", [(STOP,), (STOP, 15, 20)], ids=["once", "three times"])
def test_a_run_that_was_ended_and_resumed_is_compared_to_its_end(at: tuple[int, ...], last: int, tmp_path: Path):
    run = tmp_path / "run"
    for _ in range(len(at) + 1):
        stopping(run, *at).train(resume="latest")
    build(tmp_path / "whole").train()
    assert not diff(run, tmp_path / "whole"), "what ended the run is not part of what it computed"
    for asked in ({}, {"to_iteration": last}, {"from_iteration": 9}, {"from_iteration": STOP + 2}):
        found = verify(run, lambda: stopping(tmp_path / "again", *at), **asked)
        assert found, str(found)
        assert found.end == last


@pytest.mark.parametrize("asked", [{}, {"to_iteration": 30}], ids=["all", "to the end"])
def test_a_difference_after_the_run_was_ended_and_resumed_is_found(asked: Any, last: int, tmp_path: Path):
    assert last == 30
    run = tmp_path / "run"
    stopping(run, STOP).train()
    tampering(stopping(run, STOP), 20).train(resume="latest")
    found = verify(run, lambda: stopping(tmp_path / "again", STOP), **asked)
    assert not found
    assert found.divergence is not None
    assert found.divergence.a.iteration in (20, 21)


def test_an_end_that_depends_on_the_clock_need_not_be_repeated(last: int, tmp_path: Path):
    run, ticks = tmp_path / "run", iter(range(10**6))
    limited = build(run)
    TimeLimit(STOP, clock=lambda: next(ticks)).attach(limited)
    limited.train()
    assert 0 < limited.state.iteration < last

    def again() -> Trainer:
        made = build(tmp_path / "again")
        made.handlers.append(TimeLimit(10**-9).attach(made))  # of a machine that is slower
        return made

    first = verify(run, again)
    assert first, str(first)
    assert first.end == limited.state.iteration
    build(run).train(resume="latest")
    whole = verify(run, again)
    assert whole, str(whole)
    assert whole.end == last


def test_an_end_that_is_not_repeated_is_explained(tmp_path: Path):
    run = tmp_path / "run"
    stopping(run, STOP).train()
    found = verify(run, lambda: build(tmp_path / "again"))
    assert not found
    assert "likely cause: end: the recorded run was ended by terminate (mine), and this one continued" in str(found)
    other = verify(run, lambda: stopping(tmp_path / "other", STOP - 2))
    assert not other
    assert "this run was ended by terminate" in str(other) or "first difference" in str(other)
    outside = tmp_path / "outside"
    stopping(outside, STOP, observed=True).train()
    assert verify(outside, lambda: build(tmp_path / "again"))


def iterations(run: Path) -> list[int]:
    return [event.iteration for event in EventLog(run).read(engine="trainer", event="iteration_completed")]


def killed(made: Trainer, at: int, resume: Any) -> None:
    @made.on(Events.ITERATION_COMPLETED(once=at))
    def kill() -> None:
        raise Killed

    made.handlers[:] = [each for each in made.handlers if type(each).__name__ != "CrashBundle"]
    with pytest.raises(Killed):
        made.train(resume=resume)


@pytest.mark.parametrize(
    "attempts",
    [
        [(8, 12), (16, None)],  # from an older checkpoint, killed before it saved, then from the newest
        [(8, None), (16, None)],  # to the end, and then from one of the first attempt
        [(16, 18), (8, 12), (16, None)],
        [(16, 18), (8, None)],
    ],
    ids=str,
)
def test_a_checkpoint_of_any_attempt_continues_that_attempt(
    attempts: list[tuple[int, int | None]], last: int, tmp_path: Path
):
    run = tmp_path / "run"
    killed(build(run), 19, None)
    folders = {int(each.name[:9]): each for each in (run / "checkpoints").iterdir() if each.name[:9].isdigit()}
    for start, end in attempts:
        if end is None:
            build(run).train(resume=folders[start])
        else:
            killed(build(run), end, folders[start])
    assert iterations(run) == list(range(1, last + 1))
    assert EventLog(run).verify() == []
    build(tmp_path / "whole").train()
    assert not diff(run, tmp_path / "whole")
    found = verify(run, lambda: build(tmp_path / "again"))
    assert found, str(found)
    assert found.end == last


def test_iterations_that_no_attempt_has_kept_are_not_asked_for(tmp_path: Path):
    """Killed late, and ended earlier after the resume: what was computed in between counts no more."""
    run = tmp_path / "run"
    killed(build(run), 23, None)
    stopping(run, 18, observed=True).train(resume="latest")
    found = verify(run, lambda: build(tmp_path / "again"))
    assert found, str(found)
    assert found.end == 18
