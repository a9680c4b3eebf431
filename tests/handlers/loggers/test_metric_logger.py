"""The contract of all loggers: when they are called, with which values, and how they follow a run."""

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.utils._python_dispatch import TorchDispatchMode

from pulsetrain.engine import Engine, Events, Every
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.payloads import MediaLogged
from pulsetrain.handlers import ConsoleLogger, CSVLogger, JSONLinesLogger, MetricLogger, TensorBoardLogger
from tests.support.engines import UpdatingEngine, log, log_each_iteration, make_engine, validate_each_epoch, validated


class Noting(MetricLogger):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.calls = []

    def open(self, engine):
        self.calls.append("open")

    def log_hyperparameters(self, values):
        self.calls.append(("hyperparameters", values))

    def log_metrics(self, engine, metrics):
        self.calls.append((engine.state.iteration, dict(metrics)))

    def log_media(self, engine, media):
        self.calls.append((engine.state.iteration, media.name))

    def close(self, status):
        self.calls.append(status)


@dataclass
class Config:
    width: int = 3
    name: str | None = None
    optimizer_options: dict[str, Any] = field(default_factory=lambda: {"betas": (0, 1), "extra": {"nesterov": True}})
    every: Every = Every(epochs=1)  # noqa: RUF009  # it is frozen


def test_a_custom_logger_needs_one_method():
    said = []

    class Spoken(MetricLogger):
        def log_metrics(self, engine, metrics):
            for name, value in metrics.items():
                said.append(f"{name} is {value:.2f}")

    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 1.0 / i})
    validate_each_epoch(engine, [{"val/loss": 3.0}])
    Spoken().attach(engine)
    engine.run([0, 1], max_epochs=1)
    assert said == ["train/loss is 1.00", "train/loss is 0.50", "val/loss is 3.00"]


def test_a_run_is_opened_described_and_closed():
    engine = make_engine()
    engine.config = Config()
    log_each_iteration(engine, lambda i: {"a": float(i)})
    logger = Noting(hyperparameters={"dropout": np.float64(0.1), "width": 4}).attach(engine)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: engine.fire(Events.MEDIA_LOGGED, MediaLogged(
        name="sample", kind="text", value="to be")))  # fmt: skip
    engine.add_event_handler(Events.COMPLETED, lambda: log(engine, {"last": 9.0}))
    engine.run([0], max_epochs=1)
    settings = {
        "width": 4,
        "name": None,
        "optimizer_options.betas": "(0, 1)",
        "optimizer_options.extra.nesterov": True,
        "every": str(Every(epochs=1)),
        "dropout": 0.1,
    }
    assert logger.calls == [
        "open", ("hyperparameters", settings), (1, {"a": 1.0}), (1, "sample"), (1, {"last": 9.0}), "finished"
    ]  # fmt: skip


def test_a_plain_engine_has_no_hyperparameters():
    engine = make_engine()
    logger = Noting().attach(engine)
    engine.run([0], max_epochs=1)
    assert logger.calls == ["open", ("hyperparameters", {}), "finished"]


def fail(iteration):
    raise ArithmeticError("too large")


@pytest.mark.parametrize(
    ("step", "reaction", "status"),
    [
        (lambda i: 0.0, lambda engine: engine.terminate(), "finished"),
        (lambda i: 0.0, lambda engine: engine.terminate(skip_completed=True), "finished"),
        (lambda i: 0.0, lambda engine: engine.interrupt(), "interrupted"),
        (fail, lambda engine: None, "failed"),
    ],
)
def test_the_end_says_how_the_run_ended_once(step, reaction, status):
    engine = make_engine(step)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: reaction(engine))
    logger = Noting().attach(engine)
    if step is fail:
        with pytest.raises(ArithmeticError):
            engine.run([0, 1], max_epochs=1)
    else:
        engine.run([0, 1], max_epochs=1)
    assert logger.calls[2:] == [status]


def test_what_is_measured_outside_of_a_run_is_logged_and_detaching_closes():
    engine = make_engine()
    logger = Noting().attach(engine)
    validated(engine, {"val/loss": 1.0})
    engine.run([0], max_epochs=1)  # the same opening serves it
    validated(engine, {"val/loss": 2.0})
    logger.detach()
    logger.detach()
    none = ("hyperparameters", {})
    assert logger.calls == [
        "open", none, (0, {"val/loss": 1.0}), "finished", "open", none, (1, {"val/loss": 2.0}), "finished"
    ]  # fmt: skip


