"""The recorder writes every event of a run, in the order of the bus, and waits for no device."""

import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Engine, Event, EventBus, EventEnum, Events, Phase, SupervisedStrategy
from pulsetrain.engine.events.payloads import GradientsReady
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import EventRecorder
from pulsetrain.handlers.metric_values import event_values
from pulsetrain.handlers.recorder import log_session
from pulsetrain.handlers.recorder.log_session import BATCH
from tests.support.engines import UpdatingEngine, log, make_engine, validated
from tests.support.recordings import recorded, types


@dataclass(frozen=True, slots=True, kw_only=True)
class Anything:
    value: Any


class Custom(EventEnum):
    HAPPENED = "happened", Anything
    TICKED = "ticked"
    WEIGHED = "weighed", float


def record_of(folder, value):
    """What a payload with this value is in the log."""
    engine = make_engine()
    engine.register_events(*Custom)
    recorder = EventRecorder(folder).attach(engine)
    engine.fire(Custom.HAPPENED, Anything(value=value))
    recorder.detach()
    return recorded(folder)[-1]["payload"]["value"]


def test_every_event_of_a_run_in_the_order_of_the_bus(tmp_path):
    engine = make_engine()
    EventRecorder(tmp_path).attach(engine)
    engine.run([0], max_epochs=2)
    epoch = ["epoch_started", "iteration_started", "iteration_completed", "epoch_completed"]
    again = ["epoch_started", "dataloader_stop_iteration", *epoch[1:]]
    assert types(tmp_path) in (["started", *epoch, *epoch, "completed"], ["started", *epoch, *again, "completed"])
    numbers = [event["seq"] for event in recorded(tmp_path)]
    assert numbers == sorted(set(numbers))


def test_a_line_says_what_when_and_where(tmp_path):
    engine = UpdatingEngine()
    EventRecorder(tmp_path).attach(engine)
    engine.run([0], max_epochs=1)
    line = next(event for event in recorded(tmp_path) if event["event"] == "iteration_completed")
    seconds = line.pop("t") / 1e9
    assert seconds > 1.7e9
    assert line == {
        "seq": line["seq"],
        "ord": line["ord"],
        "engine": "trainer",
        "event": "iteration_completed",
        "epoch": 1,
        "iteration": 1,
        "output": {"loss": 0.0},
        "lr": [1.0],
    }
    assert {"payload": {"learning_rates": [1.0], "optimizer": ""}}.items() <= recorded(tmp_path)[3].items()


def test_an_event_fired_by_a_receiver_comes_after_its_cause_whenever_the_receiver_was_registered(tmp_path):
    engine = make_engine()
    engine.register_events(*Custom)
    for phase in (Phase.COMPUTE, Phase.PERSIST):
        engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: engine.fire(Custom.TICKED), phase=phase)
    EventRecorder(tmp_path).attach(engine)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: validated(engine, {"val/loss": 1.0}), phase=Phase.COMPUTE)
    engine.run([0], max_epochs=1)
    assert types(tmp_path)[-6:] == [
        "epoch_completed",
        "ticked",
        "validation_started",
        "validation_completed",
        "ticked",
        "completed",
    ]


def test_metrics_are_those_after_every_receiver(tmp_path):
    engine = make_engine()
    EventRecorder(tmp_path).attach(engine)

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.OBSERVE)
    def measure(engine):
        engine.state.metrics["accuracy"] = torch.tensor(0.5)
        engine.state.metrics["confusion"] = torch.ones(2, 2)

    engine.run([0], max_epochs=1)
    line = next(event for event in recorded(tmp_path) if event["event"] == "epoch_completed")
    assert line["metrics"] == {
        "accuracy": 0.5,
        "confusion": {"__type__": "torch.Tensor", "shape": [2, 2], "dtype": "torch.float32"},
    }


def test_engines_of_the_bus_are_recorded_also_those_that_join_later(tmp_path):
    engine = make_engine()
    EventRecorder(tmp_path).attach(engine.bus)
    evaluator = Engine(lambda engine, batch: 0.25, name="evaluator", bus=engine.bus)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0], max_epochs=1))
    engine.run([0], max_epochs=1)
    events = recorded(tmp_path)
    assert {event["engine"] for event in events} == {"trainer", "evaluator"}
    numbers = [event["seq"] for event in events]
    assert numbers == sorted(numbers)
    assert sum(event.get("output") == {"loss": 0.25} for event in events) == 1


def test_custom_events_are_recorded_also_those_registered_before_the_next_epoch(tmp_path):
    engine = make_engine()
    EventRecorder(tmp_path).attach(engine)
    engine.register_events(*Custom, "by_name")

    @engine.on(Events.ITERATION_COMPLETED)
    def happen(engine):
        engine.fire(Custom.HAPPENED, Anything(value={"reward": torch.tensor(0.5)}))
        engine.fire(Custom.WEIGHED, 2.5)
        engine.fire("by_name")

    engine.run([0], max_epochs=1)
    custom = [e for e in recorded(tmp_path) if e["event"] in ("happened", "weighed", "by_name")]
    assert [event.get("payload") for event in custom] == [{"value": {"reward": 0.5}}, 2.5, None]


