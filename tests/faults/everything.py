"""A run that uses everything its next iteration may depend on, and its outcome for comparisons."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ignite.metrics import Average
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.engine.backends.torch import TorchBackend
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.records import deterministic, encode
from pulsetrain.engine.step.accumulation import Accumulate
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.handlers import EMA, Checkpointer, CSVLogger, EarlyStopping, EventRecorder

ROWS, BATCH = 24, 3  # so 8 batches a pass
EPOCHS = 4
# `seq` counts what a resume fires besides, `seams` the resumes; `starts` has an id of each start, and `run` that of the
# folder's run
OF_THE_LOG = tuple(f"EventRecorder/state/{name}" for name in ("seq", "run", "seams", "starts"))
OBSERVED = ("seconds", "samples_per_second", "tokens_per_second")


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """No row is read twice alike: each is disturbed from python's, numpy's and torch's generators."""

    def __init__(self) -> None:
        self.inputs = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.inputs[index]
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1) + 0.1 * torch.randn(6)
        return row + noise, row.sum(0, keepdim=True)


class Disturbed(nn.Module):
    """Draws from every generator in training, and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.dropout(torch.relu(self.norm(self.first(inputs))), 0.3, self.training)
        if self.training:
            hidden = hidden + random.gauss(0, 0.1) + np.random.normal(0, 0.1, 99).mean()  # numpy keeps 624 words
        return self.last(hidden)


class CountsTokens(SupervisedStrategy):
    """Has a state: how many batches it has prepared, on which their targets depend."""

    def __init__(self, loss: str) -> None:
        super().__init__(loss)
        self.prepared = 0

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        made = super().prepare_batch(batch)
        self.prepared += 1
        return replace(made, targets=made.targets * (1 + 0.01 * (self.prepared % 7)), tokens=made.inputs.numel())

    def state_dict(self) -> dict[str, int]:
        return {"prepared": self.prepared}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.prepared = state["prepared"]


def make(
    folder: Path,
    *,
    workers: int = 0,
    every: Every | None = None,
    background: bool = False,
    keep_last: int = 3,
    precision: str = "fp32",
    accumulate: int | Accumulate = 3,
    schedule: str | None = "cosine",
    loader: Any = None,
) -> Trainer:
    """Always the same run: another folder or number of workers changes nothing."""
    trainer = Trainer(
        Disturbed(),
        loader or DataLoader(Augmented(), BATCH, shuffle=True, num_workers=workers),
        # the target with its sign reversed: the first validation stays the best
        DataLoader([(torch.full((6,), 0.1 * n), torch.full((1,), -0.6 * n)) for n in range(6)], 3),
        strategy=CountsTokens("mse"),
        backend=TorchBackend(gradient_scale=2.0**18),  # fp16 overflows at first, and then learns
        config=TrainingConfig(
            max_epochs=EPOCHS,
            optimizer="adamw",
            weight_decay=0.01,
            learning_rate=0.05,
            accumulate=accumulate,
            schedule=schedule,
            warmup_steps=3 if schedule else 0,
            clip_grad_norm=1.0,
            precision=precision,
            seed=11,
            log_every_n_steps=3,
        ),
        handlers=[
            EMA(decay=0.9, every=Every(updates=1, epochs=1)),
            Checkpointer(
                folder,
                every=every or Every(iterations=1),
                background=background,
                keep_last=keep_last,
                metric="val/loss",
            ),
            EarlyStopping(patience=50),
            EventRecorder(folder),
            CSVLogger(folder),
        ],
    )
    Average(output_transform=lambda output: output["loss"]).attach(trainer, "mean_loss")

    @trainer.on(Events.ITERATION_COMPLETED)
    def log_a_value(engine: Trainer) -> None:
        engine.log("counted", engine.state.iteration)

    if schedule is None:

        @trainer.on(Events.ITERATION_COMPLETED(once=4))
        def lower(engine: Trainer) -> None:
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.5

    return trainer


def outcome(folder: Path) -> dict[str, Any]:
    """The named contents of a run's folder: its checkpoints' whole states, its log, its metrics."""
    checkpoints = {}
    for saved in CheckpointManager(folder / "checkpoints").valid():
        for path, value in leaves(load_checkpoint(saved)):
            if not path.endswith(OF_THE_LOG):
                checkpoints[f"{saved.name}/{path}"] = bits(value)
    return {
        **checkpoints,
        **{f"log/{place}": record for place, record in logged(folder)},
        **{f"metrics/{number}": row for number, row in enumerate(table(folder / "metrics.csv"))},
    }


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested mappings and lists of mappings, with its path."""
    inner: list[tuple[Any, Any]] | None = None
    if isinstance(state, dict):
        inner = list(state.items())
    elif isinstance(state, (list, tuple)) and any(isinstance(item, dict) for item in state):
        inner = list(enumerate(state))
    if not inner:  # an empty one is a value like any other
        yield path, state
        return
    for key, value in inner:
        yield from leaves(value, f"{path}/{key}" if path else str(key))


def bits(value: Any) -> Any:
    """For a comparison: NaN equals itself, -0.0 is not 0.0."""
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    return repr(value)


def logged(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The events of a log by their place, those that a resume has computed again as they came last."""
    for event in EventLog(folder).read():
        if event.ord >= 0:
            yield f"{event.ord:09d}", deterministic(event, encode(event))


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv without what was measured by the clock."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if name not in OBSERVED} for row in rows]
