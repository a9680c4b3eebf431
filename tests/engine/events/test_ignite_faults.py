"""Faults of pytorch-ignite that our Engine does not inherit.

Each scenario runs on both engines: the test of ours states what is right, the test of ignite's what ignite does. When
ignite mends a fault its test fails, and the row in docs/ignite.md can go.
"""

from __future__ import annotations

import pytest
from ignite.engine import Engine as IgniteEngine
from ignite.engine import EventEnum as IgniteEventEnum
from ignite.engine import Events as IgniteEvents

from pulsetrain.engine import Engine, EventEnum, Events, Subscription


class StepError(Exception):
    pass


def run_or_error(engine, *args, **kwargs):
    """What run() gives: a state, None, or the exception."""
    try:
        return engine.run(*args, **kwargs)
    except BaseException as error:
        return error


def both(scenario):
    """The scenario's outcome on our engine and on ignite's."""
    return scenario(Engine, Events), scenario(IgniteEngine, IgniteEvents)


# ------------------------------------------------------------------------- a. the run after one that failed


def test_after_an_exception_the_next_run_continues():
    def scenario(kind, events):
        seen = []

        def step(engine, batch):
            seen.append(engine.state.iteration)
            if len(seen) == 2:
                raise StepError

        engine = kind(step)
        assert isinstance(run_or_error(engine, range(3), max_epochs=2), StepError)
        return run_or_error(engine, range(3), max_epochs=2), seen

    (state, seen), (their_state, their_seen) = both(scenario)
    assert (state.epoch, state.iteration) == (2, 5)
    assert seen == [1, 2, 3, 4, 5]
    assert their_state is None  # ignite's does nothing
    assert their_seen == [1, 2]


# -------------------------------------------------------------------------------- b. an exception that is taken


def test_a_taken_exception_ends_the_run():
    def scenario(kind, events):
        log = []

        def step(engine, batch):
            if engine.state.iteration == 2:
                raise StepError

        engine = kind(step)
        engine.add_event_handler(events.EXCEPTION_RAISED, lambda engine, error: log.append("taken"))
        for event in (events.EPOCH_COMPLETED, events.COMPLETED):
            engine.add_event_handler(event, lambda engine, event=event: log.append(event.name))
        return run_or_error(engine, range(3), max_epochs=2).iteration, log

    ours, theirs = both(scenario)
    assert ours == (2, ["taken"])
    assert theirs == (5, ["taken", "EPOCH_COMPLETED", "EPOCH_COMPLETED", "COMPLETED"])  # the rest of epoch 1 is skipped


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_keyboard_interrupt_is_not_swallowed(stop):
    def scenario(kind, events):
        def step(engine, batch):
            raise stop

        engine = kind(step)
        engine.add_event_handler(events.EXCEPTION_RAISED, lambda engine, error: None)
        return run_or_error(engine, range(3))

    ours, theirs = both(scenario)
    assert isinstance(ours, stop)
    assert not isinstance(theirs, BaseException)


def test_one_exception_is_one_event_though_a_handler_raises_it_again():
    def scenario(kind, events):
        log = []

        def step(engine, batch):
            raise StepError

        def again(engine, error):
            log.append("raised")
            raise error

        engine = kind(step)
        engine.add_event_handler(events.EXCEPTION_RAISED, again)
        assert isinstance(run_or_error(engine, range(3)), StepError)
        return log

    assert both(scenario) == (["raised"], ["raised", "raised"])


# ------------------------------------------------------------------------------- c. terminate itself as a handler


def test_terminate_as_a_handler_fires_completed():
    def scenario(kind, events):
        engine = kind(lambda engine, batch: None)
        log = []
        engine.add_event_handler(events.ITERATION_COMPLETED(once=2), engine.terminate)
        engine.add_event_handler(events.COMPLETED, lambda engine: log.append("COMPLETED"))
        engine.run(range(5))
        return engine.should_terminate, log

    (flag, log), (their_flag, their_log) = both(scenario)
    assert flag is True
    assert log == ["COMPLETED"]
    assert their_flag == "skip_completed"  # the engine was taken for the flag
    assert their_log == []


