"""Epochs of a trainer from a given state: what is adopted, what stays, and what is rejected."""

from dataclasses import replace

import pytest
import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, Events, Every, FunctionalBackend, TorchBackend
from pulsetrain.engine.recording.log.reader import EventLog
from pulsetrain.engine.schedules import Cosine
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.faults.everything import leaves
from tests.support.models import batches, bits, torch_model
from tests.support.runs import cut_after
from tests.support.runs_backends import needs_jax, programs_kept
from tests.support.runs_by_value import ALL, SETTINGS, each_backend, state_of, torch_norm_model, trainer

EVERY_KIND = pytest.mark.parametrize("on", [*ALL, "in place"])


@pytest.fixture(scope="module", autouse=True)
def _programs_kept():
    with programs_kept():
        yield


def make(on, handlers=(), data=None, **settings):
    """A by-value trainer, or an in-place one."""
    if on != "in place":
        return trainer(on, handlers, data, **settings)
    return Trainer(
        torch_norm_model(torch_model().state_dict()),
        data or batches(10),
        backend=TorchBackend(),
        config=TrainingConfig(**{**SETTINGS, **settings}),
        handlers=list(handlers),
    )


def in_bits(run, state):
    """A state of any backend, its arrays as bytes."""
    if isinstance(run.backend, FunctionalBackend):
        return bits(run.backend, state)
    parts = dict(leaves({"weights": dict(state.weights), "optimizer": state.optimizer}))
    return {path: leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf for path, leaf in parts.items()}


# ---------------------------------------------------------------------------------------------------- adopted state


@each_backend
def test_the_rate_of_the_state_is_the_epochs(on):
    run = make(on, schedule=None)
    start = run.model_state
    usual = in_bits(run, run.train_epoch(model_state=start))
    reported = []
    run.add_event_handler(
        Events.OPTIMIZER_STEP_COMPLETED, lambda e, event: reported.extend(event.payload.learning_rates)
    )
    slow = replace(start, metadata={**start.metadata, "learning_rate": 0.001})
    last = run.train_epoch(model_state=slow)
    assert reported == [0.001] * 10
    assert last.metadata["learning_rate"] == 0.001
    assert run.backend.learning_rate(last.optimizer) == pytest.approx(0.001)
    assert in_bits(run, last) != usual
    assert in_bits(run, run.train_epoch(model_state=start)) == usual, "and its own comes back with the first state"


@each_backend
def test_the_reported_rates_of_a_state_with_a_schedule_are_those_of_its_updates(on):
    run, schedule = make(on, schedule=None), Cosine(initial_lr=0.1, total_steps=10)
    reported, used = [], []

    @run.on(Events.OPTIMIZER_STEP_COMPLETED)
    def follow(engine, event):
        reported.extend(event.payload.learning_rates)
        used.append(run.backend.learning_rate(run.model_store._state.optimizer))

    state = run.model_state
    run.train_epoch(model_state=replace(state, metadata={**state.metadata, "schedule": schedule}))
    expected = [schedule.get_lr(update) for update in range(10)]
    assert reported == expected
    assert used == pytest.approx(expected)
    assert len(set(reported)) == 10


@each_backend
def test_a_state_without_metadata_is_one_before_the_first_update(on):
    run = make(on, schedule=None)
    start = run.model_state
    expected = run.train_epoch(model_state=start)
    found = run.train_epoch(model_state=replace(start, metadata={}))
    assert in_bits(run, found) == in_bits(run, expected)
    assert found.metadata["step"] == 10


# ------------------------------------------------------------------------------------------------------- what stays


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_in_place_state_that_is_passed_in_stays_unchanged(optimizer):
    run = make("in place", optimizer=optimizer, schedule=None)
    start = run.train_epoch()  # there are momenta now
    before = in_bits(run, start)
    first = in_bits(run, run.train_epoch(model_state=start))
    assert in_bits(run, start) == before != first
    assert in_bits(run, run.train_epoch(model_state=start)) == first