def test_on_a_bus_the_run_is_that_of_the_engine_which_starts_first():
    engine = make_engine()
    evaluator = Engine(lambda engine, batch: 1.0, name="evaluator", bus=engine.bus)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0], max_epochs=1))
    log_each_iteration(engine, lambda i: {"a": 1.0})
    logger = Noting().attach(engine.bus)
    engine.run([0], max_epochs=2)
    assert [call for call in logger.calls if isinstance(call, str)] == ["open", "finished"]
    assert logger.full_name(evaluator, "loss") == "evaluator/loss"
    logger.detach()
    assert logger.attach(engine).full_name(engine, "loss") == "loss"


def test_pictures_are_drawn_only_for_loggers_that_show_them(tmp_path):
    engine = make_engine()
    for logger in (CSVLogger(tmp_path), ConsoleLogger(stream=io.StringIO())):
        logger.attach(engine)
    assert not engine.hears(Events.MEDIA_LOGGED)
    JSONLinesLogger(tmp_path).attach(engine)
    assert engine.hears(Events.MEDIA_LOGGED)


def test_a_logger_that_fails_does_so_once_and_the_run_continues():
    class Failing(MetricLogger):
        def log_metrics(self, engine, metrics):
            raise OSError("the printer is on fire")

    engine, failures = make_engine(), []
    log_each_iteration(engine, lambda i: {"a": 1.0})
    engine.add_event_handler(Events.HANDLER_FAILED, failures.append)
    Failing().attach(engine)
    with capture_logs() as logs:
        engine.run([0, 1, 2], max_epochs=1)
    assert engine.state.iteration == 3
    assert len(logs) == 1
    assert "Failing._on_logged" in logs[0]["handler"]  # not the class that the method comes from
    Failing(on_error="raise").attach(engine)
    with pytest.raises(OSError, match="on fire"):
        engine.run([0], max_epochs=2)


def test_a_logger_that_logs_nothing_says_what_it_lacks():
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"a": 1.0})
    MetricLogger(on_error="raise").attach(engine)
    with pytest.raises(NotImplementedError, match=r"MetricLogger\.log_metrics\(engine, metrics\)"):
        engine.run([0], max_epochs=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 50}, TypeError, r"Noting\(every=50\): needs an Every"),
        ({"hyperparameters": [1]}, ConfigurationError, r"Noting\(hyperparameters=\[1\]\): needs a mapping"),
        (
            {"on_error": "ignore"},
            ConfigurationError,
            r"Noting\(on_error='ignore'\): unknown; choose one of raise, warn",
        ),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, error, message):
    with pytest.raises(error, match=message):
        Noting(**arguments)


class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def reads(tmp_path, every):
    weight = torch.ones((), requires_grad=True)
    engine = UpdatingEngine()
    engine._process_function = lambda engine, batch: {"loss": weight * 2.0}
    stream = io.StringIO()
    loggers = [CSVLogger(tmp_path, every), JSONLinesLogger(tmp_path, every), TensorBoardLogger(tmp_path, every)]
    for logger in [*loggers, ConsoleLogger(every, stream=stream), Noting(every=every)]:
        logger.attach(engine)
    with Reads() as counted:
        engine.run([0] * 40, max_epochs=1)
    return counted.count, stream.getvalue().count("train/loss=2")


def test_no_logger_waits_for_the_device_between_log_points(tmp_path):
    assert reads(tmp_path / "a", None) == (0, 0)
    count, logged = reads(tmp_path / "b", Every(iterations=20))
    assert logged == 2
    assert count <= 2 * 5  # once a logger and reading, at most


def test_a_run_that_continues_after_an_interrupt_is_closed_at_its_end():
    engine = make_engine()
    evaluator = Engine(lambda engine, batch: None, name="evaluator", bus=engine.bus)
    evaluator.add_event_handler(Events.STARTED, lambda: log(evaluator, {"b": 1.0}))
    log_each_iteration(engine, lambda i: {"a": 1.0})
    logger = Noting().attach(engine.bus)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.interrupt)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0], max_epochs=1))
    for _ in range(4):
        engine.run([0, 1], max_epochs=2)
    assert [call for call in logger.calls if isinstance(call, str)] == 2 * ["open", "interrupted", "open", "finished"]
