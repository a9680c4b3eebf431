"""The bundle of a crash, whatever has raised."""

import json
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader

from pulsetrain.engine import ConfigurationError, Engine, Events
from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording import EventLog, Replay
from pulsetrain.handlers import CrashBundle, EventRecorder
from pulsetrain.handlers.crash import bundle_writer
from pulsetrain.handlers.crash.bundle_writer import plain_batch
from pulsetrain.handlers.crash.crash_bundle import read_bundle
from pulsetrain.handlers.crash.crash_files import bundle_of
from tests.support.runs import BAD_ROW, SECRET, BrokenRows, breaking, crashed, crashing_trainer, planted

SECRET_NUMBER = "9182736455"


def test_a_planted_row_is_in_the_batch_and_named(tmp_path):
    data = planted()
    run = crashing_trainer(data, CrashBundle(tmp_path))
    error = crashed(run.train, FloatingPointError)
    (folder,) = run.handlers[0].bundles
    assert folder == tmp_path / "crash" / f"iteration-{run.state.iteration:09d}" == bundle_of(error)
    bundle = read_bundle(folder)
    assert bundle.what.startswith("FloatingPointError: no number")
    assert BAD_ROW in bundle.rows
    inputs, targets = bundle.batch
    torch.testing.assert_close(inputs, data.tensors[0][bundle.rows], equal_nan=True, rtol=0, atol=0)
    assert targets.shape == (4, 1)
    assert bundle.facts["missing"] == {}


def test_the_exception_stays_the_one_that_was_raised(tmp_path):
    raised = ValueError("mine")

    def step(engine, batch):
        raise raised

    engine = Engine(step, name="trainer")
    CrashBundle(tmp_path).attach(engine)
    assert crashed(lambda: engine.run([1])) is raised
    assert raised.args == ("mine",)
    assert [note for note in raised.__notes__ if "crash" in note] == [f"crash bundle: {bundle_of(raised)}"]


def test_the_weights_table_agrees_with_torch(tmp_path):
    run = crashing_trainer(planted(), CrashBundle(tmp_path))
    with torch.no_grad():
        run.model.bias.fill_(float("inf"))
    crashed(run.train)
    bundle = read_bundle(run.handlers[0].bundles[0])
    weight, bias = bundle.tensors()
    assert weight == {
        "name": "weight",
        "shape": [1, 3],
        "dtype": "torch.float32",
        "device": "cpu",
        "norm": pytest.approx(run.model.weight.norm().item()),
        "nan": 0,
        "infinite": 0,
    }
    assert (bias["norm"], bias["infinite"]) == ("inf", 1)


def test_the_state_of_the_optimizer_and_the_gradients_are_reported(tmp_path):
    def step(engine, batch):
        if engine.state.iteration == 2:
            raise ValueError("boom")
        engine.model(torch.ones(1, 2)).sum().backward()
        engine.optimizer.step()

    engine = Engine(step, name="trainer")
    engine.model = nn.Linear(2, 1)
    engine.optimizer = torch.optim.Adam(engine.model.parameters())
    handler = CrashBundle(tmp_path).attach(engine)
    crashed(lambda: engine.run([0, 0]))
    bundle = read_bundle(handler.bundles[0])
    assert {row["name"]: row["norm"] for row in bundle.tensors("gradients")} == {
        "weight": pytest.approx(2**0.5),
        "bias": pytest.approx(1.0),
    }
    assert {row["name"] for row in bundle.tensors("optimizer")} >= {"weight/exp_avg", "bias/exp_avg_sq"}


def test_a_row_that_cannot_be_fetched_is_among_those_named(tmp_path):
    run = crashing_trainer(BrokenRows(broken=7), CrashBundle(tmp_path))
    crashed(run.train, IndexError)
    bundle = read_bundle(run.handlers[0].bundles[0])
    assert 7 in bundle.rows
    assert bundle.batch is None
    assert "batch" not in bundle.facts["missing"]


