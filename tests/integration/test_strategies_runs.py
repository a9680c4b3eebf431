"""Runs of every strategy, interrupted, stopped or killed anywhere and resumed, end with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsetrain import SignalWatch, Trainer, verify
from pulsetrain.engine import Events, Every
from pulsetrain.engine.recording import diff
from pulsetrain.handlers import EventRecorder
from tests.faults.everything import logged
from tests.support import programs
from tests.support.runs_backends import programs_kept, saved, whole_state
from tests.support.runs_strategies import (
    CARTPOLE,
    COPIED,
    FUNCTIONAL,
    GROUPS,
    JAX,
    PADDED,
    TASKS,
    TEXTS,
    TORCH,
    Task,
    case,
    detach_recorder,
    differences,
    logged_steps,
    make,
    on_each,
    reward,
    text_rollouts,
)

pytestmark = pytest.mark.slow

Run = tuple[Trainer, Path]


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Iterator[None]:
    with programs_kept():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """An uninterrupted run, and its folder."""

    @cache
    def run(task: Task, on: str, every: Every | None = None) -> Run:
        folder = tmp_path_factory.mktemp(f"{task.name}-{on}")
        trainer = make(task, on, folder, every=every)
        trainer.train()
        return trainer, folder

    return run


# the programs for padded examples are those for packed ones without the positions, as preferences have them
EACH = [case(task, on) for task in TASKS for on in (TORCH, FUNCTIONAL, JAX) if (task, on) != (PADDED, JAX)]


@pytest.mark.parametrize(("task", "on"), EACH)
def test_a_run_resumes_after_any_iteration_as_if_it_had_not_been_interrupted(
    task: Task, on: str, whole: Callable[..., Run], tmp_path: Path
) -> None:
    trainer, folder = whole(task, on)
    expected = whole_state(trainer)
    for iteration in task.cuts if on == TORCH else task.cuts[1::2]:
        again = make(task, on, tmp_path / str(iteration))
        again.train(resume=saved(folder, iteration))
        found = whole_state(again)
        assert {path for path in expected | found if found.get(path) != expected.get(path)} == set(), iteration
    if task is TEXTS:  # otherwise no interrupted run would end its epochs early, or adapt
        assert set(trainer.history["policy/epochs"]) == {1.0, 2.0}
        assert len(set(trainer.history["policy/kl_coef"])) > 1


SELDOM = Every(epochs=9)  # no save but those at a run's ends


STOPS = [
    *((Events.GET_BATCH_COMPLETED, at) for at in (1, 6)),
    *((Events.ROLLOUT_STARTED, at) for at in (1, 2)),
    *((event, 2) for event in (Events.REWARDS_COMPUTED, Events.ROLLOUT_COMPLETED, Events.POLICY_UPDATED)),
]


@pytest.mark.parametrize(
    ("task", "on", "event", "at"),
    [
        *(case(task, TORCH, event, at) for task in (CARTPOLE, TEXTS, GROUPS) for event, at in STOPS),
        *(case(TEXTS, on, Events.ROLLOUT_COMPLETED, 2) for on in (FUNCTIONAL, JAX)),
    ],
)
def test_a_run_stopped_between_a_batch_and_its_step_resumes_exactly(
    task: Task, on: str, event: Any, at: int, whole: Callable[..., Run], tmp_path: Path
) -> None:
    trainer, folder = whole(task, on, SELDOM)
    stopped = make(task, on, tmp_path, every=SELDOM)
    stopped.add_event_handler(event(once=at), stopped.terminate)
    stopped.train()
    assert stopped.state.stop_reason == "terminate() was called"
    detach_recorder(stopped)
    again = make(task, on, tmp_path, every=SELDOM)
    again.train(resume="latest")
    assert differences(again, trainer) == set()
    assert logged_steps(tmp_path) == logged_steps(folder)


def signalled(prompts: Any, completions: Any) -> list[float]:
    """The reward, and in the third rollout a SIGTERM to the process."""
    signalled.calls += 1  # type: ignore[attr-defined]
    if signalled.calls == 3:  # type: ignore[attr-defined]
        signal.raise_signal(signal.SIGTERM)
    return reward(prompts, completions)


def test_a_signal_during_a_rollout_ends_the_run_where_it_can_resume_exactly(
    whole: Callable[..., Run], tmp_path: Path
) -> None:
    trainer, folder = whole(TEXTS, TORCH, SELDOM)
    signalled.calls = 0  # type: ignore[attr-defined]
    stopped = make(TEXTS, TORCH, tmp_path, every=SELDOM, data=text_rollouts(4, signalled))
    with SignalWatch(stopped) as watch:
        stopped.train()
    assert (stopped.state.stop_reason, watch.status) == ("SIGTERM was received", 128 + signal.SIGTERM)
    assert stopped.state.rollout_round == 3
    detach_recorder(stopped)
    again = make(TEXTS, TORCH, tmp_path, every=SELDOM)
    again.train(resume="latest")
    assert differences(again, trainer) == set()
    assert logged_steps(tmp_path) == logged_steps(folder)


VICTIM = """
import os, signal, sys
from pathlib import Path
import torch
from pulsetrain.engine import Every
from tests.support.runs_strategies import GROUPS, TORCH, make, reward, text_rollouts

