from dataclasses import dataclass, field

import numpy
import pytest
import torch

from pulsetrain.engine import Engine, Events, Every
from pulsetrain.handlers.attachment.cadence import reading_events
from pulsetrain.handlers.metric_values.step_values import scalars, step_metrics
from pulsetrain.testing import ManualClock
from tests.support.engines import UpdatingEngine, make_engine


@dataclass
class Result:
    loss: object
    metrics: dict = field(default_factory=dict)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (None, {}),
        (1.5, {"loss": 1.5}),
        (3, {"loss": 3}),
        (True, {}),
        (numpy.float32(0.5), {"loss": 0.5}),
        (torch.tensor(2.0), {"loss": 2.0}),
        (torch.tensor([2.0]), {"loss": 2.0}),
        (torch.ones(2), {}),
        ("text", {}),
        ((torch.ones(2), torch.ones(2)), {}),
        ({"loss": 1.0, "accuracy": torch.tensor(0.5), "logits": torch.ones(3), 7: 1.0}, {"loss": 1.0, "accuracy": 0.5}),
        (Result(loss=torch.tensor(2.0)), {"loss": 2.0}),
        (Result(loss=torch.tensor(2.0), metrics={"loss": 3.0, "kl": 0.25}), {"loss": 3.0, "kl": 0.25}),
    ],
)
def test_scalars_of_whatever_a_step_returns(output, expected):
    assert scalars(output) == expected


def test_scalars_are_detached_and_of_shape_empty():
    value = scalars({"loss": torch.ones(1, requires_grad=True) * 2})["loss"]
    assert (value.requires_grad, value.shape) == (False, ())


def test_step_metrics_carry_full_names_and_the_learning_rate():
    engine = UpdatingEngine()
    engine.state.output = {"loss": torch.tensor(0.5), "train/kl": 2.0}
    assert step_metrics(engine) == {"train/loss": 0.5, "train/kl": 2.0, "learning_rate": 1.0}


def test_step_metrics_of_an_evaluator_are_validation_metrics():
    evaluator = Engine(lambda engine, batch: 1.0, name="evaluator")
    evaluator.state.output = 1.0
    assert step_metrics(evaluator) == {"val/loss": 1.0}


def test_a_cadence_in_updates_reads_after_the_iteration_where_there_is_an_output():
    engine, seen = UpdatingEngine(accumulate=2), []
    engine.add_event_handler(
        reading_events(Every(updates=2)), lambda e: seen.append((e.state.iteration, e.state.output))
    )
    engine.run([0] * 9, max_epochs=1)
    assert seen == [(4, 0.0), (8, 0.0)]


def test_every_names_the_events_of_its_parts():
    engine, seen = UpdatingEngine(accumulate=2), []
    engine.add_event_handler(
        Every(iterations=4, epochs=2, updates=3).events(),
        lambda e, event: seen.append((event.type, e.state.iteration)),
    )
    engine.run([0] * 6, max_epochs=2)
    assert seen == [
        ("iteration_completed", 4),
        ("optimizer_step_completed", 6),
        ("iteration_completed", 8),
        ("optimizer_step_completed", 12),
        ("iteration_completed", 12),
        ("epoch_completed", 12),
    ]


def test_a_cadence_in_seconds_is_due_when_they_have_passed_since_it_was_last_due():
    clock, engine, seen = ManualClock(), make_engine(), []
    engine.add_event_handler(Every(seconds=10).events(clock), lambda e: seen.append(e.state.iteration))

    @engine.on(Events.ITERATION_STARTED)
    def pass_time(engine):
        clock.now += {3: 9.0, 4: 1.0, 5: 25.0, 6: 9.0}.get(engine.state.iteration, 0.0)

    engine.run([0] * 7, max_epochs=1)
    assert seen == [4, 5]


def test_two_handlers_of_one_cadence_do_not_share_their_time():
    clock, cadence = ManualClock(), Every(seconds=10)
    first, second = (next(iter(cadence.events(clock))).filter for _ in range(2))
    first(None, 1)
    clock.now = 6.0
    second(None, 1)
    clock.now = 12.0
    assert (first(None, 2), second(None, 2)) == (True, False)
