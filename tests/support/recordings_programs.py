"""Random programs that drive recorded engines, and what their logs must contain."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from structlog.testing import capture_logs

from pulsetrain.engine import Engine, Event, Events, Phase
from pulsetrain.engine.events.payloads import MetricsLogged, ValidationCompleted
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.handlers import EventRecorder
from tests.support.recordings_values import (
    OBSERVED,
    SAMPLED,
    Case,
    Custom,
    as_mapping,
    customs,
    is_now,
    metric_values,
    outputs,
    summary,
)


@dataclass(frozen=True)
class Plan:
    """A random run: what each iteration returns and fires."""

    epochs: int
    outputs: list[Case]  # of the iterations of an epoch
    fired: list[list[tuple[Custom, Case]]]  # inside each iteration's ITERATION_COMPLETED, or its step
    metrics: list[dict[str, Case]]
    rates: list[float]
    evaluated: bool
    warns: bool  # a receiver of TICKED raises, and only warns
    fails_at: int  # the iteration or the later epoch in which a receiver raises; 0 for never
    fails_in: Any
    off: tuple[int, int]  # the recorder is detached before the first's step and attached before the second's
    every: int | None
    include_batches: bool
    max_bytes: int | None = None


@st.composite
def plans(draw: st.DrawFn, max_bytes: st.SearchStrategy[int | None] = st.none()) -> Plan:  # noqa: B008
    length = draw(st.integers(1, 4))
    total = length * (epochs := draw(st.integers(1, 3)))
    off = draw(st.tuples(st.integers(0, total), st.integers(0, total)).map(sorted))
    return Plan(
        epochs,
        draw(st.lists(outputs, min_size=length, max_size=length)),
        draw(st.lists(st.lists(customs(), max_size=2), min_size=length, max_size=length)),
        draw(st.lists(metric_values, min_size=epochs, max_size=epochs)),
        draw(st.lists(st.floats(0, 1), max_size=2)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.one_of(st.just(0), st.integers(1, total))),
        draw(st.sampled_from([Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.ITERATION_STARTED])),
        (off[0], off[1]),
        draw(st.sampled_from([None, None, 2, 3])),
        draw(st.booleans()),
        draw(max_bytes),
    )


@dataclass
class Expected:
    """The expected form of an event in the log."""

    event: Event
    fields: dict[str, Any]
    late: bool  # a value of it is on a device
    over: bool = False  # its receivers have run
    whole: bool = False  # and the values that it waits for are known


class Driver:
    """Runs a plan, and notes independently what the recorder should record.

    Args:
        look: called in each recorded event, after all its receivers.
    """

    def __init__(self, plan: Plan, folder: Path, look: Callable[[Driver], None] = lambda driver: None) -> None:
        self.plan, self.look = plan, look
        self.recorder = EventRecorder(
            folder, plan.include_batches, plan.every, max_bytes=plan.max_bytes, on_error="raise"
        )
        self.expected: list[Expected] = []
        self.metrics: dict[str, Case] = {}
        self.attached = True
        self.payload: Case | None = None  # of the event that is being fired
        self.output = plan.outputs[0]
        self.places: dict[int, Expected] = {}
        self.trainer = Engine(self.step, name="trainer")
        self.trainer.optimizer = SimpleNamespace(param_groups=[{"lr": rate} for rate in plan.rates])
        self.evaluator = Engine(lambda engine, batch: 0.25, name="evaluator", bus=self.trainer.bus)
        for engine in (self.trainer, self.evaluator):
            engine.register_events(*Custom)
        self.recorder.attach(self.trainer)
        for event in (*Events, *Custom):
            self.trainer.bus.subscribe(event, self.note, phase=Phase.COMPUTE)
            self.trainer.bus.subscribe(event, self.end, phase=Phase.PERSIST)
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, self.fire)
        self.trainer.add_event_handler(Events.EPOCH_COMPLETED, self.evaluate)
        self.trainer.bus.subscribe(plan.fails_in, self.fail, sender=self.trainer)
        if plan.warns:
            self.trainer.bus.subscribe(Custom.TICKED, lambda: 1 / 0, on_error="warn")

    def run(self) -> None:
        try:
            with capture_logs():  # of receivers that fail, of lines that were cut
                self.trainer.run([0] * len(self.plan.outputs), max_epochs=self.plan.epochs)
        except ArithmeticError:
            assert self.plan.fails_at
        self.recorder.detach()

    def step(self, engine: Engine, batch: Any) -> Any:
        first, last = self.plan.off
        if first < last and engine.state.iteration in (first, last):
            (self.recorder.attach(engine) if self.recorder._attachment.bus is None else self.recorder.detach())
            self.attached = not self.attached
        self.output = self.plan.outputs[(engine.state.iteration - 1) % len(self.plan.outputs)]
        return self.output.value

    def fire(self, engine: Engine) -> None:
        for event, case in self.plan.fired[(engine.state.iteration - 1) % len(self.plan.fired)]:
            self.payload = case
            if event is Custom.POSTED:
                self.posted = case
                engine.post(event, case.value)
            else:
                engine.fire(event, case.value)

    def evaluate(self, engine: Engine) -> None:
        self.metrics = {**self.metrics, **self.plan.metrics[engine.state.epoch - 1]}
        values = {name: case.value for name, case in self.metrics.items()}
        engine.state.metrics = values
        self.payload = as_mapping(dict, {"metrics": as_mapping(dict, self.metrics)})
        engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics=values))
        if self.plan.evaluated and self.plan.off[0] == self.plan.off[1]:
            self.evaluator.run([0], max_epochs=1)
            self.payload = as_mapping(dict, {"metrics": as_mapping(dict, self.metrics), "seconds": is_now(0.5, 0.5)})
            engine.fire(Events.VALIDATION_COMPLETED, ValidationCompleted(metrics=values, seconds=0.5))

    def fail(self, engine: Engine) -> None:
        state = engine.state
        if self.plan.fails_at and state.iteration >= self.plan.fails_at:
            raise ArithmeticError("too large")

    def note(self, engine: Engine, event: Event) -> None:
        for each in self.expected:  # an exception ends what its engine was firing
            if event.type == "exception_raised" and each.event.engine == event.engine and not each.over:
                each.over = True
                if each.event.type in ("epoch_completed", "validation_completed"):
                    each.fields["error"] = summary("ArithmeticError", message="too large")
                    self.put_metrics(each)
        plan = self.plan
        left_out = event.type.startswith("get_batch") and not plan.include_batches
        if event.type in SAMPLED and plan.every and event.iteration % plan.every:
            left_out = True
        if not self.attached or left_out:
            return
        fields: dict[str, Any] = {}
        late = False
        if event.payload is not None:
            case = self.of_payload(event)
            late = case.on_device
            fields["payload"] = case.plain(0)
        if event.type == "iteration_completed":
            output = self.output if engine is self.trainer else is_now(0.25, {"loss": 0.25})
            fields["output"], late = output.plain(0), output.on_device
            if engine is self.trainer and plan.rates:
                fields["lr"] = plan.rates
        self.expected.append(Expected(event, fields, late))

    def of_payload(self, event: Event) -> Case:
        error = is_now(None, summary("ArithmeticError", message="too large"))
        if event.type == "exception_raised":
            return as_mapping(dict, {"error": error})
        if event.type == "handler_failed":
            known = {name: getattr(event.payload, name) for name in event.payload.__dataclass_fields__}
            return as_mapping(
                dict,
                {
                    name: is_now(x, summary("ZeroDivisionError", message=str(x)) if isinstance(x, Exception) else x)
                    for name, x in known.items()
                },
            )
        if event.type == "posted":
            return next(
                case
                for fired in self.plan.fired
                for kind, case in fired
                if kind is Custom.POSTED and case.value is event.payload
            )
        assert self.payload is not None
        return self.payload

    def end(self, engine: Engine, event: Event) -> None:
        if self.expected and (mine := [each for each in self.expected if each.event.seq == event.seq]):
            mine[0].over = True
            if event.type in ("epoch_completed", "validation_completed"):
                self.put_metrics(mine[0])
            self.look(self)

    def put_metrics(self, each: Expected) -> None:
        if each.event.engine == "trainer" and self.metrics:
            each.fields["metrics"] = as_mapping(dict, self.metrics).plain(0)


def shown(event: LoggedEvent) -> str:
    """The event's values, distinguished bit for bit: 1 from 1.0 and from true, 0.0 from -0.0."""
    fields = {name: getattr(event, name) for name in ("payload", "output", "metrics", "lr", "error")}
    if event.event in ("started", "epoch_started"):
        fields["payload"] = None  # the run's bounds, which its state says
    known = {name: value for name, value in fields.items() if value is not None}
    return json.dumps([event.engine, event.event, event.epoch, event.iteration, event.t, known], sort_keys=True)


def model(each: Expected) -> str:
    event = each.event
    known = {name: value for name, value in each.fields.items() if value is not None}
    return json.dumps([event.engine, event.type, event.epoch, event.iteration, event.time_ns, known], sort_keys=True)


def check_ords(found: list[LoggedEvent]) -> None:
    """Deterministic events are numbered without gaps, observed ones are not numbered."""
    places = [each.ord for each in found if each.event not in OBSERVED and not each.event.startswith("log_")]
    assert places == list(range(places[0], places[0] + len(places))) if places else True
    assert all(each.ord == -1 for each in found if each.event in OBSERVED)
