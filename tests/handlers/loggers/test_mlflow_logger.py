"""MLflowLogger against a real `mlflow server` on this machine, which these tests pause and kill."""

import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.payloads import MediaLogged
from pulsetrain.handlers import CSVLogger, MLflowLogger
from tests.support.engines import log, log_each_iteration, make_engine
from tests.support.ports import free_port

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mlflow = pytest.importorskip("mlflow")
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # mlflow and what it imports warn of their own affairs
]

EXPERIMENTS = count()


class Server:
    """One for the whole file; started again after a test has killed it."""

    def __init__(self, folder):
        self.folder = folder
        self.store = f"sqlite:///{folder / 'mlflow.db'}"
        self.url = ""
        self._process = None

    def start(self):
        if self._process is not None:
            return self
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        places = ["--backend-store-uri", self.store, "--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.txt").open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *places, "--port", str(port), "--workers", "1"],
                cwd=self.folder, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + 300
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                assert self._process.poll() is None, (self.folder / "server.txt").read_text()
                time.sleep(0.1)
        raise AssertionError("the server has not come up within 5 minutes")

    def signal(self, number):
        os.killpg(self._process.pid, number)

    def kill(self):
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def the_server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("mlflow"))
    yield server
    server.kill()


@pytest.fixture
def server(the_server, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # the machine may be busy
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return the_server.start()


@pytest.fixture
def experiment():
    return f"experiment {next(EXPERIMENTS)}"


def history(client, run_id, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


def wait_until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it did not come about within 120 seconds"
        time.sleep(0.02)


def test_a_run_has_its_metrics_parameters_and_media(server, experiment):
    engine = make_engine()
    figure = Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    log_each_iteration(engine, lambda i: {"train/loss": 1.0 / i, "odd@5": float("nan")})

    @engine.on(Events.EPOCH_COMPLETED)
    def show():
        image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
        media = {"text": "to be", "image": image, "figure": figure, "histogram": ([1], [0, 1]), "matrix": np.eye(2)}
        for kind, value in media.items():
            engine.fire(Events.MEDIA_LOGGED, MediaLogged(name=f"a {kind}", kind=kind, value=value))

    settings = {"options": {"betas": (0.9, 0.99)}, "width": 3, **{f"many.{n}": n for n in range(120)}}
    logger = MLflowLogger(server.url, experiment, "first", hyperparameters=settings, flush_seconds=30).attach(engine)
    with capture_logs() as logs:
        engine.run([0] * 3, max_epochs=1)
    assert logs == []
    client = mlflow.MlflowClient(server.url)
    run = client.get_run(logger.run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert client.get_experiment(run.info.experiment_id).name == experiment
    assert history(client, logger.run_id, "train/loss") == [(1, 1.0), (2, 0.5), (3, 1.0 / 3)]
    assert np.isnan(run.data.metrics["odd_5"])
    assert run.data.params["options.betas"] == "(0.9, 0.99)"
    assert len(run.data.params) == 122
    assert client.list_artifacts(logger.run_id, "a text")[0].path == "a text/000000003.txt"
    assert mlflow.artifacts.load_text(f"{run.info.artifact_uri}/a text/000000003.txt".replace(
        "mlflow-artifacts:", f"{server.url}/api/2.0/mlflow-artifacts/artifacts")) == "to be"  # fmt: skip
    files = [each.path for each in client.list_artifacts(logger.run_id, "images") if each.path.endswith(".png")]
    assert sorted(path.split("+")[0] for path in files) == [
        "images/a figure", "images/a histogram", "images/a image", "images/a matrix"
    ]  # fmt: skip
    local = client.download_artifacts(logger.run_id, files[[path.split()[1][:5] for path in files].index("image")])
    assert (np.asarray(Image.open(local)) == np.arange(24).reshape(2, 4, 3)).all()


def test_a_hyperparameter_that_is_refused_costs_nothing_else(server, experiment):
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"a": float(i)})
    settings = {"before": 1, "x" * 300: 2, "after": 3, "same@name": 4, "same#name": 5}
    logger = MLflowLogger(server.url, experiment, hyperparameters=settings, flush_seconds=30).attach(engine)
    with capture_logs() as logs:
        engine.run([0] * 2, max_epochs=1)
    assert [entry["event"].partition(";")[0] for entry in logs] == ["MLflowLogger: the service rejects an entry"]
    client = mlflow.MlflowClient(server.url)
    run = client.get_run(logger.run_id)
    assert run.data.params == {"before": "1", "after": "3", "same_name": "5"}
    assert (run.info.status, history(client, logger.run_id, "a")) == ("FINISHED", [(1, 1.0), (2, 2.0)])


class Strict:
    """A client of a service that refuses names of more than 250 characters; notes what it accepts."""

    def __init__(self):
        self.accepted = []

    def search_runs(self, *arguments, **options):
        return []

    def create_run(self, *arguments, **options):
        return SimpleNamespace(info=SimpleNamespace(run_id="1"), data=SimpleNamespace(params={}))

    def update_run(self, run, status):
        self.accepted.append(status)

    def set_terminated(self, run, status, end_time):
        self.accepted.append(status)

    def log_batch(self, run, params=(), metrics=()):
        if any(len(each.key) > 250 for each in params):
            raise mlflow.MlflowException("too long", error_code=INVALID_PARAMETER_VALUE)
        self.accepted += [each.key for each in params] + [(each.key, each.step) for each in metrics if each.key == "a"]


def test_several_hyperparameters_that_are_refused_cost_nothing_else(monkeypatch):
    client, engine = Strict(), make_engine()
    log_each_iteration(engine, lambda i: {"a": float(i)})
    settings = {"before": 1, "x" * 300: 2, "y" * 300: 3, "z" * 300: 4, "after": 5}
    logger = MLflowLogger(hyperparameters=settings, flush_seconds=30).attach(engine)
    monkeypatch.setattr(logger, "_connect_client", lambda: (client, "0"))
    failed = []
    engine.add_event_handler(Events.HANDLER_FAILED, lambda engine, event: failed.append(event.payload.handler))
    with capture_logs() as logs:
        engine.run([0] * 2, max_epochs=1)
    assert [entry["event"].partition(";")[0] for entry in logs] == ["MLflowLogger: the service rejects an entry"]
    assert client.accepted == ["before", "after", "RUNNING", ("a", 1), ("a", 2), "FINISHED"]
    assert failed == ["pulsetrain.handlers.MLflowLogger"]


def test_a_resumed_run_continues_in_the_same_run(server, experiment):
    def logger():
        return MLflowLogger(server.url, experiment, hyperparameters={"width": 3}, flush_seconds=30)

    engine, first = make_engine(fail_at(3)), logger()
    log_each_iteration(engine, lambda i: {"a": float(i)})
    first.attach(engine)
    with pytest.raises(ArithmeticError):
        engine.run([0] * 4, max_epochs=1)
    client = mlflow.MlflowClient(server.url)
    assert client.get_run(first.run_id).info.status == "FAILED"

    engine, again = make_engine(), logger()
    log_each_iteration(engine, lambda i: {"a": float(i)})
    again.load_state_dict(first.state_dict())
    again.attach(engine)
    engine.load_state_dict({"epoch_length": 4, "max_epochs": 1, "iteration": 2})
    engine.run([0] * 4)
    assert again.run_id == first.run_id
    assert client.get_run(first.run_id).info.status == "FINISHED"
    assert history(client, first.run_id, "a") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]

    log(engine, {"late": 7.0})  # outside of the run, but still part of it
    wait_until(lambda: history(client, first.run_id, "late") == [(4, 7.0)])
    assert client.get_run(first.run_id).info.status == "FINISHED"
    again.detach()

    again.load_state_dict({"key": None})  # as a trainer does that trains from the beginning
    again.attach(engine)
    engine.run([0], max_epochs=1)
    assert again.run_id != first.run_id


