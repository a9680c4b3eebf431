"""`engine.dispatch(event)`: what hot code asks before it prepares a payload; counters; passive subscriptions."""

from __future__ import annotations

import pytest

from pulsetrain.engine import Engine, Event, EventBus, Events, Phase
from pulsetrain.engine.events.payloads import GradientsReady, MetricsLogged, OptimizerStepCompleted
from pulsetrain.engine.events.subscription import Subscription


def an_engine(bus: EventBus | None = None) -> Engine:
    return Engine(lambda engine, batch: None, bus=bus)


def logged(**metrics: float) -> MetricsLogged:
    return MetricsLogged(metrics=metrics)


# ---------------------------------------------------------------------------------------------- live and wants


def test_the_dispatch_is_one_object_that_follows_every_subscription() -> None:
    engine = an_engine()
    dispatch = engine.dispatch(Events.METRICS_LOGGED)
    assert not dispatch.live
    handle = engine.add_event_handler(Events.METRICS_LOGGED, lambda: None)
    assert dispatch.live
    assert engine.dispatch(Events.METRICS_LOGGED(every=2)) is dispatch
    handle.remove()
    assert not dispatch.live


def test_the_dispatch_of_an_event_that_is_not_registered_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="ticked is not a valid event"):
        an_engine().dispatch("ticked")


