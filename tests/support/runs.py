"""Runs that are interrupted, warn, meet bad data or crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Engine, Events, Every, SupervisedStrategy
from pulsetrain.handlers import Checkpointer, EarlyStopping
from tests.support.models import loader, regression_model, trainer

# ----------------------------------------------------------------------------------------------------- interrupted runs


RESUMABLE_CONFIG = {
    "max_epochs": 4,
    "optimizer": "adamw",
    "accumulate": 3,
    "clip_grad_norm": 1.0,
    "schedule": "cosine",
    "warmup_steps": 3,
    "seed": 7,
}


class PlugPulled(Exception):  # noqa: N818
    """Raised to interrupt a run."""


def resumable_run(folder: Path, *, every: Every | None = None, config: dict[str, Any] | None = None) -> Trainer:
    return trainer(
        {**RESUMABLE_CONFIG, **(config or {})},
        model=regression_model(dropout=0.3),
        train_loader=loader(),
        val_loader=loader(12, shuffle=False),
        handlers=[
            Checkpointer(folder, every=every or Every(iterations=1), metric="val/loss", keep_last=100, at_end=False),
            EarlyStopping(patience=50),
        ],
    )


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def cut_after(run: Trainer, iteration: int, **options: Any) -> None:
    @run.on(Events.ITERATION_COMPLETED, phase=3)
    def pull(engine: Trainer) -> None:
        if engine.state.iteration == iteration:
            raise PlugPulled

    with pytest.raises(PlugPulled):
        run.train(**options)


# ------------------------------------------------------------------------------------------------------- runs that warn


def saving_run(
    folder: Path | None, *handlers: Any, epochs: int = 1, every: Every | None = None, **arguments: Any
) -> Trainer:
    saving = [] if folder is None else [Checkpointer(folder, every=every, at_end=False)]
    return trainer({"max_epochs": epochs, "seed": 1}, handlers=[*saving, *handlers], **arguments)


def warnings_of(run: Trainer) -> list[dict[str, Any]]:
    """The warnings of a run, without their level."""
    with structlog.testing.capture_logs() as logs:
        run.train()
    return [{k: v for k, v in entry.items() if k != "log_level"} for entry in logs if entry["log_level"] == "warning"]


# ---------------------------------------------------------------------------------------- runs on bad data, with guards


ROWS, BATCH = 64, 4


def guarded_data(bad_rows: tuple[int, ...] = (), scale: float = float("nan")) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    for row in bad_rows:
        inputs[row, 2] = scale if scale != scale else inputs[row, 2]
        targets[row] *= scale if scale == scale else 1.0
    return TensorDataset(inputs, targets)


def guarded_run(
    *handlers: Any,
    dataset: TensorDataset | None = None,
    model: nn.Module | None = None,
    shuffle: bool = False,
    validates: bool = False,
    **settings: Any,
) -> Trainer:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    options = {"max_epochs": 1, "optimizer": "adamw", "learning_rate": 0.01, "schedule": None, "seed": 3}
    return Trainer(
        model,
        DataLoader(dataset or guarded_data(), batch_size=BATCH, shuffle=shuffle),
        DataLoader(guarded_data(), batch_size=BATCH) if validates else None,
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(**{**options, **settings}),
        handlers=list(handlers),
    )


# ------------------------------------------------------------------------------------------------------ runs that crash


SECRET = "hunter2-hunter2"
BAD_ROW = 13


class RejectsNonFinite(SupervisedStrategy):
    """Raises if the loss is not finite."""

    def compute_loss(self, outputs, batch):
        password = SECRET
        loss = super().compute_loss(outputs, batch)
        if not bool(loss.isfinite()):
            raise FloatingPointError(f"no number, and {len(password)} more")
        return loss


class BrokenRows(Dataset):
    def __init__(self, broken=None):
        self.broken = broken

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == self.broken:
            raise IndexError(f"row {index} is broken")
        return torch.full((3,), float(index)), torch.ones(1)


def planted(rows=20):
    inputs = torch.randn(rows, 3)
    inputs[BAD_ROW, 1] = float("nan")
    return TensorDataset(inputs, torch.ones(rows, 1))


def crashing_trainer(data, *handlers, validation=None, **config):
    torch.manual_seed(0)
    return Trainer(
        nn.Linear(3, 1),
        DataLoader(data, batch_size=4, shuffle=True),
        validation,
        strategy=RejectsNonFinite("mse"),
        config=TrainingConfig(**{"max_epochs": 2, "seed": 1, "optimizer": "adamw", **config}),
        handlers=handlers,
    )


def crashed(run, error=Exception):
    with pytest.raises(error) as caught:
        run()
    return caught.value


def breaking(batch, at=1):
    def step(engine, given):
        if engine.state.iteration == at:
            raise ValueError("boom")
        return 1.0 / engine.state.iteration

    return Engine(step, name="trainer"), [batch] * 3