def fail_at(iteration):
    def step(now):
        if now == iteration:
            raise ArithmeticError("too large")
        return 0.0

    return step


def test_an_unresponsive_server_is_reported_once_and_receives_everything_later(server, experiment, monkeypatch):
    engine, failures = make_engine(), []
    engine.add_event_handler(Events.HANDLER_FAILED, lambda engine, event: failures.append(event.payload))
    log_each_iteration(engine, lambda i: {"a": float(i)})
    logger = MLflowLogger(server.url, experiment, flush_seconds=30).attach(engine)

    @engine.on(Events.ITERATION_COMPLETED(once=10))
    def pause():
        wait_until(lambda: logger.run_id is not None)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
        server.signal(signal.SIGSTOP)

    @engine.on(Events.ITERATION_COMPLETED(once=300))
    def resume_server():
        wait_until(lambda: len(logs) == 1)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        server.signal(signal.SIGCONT)

    with capture_logs() as logs:
        engine.run([0] * 301, max_epochs=1)
    assert [entry["event"] for entry in logs] == [
        "MLflowLogger: cannot reach the service; training continues, and what it logs waits",
        "MLflowLogger: reached the service again",
    ]
    reported = logs[0]["error"]  # of the last of several tries, or of a single one; shortened
    assert "ReadTimeoutError" in reported or "Read timed out" in reported
    assert logs[1]["lost_entries"] == 0
    assert [(each.handler, each.event) for each in failures] == [("pulsetrain.handlers.MLflowLogger", "metrics_logged")]
    client = mlflow.MlflowClient(server.store)
    found = history(client, logger.run_id, "a")
    # what was on its way when the server stopped answering may have come twice
    assert sorted(set(found)) == [(i, float(i)) for i in range(1, 302)]