@pytest.mark.parametrize("names", [(1, "1"), ("1", 1, 1.0), (None, "None"), ("1 (int)", "1", 1), (True, "True", 1)])
def test_names_with_the_same_text_lose_no_value(tmp_path, names):
    value = {name: index for index, name in enumerate(names)}  # Python itself merges 1, 1.0 and True
    found = record_of(tmp_path, value)
    assert list(found.values()) == list(value.values())
    assert set(map(str, value)) <= set(found)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        ([-math.inf, 1.5], ["-Infinity", 1.5]),
        (torch.tensor(math.nan), "NaN"),
        (torch.tensor(3), 3),
        (torch.tensor(0.1, dtype=torch.float64), 0.1),
        ([torch.tensor(1.0), torch.tensor(2.0).to_sparse()], [1.0, 2.0]),
        (
            Event(1, "e", "t", 0, 0, None, 5),
            {
                "seq": 1,
                "engine": "e",
                "type": "t",
                "epoch": 0,
                "iteration": 0,
                "payload": None,
                "time_ns": 5,
                "observed": False,
            },
        ),
        (1 / 3, 1 / 3),
        (2**70, str(2**70)),
        (True, True),
        (None, None),
        (Path("a/b"), "a/b"),
        (ValueError("too large"), {"__type__": "ValueError", "message": "too large"}),
        ({1: {"a", "b"}}, {"1": ["a", "b"]}),
        (Anything(value=(1, 2)), {"value": [1, 2]}),
        (Enum("Colour", "RED").RED, "RED"),
        (object(), {"__type__": "object"}),
        (int, {"__type__": "int"}),
        ("\udcff", "\\udcff"),
        (b"bytes", {"__type__": "bytes"}),
    ],
)
def test_payloads_are_written_as_plain_json(tmp_path, value, expected):
    assert record_of(tmp_path, value) == expected


def test_what_cannot_be_looked_at_never_stops_a_run(tmp_path):
    class Hostile(dict):
        def items(self):
            raise RuntimeError("no")

        shape = property(lambda self: 1 / 0)

    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no")

    endless: list[Any] = []
    endless.append(endless)
    summaries = record_of(tmp_path, [Hostile(), MuteError()])
    assert [set(summary) for summary in summaries] == [{"__type__"}, {"__type__"}]
    assert "list" in json.dumps(record_of(tmp_path / "endless", endless))


def test_a_tensor_that_the_step_changes_in_place_is_recorded_as_it_was(tmp_path):
    total = torch.zeros(())
    engine = make_engine(lambda i: total.add_(1.0))
    EventRecorder(tmp_path).attach(engine)
    engine.run([0] * 3, max_epochs=1)
    outputs = [e["output"]["loss"] for e in recorded(tmp_path) if e["event"] == "iteration_completed"]
    assert outputs == [1.0, 2.0, 3.0]


@pytest.fixture
def on_a_device(monkeypatch):
    """Tensors count as if they were on a device; the interval between two copies never ends by itself."""
    monkeypatch.setattr(event_values, "is_on_host", lambda value: False)
    monkeypatch.setattr(log_session, "INTERVAL", 10**18)


def test_no_step_waits_for_the_device(tmp_path, on_a_device):
    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += "_local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))

    weight = torch.ones((), requires_grad=True)
    engine = make_engine(lambda i: {"loss": weight * i, "norm": torch.tensor(1.0)})
    EventRecorder(tmp_path).attach(engine)
    with Reads() as reads:
        engine.run([0] * 300, max_epochs=1)
    assert reads.count == 0
    assert recorded(tmp_path)[-3]["output"] == {"loss": 300.0, "norm": 1.0}


def test_a_value_that_cannot_be_copied_from_a_device_with_the_others_costs_only_itself(tmp_path, on_a_device):
    value = [torch.tensor(1.0), torch.tensor(2.0).to_sparse()]  # stacking the two fails
    expected = {"__type__": "torch.Tensor", "shape": [], "dtype": "torch.float32"}
    assert record_of(tmp_path, value) == [1.0, expected]


def losses_known_after_each_iteration(folder, iterations):
    """How many events and how many losses the log on disk holds while handlers of each iteration run."""
    engine, seen, known = make_engine(lambda i: {"loss": torch.tensor(float(i))}), [], []
    EventRecorder(folder).attach(engine)

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine):
        events = list(EventLog(folder).read(event="iteration_completed"))
        seen.append(len(events))
        known.append(sum(event.output["loss"] is not None and not event.open for event in events))

    engine.run([0] * iterations, max_epochs=1)
    losses = [event["output"]["loss"] for event in recorded(folder) if event["event"] == "iteration_completed"]
    assert losses == [float(n) for n in range(1, iterations + 1)]
    return seen, known


