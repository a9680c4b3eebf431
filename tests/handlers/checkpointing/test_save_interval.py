"""With every="auto", the cost of saving stays below a share of the training time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pulsetrain.engine import Events, Every
from pulsetrain.engine.events.payloads import CheckpointLoaded
from pulsetrain.handlers import Checkpointer
from pulsetrain.handlers.checkpointing.save_interval import SaveInterval
from pulsetrain.testing import ManualClock
from tests.support.engines import Gate, SavingEngine, join_writers, payloads_of, saved


def iterate(interval: SaveInterval, clock: ManualClock, seconds: float, at_most: int = 100_000) -> int | None:
    """The number of iterations of this length until a save is due."""
    for number in range(1, at_most + 1):
        clock.now += seconds
        if interval.is_due(None, number):
            return number
    return None


def save(interval: SaveInterval, clock: ManualClock, seconds: float) -> None:
    clock.now += seconds
    interval.saved(seconds)


@pytest.mark.parametrize("begun_at", [0, 500])
def test_memory_for_the_first_save_is_made_after_the_tenth_iteration_of_a_run(begun_at: int, tmp_path: Path):
    engine = SavingEngine()
    handler = Checkpointer(tmp_path, Every(iterations=1000), at_end=False, background=True).attach(engine)
    background = handler._background
    held = []

    @engine.on(Events.STARTED)
    def reset(engine):
        held.clear()

    @engine.on(Events.ITERATION_COMPLETED, phase=3)
    def look():
        if background._preparing is not None:
            background._preparing.join()
        held.append(background._snapshot.nbytes)

    engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=tmp_path, iteration=begun_at))
    engine.state.iteration = begun_at
    engine.run(range(begun_at + 20), max_epochs=1)
    assert [bytes > 0 for bytes in held[:20]] == [False] * 9 + [True] * 11


def test_the_first_save_comes_when_fifty_iterations_have_been_measured(clock: ManualClock):
    # the first look has nothing to measure from
    assert iterate(SaveInterval(clock=clock), clock, 0.25) == 51


def test_the_interval_amortises_the_cost_at_the_configured_share(clock: ManualClock):
    interval = SaveInterval(clock=clock)
    iterate(interval, clock, 0.25)
    save(interval, clock, 2.0)
    assert iterate(interval, clock, 0.25) == 229  # 2 s / (3.5% of 0.25 s) = 228.6


def test_the_cost_of_each_save_is_amortised_separately(clock: ManualClock):
    interval = SaveInterval(clock=clock, share=0.125, window=4)
    iterate(interval, clock, 0.5)
    save(interval, clock, 16.0)
    assert iterate(interval, clock, 0.5) == 256
    save(interval, clock, 1.0)
    assert iterate(interval, clock, 0.5) == 16
    save(interval, clock, 1.0)
    assert iterate(interval, clock, 0.25) == 16  # the slower ones before the save were measured ...
    save(interval, clock, 1.0)
    assert iterate(interval, clock, 0.25) == 32  # ... and now the faster ones


@pytest.mark.parametrize("costs", [[0.5], [0.5, 5.0, 0.1], [3.0, 0.01, 0.02]], ids=str)
def test_saving_never_takes_more_than_the_configured_share_of_time(costs: list[float], clock: ManualClock):
    interval = SaveInterval(clock=clock)
    training = saving = 0.0
    iterate(interval, clock, 0.01)
    for number in range(30):
        cost = costs[number % len(costs)]
        save(interval, clock, cost)
        iterations = iterate(interval, clock, 0.01)
        assert iterations is not None
        saving, training = saving + cost, training + 0.01 * iterations
        assert saving <= 0.035 * training
        if len(costs) == 1:
            assert iterations - 1 < cost / (0.035 * 0.01)  # and no iteration more than that takes


def test_a_validation_does_not_change_the_interval(clock: ManualClock):
    interval = SaveInterval(clock=clock, share=0.125, window=5)
    for number, seconds in enumerate([0.5, 0.5, 100.0, 0.5, 0.5]):
        clock.now += seconds
        assert not interval.is_due(None, number)
    assert iterate(interval, clock, 0.5) == 1
    save(interval, clock, 1.0)
    assert iterate(interval, clock, 0.5) == 16


def test_iterations_that_a_writing_thread_slows_down_are_part_of_the_cost(clock: ManualClock):
    writing = False
    interval = SaveInterval(lambda: writing, clock=clock, share=0.125, window=4)
    iterate(interval, clock, 0.5)
    save(interval, clock, 1.0)
    writing = True
    assert iterate(interval, clock, 0.75, at_most=100) is None  # however long it takes, the next does not begin
    writing = False
    # 1 s and 100 x 0.25 s; the 100 have been made already
    assert iterate(interval, clock, 0.5) == 26 * 16 - 100


def test_the_iteration_in_which_the_writing_ended_is_part_of_the_cost_and_a_validation_beside_it_is_not(
    clock: ManualClock,
):
    for seconds, cost in ((1.0, 1.5), (100.0, 1.0 + 4 * 0.5)):
        interval = SaveInterval(clock=clock, share=0.125, window=4)
        iterate(interval, clock, 0.5)
        save(interval, clock, 1.0)
        clock.now += seconds
        interval.is_due(None, 0)
        assert interval.interval == cost / (0.125 * 0.5)


def test_after_a_save_that_failed_it_does_not_try_again_at_each_iteration(clock: ManualClock):
    interval = SaveInterval(clock=clock, window=20)
    iterate(interval, clock, 0.5)
    clock.now += 0.001
    interval.failed()
    interval.saved(0.001)
    assert iterate(interval, clock, 0.5) == 20
    save(interval, clock, 0.001)
    assert iterate(interval, clock, 0.5) == 1


def test_a_clock_that_does_not_advance_is_not_an_error(clock: ManualClock):
    interval = SaveInterval(clock=clock, window=8)
    assert iterate(interval, clock, 0.0) == 9
    save(interval, clock, 0.0)
    assert iterate(interval, clock, 0.0) == 8


@pytest.mark.parametrize("background", [False, True])
def test_the_checkpointer_saves_where_its_interval_says(background: bool, tmp_path: Path, clock: ManualClock):
    engine = SavingEngine()
    handler = Checkpointer(tmp_path, "auto", keep_last=99, at_end=False, background=background, clock=clock)
    handler.attach(engine)
    checkpoint_state = engine.checkpoint_state

    def slow() -> dict[str, Any]:
        clock.now += 0.5
        return checkpoint_state()

    engine.checkpoint_state = slow
    engine.add_event_handler(Events.ITERATION_COMPLETED, join_writers)  # the writing itself slows nothing here

    @engine.on(Events.ITERATION_STARTED)
    def tick() -> None:
        clock.now += 0.25

    engine.run(range(270))
    assert saved(handler) == [51, 51 + 100, 51 + 200]  # 0.5 s / (2% of 0.25 s) = 100


def test_where_auto_fails_it_waits_and_continues(tmp_path: Path, clock: ManualClock):
    engine = SavingEngine()
    handler = Checkpointer(tmp_path, "auto", background=True, at_end=False, clock=clock).attach(engine)
    gate = Gate(handler.manager, opened=True)
    gate.error = OSError(13, "Permission denied")
    engine.add_event_handler(Events.ITERATION_COMPLETED, join_writers)
    failures = payloads_of(engine, Events.HANDLER_FAILED)

    @engine.on(Events.ITERATION_STARTED)
    def tick() -> None:
        clock.now += 0.25

    engine.run(range(160))
    assert len(gate.threads) == len(failures) == 3  # at 51, 101, 151: not at each iteration


def test_any_word_other_than_auto_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match=r"Checkpointer\(every='often'\).*auto"):
        Checkpointer(tmp_path, every="often")
