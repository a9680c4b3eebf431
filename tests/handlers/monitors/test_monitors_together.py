"""All monitors on one trainer do not change what they measure, in a run, through a failure, and in a resumed run."""

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import (
    Checkpointer,
    CSVLogger,
    EventRecorder,
    GradientMonitor,
    HangWatchdog,
    MemoryMonitor,
    Profiler,
    SampleText,
    Throughput,
)


def write(prompt, length, *, temperature, generator):
    return "".join(chr(97 + int(each)) for each in torch.randint(26, (length,), generator=generator))


def monitors(folder):
    return [
        GradientMonitor(Every(updates=2), histograms=True, updates=True),
        Throughput(Every(iterations=4), peak_flops=1e9),
        MemoryMonitor(Every(iterations=4)),
        Profiler(folder, start=3, iterations=2, warmup=1),
        SampleText("a", folder, Every(epochs=1), length=5, generate=write),
        HangWatchdog(folder),
    ]


def make_trainer(folder, *, watched=True):
    torch.manual_seed(0)
    inputs = torch.randn(24, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)),
        DataLoader(data, batch_size=4, shuffle=True),
        DataLoader(data, batch_size=4),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=3, optimizer="adamw", learning_rate=0.01, schedule=None, seed=0),
        handlers=[
            EventRecorder(folder),
            *(monitors(folder) if watched else []),
            CSVLogger(folder),
            Checkpointer(folder, Every(iterations=4)),
        ],
    )


def end(trainer):
    for handler in trainer.handlers:
        handler.detach()


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("plain"), watched=False)
    trainer.train()
    end(trainer)
    return weights(trainer)


def test_a_watched_run_ends_with_the_same_weights(tmp_path, plain):
    trainer = make_trainer(tmp_path)
    with capture_logs() as logs:
        trainer.train()
    end(trainer)
    assert all(torch.equal(mine, other) for mine, other in zip(weights(trainer), plain, strict=True))
    assert logs == []
    assert {path.name for path in tmp_path.iterdir()} >= {"profile", "samples", "metrics.csv"}


def test_a_run_that_fails_and_continues_ends_with_them_and_repeats_what_it_had_reported(tmp_path, plain):
    trainer = make_trainer(tmp_path)

    @trainer.on(Events.ITERATION_COMPLETED(once=11))
    def fail():
        raise RuntimeError("the power went")

    with capture_logs(), pytest.raises(RuntimeError, match="the power went"):
        trainer.train()
    end(trainer)
    trainer = make_trainer(tmp_path)
    with capture_logs() as logs:
        trainer.train(resume="latest")
    end(trainer)
    assert all(torch.equal(mine, other) for mine, other in zip(weights(trainer), plain, strict=True))
    assert [log for log in logs if log["log_level"] in ("warning", "error")] == []
    metrics = [event for event in EventLog(tmp_path).read() if event.event == "metrics_logged"]
    reported = [(event.ord < 0, {name.partition("/")[0] for name in event.payload["metrics"]}) for event in metrics]
    assert (False, {"grad_norm", "update_ratio"}) in reported
    assert all(observed == bool(names & {"throughput", "memory"}) for observed, names in reported)
    assert [names for observed, names in reported if observed].count({"memory"}) >= 4
