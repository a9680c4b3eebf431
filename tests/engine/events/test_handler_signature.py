"""How a handler is called: by its signature, decided when it is registered."""

from __future__ import annotations

import functools

import pytest
from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents

from pulsetrain.engine import Engine, Event, Events
from pulsetrain.engine.events.payloads import EpochTerminated, ExceptionRaised


def call_with(engine, event, handler_of, *args, **kwargs):
    """Register a handler, fire the event once, return what the handler got."""
    got = []
    engine.add_event_handler(event, handler_of(got), *args, **kwargs)
    if event == Events.EXCEPTION_RAISED:
        engine.fire(event, ExceptionRaised(error=ERROR))
    elif event == Events.TERMINATE_SINGLE_EPOCH:
        engine.fire(event, EpochTerminated(iter_counter=7))
    else:
        engine.fire(event)
    [call] = got
    return call


ERROR = ValueError("the step's")


def shown(value):
    """What a test table can name: the engine as "engine", a record as "event"."""
    if isinstance(value, (Engine, IgniteEngine)):
        return "engine"
    return "event" if isinstance(value, Event) else value


# Each maker returns a handler that notes its arguments; beside it the arguments given with it, and what it gets.
ORDINARY = [
    ("()", lambda got: lambda: got.append(()), (), ()),
    ("(engine)", lambda got: lambda engine: got.append((engine,)), (), ("engine",)),
    ("(anything)", lambda got: lambda anything: got.append((anything,)), (), ("engine",)),
    ("(engine, event)", lambda got: lambda engine, event: got.append((engine, event)), (), ("engine", "event")),
    ("(_, event)", lambda got: lambda _, event: got.append((_, event)), (), ("engine", "event")),
    (
        "(engine, event, x)",
        lambda got: lambda engine, event, x: got.append((engine, event, x)),
        (1,),
        ("engine", "event", 1),
    ),
    ("(engine, event) and a value", lambda got: lambda engine, event: got.append((engine, event)), (1,), ("engine", 1)),
    ("(engine, event=None)", lambda got: lambda engine, event=None: got.append((engine, event)), (), ("engine", None)),
    ("(engine, x)", lambda got: lambda engine, x: got.append((engine, x)), (1,), ("engine", 1)),
    ("(x)", lambda got: lambda x: got.append((x,)), (1,), (1,)),
    ("(engine, *, event)", lambda got: lambda *args: got.append(args), (1, 2), ("engine", 1, 2)),
    ("(*args)", lambda got: lambda *args: got.append(args), (), ("engine",)),
    ("(engine=None)", lambda got: lambda engine=None: got.append((engine,)), (), (None,)),
    ("(flag=False)", lambda got: lambda flag=False: got.append((flag,)), (), (False,)),
    ("(flag=False) and a value", lambda got: lambda flag=False: got.append((flag,)), (True,), (True,)),
    ("(a=1, event=2)", lambda got: lambda a=1, event=2: got.append((a, event)), (), (1, 2)),
    ("(event)", lambda got: lambda event: got.append((event,)), (), ("engine",)),
    ("(event, engine)", lambda got: lambda event, engine: got.append((event, engine)), (1,), ("engine", 1)),
    ("(x, y=2)", lambda got: lambda x, y=2: got.append((x, y)), (), ("engine", 2)),
]


@pytest.mark.parametrize(("name", "maker", "args", "expected"), ORDINARY, ids=[row[0] for row in ORDINARY])
def test_a_handler_gets_what_its_signature_asks_for(engine, name, maker, args, expected):
    assert tuple(map(shown, call_with(engine, Events.EPOCH_COMPLETED, maker, *args))) == expected


