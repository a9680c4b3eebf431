"""Filters: which counter values are due, by the formulas and by running engines."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents

from pulsetrain.engine import Engine, EventEnum, Events
from pulsetrain.engine.events.filters import NEVER, EventFilter


def due(up_to=20, **filter_arguments):
    chosen = Events.ITERATION_COMPLETED(**filter_arguments).filter
    return [value for value in range(up_to + 1) if chosen is None or chosen(None, value)]


# ---------------------------------------------------------------------------------------------- the formulas


def test_every_three_is_due_at_three_six_nine():
    assert due(10, every=3) == [0, 3, 6, 9]  # 0 too: only GET_BATCH_STARTED and STARTED ever stand there


def test_every_one_is_not_a_filter():
    assert Events.ITERATION_COMPLETED(every=1).filter is None
    assert due(3, every=1) == [0, 1, 2, 3]


def test_once_is_due_at_its_number_or_at_each_of_its_numbers():
    assert due(once=4) == [4]
    assert due(once=[9, 2, 2]) == [2, 9]
    assert due(once=(5, 7)) == [5, 7]


def test_before_is_exclusive_and_leaves_out_zero():
    assert due(before=3) == [1, 2]


def test_after_is_exclusive():
    assert due(after=17) == [18, 19, 20]


def test_before_and_after_bound_a_window():
    assert due(after=3, before=7) == [4, 5, 6]
    assert due(after=3, before=4) == []


def test_every_with_a_bound_is_anchored_after_after():
    assert due(12, every=3, after=4) == [5, 8, 11]
    assert due(every=3, before=8) == [1, 4, 7]
    assert due(25, every=5, after=8, before=25) == [9, 14, 19, 24]
    assert due(5, every=1, after=2) == [3, 4, 5]


def test_a_function_decides_from_engine_and_value(engine):
    asked = []

    def odd(engine, value):
        asked.append((engine, value))
        return value % 2 == 1

    seen = []
    engine.on(Events.ITERATION_COMPLETED(odd))(lambda: seen.append(engine.state.iteration))
    engine.run(range(4))
    assert seen == [1, 3]
    assert asked == [(engine, value) for value in (1, 2, 3, 4)]


filters = st.one_of(
    st.builds(EventFilter, every=st.integers(1, 50)),
    st.builds(
        EventFilter, once=st.lists(st.integers(1, 200), min_size=1).map(lambda values: tuple(sorted(set(values))))
    ),
    st.builds(
        EventFilter, every=st.integers(1, 50), before=st.integers(0, 200) | st.just(NEVER), after=st.integers(0, 200)
    ),
)


@given(filters, st.integers(0, 250))
def test_next_due_is_the_first_value_above_at_which_the_filter_says_yes(chosen, value):
    above = (candidate for candidate in range(value + 1, 600) if chosen(None, candidate))
    assert chosen.next_due(value) == next(above, NEVER)


bounds = st.none() | st.integers(0, 60)


@given(st.none() | st.integers(1, 12), bounds, bounds, st.none() | st.integers(1, 60), st.integers(0, 100))
def test_a_filter_agrees_with_ignites_at_every_value(every, before, after, once, value):
    arguments = {"every": every, "before": before, "after": after, "once": once}
    try:
        theirs = IgniteEvents.ITERATION_COMPLETED(**arguments).filter
    except ValueError:
        with pytest.raises(ValueError, match="Only one of the input arguments"):
            Events.ITERATION_COMPLETED(**arguments)
        return
    ours = Events.ITERATION_COMPLETED(**arguments).filter
    assert (ours is None or ours(None, value)) == (theirs is None or theirs(None, value))


def test_a_filter_is_a_frozen_value():
    assert Events.STARTED(every=3).filter == Events.COMPLETED(every=3).filter == EventFilter(every=3)
    assert hash(EventFilter(every=3)) == hash(copy.deepcopy(EventFilter(every=3)))
    with pytest.raises(AttributeError):
        EventFilter(every=3).every = 4


def test_numpy_integers_are_integers():
    assert due(10, every=np.int64(5)) == [0, 5, 10]
    assert due(10, after=np.int64(8)) == [9, 10]


# ------------------------------------------------------------------------------------------ in a running loop

RUNS = [
    ("GET_BATCH_STARTED", {"every": 2}),  # iteration has not grown yet: 0, 2, 4 ...
    ("GET_BATCH_COMPLETED", {"once": 3}),
    ("ITERATION_STARTED", {"every": 4, "after": 3, "before": 11}),
    ("ITERATION_COMPLETED", {"every": 5}),
    ("ITERATION_COMPLETED", {"once": [1, 6, 12]}),
    ("ITERATION_COMPLETED", {"before": 3}),
    ("EPOCH_STARTED", {"every": 2}),
    ("EPOCH_COMPLETED", {"after": 1}),
    ("STARTED", {"every": 2}),  # epoch is 0 there
    ("STARTED", {"once": 1}),
    ("COMPLETED", {"every": 3}),
    ("COMPLETED", {"every": 2}),
]


@pytest.mark.parametrize(("name", "arguments"), RUNS, ids=lambda value: str(value).replace(" ", ""))
def test_a_filtered_handler_runs_when_it_runs_on_ignite(name, arguments):
    seen = {}
    for kind, events in ((Engine, Events), (IgniteEngine, IgniteEvents)):
        engine = kind(lambda engine, batch: None)
        calls = seen[kind] = []
        engine.add_event_handler(
            events[name](**arguments),
            lambda engine, calls=calls: calls.append((engine.state.epoch, engine.state.iteration)),
        )
        engine.run(range(4), max_epochs=3)
        engine.run(range(4), max_epochs=3)  # from zero again
    assert seen[Engine] == seen[IgniteEngine]


def test_get_batch_started_every_two_runs_at_zero(engine):
    seen = []
    engine.on(Events.GET_BATCH_STARTED(every=2))(lambda: seen.append(engine.state.iteration))
    engine.run(range(5))
    assert seen == [0, 2, 4]


def test_filters_of_one_event_are_independent(engine):
    seen = []
    for every in (2, 3):
        engine.on(Events.ITERATION_COMPLETED(every=every))(
            lambda every=every: seen.append((every, engine.state.iteration))
        )
    engine.on(Events.ITERATION_COMPLETED)(lambda: seen.append((1, engine.state.iteration)))
    engine.run(range(6))
    expected = [(e, i) for i in range(1, 7) for e in (2, 3, 1) if i % e == 0]
    assert seen == expected


@given(st.lists(st.integers(-30, 30), max_size=25), filters, st.booleans())
def test_no_jump_of_the_counter_makes_a_filter_miss_or_mistake_a_value(jumps, chosen, with_unfiltered):
    # the plan keeps a window in which nothing is due; values outside it have to be looked at, wherever they lie
    engine = Engine(lambda engine, batch: None)
    received, expected = [], []
    event = Events.ITERATION_COMPLETED(event_filter=lambda engine, value: False)
    event.filter = chosen
    engine.on(event)(lambda: received.append(engine.state.iteration))
    if with_unfiltered:
        engine.on(Events.ITERATION_COMPLETED)(lambda: None)
    last_once = None
    for jump in jumps:
        engine.state.iteration = value = max(0, engine.state.iteration + jump)
        engine.fire_event(Events.ITERATION_COMPLETED)
        if chosen(None, value) and not (chosen.once and value == last_once):
            expected.append(value)
            last_once = value
    assert received == expected


def test_a_filter_on_a_list_of_events_belongs_to_its_own_event(engine):
    seen = []
    engine.on(Events.EPOCH_COMPLETED(every=2) | Events.COMPLETED)(lambda: seen.append(engine.last_event_name.name))
    engine.run([1], max_epochs=3)
    assert seen == ["EPOCH_COMPLETED", "COMPLETED"]


# ------------------------------------------------------------------------------------------------ bad input


def only_the_engine(engine):
    return True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every": 0}, ["every=0", "greater than zero"]),
        ({"every": -3}, ["every=-3"]),
        ({"every": 2.5}, ["every=2.5", "integer"]),
        ({"every": "3"}, ["every='3'"]),
        ({"once": 0}, ["once", "got 0"]),
        ({"once": -1}, ["once", "got -1"]),
        ({"once": []}, ["once", "got []"]),
        ({"once": [1, 0]}, ["once", "got [1, 0]"]),
        ({"once": [1, "2"]}, ["once", "got [1, '2']"]),
        ({"once": "12"}, ["once", "got 12"]),
        ({"once": 2.0}, ["once", "got 2.0"]),
        ({"before": -1}, ["before=-1", "greater or equal to zero"]),
        ({"after": 1.5}, ["after=1.5", "integer"]),
        ({}, ["Only one of"]),
        ({"every": 2, "once": 3}, ["Only one of"]),
        ({"once": 3, "after": 3}, ["Only one of"]),
        ({"event_filter": max, "every": 3}, ["Only one of"]),
        ({"event_filter": only_the_engine}, ["event_filter", "(engine, value)"]),
        ({"event_filter": max}, ["event_filter", "max"]),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],
)
def test_a_bad_filter_is_a_value_error_that_names_argument_and_value(arguments, words):
    with pytest.raises(ValueError, match=r"Events\.ITERATION_COMPLETED") as caught:
        Events.ITERATION_COMPLETED(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_a_misspelt_keyword_of_an_event_is_answered_with_the_nearest():
    with pytest.raises(TypeError, match=r"^Events\.EPOCH_COMPLETED\(evry=2\): is not .*; did you mean 'every'\?$"):
        Events.EPOCH_COMPLETED(evry=2)  # type: ignore[call-arg]


def test_an_event_filter_that_is_not_a_callable_is_a_type_error():
    with pytest.raises(TypeError, match="event_filter=3"):
        Events.ITERATION_COMPLETED(event_filter=3)


class Custom(EventEnum):
    UNCOUNTED = "uncounted"
    COUNTED = "counted"


@pytest.mark.parametrize(
    "event", [Events.TERMINATE, Events.EXCEPTION_RAISED, Events.PREEMPTED, Custom.UNCOUNTED], ids=str
)
def test_a_filter_on_an_event_without_a_counter_fails_at_registration(engine, event):
    engine.register_events(*Custom, event_to_attr={Custom.COUNTED: "counted"})
    with pytest.raises(ValueError, match="needs a counter"):
        engine.on(event(every=2))(lambda *_: None)
    assert not engine.hears(event)
    with pytest.raises(ValueError, match="needs a counter"):
        engine.bus.subscribe(event(every=2), lambda *_: None)
    assert not engine.hears(event)


def test_one_bad_event_of_a_list_registers_none_of_them(engine):
    with pytest.raises(ValueError, match="needs a counter"):
        engine.on(Events.STARTED | Events.TERMINATE(every=2))(lambda: None)
    assert not engine.hears(Events.STARTED)


def test_a_filter_on_a_bus_asks_only_the_engines_that_know_the_event(engine, make_engine):
    make_engine(bus=engine.bus)  # does not register the custom event
    engine.register_events(*Custom, event_to_attr={Custom.COUNTED: "counted"})
    seen = []
    engine.bus.subscribe(Custom.COUNTED(every=2), lambda engine: seen.append(engine.state.counted))
    for _ in range(5):
        engine.fire(Custom.COUNTED)
    assert seen == [2, 4]


def test_a_filter_set_on_the_bus_before_an_engine_registers_the_event_uncounted_is_refused_when_it_fires(engine):
    engine.bus.subscribe(Custom.UNCOUNTED(every=2), lambda: None)
    engine.register_events(*Custom)
    with pytest.raises(ValueError, match=r"Custom\.UNCOUNTED: a filter needs a counter"):
        engine.fire(Custom.UNCOUNTED)


class At(EventFilter):
    """Due at values of its own, which do not count when filters are compared: all of these are equal."""

    def __init__(self, *values: int) -> None:
        super().__init__()
        self.values = values

    def __call__(self, engine: object, value: int) -> bool:
        return value in self.values

    def next_due(self, value: int) -> int:
        return min((each for each in self.values if each > value), default=NEVER)


def test_equal_filters_with_a_state_of_their_own_are_asked_one_by_one():
    engine, called = Engine(lambda engine, batch: None), list[tuple[str, int]]()
    for name, values in (("a", (2, 9)), ("b", (3, 5))):
        due = Events.ITERATION_COMPLETED(event_filter=At(*values))
        engine.add_event_handler(due, lambda engine, name: called.append((name, engine.state.iteration)), name)
    engine.run(range(10))
    assert called == [("a", 2), ("b", 3), ("b", 5), ("a", 9)]


def test_iterations_may_be_given_as_a_list():
    engine, called = Engine(lambda engine, batch: None), list[int]()
    due = Events.ITERATION_COMPLETED(event_filter=EventFilter(once=[3, 5]))  # type: ignore[arg-type]
    engine.add_event_handler(due, lambda engine: called.append(engine.state.iteration))
    engine.run(range(10))
    assert called == [3, 5]