@pytest.mark.parametrize(
    ("event", "wanted"),
    [
        (Events.OPTIMIZER_STEP_COMPLETED, [1, 2, 3, 4, 5, 6, 7, 8]),
        (Events.OPTIMIZER_STEP_COMPLETED(every=3), [3, 6]),
        (Events.OPTIMIZER_STEP_COMPLETED(once=[2, 5]), [2, 5]),
        (Events.OPTIMIZER_STEP_COMPLETED(after=3, before=6), [4, 5]),
        (Events.OPTIMIZER_STEP_COMPLETED(every=3) | Events.OPTIMIZER_STEP_COMPLETED(once=4), [3, 4, 6]),
        # a function cannot be asked in advance
        (Events.OPTIMIZER_STEP_COMPLETED(event_filter=lambda engine, value: value == 7), [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
    ids=["always", "every", "once", "window", "joined", "function"],
)
def test_wants_says_at_which_counts_a_handler_is_due(event: object, wanted: list[int]) -> None:
    engine = an_engine()
    engine.add_event_handler(event, lambda: None)
    dispatch = engine.dispatch(Events.OPTIMIZER_STEP_COMPLETED)
    assert [count for count in range(1, 9) if dispatch.wants(count)] == wanted
    assert [count for count in range(8, 0, -1) if dispatch.wants(count)] == wanted[::-1]


def test_asking_does_not_change_what_runs() -> None:
    engine, seen = an_engine(), []
    engine.on(Events.OPTIMIZER_STEP_COMPLETED(every=3))(lambda engine: seen.append(engine.state.update))
    dispatch = engine.dispatch(Events.OPTIMIZER_STEP_COMPLETED)
    for _ in range(9):
        for count in range(12):
            dispatch.wants(count)
        engine.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=()))
    assert seen == [3, 6, 9]


def test_an_engine_that_overrides_fire_event_wants_everything() -> None:
    class Subclass(Engine):
        def _fire_event(self, event_name, *args, **kwargs):
            super()._fire_event(event_name, *args, **kwargs)

    dispatch = Subclass(lambda engine, batch: None).dispatch(Events.METRICS_LOGGED)
    assert dispatch.live
    assert dispatch.wants(1)


# --------------------------------------------------------------------------------------------------- counters


def test_setting_counters_makes_the_next_event_of_a_step_advance_them() -> None:
    engine = an_engine()
    ready, done = GradientsReady(grad_norm=None), OptimizerStepCompleted(learning_rates=())  # type: ignore[arg-type]
    for _ in range(2):
        engine.fire(Events.GRADIENTS_READY, ready)
        engine.fire(Events.OPTIMIZER_STEP_COMPLETED, done)
    assert engine.state.update == 2
    engine.set_counters({"update": 10, "iteration": 40})
    assert (engine.state.update, engine.state.iteration) == (10, 40)
    engine.fire(Events.OPTIMIZER_STEP_COMPLETED, done)  # GRADIENTS_READY was not fired: this event counts the step
    assert engine.state.update == 11
    engine.fire(Events.GRADIENTS_READY, ready)
    engine.fire(Events.OPTIMIZER_STEP_COMPLETED, done)
    assert engine.state.update == 12


# --------------------------------------------------------------------------------------- passive subscriptions


def test_a_passive_subscription_sees_what_is_fired_and_does_not_count_as_a_receiver() -> None:
    engine, seen = an_engine(), []
    engine.bus.subscribe(Events.METRICS_LOGGED, lambda engine, event: seen.append(event.payload.metrics), passive=True)
    assert not engine.hears(Events.METRICS_LOGGED)
    assert not engine.dispatch(Events.METRICS_LOGGED).wants(1)
    engine.fire(Events.METRICS_LOGGED, logged(loss=1.0))
    assert seen == [{"loss": 1.0}]


def test_a_passive_subscription_sees_the_events_of_the_loop() -> None:
    engine, seen = an_engine(), []
    engine.bus.subscribe(Events.ITERATION_COMPLETED(every=2), lambda e: seen.append(e.state.iteration), passive=True)
    engine.run(range(6))
    assert seen == [2, 4, 6]


def test_beside_a_passive_subscription_only_the_active_filter_decides_what_is_wanted() -> None:
    engine, seen = an_engine(), []
    event = Events.OPTIMIZER_STEP_COMPLETED
    engine.bus.subscribe(event, lambda e: seen.append(("passive", e.state.update)), passive=True)
    subscription = engine.bus.subscribe(event(every=3), lambda e: seen.append(("active", e.state.update)))
    dispatch = engine.dispatch(event)
    assert [count for count in range(1, 8) if dispatch.wants(count)] == [3, 6]
    for _ in range(3):
        engine.fire(event, OptimizerStepCompleted(learning_rates=()))
    assert seen == [("passive", 1), ("passive", 2), ("passive", 3), ("active", 3)]
    subscription.cancel()
    assert not engine.hears(event)


# ------------------------------------------------------------------------------------------------ observed


def records(engine: Engine, *events: Events) -> list[Event]:
    seen: list[Event] = []
    for event in events:
        engine.bus.subscribe(event, lambda engine, event: seen.append(event), phase=Phase.COMPUTE)
    return seen


def test_an_observed_event_marks_those_that_its_handlers_fire_and_no_later_one() -> None:
    engine = an_engine()
    engine.on(Events.METRICS_LOGGED)(lambda: engine.fire(Events.VALIDATION_STARTED))
    seen = records(engine, Events.METRICS_LOGGED, Events.VALIDATION_STARTED)
    engine.fire(Events.METRICS_LOGGED, logged(), observed=True)
    engine.fire(Events.METRICS_LOGGED, logged())
    assert [(event.type, event.observed) for event in seen] == [
        ("metrics_logged", True),
        ("validation_started", True),
        ("metrics_logged", False),
        ("validation_started", False),
    ]


def test_the_engines_of_a_bus_share_the_mark() -> None:
    bus = EventBus()
    trainer, evaluator = an_engine(bus), an_engine(bus)
    trainer.on(Events.METRICS_LOGGED)(lambda: evaluator.run([1]))
    seen = records(evaluator, Events.ITERATION_COMPLETED)
    trainer.fire(Events.METRICS_LOGGED, logged(), observed=True)
    trainer.fire(Events.METRICS_LOGGED, logged())
    assert [event.observed for event in seen if event.engine == evaluator.name] == [True, False]


def test_a_failing_handler_of_an_observed_event_does_not_leave_the_mark() -> None:
    engine = an_engine()
    handle = engine.add_event_handler(Events.METRICS_LOGGED, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.fire(Events.METRICS_LOGGED, logged(), observed=True)
    handle.remove()
    seen = records(engine, Events.METRICS_LOGGED)
    engine.fire(Events.METRICS_LOGGED, logged())
    assert [event.observed for event in seen] == [False]


def test_a_posted_event_is_observed() -> None:
    engine = an_engine()
    seen = records(engine, Events.METRICS_LOGGED)
    engine.on(Events.ITERATION_STARTED)(lambda: engine.post(Events.METRICS_LOGGED, logged()))
    engine.run([1])
    assert [event.observed for event in seen] == [True]


# ------------------------------------------------------------------------------------------------ the sequence


def test_a_bus_continues_after_a_number_and_never_goes_back() -> None:
    engine = an_engine()
    seen = records(engine, Events.METRICS_LOGGED)
    engine.bus.continue_after(100)
    engine.fire(Events.METRICS_LOGGED, logged())
    engine.bus.continue_after(5)
    engine.fire(Events.METRICS_LOGGED, logged())
    assert [event.seq for event in seen] == [101, 102]


# ------------------------------------------------------------------------------------------ filters that are functions


def test_beside_a_function_the_other_filters_are_applied_only_where_one_of_them_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    genuine = Subscription.is_due
    monkeypatch.setattr(Subscription, "is_due", lambda self, *given: asked.append(self.filter) or genuine(self, *given))
    engine, seen = an_engine(), []

    def third(engine: Engine, iteration: int) -> bool:
        return iteration % 3 == 0

    engine.on(Events.ITERATION_COMPLETED(every=4))(lambda: seen.append(("every", engine.state.iteration)))
    engine.on(Events.ITERATION_COMPLETED(event_filter=third))(lambda: seen.append(("third", engine.state.iteration)))
    engine.on(Events.ITERATION_COMPLETED(once=6))(lambda: seen.append(("once", engine.state.iteration)))
    engine.on(Events.ITERATION_COMPLETED)(lambda: seen.append(("each", engine.state.iteration)))
    engine.run(range(8))
    due = {"every": [4, 8], "third": [3, 6], "once": [6], "each": [*range(1, 9)]}
    assert seen == [(name, number) for number in range(1, 9) for name in due if number in due[name]]
    assert asked.count(third) == 8
    assert len(asked) - asked.count(third) == 2 * len([1, 4, 6, 8])  # the first firing, and where one may be due


def test_a_handler_that_joins_in_the_middle_of_an_event_is_called_once_and_in_its_turn() -> None:
    engine, seen = an_engine(), []

    def join(engine: Engine, event: Event) -> None:
        seen.append(event.iteration)
        if event.iteration == 2:
            engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, event: seen.append(-event.iteration))

    engine.add_event_handler(Events.ITERATION_COMPLETED, join)
    engine.run(range(3))
    assert seen == [1, 2, -2, 3, -3]


def test_handlers_with_and_without_the_record_get_what_they_ask_for() -> None:
    engine, seen = an_engine(), []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, event: seen.append(event.seq))
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append("none"))
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.name))
    engine.run([0])
    assert seen == [engine.bus.sequence.last - 2, "none", engine.name]