def test_values_on_the_host_are_in_the_log_with_their_event(tmp_path):
    seen, known = losses_known_after_each_iteration(tmp_path, 30)
    assert seen == known == list(range(1, 31))


def test_events_are_in_the_log_at_once_and_values_from_a_device_in_batches(tmp_path, on_a_device):
    seen, known = losses_known_after_each_iteration(tmp_path, 250)
    assert seen == list(range(1, 251))
    assert known == [max(1, 1 + BATCH * ((n - 1) // BATCH)) for n in range(1, 251)]  # the first is copied at once


def test_values_on_a_device_are_in_the_log_after_an_interval(tmp_path, on_a_device, monkeypatch):
    monkeypatch.setattr(log_session, "INTERVAL", 0)
    seen, known = losses_known_after_each_iteration(tmp_path, 30)
    assert seen == known == list(range(1, 31))


def test_events_within_an_unfinished_one_wait_for_their_turn(tmp_path):
    """A long validation inside EPOCH_COMPLETED, whose own line comes first and gets its metrics last."""
    engine = make_engine()
    evaluator = Engine(lambda engine, batch: 1.0, name="evaluator", bus=engine.bus)
    EventRecorder(tmp_path).attach(engine)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0] * 3 * BATCH, max_epochs=1))
    engine.run([0], max_epochs=1)
    numbers = [event["seq"] for event in recorded(tmp_path)]
    assert numbers == sorted(numbers)
    assert len(numbers) > 6 * BATCH


def test_fetching_is_left_out_unless_asked_for(tmp_path):
    for asked in (False, True):
        engine = make_engine()
        EventRecorder(tmp_path / str(asked), include_batches=asked).attach(engine)
        engine.run([0, 1], max_epochs=1)
    assert "get_batch_started" not in types(tmp_path / "False")
    assert types(tmp_path / "True").count("get_batch_completed") == 2


def test_sampling_thins_the_events_of_iterations_alone(tmp_path):
    engine = UpdatingEngine()
    EventRecorder(tmp_path, every=3).attach(engine)
    engine.run([0] * 7, max_epochs=2)
    events = recorded(tmp_path)
    for event in ("iteration_started", "iteration_completed", "optimizer_step_completed"):
        assert [e["iteration"] for e in events if e["event"] == event] == [3, 6, 9, 12]
    assert types(tmp_path).count("epoch_completed") == 2


def test_gradient_norms_are_recorded(tmp_path):
    engine = make_engine()
    recorder = EventRecorder(tmp_path).attach(engine)
    engine.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=torch.tensor(2.0)))
    recorder.flush()
    assert recorded(tmp_path)[0]["payload"] == {"grad_norm": 2.0, "optimizer": ""}


@pytest.mark.parametrize(
    ("grad_norm", "clip", "norms"),
    [(True, None, 5), (False, None, 0), (None, None, 0), (False, 1.0, 5), (None, 1.0, 5), (True, 1.0, 5)],
)
def test_gradient_norms_are_measured_for_the_recorder_alone_or_only_recorded(tmp_path, grad_norm, clip, norms):
    torch.manual_seed(0)
    trainer = Trainer(
        torch.nn.Linear(2, 1),
        [(torch.ones(4, 2), torch.ones(4, 1))] * 5,
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=1, clip_grad_norm=clip),
        handlers=[EventRecorder(tmp_path, grad_norm=grad_norm)],
    )
    trainer.train()
    found = [each["payload"]["grad_norm"] for each in recorded(tmp_path) if each["event"] == "gradients_ready"]
    assert (len(found), trainer.stepper.grad_norm is not None) == (norms, norms > 0)
    assert all(norm > 0 for norm in found)


def test_detaching_closes_the_log(tmp_path):
    engine = make_engine()
    recorder = EventRecorder(tmp_path).attach(engine)
    log(engine, {"train/loss": 0.5})
    assert not EventLog(tmp_path).ended
    recorder.detach()
    assert EventLog(tmp_path).ended
    assert types(tmp_path) == ["metrics_logged"]


def test_an_empty_bus_can_be_recorded(tmp_path):
    bus = EventBus()
    EventRecorder(tmp_path).attach(bus)
    make_engine(bus=bus).run([0], max_epochs=1)
    assert types(tmp_path)[-1] == "completed"


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_sampling_that_is_not_a_positive_whole_number_is_refused(tmp_path, every):
    with pytest.raises(ValueError, match=r"EventRecorder\(every=.*needs a whole number of at least 1"):
        EventRecorder(tmp_path, every=every)
