"""Every: cadences as values, and the events that they subscribe to."""

from __future__ import annotations

import copy

import pytest

from pulsetrain.engine import Events, Every


def fired_at(engine, cadence, data, **run):
    seen = []
    engine.on(cadence.events())(lambda engine: seen.append((engine.state.epoch, engine.state.iteration)))
    engine.run(data, **run)
    return seen


def test_iterations_and_epochs_are_alternatives(engine):
    assert fired_at(engine, Every(iterations=2, epochs=1), range(3), max_epochs=2) == [
        (1, 2),
        (1, 3),
        (2, 4),
        (2, 6),
        (2, 6),
    ]


def test_updates_count_optimizer_steps():
    [event] = Every(updates=5).events()
    assert event == Events.OPTIMIZER_STEP_COMPLETED
    assert event.filter.every == 5


def test_seconds_are_counted_by_the_clock_that_is_given(engine):
    now = [100.0]
    seen = []

    @engine.on(Events.ITERATION_STARTED)
    def advance():
        now[0] += 4.0

    engine.on(Every(seconds=10).events(clock=lambda: now[0]))(lambda: seen.append(engine.state.iteration))
    engine.run(range(9))
    assert seen == [4, 7]  # 12 s after the first look, and 12 s after that


def test_each_call_of_events_has_its_own_memory_of_time():
    cadence = Every(seconds=10)
    now = [0.0]
    first, second = (cadence.events(clock=lambda: now[0])[0].filter for _ in range(2))
    assert not first(None, 1)
    now[0] = 10.0
    assert first(None, 2)
    assert not first(None, 3)
    assert not second(None, 3)  # asked for the first time


def test_joining_gives_a_new_cadence_and_changes_neither_side():
    left, right = Every(iterations=500), Every(epochs=1)
    assert left | right == Every(iterations=500, epochs=1)
    assert (left, right) == (Every(iterations=500), Every(epochs=1))
    assert left | left == left
    assert hash(left) == hash(copy.deepcopy(left))


def test_two_cadences_of_one_unit_do_not_join():
    with pytest.raises(
        ValueError, match=r"Every\(iterations=5\): cannot join Every\(iterations=7\); one cadence per unit"
    ):
        Every(iterations=5) | Every(iterations=7)
    with pytest.raises(TypeError):
        Every(iterations=5) | 7


@pytest.mark.parametrize("value", [0, -1, -0.5, float("nan")])
def test_a_cadence_that_is_not_positive_is_a_value_error(value):
    with pytest.raises(ValueError, match=rf"Every\(seconds={value}\): needs a positive number"):
        Every(seconds=value)


@pytest.mark.parametrize(("unit", "value"), [("iterations", 1.5), ("epochs", "1"), ("updates", True), ("seconds", "9")])
def test_a_cadence_of_another_type_is_a_type_error(unit, value):
    with pytest.raises(TypeError, match=rf"Every\({unit}={value!r}\): needs a"):
        Every(**{unit: value})


def test_a_cadence_of_nothing_is_a_value_error():
    with pytest.raises(ValueError, match="needs at least one of iterations, epochs, updates, seconds"):
        Every()
