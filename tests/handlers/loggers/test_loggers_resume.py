"""Loggers of a run that failed and resumed have the same content as those of a run that never failed."""

import csv
import json

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import EventBus, Events, Every, Phase, SupervisedStrategy
from pulsetrain.engine.checkpoint import find_checkpoints
from pulsetrain.engine.events.payloads import MediaLogged, MetricsLogged
from pulsetrain.handlers import Checkpointer, CSVLogger, JSONLinesLogger


def make(folder, handlers=()):
    torch.manual_seed(0)
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = Trainer(
        nn.Linear(4, 1),
        DataLoader(data, batch_size=4, shuffle=True),
        DataLoader(data, batch_size=4),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(
            max_epochs=3,
            optimizer="sgd",
            learning_rate=0.01,
            log_every_n_steps=5,
            validate_every=Every(epochs=2),
            seed=3,
        ),
        handlers=[*handlers, Checkpointer(folder, every=Every(iterations=10))],
    )

    def measure(name):
        value = float(next(trainer.model.parameters()).detach().norm())
        trainer.fire(Events.METRICS_LOGGED, MetricsLogged(metrics={name: value}))

    # as monitors do; the row of an epoch's last iteration grows after the checkpoint that counts it
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), measure, "norm", phase=Phase.OBSERVE)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, measure, "norm of the epoch", phase=Phase.OBSERVE)

    @trainer.on(Events.EPOCH_COMPLETED)
    def write():
        trainer.fire(Events.MEDIA_LOGGED, MediaLogged(name="sample", kind="text", value=str(trainer.state.epoch)))

    return trainer


def written(folder):
    """The table's rows by column, and the lines, both without measured times."""
    clocked = ("time", "seconds", "samples_per_second")
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[{name: row[name] for name in row if name not in clocked} for row in rows] for rows in (table, lines)]


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [3, 11, 19, 20, 25])
def test_a_run_that_failed_and_was_resumed_has_logged_what_one_did_that_never_failed(tmp_path, fails_at):
    def loggers(folder):
        return [CSVLogger(folder), JSONLinesLogger(folder)]

    make(tmp_path / "whole", loggers(tmp_path / "whole")).train()
    trainer = make(tmp_path / "cut", loggers(tmp_path / "cut"))

    @trainer.on(Events.ITERATION_COMPLETED(once=fails_at), phase=Phase.PERSIST)
    def fail():
        raise RuntimeError("the power went")

    with pytest.raises(RuntimeError, match="the power went"):
        trainer.train()
    with capture_logs() as logs:
        make(tmp_path / "cut", loggers(tmp_path / "cut")).train(resume="latest")
    assert not [line for line in logs if line["event"].startswith("metrics.")]
    (table, lines), (expected_table, expected_lines) = written(tmp_path / "cut"), written(tmp_path / "whole")
    assert table == expected_table
    assert lines == expected_lines
    assert [row["iteration"] for row in table if row["val/loss"]] == ["20", "30"]
    assert [row["iteration"] for row in table if row["train/loss"] and row["norm of the epoch"]] == ["10", "30"]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
def test_a_trainer_of_a_bus_that_resumes_leaves_the_rows_of_the_other_trainers(tmp_path, kind):
    def two():
        bus = EventBus()
        trainers = [
            Trainer(
                nn.Linear(4, 1),
                [(torch.ones(8, 4), torch.ones(8, 1))] * 2,
                strategy=SupervisedStrategy("mse"),
                config=TrainingConfig(max_epochs=2, optimizer="sgd", learning_rate=0.01, log_every_n_steps=1, seed=3),
                name=name,
                bus=bus,
                handlers=[Checkpointer(tmp_path / name)],
            )
            for name in ("one", "two")
        ]
        return *trainers, kind(tmp_path).attach(bus)

    def iterations():
        lines = logger.read_lines()
        return [
            (name, logger.iteration_of(each)) for each in lines for name in ("one", "two") if logger.is_of(each, name)
        ]

    one, other, logger = two()
    one.train()
    other.train()
    rows = iterations()
    assert [row for row in rows if row[0] == "one"] == [("one", each) for each in (1, 2, 3, 4)]
    checkpoint = find_checkpoints(tmp_path / "one" / "checkpoints")[0]
    one, other, logger = two()
    with capture_logs() as logs:
        one.train(resume=checkpoint)
    assert not [line for line in logs if line["event"].startswith("metrics.")]
    others = [("two", each) for each in (1, 2, 3, 4)]
    assert iterations() == [("one", 1), ("one", 2), *others, ("one", 3), ("one", 4)]
