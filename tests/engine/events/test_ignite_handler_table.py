"""`engine._event_handlers`: the table that pytorch-ignite's profilers read and edit, as a live view of the bus."""

from __future__ import annotations

import functools
import weakref

import pytest
from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents

from pulsetrain.engine import Engine, Events, Phase


def nothing(engine, batch):
    return None


def test_the_table_shows_the_handlers_of_each_event_as_ignite_stores_them(either):
    engine = either(nothing)

    def with_engine(engine, value, *, key):
        pass

    def bare():
        pass

    engine.add_event_handler(IgniteEvents.STARTED, with_engine, 1, key=2)
    engine.add_event_handler(IgniteEvents.STARTED, bare)
    [first, second] = engine._event_handlers[IgniteEvents.STARTED]
    assert first[0] is with_engine
    assert isinstance(first[1][0], weakref.ref)
    assert first[1][0]() is engine
    assert first[1][1:] == (1,)
    assert first[2] == {"key": 2}
    assert second == (bare, (), {})


def test_the_table_knows_which_events_have_handlers(either):
    engine = either(nothing)
    engine.add_event_handler(IgniteEvents.STARTED, lambda: None)
    engine.add_event_handler(IgniteEvents.ITERATION_COMPLETED(every=3), lambda: None)
    assert IgniteEvents.STARTED in engine._event_handlers
    assert IgniteEvents.ITERATION_COMPLETED in engine._event_handlers
    assert IgniteEvents.COMPLETED not in engine._event_handlers
    assert {event.name for event in engine._event_handlers} == {"STARTED", "ITERATION_COMPLETED"}
    assert len(engine._event_handlers) == 2
    assert len(engine._event_handlers[IgniteEvents.COMPLETED]) == 0


def test_the_table_is_in_the_order_of_execution(engine):
    def observe():
        pass

    def act():
        pass

    engine.on(Events.STARTED, phase=Phase.OBSERVE)(observe)
    engine.on(Events.STARTED)(act)
    assert [handler for handler, _, _ in engine._event_handlers[Events.STARTED]] == [act, observe]


def test_the_table_leaves_out_subscriptions_to_the_whole_bus(engine):
    engine.bus.subscribe(Events.STARTED, lambda: None)
    assert Events.STARTED not in engine._event_handlers


def test_a_filtered_handler_is_shown_as_a_function_that_asks_the_filter(either):
    engine = either(nothing)
    seen = []

    def handler(engine):
        seen.append(engine.state.iteration)

    engine.add_event_handler(IgniteEvents.ITERATION_COMPLETED(every=2), handler)
    [(shown, args, kwargs)] = engine._event_handlers[IgniteEvents.ITERATION_COMPLETED]
    assert shown is not handler
    assert shown._parent() is handler
    for iteration in (1, 2, 3, 4):
        engine.state.iteration = iteration
        shown(args[0](), *args[1:], **kwargs)
    assert seen == [2, 4]


def test_append_registers_at_the_end(either):
    engine = either(nothing)
    seen = []
    engine.add_event_handler(IgniteEvents.STARTED, lambda: seen.append("first"))
    engine._event_handlers[IgniteEvents.STARTED].append((seen.append, ("appended",), {}))
    engine._event_handlers[IgniteEvents.STARTED].append(
        (lambda engine, value: seen.append((type(engine), value)), (weakref.ref(engine), 3), {})
    )
    engine.run([1])
    assert seen == ["first", "appended", (either, 3)]


def test_insert_at_zero_runs_before_every_phase(engine):
    seen = []
    engine.on(Events.STARTED, phase=Phase.COMPUTE)(lambda: seen.append("compute"))
    engine.on(Events.STARTED)(lambda: seen.append("act"))
    engine._event_handlers[Events.STARTED].insert(0, (seen.append, ("inserted",), {}))
    engine.run([1])
    assert seen == ["inserted", "compute", "act"]


@pytest.mark.parametrize("index", [0, 1, 2, 3, -1, 99, -99])
def test_insert_puts_it_where_a_list_would(either, index):
    engine = either(nothing)
    seen = []
    for name in "abc":
        engine.add_event_handler(IgniteEvents.STARTED, seen.append, name)
    engine._event_handlers[IgniteEvents.STARTED].insert(index, (seen.append, ("x",), {}))
    engine.run([1])
    expected = list("abc")
    expected.insert(index, "x")
    assert seen == expected


def test_many_inserts_at_one_place_keep_their_order(engine):
    seen = []
    engine.on(Events.STARTED)(lambda: seen.append("first"))
    engine.on(Events.STARTED)(lambda: seen.append("last"))
    for number in range(30):
        engine._event_handlers[Events.STARTED].insert(1, (seen.append, (number,), {}))
    engine.run([1])
    assert seen == ["first", *reversed(range(30)), "last"]


def test_setting_an_entry_replaces_the_handler_in_its_place(either):
    engine = either(nothing)
    seen = []
    for name in "abc":
        engine.add_event_handler(IgniteEvents.STARTED, lambda engine, name=name: seen.append(name))
    entries = engine._event_handlers[IgniteEvents.STARTED]
    _, args, kwargs = entries[1]
    entries[1] = (lambda engine: seen.append("replaced"), args, kwargs)
    engine.run([1])
    assert seen == ["a", "replaced", "c"]


