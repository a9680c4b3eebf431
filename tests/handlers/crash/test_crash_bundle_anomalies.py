"""A bundle at an anomaly: whose rows they are, and which batch."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events
from pulsetrain.engine.events.payloads import AnomalyDetected
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.strategies import SupervisedStrategy
from pulsetrain.handlers import CrashBundle, EventRecorder
from pulsetrain.handlers.crash.crash_bundle import read_bundle
from tests.support.engines import make_engine
from tests.support.runs import BrokenRows, crashing_trainer


def test_an_anomaly_is_bundled_where_asked_for_and_the_run_continues(tmp_path):
    anomaly = AnomalyDetected(kind="loss_spike", value=9.0, batch_indices=(4, 2))
    for faults, count in ((["exception_raised"], 0), ([Events.ANOMALY_DETECTED], 2), (["anomaly_detected"], 2)):
        engine = make_engine()
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: e.fire(Events.ANOMALY_DETECTED, anomaly))
        handler = CrashBundle(tmp_path / "run", faults=faults, at_most=2).attach(engine)
        engine.run([torch.ones(2)] * 4)
        assert len(handler.bundles) == count
        assert engine.state.iteration == 4
    bundle = read_bundle(handler.bundles[0])
    assert bundle.what == "anomaly loss_spike (9.0)"
    assert bundle.rows == [4, 2]
    assert bundle.traceback is None
    torch.testing.assert_close(bundle.batch, torch.ones(2))


def announcing(data, folder, anomaly, at=6, **loading):
    """A trainer that reports an anomaly after an iteration, its bundle, and the rows of its batches by iteration."""
    torch.manual_seed(0)
    run = Trainer(
        nn.Linear(3, 1),
        DataLoader(data, batch_size=4, shuffle=True, **loading),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=2, seed=1),
        handlers=[CrashBundle(folder, faults=["anomaly_detected"])],
    )
    rows = {}
    run.add_event_handler(
        Events.ITERATION_STARTED, lambda e: rows.update({e.state.iteration: run.data.rows(e.state.iteration)})
    )

    @run.on(Events.ITERATION_COMPLETED(once=at))
    def report(engine):
        engine.fire(Events.ANOMALY_DETECTED, anomaly(rows))

    run.train()
    (path,) = run.handlers[0].bundles
    return read_bundle(path), rows, run


class Noisy(BrokenRows):
    """Draws, as augmentation does, and counts in what it gives which rows were asked for."""

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.rand(3), targets


@pytest.mark.parametrize("loading", [{}, {"collate_fn": lambda rows: {"x": torch.stack([x for x, _ in rows])}}])
def test_an_anomaly_found_out_later_has_the_batch_of_its_own_rows(loading, tmp_path):
    if loading:
        rows = [4, 11, 2]
        run = crashing_trainer(BrokenRows(), CrashBundle(tmp_path, faults=["anomaly_detected"]))
        run.train_loader.collate_fn = loading["collate_fn"]
        run.fire(
            Events.ANOMALY_DETECTED, AnomalyDetected(kind="nan", value=1.0, batch_indices=(4, 11, 2), at_iteration=3)
        )
        bundle = read_bundle(run.handlers[0].bundles[0])
        inputs = bundle.batch["x"]
    else:
        bundle, known, _ = announcing(
            BrokenRows(), tmp_path,
            lambda rows: AnomalyDetected(kind="nan", value=1.0, batch_indices=tuple(rows[3]), at_iteration=3),
        )  # fmt: skip
        rows, (inputs, _) = known[3], bundle.batch
    assert bundle.rows == rows
    assert inputs[:, 0].tolist() == [float(row) for row in rows]
    assert (bundle.facts["at_iteration"], bundle.facts["fetched_again"]) == (3, True)
    assert bundle.facts["missing"] == {}


def test_rows_of_several_batches_that_made_an_update_are_all_in_the_batch(tmp_path):
    bundle, rows, _ = announcing(
        BrokenRows(), tmp_path,
        lambda rows: AnomalyDetected(kind="nan", value=1.0, batch_indices=(*rows[5], *rows[6]), at_iteration=6),
    )  # fmt: skip
    assert bundle.batch[0][:, 0].tolist() == [float(row) for row in (*rows[5], *rows[6])]


def test_an_anomaly_of_the_current_batch_has_that_batch(tmp_path):
    bundle, _, _ = announcing(
        Noisy(), tmp_path / "a",
        lambda rows: AnomalyDetected(kind="nan", value=1.0, batch_indices=tuple(rows[6]), at_iteration=6),
    )  # fmt: skip
    seen = []
    run = crashing_trainer(Noisy(), learning_rate=1e-6)
    run.add_event_handler(Events.ITERATION_STARTED(once=6), lambda e: seen.append(e.state.batch[0].clone()))
    run.train()
    assert bundle.facts["fetched_again"] is False
    assert torch.equal(bundle.batch[0], seen[0])


def test_rereading_rows_does_not_touch_the_runs_generators(tmp_path):
    weights = []
    for at_iteration in (3, 6):
        _, _, run = announcing(
            Noisy(), tmp_path,
            lambda rows, at=at_iteration: AnomalyDetected(
                kind="nan", value=1.0, batch_indices=tuple(rows[at]), at_iteration=at
            ),
        )  # fmt: skip
        weights.append(torch.cat([run.model.weight.detach().flatten(), torch.rand(1)]))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("loader", "rows", "why"),
    [
        (None, (), "its rows are not known"),
        ([(torch.ones(4, 3), torch.ones(4, 1))] * 5, (1, 2), "list cannot give single rows"),
    ],
)
def test_a_batch_no_longer_held_is_missing_and_the_reason_is_given(loader, rows, why, tmp_path):
    run = crashing_trainer(BrokenRows(), CrashBundle(tmp_path, faults=["anomaly_detected"]), max_epochs=1)
    run.train_loader = run.train_loader if loader is None else loader
    anomaly = AnomalyDetected(kind="nan", value=1.0, batch_indices=rows, at_iteration=2)
    run.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda e: e.fire(Events.ANOMALY_DETECTED, anomaly))
    run.train()
    bundle = read_bundle(run.handlers[0].bundles[0])
    assert bundle.batch is None
    assert bundle.facts["missing"] == {
        "batch": f"LookupError: the batch of iteration 2 is not in memory any more, and {why}"
    }


def test_a_crash_bundle_alone_asks_for_no_metrics_media_or_gradients(tmp_path):
    run = crashing_trainer(BrokenRows(), CrashBundle(tmp_path), progress=False)
    assert not run.hears(Events.METRICS_LOGGED)
    assert not run.hears(Events.MEDIA_LOGGED)
    assert not run.hears(Events.GRADIENTS_READY)
    assert run.hears(Events.EPOCH_COMPLETED)


def test_an_anomaly_is_the_last_event_of_the_log_and_losses_that_the_recorder_still_held_are_in_it(tmp_path):
    handlers = [EventRecorder(tmp_path), CrashBundle(tmp_path, faults=["anomaly_detected"])]
    run = crashing_trainer(BrokenRows(), *handlers, max_epochs=1)
    losses = []
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda e: losses.append(e.state.output["loss"].item()))
    anomaly = AnomalyDetected(kind="nan", value=1.0, batch_indices=())
    run.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda e: e.fire(Events.ANOMALY_DETECTED, anomaly))
    run.train()
    events = list(EventLog(handlers[1].bundles[0]).read())
    reported = [each.output and each.output["loss"] for each in events if each.event == "iteration_completed"]
    assert len(reported) >= 2
    assert reported == pytest.approx(losses[: len(reported)])
    assert (events[-1].event, events[-1].iteration) == ("anomaly_detected", 3)