FAILURES = [
    ("(error)", lambda got: lambda error: got.append((error,)), (), (ERROR,)),
    ("(engine, error)", lambda got: lambda engine, error: got.append((engine, error)), (), ("engine", ERROR)),
    (
        "(engine, error, x)",
        lambda got: lambda engine, error, x: got.append((engine, error, x)),
        (1,),
        ("engine", ERROR, 1),
    ),
    ("(error, x)", lambda got: lambda error, x: got.append((error, x)), (1,), (ERROR, 1)),
    ("(*args)", lambda got: lambda *args: got.append(args), (), ("engine", ERROR)),
    ("(engine, event)", lambda got: lambda engine, event: got.append((engine, event)), (), ("engine", "event")),
]


@pytest.mark.parametrize(("name", "maker", "args", "expected"), FAILURES, ids=[row[0] for row in FAILURES])
def test_on_exception_raised_a_handler_gets_the_error_before_its_own_arguments(engine, name, maker, args, expected):
    assert tuple(map(shown, call_with(engine, Events.EXCEPTION_RAISED, maker, *args))) == expected


COUNTS = [
    ("(iter_counter)", lambda got: lambda iter_counter: got.append((iter_counter,)), (), (7,)),
    (
        "(engine, iter_counter)",
        lambda got: lambda engine, iter_counter: got.append((engine, iter_counter)),
        (),
        ("engine", 7),
    ),
    (
        "(engine, x, iter_counter)",
        lambda got: lambda engine, x, iter_counter: got.append((engine, x, iter_counter)),
        (1,),
        ("engine", 1, 7),
    ),
    ("(engine, n)", lambda got: lambda engine, n: got.append((engine, n)), (), ("engine", 7)),
    ("(n)", lambda got: lambda n: got.append((n,)), (), (7,)),
    ("(engine, **kwargs)", lambda got: lambda engine, **kw: got.append((engine, *kw.values())), (), ("engine", 7)),
    ("(engine, event)", lambda got: lambda engine, event: got.append((engine, event)), (), ("engine", "event")),
]


@pytest.mark.parametrize(("name", "maker", "args", "expected"), COUNTS, ids=[row[0] for row in COUNTS])
def test_on_terminate_single_epoch_a_handler_gets_the_count(engine, name, maker, args, expected):
    assert tuple(map(shown, call_with(engine, Events.TERMINATE_SINGLE_EPOCH, maker, *args))) == expected


def test_an_event_parameter_finds_everything_in_the_payload(engine):
    _, event = call_with(engine, Events.EXCEPTION_RAISED, lambda got: lambda engine, event: got.append((engine, event)))
    assert event.payload == ExceptionRaised(error=ERROR)


def test_the_rules_of_the_payload_events_hold_for_ignites_own_members_too(engine):
    seen = []
    engine.on(IgniteEvents.TERMINATE_SINGLE_EPOCH)(lambda engine, iter_counter: seen.append(iter_counter))
    engine.on(IgniteEvents.ITERATION_COMPLETED(once=2))(engine.terminate_epoch)
    engine.run(range(5))
    assert seen == [2]


# ------------------------------------------------------------------------------------------ kinds of callable


def test_methods_of_every_kind_and_callable_objects_are_bound_like_functions(engine):
    seen = []

    class Owner:
        def method(self, engine, event):
            seen.append(("method", shown(engine), shown(event)))

        def __call__(self, engine):
            seen.append(("object", shown(engine)))

        @staticmethod
        def static():
            seen.append(("static",))

        @classmethod
        def of_class(cls, engine):
            seen.append(("of class", shown(engine)))

    owner = Owner()
    for handler in (owner.method, owner, owner.static, Owner.of_class):
        engine.add_event_handler(Events.STARTED, handler)
    engine.run([1])
    assert seen == [("method", "engine", "event"), ("object", "engine"), ("static",), ("of class", "engine")]


def test_a_partial_is_asked_for_what_it_leaves_open(engine):
    seen = []

    def function(first, engine, event, *, last):
        seen.append((first, shown(engine), shown(event), last))

    engine.add_event_handler(Events.STARTED, functools.partial(function, 0), last=9)
    engine.add_event_handler(Events.STARTED, functools.partial(seen.append, "builtin"))
    engine.run([1])
    assert seen == [(0, "engine", "event", 9), "builtin"]