@EVERY_KIND
def test_accumulated_gradients_are_not_carried_to_another_state(on):
    run = make(on, data=batches(4), accumulate=3, schedule=None)
    start = run.model_state
    found = [in_bits(run, run.train_epoch(model_state=start)) for _ in range(3)]
    assert found[0] == found[1] == found[2] != in_bits(run, start)


# ------------------------------------------------------------------------------------------------- rejected state


def surplus(on, state):
    if on == "in place":
        return replace(state, weights={**state.weights, "more": torch.ones(2)})
    tree = state.weights["parameters"]
    return replace(state, weights={**state.weights, "buffers": {**state.weights["buffers"], "more": tree}})


def lacking(on, state):
    if on == "in place":
        return replace(state, weights=dict(list(state.weights.items())[1:]))
    tree = state.weights["parameters"]
    return replace(state, weights={**state.weights, "parameters": dict(list(tree.items())[1:])})


def of_another_optimizer(on, state):
    if on == "numpy":
        return replace(state, optimizer={"learning_rate": 0.1})
    return replace(state, optimizer=make(on, optimizer="adam").model_state.optimizer)


WRONG = {
    "surplus": surplus,
    "lacking": lacking,
    "another optimizer": of_another_optimizer,
    "no optimizer": lambda on, state: replace(state, optimizer={}),
    "None for the optimizer": lambda on, state: replace(state, optimizer=None),
    "another kind": lambda on, state: make("torch" if on == "in place" else "in place").model_state,
    "weights alone": lambda on, state: state.weights,
    "5": lambda on, state: 5,
}


@EVERY_KIND
@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(on, wrong):
    run = make(on, schedule=None)
    run.train_epoch()
    before, rate = in_bits(run, run.model_state), run.optimizer.param_groups[0]["lr"]
    given = WRONG[wrong](on, run.model_state)
    with pytest.raises((ConfigurationError, TypeError), match=r"Backend|model_state|optimizer"):
        run.train_epoch(model_state=given)
    assert in_bits(run, run.model_state) == before
    assert run.optimizer.param_groups[0]["lr"] == rate


# ------------------------------------------------------------------------------------------------- beside handlers


@pytest.mark.slow
@EVERY_KIND
def test_epochs_by_hand_are_saved_and_recorded_and_their_checkpoint_resumes(on, tmp_path):
    def run_in(folder):
        every = Every(iterations=5)
        return make(on, [Checkpointer(folder, every=every, keep_last=9), EventRecorder(folder)], schedule=None)

    run = run_in(tmp_path / "whole")
    for _ in range(3):
        last = run.train_epoch()
    folder = tmp_path / "whole" / "checkpoints"
    assert sorted(each.name for each in folder.glob("*-checkpoint")) == [
        f"{5 * count:09d}-checkpoint" for count in range(1, 7)
    ]
    log = EventLog(tmp_path / "whole")
    recorded = [each.iteration for each in log.read(event="iteration_completed") if each.engine == "trainer"]
    assert recorded == list(range(1, 31))
    again = run_in(tmp_path / "again")
    again.load_checkpoint(folder / "000000015-checkpoint")
    assert again.state.iteration == 15
    again.train()
    assert again.state.iteration == 30
    assert in_bits(again, again.model_state) == in_bits(run, last)


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize("iteration", [7, 8])
def test_the_last_batch_of_an_update_draws_the_same_after_a_resume(iteration, tmp_path):
    every = Every(iterations=iteration)
    whole = trainer("jax", accumulate=3)
    history = whole.train()
    cut_after(trainer("jax", [Checkpointer(tmp_path, every)], accumulate=3), iteration)
    resumed = trainer("jax", [Checkpointer(tmp_path, every)], accumulate=3)
    assert resumed.train(resume="latest") == history
    assert state_of(resumed) == state_of(whole)
