"""A run that returns to a checkpoint has not ended, and no handler reports that it has."""

import io

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Event, Events, Every, SupervisedStrategy
from pulsetrain.handlers import Alert, Checkpointer, ConsoleLogger, MetricLogger, NaNGuard, Plots, ProgressBar
from pulsetrain.handlers.attachment.engine_queries import is_run_end
from tests.support.engines import make_engine
from tests.support.models import regression_model


class Noting(MetricLogger):
    def __init__(self):
        super().__init__()
        self.calls = []

    def open(self, engine):
        self.calls.append("open")

    def log_metrics(self, engine, metrics):
        pass

    def close(self, status):
        self.calls.append(status)


@pytest.fixture
def rewound(tmp_path, monkeypatch):
    """A trainer that has returned to a checkpoint once, its logger, its alerts, the iterations of its figures, and what
    its console logger and its progress bar have written."""
    alerted, drawn = [], []
    console, bar = io.StringIO(), io.StringIO()
    monkeypatch.setattr(Alert, "_run", lambda self, message: alerted.append(message["event"]))
    monkeypatch.setattr(Plots, "_start", lambda self, engines: drawn.append(trainer.state.iteration))
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    inputs[13] = float("nan")
    logger = Noting()
    trainer = Trainer(
        regression_model(),
        DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=1, schedule=None, log_every_n_steps=2),
        handlers=[
            NaNGuard("rewind", Every(iterations=3)),
            Checkpointer(tmp_path, every=Every(iterations=2), keep_last=9),
            logger,
            Alert(["true"]),
            Plots(tmp_path),
            ConsoleLogger(stream=console),
            ProgressBar(stream=bar, interval=1e6),
        ],
    )
    trainer.train()
    assert trainer.rewinds == 1
    return trainer, logger, alerted, drawn, console.getvalue(), bar.getvalue()


def test_the_console_and_the_bar_show_one_end(rewound):
    *_, console, bar = rewound
    assert [line.split()[1:3] for line in console.splitlines() if " run " in line] == [
        ["run", "started"], ["run", "started"], ["run", "completed"]
    ]  # fmt: skip
    assert len(bar.splitlines()) == 1


def test_a_logger_is_opened_and_closed_once(rewound):
    _, logger, *_ = rewound
    assert logger.calls == ["open", "finished"]


def test_only_the_end_is_alerted(rewound):
    _, _, alerted, *_ = rewound
    assert [each for each in alerted if each != "anomaly_detected"] == ["completed"]


def test_pictures_are_drawn_only_at_the_end(rewound):
    trainer, _, _, drawn, *_ = rewound
    assert set(drawn) == {trainer.state.iteration}  # begun before the other handlers' work, and completed after it


@pytest.mark.parametrize(("should_terminate", "ends"), [(True, False), ("skip_completed", True)])
def test_terminate_is_the_end_of_a_run_if_completed_is_skipped(should_terminate, ends):
    engine = make_engine()
    engine.should_terminate = should_terminate
    event = Event(0, "trainer", Events.TERMINATE.value, 1, 1, None, 0)
    assert is_run_end(engine, event) is ends
