import pytest
import torch
from torch import nn

from pulsetrain.engine import ConfigurationError, Events, Every
from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.engine.schedules import Cosine
from pulsetrain.handlers import EventRecorder, LRMonitor, LRScheduler
from tests.support.engines import UpdatingEngine, make_engine
from tests.support.models import trainer


def groups(*options, kind=torch.optim.SGD):
    return kind([{"params": [nn.Parameter(torch.ones(1))], **each} for each in options], lr=1.0)


def published(monitor, optimizer, batches=4, *handlers, epochs=1):
    """The iterations and metrics that the monitor fires."""
    engine, found = UpdatingEngine(optimizer), []
    for handler in (*handlers, monitor):
        handler.attach(engine)

    def see(engine, event):
        found.append((event.iteration, dict(event.payload.metrics)))

    engine.add_event_handler(Events.METRICS_LOGGED, see)
    engine.run([0] * batches, max_epochs=epochs)
    return found


def test_one_group_is_the_learning_rate():
    assert published(LRMonitor(Every(iterations=2)), groups({"lr": 0.5})) == [
        (2, {"learning_rate": 0.5}),
        (4, {"learning_rate": 0.5}),
    ]


def test_several_groups_go_by_number_or_by_their_names():
    every = Every(iterations=4)
    assert published(LRMonitor(every), groups({"lr": 0.5}, {"lr": 0.1})) == [
        (4, {"learning_rate/0": 0.5, "learning_rate/1": 0.1})
    ]
    assert published(LRMonitor(every), groups({"lr": 0.5, "name": "head"}, {"lr": 0.1})) == [
        (4, {"learning_rate/head": 0.5, "learning_rate/1": 0.1})
    ]
    twice = groups({"lr": 0.5, "name": "head"}, {"lr": 0.1, "name": "head"})
    assert published(LRMonitor(every), twice) == [(4, {"learning_rate/0": 0.5, "learning_rate/1": 0.1})]


def test_the_rate_is_that_of_the_last_update_of_a_trainer():
    run = trainer({"max_epochs": 1, "schedule": "cosine"}, handlers=[LRMonitor(Every(iterations=1))])
    found, used = [], []
    run.add_event_handler(Events.METRICS_LOGGED, lambda engine, event: found.append(event.payload.metrics))
    run.add_event_handler(
        Events.OPTIMIZER_STEP_COMPLETED, lambda engine, event: used.append(event.payload.learning_rates[0])
    )
    run.train()
    assert [each["learning_rate"] for each in found if len(each) == 1] == used
    assert len(set(used)) == 10


def test_momentum_and_weight_decay_are_reported_where_asked_for():
    monitor = LRMonitor(Every(iterations=4), momentum=True, weight_decay=True)
    assert published(monitor, groups({"momentum": 0.9, "weight_decay": 0.25})) == [
        (4, {"learning_rate": 1.0, "momentum": 0.9, "weight_decay": 0.25})
    ]
    monitor = LRMonitor(Every(iterations=4), momentum=True)
    assert published(monitor, groups({"betas": (0.5, 0.99)}, {}, kind=torch.optim.Adam)) == [
        (4, {"learning_rate/0": 1.0, "learning_rate/1": 1.0, "momentum/0": 0.5, "momentum/1": 0.9})
    ]
    monitor = LRMonitor(Every(iterations=4), momentum=True)
    assert published(monitor, groups({}, kind=torch.optim.Adagrad)) == [(4, {"learning_rate": 1.0})]


def test_tensor_rates_are_copied_to_the_host():
    assert published(LRMonitor(Every(iterations=4)), groups({"lr": torch.tensor(0.5)}, {"lr": 0.1})) == [
        (4, {"learning_rate/0": 0.5, "learning_rate/1": 0.1})
    ]


def test_parts_of_a_cadence_that_coincide_fire_once():
    monitor, optimizer = LRMonitor(Every(iterations=2, epochs=1, updates=4)), groups({})
    assert [iteration for iteration, _ in published(monitor, optimizer, epochs=2)] == [2, 4, 6, 8]


def test_each_run_of_an_engine_is_read_from_its_start():
    engine, found = UpdatingEngine(groups({})), []
    LRMonitor(Every(iterations=4)).attach(engine)
    engine.add_event_handler(Events.METRICS_LOGGED, lambda: found.append(engine.state.iteration))
    for _ in range(2):
        engine.run([0] * 4, max_epochs=1)
    assert found == [4, 4]


def test_without_a_handler_nothing_is_fired():
    engine = UpdatingEngine(groups({}))
    LRMonitor(Every(iterations=1)).attach(engine)
    before = engine.bus.sequence.last
    silent = UpdatingEngine(groups({}))
    start = silent.bus.sequence.last
    for each in (engine, silent):
        each.run([0] * 3, max_epochs=1)
    assert engine.bus.sequence.last - before == silent.bus.sequence.last - start


def test_a_replay_publishes_what_the_run_published(tmp_path):
    run, live = (
        trainer(
            {"max_epochs": 2, "schedule": "cosine", "accumulate": 4, "log_every_n_steps": 1000},
            handlers=[EventRecorder(tmp_path), LRMonitor(Every(iterations=3))],
        ),
        [],
    )
    run.add_event_handler(
        Events.METRICS_LOGGED, lambda engine, event: live.append((event.iteration, event.payload.metrics))
    )
    run.train()
    live = [(iteration, metrics) for iteration, metrics in live if set(metrics) == {"learning_rate"}]
    assert len(live) == 6

    replay = Replay(tmp_path)
    LRMonitor(Every(iterations=3)).attach(replay)
    replay.add_event_handler(Events.METRICS_LOGGED, lambda: None)  # a subscriber
    replay.run()
    assert [(event.iteration, event.payload.metrics) for event in replay.fired] == live


def test_a_log_holds_no_momentum(tmp_path):
    trainer({"max_epochs": 1}, handlers=[EventRecorder(tmp_path)]).train()
    with pytest.raises(RecordingError, match=r"LRMonitor\.attach\(\).*has no momentum and weight decay"):
        LRMonitor(momentum=True).attach(Replay(tmp_path))


def test_it_reads_the_rate_that_a_schedule_of_the_engine_sets():
    found = published(LRMonitor(Every(iterations=1)), groups({}), 3, LRScheduler(Cosine(initial_lr=1.0, total_steps=8)))
    assert [metrics["learning_rate"] for _, metrics in found] == [
        Cosine(initial_lr=1.0, total_steps=8).get_lr(step) for step in (1, 2, 3)
    ]  # of an engine that keeps no rates of its last update: those of the next


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"LRMonitor\(every=50\): needs an Every"):
        LRMonitor(50)
    with pytest.raises(ConfigurationError, match=r"'trainer' has no optimizer; set engine.optimizer"):
        LRMonitor().attach(make_engine())