@pytest.mark.parametrize("event", [Events.STARTED, Events.EPOCH_STARTED, Events.GET_BATCH_STARTED])
def test_a_failure_before_the_first_batch_leaves_a_bundle_without_a_batch(event, tmp_path):
    def fail():
        raise ValueError("boom")

    run = crashing_trainer(BrokenRows(), CrashBundle(tmp_path))
    run.add_event_handler(event, fail)
    crashed(run.train, ValueError)
    bundle = read_bundle(run.handlers[0].bundles[0])
    assert (bundle.rows, bundle.batch) == (None, None)
    assert bundle.facts["missing"] == {}


def test_a_validation_that_fails_reports_its_own_batch_and_set(tmp_path):
    validation = {"clean": DataLoader(BrokenRows(), batch_size=5), "dirty": DataLoader(planted(), batch_size=5)}
    run = crashing_trainer(BrokenRows(), CrashBundle(tmp_path), validation=validation, learning_rate=1e-6)
    crashed(run.train, FloatingPointError)
    (folder,) = run.handlers[0].bundles
    bundle = read_bundle(folder)
    assert (bundle.facts["engine"], bundle.facts["set"]) == ("evaluator", "dirty")
    assert bundle.batch[0].shape == (5, 3)
    assert bundle.batch[0].isnan().any()
    assert bundle.rows is None


def test_a_validation_of_its_own_that_fails_leaves_a_bundle_too(tmp_path):
    run = crashing_trainer(BrokenRows(), CrashBundle(tmp_path))
    crashed(lambda: run.evaluator.run(DataLoader(planted(), batch_size=5)))
    assert read_bundle(run.handlers[0].bundles[0]).facts["engine"] == "evaluator"


@pytest.mark.parametrize("recorded", [True, False])
def test_the_last_events_are_a_log_with_the_losses(recorded, tmp_path):
    losses = []
    recorder = [EventRecorder(tmp_path / "run")] if recorded else []
    run = crashing_trainer(planted(), *recorder, CrashBundle(tmp_path / "run", events=12), max_epochs=30)
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output["loss"].item()))
    run.train_loader.dataset.tensors[0][BAD_ROW] = 0.0
    run.add_event_handler(Events.EPOCH_STARTED(once=9), lambda: run.train_loader.dataset.tensors[0].fill_(float("nan")))
    crashed(run.train, FloatingPointError)
    folder = run.handlers[len(recorder)].bundles[0]
    log = EventLog(folder)
    events = list(log.read())
    assert len(events) == 12
    assert not log.damage
    assert log.ended
    assert events[-1].event == "exception_raised"
    assert events[-1].payload["error"]["__type__"] == "FloatingPointError"
    reported = [event.output["loss"] for event in events if event.event == "iteration_completed"]
    assert len(reported) >= 2
    assert reported == pytest.approx(losses[-len(reported) :])
    if recorded:
        recorded_events = list(EventLog(tmp_path / "run").read())[-12:]
        assert [(each.seq, each.event) for each in events] == [(each.seq, each.event) for each in recorded_events]
        assert read_bundle(folder).facts["seq"] == recorded_events[-1].seq


def test_with_a_recorder_an_iteration_costs_nothing(tmp_path):
    run = crashing_trainer(BrokenRows(), EventRecorder(tmp_path), CrashBundle(tmp_path))
    alone = crashing_trainer(BrokenRows(), EventRecorder(tmp_path / "b"))
    counts = [len(each.bus.signal(Events.ITERATION_COMPLETED).receivers) for each in (run, alone)]
    assert counts[0] == counts[1]


def test_a_second_crash_gets_its_own_folder(tmp_path):
    for _ in range(2):
        engine, data = breaking(0)
        CrashBundle(tmp_path).attach(engine)
        crashed(partial(engine.run, data))
    assert sorted(path.name for path in (tmp_path / "crash").iterdir()) == [
        "iteration-000000001",
        "iteration-000000001-2",
    ]