def test_a_builtin_method_gets_its_own_arguments(engine):
    seen = []
    engine.add_event_handler(Events.STARTED, seen.append)
    engine.add_event_handler(Events.COMPLETED, seen.clear)
    engine.fire(Events.STARTED)
    assert seen == [engine]
    engine.fire(Events.COMPLETED)
    assert seen == []


def test_a_class_is_called_with_what_its_constructor_takes(engine):
    made = []

    class Note:
        def __init__(self, engine):
            made.append(engine)

    engine.add_event_handler(Events.STARTED, Note)
    engine.run([1])
    assert made == [engine]


def test_a_callable_that_cannot_be_referred_to_weakly_is_a_handler_too(engine):
    class Slotted:
        __slots__ = ("calls",)

        def __call__(self):
            self.calls += 1

    handler = Slotted()
    handler.calls = 0
    handle = engine.add_event_handler(Events.STARTED, handler)
    engine.run([1])
    handle.remove()
    engine.run([1])
    assert handler.calls == 1


def test_terminate_as_a_handler_does_what_it_says(engine, log_of):
    log = log_of(engine, Events.TERMINATE, Events.COMPLETED)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.terminate)
    engine.run(range(10))
    assert engine.state.iteration == 2
    assert log == ["TERMINATE", "COMPLETED"]


def test_keyword_arguments_reach_the_handler(engine):
    seen = []
    engine.add_event_handler(Events.STARTED, lambda engine, *, key: seen.append(key), key=1)
    engine.add_event_handler(Events.STARTED, lambda engine, event: seen.append(event), event=2)  # its own `event`
    engine.on(Events.STARTED, 3, key=4)(lambda engine, value, key: seen.append((value, key)))
    engine.run([1])
    assert seen == [1, 2, (3, 4)]


def test_the_decorator_gives_the_function_back(engine):
    def handler():
        pass

    assert engine.on(Events.STARTED)(handler) is handler


# -------------------------------------------------------------------------------- refused when registered


@pytest.mark.parametrize(
    ("event", "handler", "args"),
    [
        (Events.STARTED, lambda engine, one, two: None, ()),
        (Events.STARTED, lambda engine, event, other: None, ()),
        (Events.STARTED, lambda: None, (1,)),
        (Events.STARTED, lambda engine, *, key: None, ()),
        (Events.EXCEPTION_RAISED, lambda: None, ()),
        (Events.TERMINATE_SINGLE_EPOCH, lambda: None, ()),
    ],
    ids=["two more", "one more", "too many given", "keyword missing", "no error taken", "no count taken"],
)
def test_a_signature_that_fits_nothing_is_a_value_error_at_registration(engine, event, handler, args):
    with pytest.raises(ValueError, match=r"takes parameters .* but will be called with") as caught:
        engine.add_event_handler(event, handler, *args)
    assert event.name in str(caught.value)
    with pytest.raises(ValueError, match="takes parameters"):
        engine.bus.subscribe(event, handler, *args)
    assert not engine.hears(event)


def test_what_is_missing_is_the_parameter_after_the_engine(engine):
    with pytest.raises(ValueError, match="missing a required argument: 'batch'"):
        engine.add_event_handler(Events.STARTED, lambda engine, batch: None)


def test_a_handler_with_an_event_and_one_parameter_more_names_that_parameter(engine):
    def report(engine, event, loss): ...

    with pytest.raises(ValueError, match=r"^Error adding report 'handler' to") as caught:
        engine.add_event_handler(Events.STARTED, report)
    assert str(caught.value).endswith(
        "takes parameters ['engine', 'event', 'loss'] but will be called with (engine, event) (missing a required "
        "argument: 'loss'); change the handler's parameters or the arguments given with it"
    )