def test_setting_an_entry_without_the_engine_calls_it_without(either):
    engine = either(nothing)
    seen = []
    engine.add_event_handler(IgniteEvents.STARTED, lambda engine: seen.append("with"))
    engine._event_handlers[IgniteEvents.STARTED][0] = (lambda *args: seen.append(args), (), {})
    engine.run([1])
    assert seen == [()]


def test_setting_an_entry_in_mid_fire_takes_effect_in_that_fire(either):
    engine = either(nothing)
    seen = []

    @engine.on(IgniteEvents.STARTED)
    def replace(engine):
        entries = engine._event_handlers[IgniteEvents.STARTED]
        entries[1] = (lambda engine: seen.append("new"), *entries[1][1:])

    engine.add_event_handler(IgniteEvents.STARTED, lambda engine: seen.append("old"))
    engine.run([1])
    assert seen == ["new"]


def test_wrapping_a_filtered_handler_and_putting_it_back_is_what_profilers_do(either):
    engine = either(nothing)
    seen, wrapped_calls = [], []

    def handler(engine):
        seen.append(engine.state.iteration)

    engine.add_event_handler(IgniteEvents.ITERATION_COMPLETED(every=2), handler)
    event = next(iter(engine._event_handlers))
    genuine, args, kwargs = engine._event_handlers[event][0]

    @functools.wraps(genuine)
    def wrapper(*call_args, **call_kwargs):
        wrapped_calls.append(engine.state.iteration)
        return genuine(*call_args, **call_kwargs)

    engine._event_handlers[event][0] = (wrapper, args, kwargs)
    engine.run(range(4))
    assert wrapped_calls == [1, 2, 3, 4]  # the wrapper comes before the filter, as with ignite
    assert seen == [2, 4]
    engine._event_handlers[event][0] = (genuine, args, kwargs)
    engine.run(range(4))
    assert wrapped_calls == [1, 2, 3, 4]
    assert seen == [2, 4, 2, 4]
    assert engine._event_handlers[event][0][0] is genuine
    assert engine.has_event_handler(handler)


def test_a_filter_put_back_is_again_not_asked_where_it_is_not_due(engine):
    engine.on(Events.ITERATION_COMPLETED(every=5))(lambda: None)
    entries = engine._event_handlers[Events.ITERATION_COMPLETED]
    [entry] = entries
    entries[0] = (lambda *args: None, *entry[1:])
    entries[0] = entry
    [subscription] = engine.bus.signal(Events.ITERATION_COMPLETED).subscriptions(id(engine))
    assert subscription.filter == Events.ITERATION_COMPLETED(every=5).filter


def test_assigning_a_whole_list_keeps_drops_and_adds(either):
    engine = either(nothing)
    seen = []
    for name in "abc":
        engine.add_event_handler(IgniteEvents.STARTED, seen.append, name)
    entries = engine._event_handlers[IgniteEvents.STARTED]
    engine._event_handlers[IgniteEvents.STARTED] = [entries[0], entries[2], (seen.append, ("new",), {})]
    engine.run([1])
    assert seen == ["a", "c", "new"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda entries: entries.__delitem__(1),
        lambda entries: entries.pop(1),
        lambda entries: entries.remove(entries[1]),
        lambda entries: entries.__delitem__(slice(1, 2)),
    ],
    ids=["del", "pop", "remove", "del slice"],
)
def test_deleting_an_entry_cancels_that_registration(either, edit):
    engine = either(nothing)
    seen = []
    for name in "abc":
        engine.add_event_handler(IgniteEvents.STARTED, seen.append, name)
    edit(engine._event_handlers[IgniteEvents.STARTED])
    engine.run([1])
    assert seen == ["a", "c"]


def test_extend_and_clear_write_through(either):
    engine = either(nothing)
    seen = []
    engine._event_handlers[IgniteEvents.STARTED].extend([(seen.append, (1,), {}), (seen.append, (2,), {})])
    engine.run([1])
    engine._event_handlers[IgniteEvents.STARTED].clear()
    engine.run([1])
    assert seen == [1, 2]


def test_deleting_an_event_cancels_all_its_handlers(engine):
    seen = []
    engine.on(Events.STARTED | Events.COMPLETED)(lambda: seen.append(engine.last_event_name.name))
    del engine._event_handlers[Events.STARTED]
    engine.run([1])
    assert seen == ["COMPLETED"]


def test_assigning_a_slice_is_refused(engine):
    engine.on(Events.STARTED)(lambda: None)
    with pytest.raises(TypeError, match="assign one entry at a time"):
        engine._event_handlers[Events.STARTED][:] = []


def test_an_entry_that_refers_to_another_engine_calls_with_that_one(make_engine):
    engine, other = make_engine(), make_engine()
    seen = []
    engine._event_handlers[Events.STARTED].append((lambda engine: seen.append(engine), (weakref.ref(other),), {}))
    engine.run([1])
    assert seen == [other]


def test_the_view_keeps_nothing_alive():
    engine = Engine(nothing)
    engine.on(Events.STARTED(every=2))(lambda engine: None)
    entries = list(engine._event_handlers[Events.STARTED])
    reference = weakref.ref(engine)
    del engine
    assert reference() is None
    assert entries[0][1][0]() is None


def test_ignites_engine_still_has_the_table_that_this_is_a_view_of():
    assert isinstance(IgniteEngine(nothing)._event_handlers, dict)