def test_nothing_secret_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("API_KEY", SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run = crashing_trainer(planted(), CrashBundle(tmp_path))
    crashed(run.train)
    (folder,) = run.handlers[0].bundles
    assert not [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    bundle = read_bundle(folder)
    assert bundle.facts["variables"]["OMP_NUM_THREADS"] == "3"
    frame = next(each for each in bundle.facts["frames"] if each["function"] == "compute_loss")
    assert frame["locals"]["password"] == "str"
    assert frame["locals"]["loss"] == "float32 () on cpu"
    assert frame["code"].startswith("raise FloatingPointError")
    assert "FloatingPointError: no number" in bundle.traceback


def test_credentials_in_the_message_of_an_error_are_not_written(tmp_path):
    def step(engine, batch):
        password = int(SECRET_NUMBER)
        try:
            raise OSError(f"https://me:{SECRET}@host/data cannot be read; Authorization: Bearer {SECRET}")
        except OSError as error:
            raise RuntimeError(f"api_key={SECRET}: {password > 0}") from error

    engine = Engine(step, name="trainer")
    handler = CrashBundle(tmp_path).attach(engine)
    crashed(lambda: engine.run([1]), RuntimeError)
    (folder,) = handler.bundles
    texts = {path.name: path.read_text() for path in folder.glob("*") if path.suffix in (".json", ".txt")}
    assert "host/data cannot be read" in texts["traceback.txt"]
    assert "RuntimeError: api_key=" in texts["bundle.json"]
    assert [name for name, text in texts.items() if SECRET in text or SECRET_NUMBER in text] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ConfigurationError])
def test_stops_and_errors_with_a_remedy_leave_no_bundle(error, tmp_path):
    def step(engine, batch):
        raise error("so")

    engine = Engine(step, name="trainer")
    handler = CrashBundle(tmp_path).attach(engine)
    crashed(lambda: engine.run([1]), error)
    assert not handler.bundles
    assert not (tmp_path / "crash").exists()


def test_a_wrong_value_after_the_first_iteration_leaves_a_bundle_with_its_batch(tmp_path):
    def step(engine, batch):
        if batch == 3:
            raise ConfigurationError("needs at most 2", "step", batch=batch)

    engine = Engine(step, name="trainer")
    handler = CrashBundle(tmp_path).attach(engine)
    crashed(lambda: engine.run([1, 2, 3]), ConfigurationError)
    assert len(handler.bundles) == 1


def test_what_cannot_be_read_is_missing_and_the_rest_is_there(tmp_path, monkeypatch):
    def dead(tensors):
        raise RuntimeError("CUDA error: device-side assert triggered")

    class OnADeadDevice(torch.Tensor):
        def cpu(self):
            raise RuntimeError("CUDA error: device-side assert triggered")

        def detach(self):
            return self

    monkeypatch.setattr("pulsetrain.handlers.crash.bundle_writer.to_host", dead)
    batch = torch.ones(2, 3).as_subclass(OnADeadDevice)
    engine, data = breaking(batch)
    engine.model = nn.Linear(3, 1)
    handler = CrashBundle(tmp_path).attach(engine)
    assert str(crashed(lambda: engine.run(data))) == "boom"
    bundle = read_bundle(handler.bundles[0])
    assert set(bundle.facts["missing"]) == {"batch", "weights"}
    assert "device-side assert" in bundle.facts["missing"]["weights"]
    assert bundle.facts["batch"] == "float32 (2, 3)"
    assert "boom" in bundle.traceback
    assert len(EventLog(bundle.folder)) > 0


def test_a_vanished_folder_is_a_warning_and_the_runs_exception_is_raised(tmp_path):
    engine, data = breaking(0)
    handler = CrashBundle(tmp_path / "run").attach(engine)
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_text("in the way")
    with capture_logs() as logs:
        assert str(crashed(lambda: engine.run(data))) == "boom"
    assert [each["event"] for each in logs] == ["the crash bundle could not be written"]
    assert not handler.bundles