def train(handlers, hook=lambda trainer: None):
    """The weights after 200 updates of a model whose noise comes from three generators; and the trainer."""
    random.seed(5)
    np.random.seed(5)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(400, 4, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    config = TrainingConfig(max_epochs=2, optimizer="sgd", learning_rate=0.01, log_every_n_steps=1, seed=3)
    trainer = Trainer(
        model,
        DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True),
        strategy=SupervisedStrategy("mse"),
        config=config,
        handlers=handlers,
    )

    @trainer.on(Events.ITERATION_STARTED)
    def disturb():
        inputs.add_(0.01 * random.random() - 0.01 * np.random.rand())

    hook(trainer)
    trainer.train()
    return [weight.detach().clone() for weight in model.parameters()], trainer


def test_a_server_killed_in_mid_run_costs_what_comes_after_it_and_nothing_else(server, experiment, tmp_path):
    expected, _ = train([])
    logger = MLflowLogger(server.url, experiment, flush_seconds=1.0)
    failures = []

    def kill_the_server(trainer):
        @trainer.on(Events.ITERATION_COMPLETED(once=60))
        def kill():
            wait_until(lambda: logger.run_id is not None)
            client = mlflow.MlflowClient(server.url)
            wait_until(lambda: len(client.get_metric_history(logger.run_id, "train/loss")) >= 50)
            server.kill()

        @trainer.on(Events.ITERATION_COMPLETED(once=150))
        def wait():
            wait_until(lambda: logs)

        trainer.add_event_handler(Events.HANDLER_FAILED, lambda engine, event: failures.append(event.payload.error))

    with capture_logs() as logs:
        weights, trainer = train([logger, CSVLogger(tmp_path)], kill_the_server)
    assert trainer.state.iteration == 200
    assert all(weight.isfinite().all() for weight in weights)
    assert all(torch.equal(weight, other) for weight, other in zip(weights, expected, strict=True))
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == [
        "MLflowLogger: cannot reach the service; training continues, and what it logs waits",
        "MLflowLogger: discarded what could not be sent",
    ]
    assert [type(error).__name__ for error in failures] == ["MlflowException"]
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(rows) >= 201  # the other logger has missed nothing

    client = mlflow.MlflowClient(server.store)  # the server's own database
    run = client.get_run(logger.run_id)
    assert run.info.status == "RUNNING"  # its end was never reported
    assert run.data.params["learning_rate"] == "0.01"
    logged = history(client, logger.run_id, "train/loss")
    assert [step for step, _ in logged] == list(range(1, len(logged) + 1))
    assert 50 <= len(logged) <= 60
    column = rows[0].split(",").index("train/loss")
    assert [value for _, value in logged] == [float(row.split(",")[column]) for row in rows[1 : len(logged) + 1]]


def test_a_closed_port_costs_one_warning_and_the_wait_at_the_end(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    engine, failures = make_engine(), []
    engine.add_event_handler(Events.HANDLER_FAILED, lambda: failures.append(engine.state.iteration))
    log_each_iteration(engine, lambda i: {"a": 1.0})
    MLflowLogger("http://127.0.0.1:9", flush_seconds=2.0).attach(engine)
    with capture_logs() as logs:
        engine.run([0] * 100, max_epochs=1)
    assert [entry["event"].partition(": ")[2].partition(" ")[0] for entry in logs] == ["cannot", "discarded"]
    assert logs[1]["entries"] == 102  # the beginning, 100 log points, the end
    assert len(failures) == 1


def test_without_a_server_the_run_folder_holds_the_store(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"a": float(i)})
    logger = MLflowLogger(folder=tmp_path / "runs" / "digits", flush_seconds=60).attach(engine)
    engine.run([0] * 2, max_epochs=1)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'digits' / 'mlflow.db'}")
    run = client.get_run(logger.run_id)
    assert run.info.run_name == "digits"
    assert run.info.artifact_uri.startswith((tmp_path / "runs" / "digits" / "mlflow").as_uri())
    assert history(client, logger.run_id, "a") == [(1, 1.0), (2, 2.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_checkpoint_does_not_report_the_password_in_the_address():
    logger = MLflowLogger("http://me:secret@127.0.0.1:9", "digits")
    trainer = Trainer(nn.Linear(1, 1), [torch.zeros(1, 1)] * 2, config=TrainingConfig(max_epochs=1), handlers=[logger])
    settings = trainer.registry.settings()["MLflowLogger"]
    assert "experiment='digits'" in settings
    assert "secret" not in settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tracking_uri": ""}, r"MLflowLogger\(tracking_uri=''\): needs a text, or None"),
        ({"experiment": 7}, r"MLflowLogger\(experiment=7\): needs a text"),
        ({"room": 0}, r"MLflowLogger\(room=0\): needs a whole number of at least 1"),
        ({"flush_seconds": -1.0}, r"MLflowLogger\(flush_seconds=-1\.0\): needs a finite number of at least 0"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        MLflowLogger(**arguments)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigurationError, match=r"MLflowLogger: cannot import .* pip install 'pulsetrain\[mlflow\]'"):
        MLflowLogger()