@pytest.mark.parametrize(
    ("args", "called"), [((), r"\(engine\) or \(\) \("), ((1, 2), r"\(engine, \*args\) or .*, args=\(1, 2\) \(")]
)
def test_what_a_handler_is_called_with_is_listed_where_there_is_any(engine, args, called):
    with pytest.raises(ValueError, match=rf"called with {called}.*; to get the event's record, name the second"):
        engine.add_event_handler(Events.STARTED, lambda engine, *, key: None, *args)


def test_a_misspelt_name_of_an_event_is_corrected(engine):
    with pytest.raises(ValueError, match=r"did you mean Events.EPOCH_COMPLETED\?"):
        engine.add_event_handler("epoch_complete", print)


def test_a_misspelt_name_of_a_custom_event_is_corrected_and_of_no_other_enum(engine):
    engine.register_events("games_won")
    with pytest.raises(ValueError, match=r"did you mean 'games_won'\?"):
        engine.add_event_handler("game_won", print)


def test_a_callable_without_a_signature_is_a_value_error(engine):
    with pytest.raises(ValueError, match="no readable signature"):
        engine.add_event_handler(Events.STARTED, max)


@pytest.mark.parametrize("handler", [None, 3, "print"])
def test_a_handler_that_is_not_a_callable_is_a_type_error(engine, handler):
    with pytest.raises(TypeError, match=r"started: handler=.*needs a callable"):
        engine.add_event_handler(Events.STARTED, handler)


async def coroutine(engine):
    pass


class AsyncCallable:
    async def __call__(self, engine):
        pass


@pytest.mark.parametrize(
    "handler", [coroutine, functools.partial(coroutine), AsyncCallable()], ids=["function", "partial", "object"]
)
def test_coroutine_functions_are_refused(engine, handler):
    with pytest.raises(TypeError, match="coroutine functions are not awaited"):
        engine.add_event_handler(Events.STARTED, handler)
    assert not engine.hears(Events.STARTED)


@pytest.mark.parametrize("event", ["no_such_event", None, 3, Events], ids=str)
def test_an_event_that_is_not_registered_is_a_value_error(engine, event):
    with pytest.raises(ValueError, match="is not a valid event for this Engine; custom events are allowed by"):
        engine.add_event_handler(event, lambda: None)


# ---------------------------------------------------------------------------------------- ignite's own handles


def test_a_handle_removes_its_registration_and_removing_twice_is_once(engine):
    seen = []
    handle = engine.add_event_handler(Events.STARTED | Events.COMPLETED, lambda: seen.append(1))
    engine.run([1])
    handle.remove()
    handle.remove()
    engine.run([1])
    assert seen == [1, 1]


def test_a_handle_is_a_context_manager_and_can_be_cancelled(engine):
    seen = []
    with engine.add_event_handler(Events.STARTED, lambda: seen.append(1)):
        engine.run([1])
    engine.add_event_handler(Events.STARTED, lambda: seen.append(2)).cancel()
    engine.run([1])
    assert seen == [1]


def test_remove_event_handler_undoes_every_registration_on_the_event(engine):
    seen = []

    def handler():
        seen.append(1)

    engine.on(Events.STARTED)(handler)
    engine.on(Events.STARTED(every=1))(handler)
    engine.on(Events.ITERATION_COMPLETED(every=2))(handler)
    assert engine.has_event_handler(handler)
    assert engine.has_event_handler(handler, Events.STARTED)
    engine.remove_event_handler(handler, Events.STARTED)
    assert not engine.has_event_handler(handler, Events.STARTED)
    assert engine.has_event_handler(handler, Events.ITERATION_COMPLETED)
    engine.remove_event_handler(handler, Events.ITERATION_COMPLETED)
    assert not engine.has_event_handler(handler)
    engine.run([1, 2])
    assert seen == []


def test_removing_what_is_not_there_is_a_value_error(engine):
    with pytest.raises(ValueError, match="does not exist"):
        engine.remove_event_handler(print, Events.STARTED)
    engine.on(Events.STARTED)(lambda: None)
    with pytest.raises(ValueError, match="is not found among registered event handlers"):
        engine.remove_event_handler(print, Events.STARTED)
