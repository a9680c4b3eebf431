"""Handlers and steps that fail: which receivers are called, what the caller gets, and how the next run continues."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import Engine, EventBus, EventEnum, Events, Phase
from pulsetrain.engine.events.payloads import ExceptionRaised


class MineError(ValueError):
    pass


def failing_at(iteration, error):
    def step(engine, batch):
        if engine.state.iteration == iteration:
            raise error

    return step


def broken(engine):
    raise MineError("broken")


def broken_with_event(engine, event):
    raise MineError("broken")


# ------------------------------------------------------------------------------------------ on_error="raise"


@pytest.mark.parametrize("handler", [broken, broken_with_event], ids=["(engine)", "(engine, event)"])
@pytest.mark.parametrize(
    "event", [Events.ITERATION_COMPLETED, Events.ITERATION_COMPLETED(every=3)], ids=["", "every=3"]
)
def test_a_failing_handlers_error_keeps_its_type_and_says_where_it_came_from(engine, handler, event):
    start = 1 if event.filter is None else 3
    engine.add_event_handler(event, handler)
    with pytest.raises(MineError, match="broken") as caught:
        engine.run(range(2), max_epochs=3)
    [note] = caught.value.__notes__
    assert f"{__name__}.{handler.__name__}" in note
    assert "handling Events.ITERATION_COMPLETED of 'engine'" in note
    assert f"epoch {(start + 1) // 2}, iteration {start}" in note


def test_the_note_names_the_handler_that_failed_among_several(engine):
    engine.on(Events.STARTED)(lambda: None)
    engine.on(Events.STARTED)(broken)
    engine.on(Events.STARTED)(lambda engine: None)
    with pytest.raises(MineError) as caught:
        engine.run([1])
    assert caught.value.__notes__[0].startswith(f"in {__name__}.broken, ")


def test_a_handler_added_in_mid_fire_is_named_too(engine):
    engine.on(Events.STARTED)(lambda engine: engine.add_event_handler(Events.STARTED, broken))
    with pytest.raises(MineError) as caught:
        engine.run([1])
    assert f"{__name__}.broken" in caught.value.__notes__[0]


def test_handlers_after_a_failing_one_do_not_run(engine):
    seen = []
    engine.on(Events.STARTED)(broken)
    engine.on(Events.STARTED, phase=Phase.PERSIST)(lambda: seen.append(1))
    with pytest.raises(MineError):
        engine.run([1])
    assert seen == []


# ------------------------------------------------------------------------------------------- on_error="warn"


def test_with_warn_the_run_continues_and_the_failure_is_logged_once(engine):
    seen = []
    engine.on(Events.ITERATION_COMPLETED, on_error="warn")(broken)
    engine.on(Events.ITERATION_COMPLETED)(lambda: seen.append(1))
    with capture_logs() as logs:
        state = engine.run(range(5))
    assert state.iteration == 5
    assert len(seen) == 5
    [entry] = logs
    assert entry["log_level"] == "warning"
    assert entry["handler"] == f"{__name__}.broken"
    assert entry["on"] == "iteration_completed"
    assert entry["error"] == "MineError: broken"


def test_with_warn_failures_are_counted(engine):
    subscription = engine.bus.subscribe(Events.ITERATION_COMPLETED, broken_with_event, on_error="warn")
    with capture_logs():
        engine.run(range(5))
    assert subscription.failures == 5


def test_with_warn_handler_failed_is_fired_each_time(engine, recorder):
    recorder.attach(engine, Events.HANDLER_FAILED)
    engine.on(Events.ITERATION_COMPLETED(every=2), on_error="warn")(broken)
    with capture_logs():
        engine.run(range(5))
    assert [event.iteration for event in recorder.events] == [2, 4]
    payload = recorder.events[0].payload
    assert (payload.handler, payload.event) == (f"{__name__}.broken", "iteration_completed")
    assert isinstance(payload.error, MineError)


def test_a_handler_of_handler_failed_that_fails_too_does_not_recurse(engine):
    seen = []

    @engine.on(Events.HANDLER_FAILED, on_error="warn")
    def worse(engine, event):
        seen.append(event.payload.handler)
        raise MineError("worse")

    engine.on(Events.ITERATION_COMPLETED, on_error="warn")(broken)
    with capture_logs() as logs:
        engine.run(range(3))
    assert seen == [f"{__name__}.broken"] * 3
    assert len(logs) == 2  # one for each handler


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_warn_does_not_hold_back_keyboard_interrupt_and_system_exit(engine, stop):
    def handler():
        raise stop

    engine.on(Events.ITERATION_COMPLETED, on_error="warn")(handler)
    with pytest.raises(stop):
        engine.run([1])


# ---------------------------------------------------------------------------------- an exception of the step


@pytest.fixture
def story(make_recorder):
    """A recorder of the events that matter to a failing run."""

    def attach(engine):
        return make_recorder().attach(
            engine, Events.EXCEPTION_RAISED, Events.EPOCH_COMPLETED, Events.TERMINATE, Events.COMPLETED
        )

    return attach


@pytest.mark.parametrize("error", [MineError("the step's"), KeyboardInterrupt(), SystemExit(3), StopIteration("ended")])
def test_an_exception_of_the_step_reaches_the_caller_as_it_is(error, story):
    engine = Engine(failing_at(3, error))
    received = story(engine)
    with pytest.raises(type(error)) as caught:
        engine.run(range(2), max_epochs=3)
    assert caught.value is error
    assert received.types == ["epoch_completed", "exception_raised"]
    assert received.events[1].payload == ExceptionRaised(error=error)
    assert engine.state.stop_reason == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "event",
    [
        Events.STARTED,
        Events.EPOCH_STARTED,
        Events.GET_BATCH_STARTED,
        Events.GET_BATCH_COMPLETED,
        Events.ITERATION_STARTED,
        Events.ITERATION_COMPLETED,
        Events.EPOCH_COMPLETED,
        Events.COMPLETED,
        Events.TERMINATE,
        Events.TERMINATE_SINGLE_EPOCH,
        Events.DATALOADER_STOP_ITERATION,
        Events.INTERRUPT,
    ],
    ids=str,
)
@pytest.mark.parametrize("error", [MineError, StopIteration])
def test_an_exception_of_any_events_handler_reaches_the_caller_and_is_raised_once(engine, recorder, event, error):
    def handler(engine, event):
        raise error("the handler's")

    engine.on(Events.ITERATION_COMPLETED(once=1))(engine.terminate_epoch)
    if event == Events.TERMINATE:
        engine.on(Events.ITERATION_COMPLETED(once=3))(engine.terminate)
    if event == Events.INTERRUPT:
        engine.on(Events.ITERATION_COMPLETED(once=3))(engine.interrupt)
    engine.on(event)(handler)
    recorder.attach(engine, Events.EXCEPTION_RAISED)
    with pytest.raises(error, match="the handler's"):
        engine.run(range(2), max_epochs=3)
    assert recorder.types == ["exception_raised"]


def test_an_exception_of_the_loader_reaches_the_caller(engine, story):
    def loader():
        yield 1
        raise MineError("the loader's")

    received = story(engine)
    with pytest.raises(MineError, match="the loader's"):
        engine.run(loader(), epoch_length=3)
    assert received.types == ["exception_raised"]


def test_a_handler_of_the_engine_takes_the_exception_and_the_run_ends(story):
    engine = Engine(failing_at(2, MineError("the step's")))
    received = story(engine)
    taken = []
    engine.on(Events.EXCEPTION_RAISED)(lambda engine, error: taken.append(error))
    state = engine.run(range(3), max_epochs=5)
    assert state is engine.state
    assert (state.epoch, state.iteration) == (1, 2)
    assert [str(error) for error in taken] == ["the step's"]
    assert received.types == ["exception_raised"]
    assert state.stop_reason == "MineError: the step's"


def test_subscribers_of_the_bus_only_observe_an_exception(recorder):
    engine = Engine(failing_at(2, MineError("the step's")))
    recorder.attach(engine, Events.EXCEPTION_RAISED)
    engine.bus.subscribe(Events.EXCEPTION_RAISED, lambda engine, error: None, sender=engine)
    kept = [lambda sender, event: None]
    engine.bus.signal(Events.EXCEPTION_RAISED).connect(kept[0])
    with pytest.raises(MineError):
        engine.run(range(3))
    assert recorder.types == ["exception_raised"]


def test_a_muted_exception_raised_takes_nothing():
    engine = Engine(failing_at(1, MineError("the step's")))
    engine.on(Events.EXCEPTION_RAISED)(lambda error: None)
    with engine.bus.signal(Events.EXCEPTION_RAISED).muted(), pytest.raises(MineError):
        engine.run([1])
    assert engine.run([1], max_epochs=2).stop_reason is None


def test_a_handler_that_raises_the_exception_again_does_not_take_it():
    engine = Engine(failing_at(1, MineError("the step's")))

    @engine.on(Events.EXCEPTION_RAISED)
    def again(error):
        raise error

    with pytest.raises(MineError, match="the step's"):
        engine.run([1])


def test_a_handler_that_fails_on_the_exception_gives_the_caller_its_own_error_with_the_first_as_context():
    engine = Engine(failing_at(1, MineError("the step's")))

    @engine.on(Events.EXCEPTION_RAISED)
    def fail(error):
        raise KeyError("the handler's")

    with pytest.raises(KeyError) as caught:
        engine.run([1])
    assert isinstance(caught.value.__context__, MineError)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_keyboard_interrupt_and_system_exit_are_raised_again_though_a_handler_took_them(stop):
    engine = Engine(failing_at(2, stop()))
    taken = []
    engine.on(Events.EXCEPTION_RAISED)(lambda error: taken.append(error))
    with pytest.raises(stop):
        engine.run(range(3))
    assert len(taken) == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_keyboard_interrupt_and_system_exit_are_taken_by_a_handler_that_terminates(stop, story):
    engine = Engine(failing_at(2, stop()))
    received = story(engine)
    engine.on(Events.EXCEPTION_RAISED)(lambda engine, error: engine.terminate())
    assert engine.run(range(3)).iteration == 2
    assert received.types == ["exception_raised"]


def test_after_a_failure_the_next_run_continues_as_after_terminate(make_engine, make_recorder):
    stories = []
    for fail in (True, False):
        engine = make_engine()

        @engine.on(Events.ITERATION_COMPLETED(once=4))
        def stop(engine, fail=fail):
            if fail:
                raise MineError
            engine.terminate()

        try:
            engine.run(range(3), max_epochs=4)
        except MineError:
            assert fail
        story = make_recorder().attach(engine)
        state = engine.run(range(3))
        assert state.stop_reason is None
        stories.append([(event.type, event.epoch, event.iteration) for event in story.events])
    assert stories[0] == stories[1]
    assert stories[0][0] == ("started", 2, 4)
    assert stories[0][1] == ("epoch_started", 3, 4)
    assert stories[0][-1] == ("completed", 4, 10)


def test_a_failed_run_can_be_repeated_until_it_succeeds():
    failures = [MineError("first"), MineError("second")]

    def step(engine, batch):
        if failures:
            raise failures.pop(0)

    engine = Engine(step)
    for words in ("first", "second"):
        with pytest.raises(MineError, match=words):
            engine.run(range(3), max_epochs=9)
    assert engine.run(range(3), max_epochs=9).stop_reason is None
    assert engine.state.epoch == 9


def test_run_from_an_engines_own_handler_is_a_clear_error(engine):
    engine.on(Events.EPOCH_COMPLETED)(lambda engine: engine.run([1]))
    with pytest.raises(RuntimeError, match=r"'engine'\.run\(\) was called from inside its own run; use another engine"):
        engine.run([1])


def test_run_from_its_own_step_is_a_clear_error_and_leaves_the_engine_usable():
    engine = Engine(lambda engine, batch: engine.run([1]) if batch == "nested" else None)
    with pytest.raises(RuntimeError, match="from inside its own run"):
        engine.run(["nested"])
    assert engine.run(["plain"]).iteration == 1


def test_an_evaluator_failing_inside_a_trainers_handler_fires_on_both(make_engine, recorder):
    bus = EventBus()
    trainer = make_engine(name="trainer", bus=bus)
    evaluator = Engine(failing_at(1, MineError("the evaluator's")), name="evaluator", bus=bus)
    recorder.attach(bus, Events.EXCEPTION_RAISED)
    trainer.on(Events.EPOCH_COMPLETED)(lambda: evaluator.run([1]))
    with pytest.raises(MineError, match="the evaluator's") as caught:
        trainer.run([1], max_epochs=2)
    assert [event.engine for event in recorder.events] == ["evaluator", "trainer"]
    assert recorder.events[0].payload.error is recorder.events[1].payload.error is caught.value
    assert "handling Events.EPOCH_COMPLETED of 'trainer'" in caught.value.__notes__[0]


def test_an_evaluators_failure_that_its_own_handler_takes_does_not_touch_the_trainer(make_engine):
    trainer = make_engine(name="trainer")
    evaluator = Engine(failing_at(1, MineError("the evaluator's")), name="evaluator", bus=trainer.bus)
    evaluator.on(Events.EXCEPTION_RAISED)(lambda error: None)
    trainer.on(Events.EPOCH_COMPLETED)(lambda: evaluator.run([1]))
    assert trainer.run([1], max_epochs=2).epoch == 2


def test_the_error_is_not_kept_alive_by_the_engine():
    import gc
    import weakref

    class Heavy:
        pass

    def step(engine, batch):
        heavy = Heavy()
        references.append(weakref.ref(heavy))
        raise MineError

    references = []
    engine = Engine(step)
    gc.disable()
    try:
        with pytest.raises(MineError):
            engine.run([1])
        assert references[0]() is None
    finally:
        gc.enable()


def test_an_error_while_firing_outside_a_run_reaches_the_caller(engine, recorder):
    class Custom(EventEnum):
        HAPPENED = "happened"

    engine.register_events(*Custom)
    recorder.attach(engine, Events.EXCEPTION_RAISED)
    engine.on(Custom.HAPPENED)(broken)
    with pytest.raises(MineError):
        engine.fire(Custom.HAPPENED)
    assert recorder.events == []


class Reporter:
    def report(self, engine):
        pass


def test_a_method_is_named_by_the_shortest_name_that_imports_its_class(engine):
    from pulsetrain.handlers import EarlyStopping

    exported = engine.bus.subscribe(Events.STARTED, EarlyStopping().detach)
    assert exported.description == "pulsetrain.handlers.EarlyStopping.detach"
    assert engine.bus.subscribe(Events.STARTED, Reporter().report).description == f"{__name__}.Reporter.report"