def test_a_bundle_that_cannot_be_finished_leaves_no_part(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle_writer, "replace_file", full)
    engine, data = breaking(0)
    CrashBundle(tmp_path).attach(engine)
    with capture_logs():
        assert str(crashed(lambda: engine.run(data))) == "boom"
    assert list((tmp_path / "crash").iterdir()) == []


def test_a_validation_whose_error_was_handled_is_not_in_a_later_bundle(tmp_path):
    taken = []  # and kept, so that no later error is where it was

    def validate(engine):
        try:
            engine.validate()
        except FloatingPointError as error:
            taken.append(error)

    def fail():
        raise ValueError("boom")

    run = crashing_trainer(
        BrokenRows(), CrashBundle(tmp_path), validation=DataLoader(planted(), batch_size=5), validate_every=None
    )
    run.add_event_handler(Events.ITERATION_COMPLETED(once=2), validate)
    run.add_event_handler(Events.ITERATION_COMPLETED(once=3), fail)
    crashed(run.train, ValueError)
    assert len(taken) == 1
    bundle = read_bundle(run.handlers[0].bundles[0])
    assert (bundle.facts["engine"], bundle.facts["set"], bundle.facts["iteration"]) == ("trainer", None, 3)
    assert bundle.batch[0].shape == (4, 3)


@dataclass
class Pair:
    inputs: torch.Tensor
    names: list


def test_any_batch_becomes_one_that_loads_safely(tmp_path):
    grown = torch.arange(1000.0)[10:12].requires_grad_()
    batch = {"pair": Pair(grown, ["a", None]), 3: (np.arange(2), np.float32(2.5), True), "odd": object()}
    torch.save(plain_batch(batch), tmp_path / "batch.pt")
    found = torch.load(tmp_path / "batch.pt", weights_only=True)
    torch.testing.assert_close(found["pair"]["inputs"], torch.tensor([10.0, 11.0]))
    assert found["pair"]["names"] == ["a", None]
    assert found["3"][0].tolist() == [0, 1]
    assert found["3"][1:] == (2.5, True)
    assert found["odd"] == "<builtins.object>"
    assert (tmp_path / "batch.pt").stat().st_size < 3000


def test_a_replay_is_refused(tmp_path):
    engine, data = breaking(0)
    EventRecorder(tmp_path).attach(engine)
    crashed(lambda: engine.run(data))
    with pytest.raises(RecordingError, match="does not hold the batch"):
        CrashBundle(tmp_path / "b").attach(Replay(tmp_path))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"events": 0}, r"CrashBundle\(events=0\): needs a whole number of at least 1"),
        ({"at_most": True}, r"CrashBundle\(at_most=True\)"),
        ({"faults": ["exception_raise"]}, r"unknown; choose one of .*did you mean 'exception_raised'"),
        ({"faults": "exception_raised"}, r"needs a list of events"),
        ({"faults": [Events.STARTED]}, r"choose one of anomaly_detected, exception_raised"),
    ],
)
def test_bad_input_is_refused(arguments, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        CrashBundle(tmp_path, **arguments)


@pytest.mark.parametrize("content", [None, b"{", b"[]"])
def test_a_file_that_is_not_a_bundle_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "bundle.json").write_bytes(content)
    with pytest.raises(RecordingError, match=r"bundle\.json"):
        read_bundle(tmp_path)


def test_the_run_and_its_configuration_are_in_it(tmp_path):
    (tmp_path / "config.yaml").write_text("run: here\n")
    run = crashing_trainer(planted(), CrashBundle(tmp_path))
    crashed(run.train)
    bundle = read_bundle(run.handlers[0].bundles[0])
    assert (bundle.folder / "config.yaml").read_text() == "run: here\n"
    assert bundle.run["environment"]["torch"] == torch.__version__
    assert bundle.run["handlers"] == ["CrashBundle", "RunSummary", "ProgressBar"]
    assert json.loads((bundle.folder / "bundle.json").read_text())["trained"] == run.state.iteration