# ------------------------------------------------------------------------------------------ j. removing one handle


def test_removing_one_filtered_handle_leaves_the_handlers_other_registrations():
    def scenario(kind, events):
        engine = kind(lambda engine, batch: None)
        seen = []

        def handler(engine):
            seen.append(engine.state.iteration)

        engine.add_event_handler(events.ITERATION_COMPLETED(every=2), handler)
        handle = engine.add_event_handler(events.ITERATION_COMPLETED(every=3), handler)
        handle.remove()
        engine.run(range(6))
        return seen

    ours, theirs = both(scenario)
    assert ours == [2, 4, 6]
    assert theirs == []


# ----------------------------------------------------------------------------------------- k. events of one name


def test_an_event_of_the_same_name_in_a_different_enum_is_distinct():
    def scenario(kind, events):
        base = EventEnum if events is Events else IgniteEventEnum
        other = base("Other", {"STARTED": "started", "PAUSED": "paused"})
        engine = kind(lambda engine, batch: None)
        engine.register_events(*other)
        seen = []
        engine.add_event_handler(other.STARTED, lambda engine: seen.append("other"))
        engine.run([1])
        engine.fire_event(other.STARTED)
        return seen

    ours, theirs = both(scenario)
    assert ours == ["other"]
    assert theirs == ["other", "other"]  # the run's own STARTED, too


def test_ignites_own_enums_do_not_collide_on_our_engine_either():
    class Other(IgniteEventEnum):
        STARTED = "started"

    engine = Engine(lambda engine, batch: None)
    engine.register_events(*Other)
    seen = []
    engine.on(Other.STARTED)(lambda: seen.append("other"))
    engine.on(IgniteEvents.STARTED)(lambda: seen.append("ignite's"))
    engine.run([1])
    engine.fire_event(Other.STARTED)
    assert seen == ["ignite's", "other"]


def test_event_to_attr_belongs_to_one_engine():
    def scenario(kind, events):
        base = EventEnum if events is Events else IgniteEventEnum
        custom = base("Custom", {f"HAPPENED_ON_{kind.__module__.replace('.', '_')}": "happened"})
        event = next(iter(custom))
        first, second = (kind(lambda engine, batch: None) for _ in range(2))
        first.register_events(event, event_to_attr={event: "first_count"})
        second.register_events(event, event_to_attr={event: "second_count"})
        try:
            first.state.first_count = 7
            return first.state.get_event_attrib_value(event)
        except AttributeError as error:
            return error
        finally:
            if kind is IgniteEngine:  # it is a table of the class: leave no trace of this test
                from ignite.engine.events import State

                del State.event_to_attr[event]

    ours, theirs = both(scenario)
    assert ours == 7
    assert isinstance(theirs, AttributeError)  # 'State' object has no attribute 'second_count'


# ------------------------------------------------------------------------ l. a filter on an event without a counter


def test_a_filter_on_an_event_without_a_counter_fails_when_it_is_registered():
    def scenario(kind, events):
        engine = kind(lambda engine, batch: None)
        try:
            engine.add_event_handler(events.TERMINATE(every=2), lambda engine: None)
        except ValueError as error:
            return "registering", error
        engine.add_event_handler(events.ITERATION_COMPLETED(once=2), lambda engine: engine.terminate())
        return "firing", run_or_error(engine, range(3))

    (when, error), (their_when, their_error) = both(scenario)
    assert when == "registering"
    assert "Events.TERMINATE" in str(error)
    assert "needs a counter" in str(error)
    assert their_when == "firing"
    assert isinstance(their_error, RuntimeError)


# ---------------------------------------------------------------------- m. a filtered handler that is not due


