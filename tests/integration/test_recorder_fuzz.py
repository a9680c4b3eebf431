"""Whatever a run fires and wherever it is killed, the recorder writes it, stops nothing, and the log gives it back."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from engine import Engine, Event, EventEnum, Events, Phase
from engine.payloads import MetricsLogged, ValidationCompleted
from engine.recording import EventLog, LoggedEvent
from handlers import EventRecorder

MAX_DEPTH = 8
OBSERVED = {
    "started", "completed", "terminate", "interrupt", "exception_raised", "preempted", "handler_failed",
    "checkpoint_saved", "checkpoint_loaded", "get_batch_started", "get_batch_completed", "posted",
}  # fmt: skip
SAMPLED = {"get_batch_started", "get_batch_completed", "iteration_started", "iteration_completed"}


class Case:
    """A value, and what stands for it in the log when it lies so deep.

    Args:
        on_device: it is a tensor or holds one: its value comes later.
    """

    def __init__(self, value: Any, plain: Callable[[int], Any], on_device: bool = False) -> None:
        self.value, self.plain, self.on_device = value, plain, on_device

    def __repr__(self) -> str:
        return f"<{self.plain(0)!r}>"  # not every value has a text


def is_now(value: Any, plain: Any) -> Case:
    return Case(value, lambda depth: plain)


def summary(name: str, **more: Any) -> dict[str, Any]:
    return {"__type__": name, **more}


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(each):04x}" if 0xD800 <= ord(each) < 0xE000 else each for each in text)


def number(value: float) -> float | str:
    return "NaN" if math.isnan(value) else value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


class Colour(Enum):
    RED = 1


@dataclass(frozen=True, slots=True)
class Pair:
    left: Any
    right: Any


class Packed(msgspec.Struct):
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Row:
    """A payload that says it holds numbers and text alone."""

    count: int
    share: float
    name: str
    known: bool


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attribute")


class HostileMapping(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError("no items")


@dataclass
class Broken:
    value: Any = field(init=False)  # which nobody sets


HERE = __name__


def cycle(kind: type) -> Case:
    value: Any = kind()
    if kind is list:
        value.append(value)
    else:
        value["self"] = value

    def plain(depth: int) -> Any:
        if depth >= MAX_DEPTH:
            return summary(kind.__name__)
        return [plain(depth + 1)] if kind is list else {"self": plain(depth + 1)}

    return Case(value, plain)


def tower(height: int) -> Case:
    value: Any = []
    for _ in range(height):
        value = [value]

    def plain(depth: int, left: int = height) -> Any:
        if depth >= MAX_DEPTH:
            return summary("list")
        return [plain(depth + 1, left - 1)] if left else []

    return Case(value, plain)


def tensor(value: torch.Tensor) -> Case:
    if value.numel() == 1 and value.dtype != torch.complex64 and not value.is_meta:
        plain = value.detach().reshape(()).tolist()
        return Case(value, lambda depth: number(plain) if isinstance(plain, float) else plain, True)
    return is_now(value, summary("torch.Tensor", shape=list(value.shape), dtype=str(value.dtype)))


floats = st.floats() | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324])
SHAPES: list[tuple[int, ...]] = [(), (1,), (1, 1), (0,), (2, 3)]
texts = st.text(max_size=6) | st.text(st.sampled_from('a"\\\n\0\ud800\udcffé€😀'), max_size=6)
whole = st.integers(-(2**63), 2**63 - 1)
numbers = st.one_of(
    floats.map(lambda x: is_now(x, number(x))),
    whole.map(lambda x: is_now(x, x)),
    st.integers(2**64, 2**80).map(lambda x: is_now(x, str(x))),
    st.floats(width=32).map(lambda x: is_now(np.float32(x), number(float(np.float32(x))))),
    floats.map(lambda x: is_now(np.float64(x), number(x))),
    st.integers(-128, 127).map(lambda x: is_now(np.int8(x), x)),
)
tensors = st.one_of(
    st.builds(lambda x, shape: tensor(torch.full(shape, x, dtype=torch.float64)), floats, st.sampled_from(SHAPES)),
    st.floats(-1e30, 1e30).map(lambda x: tensor(torch.tensor(x, dtype=torch.bfloat16, requires_grad=True))),
    whole.map(lambda x: tensor(torch.tensor(x))),
    st.sampled_from([True, 1j]).map(lambda x: tensor(torch.tensor(x))),
    st.just(tensor(torch.ones((), device="meta"))),
)
scalar_tensors = tensors.filter(lambda case: case.on_device and case.value.dtype != torch.bool)
arrays = st.sampled_from([np.ones(3), np.zeros((2, 0)), np.array([1])]).map(
    lambda x: is_now(x, summary("numpy.ndarray", shape=list(x.shape), dtype=str(x.dtype)))
)
others = st.sampled_from(
    [
        is_now(None, None),
        is_now(True, True),
        is_now(Colour.RED, "RED"),
        is_now(Path("a/b"), "a/b"),
        is_now(b"bytes", summary("bytes")),
        is_now(object(), summary("object")),
        is_now(int, summary("int")),
        is_now(1 + 2j, summary("complex")),
        is_now(10**5000, summary("int")),  # Python does not print it
        is_now(range(3), summary("range")),
        is_now({3, 1, 2}, [1, 2, 3]),
        is_now(ValueError("too \ud800"), summary("ValueError", message="too \\ud800")),
        is_now(HostileError(), summary(f"{HERE}.HostileError")),
        is_now(Hostile(), summary(f"{HERE}.Hostile")),
        is_now({Hostile()}, None),
        is_now(HostileMapping(a=1), None),
        is_now(Broken(), None),
        cycle(list),
        cycle(dict),
        tower(7),
        tower(3000),
    ]
).map(
    # what fails within is summarised as a whole
    lambda case: is_now(case.value, summary(_name(case.value))) if _fails(case.value) else case
)


def _fails(value: Any) -> bool:
    return type(value) in (HostileMapping, Broken) or (type(value) is set and any(type(x) is Hostile for x in value))


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def as_list(kind: Callable[[list[Any]], Any], inner: list[Case]) -> Case:
    value = kind([each.value for each in inner])

    def plain(depth: int) -> Any:
        return summary(_name(value)) if depth >= MAX_DEPTH else [each.plain(depth + 1) for each in inner]

    return Case(value, plain, any(each.on_device for each in inner))


def as_mapping(kind: Callable[[dict[Any, Any]], Any], inner: dict[Any, Case]) -> Case:
    value = kind({key: case.value for key, case in inner.items()})

    def plain(depth: int) -> Any:
        if depth >= MAX_DEPTH:
            return summary(_name(value))
        return {escaped(str(key)): each.plain(depth + 1) for key, each in inner.items()}

    return Case(value, plain, any(each.on_device for each in inner.values()))


def _measured(inner: dict[Any, Case]) -> dict[Any, Case]:
    """Fields that are measured."""
    first = next(iter(inner.values()), None)
    return inner if first is None else {**inner, "seconds": first, "tokens_per_second": first}


keys = st.one_of(texts, st.sampled_from([None, Path("p"), Colour.RED, "ord", "seq", "observed", "event", "c"]))
leaves = st.one_of(numbers, tensors, arrays, others, texts.map(lambda x: is_now(x, escaped(x))))


def unlike(inner: dict[Any, Case]) -> bool:
    return len({escaped(str(key)) for key in inner}) == len(inner)


def nested(inner: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
    mappings = st.dictionaries(keys, inner, max_size=3).filter(unlike)
    two = st.fixed_dictionaries({"left": inner, "right": inner})
    return st.one_of(
        st.builds(as_list, st.sampled_from([list, tuple]), st.lists(inner, max_size=3)),
        mappings.map(lambda x: as_mapping(dict, x)),
        mappings.map(lambda x: as_mapping(dict, _measured(x))),
        two.map(lambda x: as_mapping(lambda fields: Pair(**fields), x)),
        two.map(lambda x: as_mapping(lambda fields: Packed(**fields), x)),
    )


cases = st.recursive(leaves, nested, max_leaves=8)
rows = st.builds(Row, whole, floats, texts, st.booleans())


class Custom(EventEnum):
    HAPPENED = "happened", Pair
    LISTED = "listed", list
    MAPPED = "mapped", dict
    COUNTED = "counted", Row
    WEIGHED = "weighed", float
    TICKED = "ticked"
    POSTED = "posted", Pair


def _custom() -> st.SearchStrategy[tuple[Custom, Case]]:
    mappings = st.dictionaries(keys, cases, max_size=3).filter(unlike)
    return st.one_of(
        st.tuples(
            st.sampled_from([Custom.HAPPENED, Custom.POSTED]),
            st.builds(lambda x, y: as_mapping(lambda fields: Pair(**fields), {"left": x, "right": y}), cases, cases),
        ),
        st.tuples(st.just(Custom.LISTED), st.lists(cases, max_size=3).map(lambda x: as_list(list, x))),
        st.tuples(st.just(Custom.MAPPED), mappings.map(lambda x: as_mapping(dict, x))),
        st.tuples(
            st.just(Custom.COUNTED),
            rows.map(
                lambda row: is_now(
                    row,
                    {"count": row.count, "share": number(row.share), "name": escaped(row.name), "known": row.known},
                )
            ),
        ),
        st.tuples(st.just(Custom.WEIGHED), floats.map(lambda x: is_now(x, number(x)))),
        st.just((Custom.TICKED, is_now(None, None))),
    )


def _output(inner: dict[str, Case], *, scalars: set[str]) -> Case:
    kept = {escaped(name): case for name, case in inner.items() if name in scalars}
    return Case(
        {name: case.value for name, case in inner.items()},
        lambda depth: {name: case.plain(0) for name, case in kept.items()} or None,
        any(case.on_device for case in kept.values()),
    )


single = (numbers | scalar_tensors).map(lambda x: Case(x.value, lambda depth: {"loss": x.plain(0)}, x.on_device))
left_out = st.one_of(
    arrays, st.just(is_now([1, 2], None)), st.just(is_now({"a": {"b": 1}}, None)), st.just(is_now(None, None))
)
outputs = st.one_of(
    single,
    left_out.map(lambda x: is_now(x.value, None)),
    st.builds(
        lambda inside, outside: _output({**inside, **outside}, scalars=set(inside)),
        st.dictionaries(texts, numbers | scalar_tensors, max_size=3).filter(unlike),
        st.dictionaries(st.sampled_from(["?x", "?y"]), left_out, max_size=2),
    ),
    st.builds(
        lambda loss, more: Case(
            SimpleNamespace(loss=loss.value, metrics={"!": more.value}),
            lambda depth: {"loss": loss.plain(0), "!": more.plain(0)},
            loss.on_device or more.on_device,
        ),
        numbers | scalar_tensors,
        numbers | scalar_tensors,
    ),
)
metric_values = st.dictionaries(st.text("abc/é", min_size=1, max_size=3), numbers | tensors | arrays, max_size=2)


@dataclass(frozen=True)
class Plan:
    """A run, drawn as a whole: what each iteration gives and fires."""

    epochs: int
    outputs: list[Case]  # of the iterations of an epoch
    fired: list[list[tuple[Custom, Case]]]  # inside each iteration's ITERATION_COMPLETED, or its step
    metrics: list[dict[str, Case]]
    rates: list[float]
    evaluated: bool
    warns: bool  # a receiver of TICKED raises, and only warns
    fails_at: int  # the iteration in which, or behind it the epoch in which, a receiver raises; 0 for never
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
        draw(st.lists(st.lists(_custom(), max_size=2), min_size=length, max_size=length)),
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
    """What an event is to be in the log."""

    event: Event
    fields: dict[str, Any]
    late: bool  # a value of it is on a device
    over: bool = False  # its receivers have run
    whole: bool = False  # and the values that it waits for are known


class Driver:
    """Runs a plan, and notes beside the recorder what is to be recorded.

    Args:
        look: called in each event that is recorded, behind all its receivers.
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
    """The event's values, told apart to the bit: 1 from 1.0 and from true, 0.0 from -0.0."""
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
    """Deterministic events are counted without gaps, observed ones have no place."""
    places = [each.ord for each in found if each.event not in OBSERVED and not each.event.startswith("log_")]
    assert places == list(range(places[0], places[0] + len(places))) if places else True
    assert all(each.ord == -1 for each in found if each.event in OBSERVED)


common = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.slow
@settings(max_examples=120, **common)  # type: ignore[arg-type]
@given(plan=plans())
def test_whatever_is_fired_is_read_back_as_the_rules_say(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as name:
        driver = Driver(plan, Path(name))
        driver.run()
        log = EventLog(name)
        found = list(log.read())
        assert [shown(each) for each in found] == [model(each) for each in driver.expected]
        assert [each.seq for each in found] == [each.event.seq for each in driver.expected]
        assert [each for each in found if each.open] == []
        check_ords(found)
        assert (log.verify(), log.ended or not found) == ([], True)


@pytest.mark.slow
@settings(max_examples=25, **common)  # type: ignore[arg-type]
@given(several=st.lists(plans(max_bytes=st.integers(1, 2000)), min_size=3, max_size=4))
def test_within_a_budget_only_iterations_own_events_are_missing(several: list[Plan]) -> None:
    with tempfile.TemporaryDirectory() as name, mock.patch("handlers.event_recorder.LEAST_BYTES", 1):
        expected: list[Expected] = []
        for plan in several:
            driver = Driver(plan, Path(name))
            driver.run()
            expected += driver.expected
        log = EventLog(name)
        everything = list(log.read(superseded=True))
        found = [shown(each) for each in everything if not each.event.startswith("log_")]
        taken = sum(each.payload["events"] for each in everything if each.event == "log_thinned")
        assert len(found) == len(expected) - taken
        rest = iter(map(model, expected))
        assert all(each in rest for each in found), "in the order in which they came"
        kept = [model(each) for each in expected if each.event.type not in SAMPLED]
        assert [each for each in found if json.loads(each)[1] not in SAMPLED] == kept
        assert log.verify() == []


CLOSED_LATER = ("epoch_completed", "validation_completed", "completed", "terminate", "interrupt")  # by a second line


@pytest.mark.slow
@settings(max_examples=60, **common)  # type: ignore[arg-type]
@given(plan=plans(), second=plans(), data=st.data())
def test_a_run_killed_anywhere_leaves_what_came_before_and_the_next_goes_on(
    plan: Plan, second: Plan, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        killed, stop = Path(name) / "killed", data.draw(st.integers(1, 40))
        before: list[tuple[Expected, str, bool]] = []

        def look(driver: Driver) -> None:
            if len(driver.expected) >= stop and not killed.exists():
                shutil.copytree(Path(name) / "run" / "events", killed / "events")
                before.extend((each, model(each), each.over) for each in driver.expected)

        driver = Driver(plan, Path(name) / "run", look)
        driver.run()
        if not killed.exists():
            return
        tail = killed / "events" / "tail.jsonl"
        content = tail.read_bytes().rstrip(b"\n")
        cut = data.draw(st.just(len(content)) | st.integers(0, len(content)))
        tail.write_bytes(content[:cut] + (b"\n" if cut == len(content) else b""))
        lines = [json.loads(line)["seq"] for line in content.split(b"\n")] if content else []
        ends = [at for at, byte in enumerate(content + b"\n") if byte == ord("\n")]
        left = {seq for seq, end in zip(lines, ends, strict=False) if end <= cut}
        log = EventLog(killed)
        found = {each.seq: each for each in log.read()}
        sealed = {seq for header in log.headers for seq in range(header.seq[0], header.seq[1] + 1)}
        known = {each.event.seq for each, *_ in before}
        assert set(found) == known & (left | sealed)
        for each, expected, over in before:
            seq = each.event.seq
            if seq in found and not found[seq].open:
                assert shown(found[seq]) == expected
            elif seq in found:  # with its values still on a device, or under way, or its last line cut off
                assert each.late or not over or each.event.type in CLOSED_LATER
                event = found[seq]
                same = (event.engine, event.event, event.epoch, event.iteration, event.t)
                mine = each.event
                assert same == (mine.engine, mine.type, mine.epoch, mine.iteration, mine.time_ns)

        again = Driver(second, killed)
        again.run()
        log = EventLog(killed)
        everything = list(log.read(superseded=True))
        newer = [each for each in everything if each.seq > max(found, default=-1) and each.event != "log_resumed"]
        assert [shown(each) for each in newer] == [model(each) for each in again.expected]
        check_ords(newer)
        assert [each.seq for each in everything if each.seq in found] == list(found)
        assert [each.seq for each in everything] == sorted({each.seq for each in everything})
        assert set(map(shown, newer)) <= set(map(shown, log.read()))
        assert (log.verify(), log.ended or not again.expected) == ([], True)