torch.set_num_threads(1)
rollouts = 0

def deadly(prompts, completions):
    global rollouts
    rollouts += 1
    if rollouts == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return reward(prompts, completions)

make(GROUPS, TORCH, Path(sys.argv[1]), every=Every(iterations=3), data=text_rollouts(2, deadly)).train()
"""


def test_a_run_that_was_killed_in_a_rollout_ends_as_if_it_had_not_been(
    whole: Callable[..., Run], tmp_path: Path
) -> None:
    """In the third, after iteration 8, so that it resumes after 6: in the second, after two of three batches."""
    trainer, folder = whole(GROUPS, TORCH, Every(iterations=3))
    died = programs.run("-c", VICTIM, tmp_path, cwd=Path(__file__).parents[2])
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert max(path.name for path in (tmp_path / "checkpoints").glob("0*")) == "000000006-checkpoint"
    again = make(GROUPS, TORCH, tmp_path, every=Every(iterations=3))
    again.train(resume="latest")
    assert whole_state(again) == whole_state(trainer)
    assert dict(logged(tmp_path)) == dict(logged(folder))
    (check,) = (each.resume_check for each in again.handlers if isinstance(each, EventRecorder))
    assert (check.difference, check.agreed > 0) == (None, True)


# ------------------------------------------------------------------------------------------------------------- proofs


@on_each(backends=[TORCH])
def test_a_run_is_reproducible(task: Task, on: str, whole: Callable[..., Run]) -> None:
    _, folder = whole(task, on)
    for stretch, begins in (({}, 0), ({"from_iteration": 7, "to_iteration": 9}, 6)):
        found = verify(folder, lambda: make(task, on, folder), **stretch)
        assert found, str(found)
        assert (found.start, found.changed) == (begins, ())
        assert found.agreed > 4 * (found.end - found.start)


@on_each([COPIED, TEXTS], [FUNCTIONAL, JAX])
def test_a_stretch_is_reproducible_where_states_are_values(task: Task, on: str, whole: Callable[..., Run]) -> None:
    _, folder = whole(task, on)
    found = verify(folder, lambda: make(task, on, folder), from_iteration=7, to_iteration=8)
    assert found, str(found)


@on_each(backends=[TORCH])
def test_a_single_flipped_bit_in_a_weight_is_found(
    task: Task, on: str, whole: Callable[..., Run], tmp_path: Path
) -> None:
    _, folder = whole(task, on)
    make(task, on, tmp_path / "same", every=None).train()
    assert not diff(folder, tmp_path / "same")
    model = task.model()
    with torch.no_grad():
        next(model.parameters()).view(torch.int32)[0, 0] ^= 8  # the lowest bit may be rounded away by the first update
    make(task, on, tmp_path / "other", model=model).train()
    compared = diff(folder, tmp_path / "other")
    assert compared
    assert compared.divergence.a.iteration <= 3  # the first update's, or earlier