class SpyFilter:
    """Replaces a filter and counts its calls."""

    def __init__(self, genuine):
        self.genuine = genuine
        self.asked = 0

    def __call__(self, engine, value):
        self.asked += 1
        return self.genuine(engine, value)


def test_a_filter_that_is_not_due_is_not_asked(monkeypatch):
    from pulsetrain.engine.events.filters import EventFilter

    calls = []
    genuine = EventFilter.__call__
    monkeypatch.setattr(
        EventFilter, "__call__", lambda self, engine, value: calls.append(value) or genuine(self, engine, value)
    )
    engine = Engine(lambda engine, batch: None)
    seen = []
    for _ in range(10):
        engine.on(Events.ITERATION_COMPLETED(every=100))(lambda: seen.append(engine.state.iteration))
    engine.run(range(1000))
    assert len(seen) == 100
    assert sorted(set(calls)) == [1, *range(100, 1001, 100)]  # once to find out, then only where it is due

    event = IgniteEvents.ITERATION_COMPLETED(every=100)
    event.filter = spy = SpyFilter(event.filter)
    theirs = IgniteEngine(lambda engine, batch: None)
    theirs.add_event_handler(event, lambda engine: None)
    theirs.run(range(1000))
    assert spy.asked == 1000


def test_firing_where_nothing_is_due_calls_no_handler_code(monkeypatch):
    calls = []
    genuine = Subscription.is_due
    monkeypatch.setattr(Subscription, "is_due", lambda self, *given: calls.append(1) or genuine(self, *given))
    engine = Engine(lambda engine, batch: None)
    engine.on(Events.ITERATION_COMPLETED(every=100))(lambda: None)
    engine.run(range(1000))
    assert len(calls) == 11


# ------------------------------------------------------------------------------------- once, in ignite's #3625


def test_once_is_once_though_the_counter_does_not_advance():
    def scenario(kind, events):
        engine = kind(lambda engine, batch: None)
        calls = []

        @engine.on(events.GET_BATCH_STARTED(once=12))
        def end_epoch():
            calls.append(engine.state.iteration)
            if len(calls) == 1:
                engine.terminate_epoch()

        engine.run(range(10), max_epochs=3)
        return calls

    ours, theirs = both(scenario)
    assert ours == [12]
    assert theirs == [12, 12]


def test_once_is_once_in_a_run_and_is_repeated_in_the_next_one():
    def scenario(kind, events):
        engine = kind(lambda engine, batch: None)
        calls = []
        engine.add_event_handler(
            events.ITERATION_COMPLETED(once=[2, 3]), lambda engine: calls.append(engine.state.iteration)
        )
        engine.run(range(4))
        engine.run(range(4))
        return calls

    ours, theirs = both(scenario)
    assert ours == theirs == [2, 3, 2, 3]


# ------------------------------------------------------------------------- a StopIteration that is the step's own


def test_a_stop_iteration_raised_by_the_step_reaches_the_caller():
    def scenario(kind, events):
        def step(engine, batch):
            raise StopIteration("the step's")

        return run_or_error(kind(step), range(3))

    ours, theirs = both(scenario)
    assert type(ours) is StopIteration
    assert type(theirs) is RuntimeError


# ---------------------------------------------------------------------------------------- an exhausted iterator


def test_an_iterator_that_was_used_up_before_is_an_error():
    def scenario(kind, events):
        return run_or_error(kind(lambda engine, batch: None), iter([]))

    ours, theirs = both(scenario)
    assert isinstance(ours, ValueError)
    assert theirs.epoch_length == 0  # ignite's run ends as if all were well


# -------------------------------------------------------------------------------- joining events changes neither


def test_growing_a_joined_list_leaves_the_list_it_grew_from():
    def scenario(kind, events):
        left = events.STARTED | events.COMPLETED
        left | events.EPOCH_STARTED
        return len(left)

    assert both(scenario) == (2, 3)
