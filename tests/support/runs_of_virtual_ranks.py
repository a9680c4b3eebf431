"""Trainers whose batches are divided among virtual ranks, and what is compared of their runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pulsetrain import Trainer
from pulsetrain.engine import Every, TorchBackend
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import Checkpointer, EventRecorder, Fingerprints
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import make_with

__all__ = ["Noisy", "bits_of", "losses_in", "net", "run_on", "tree", "virtual"]


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Pairs whose inputs are augmented by random numbers."""

    def __init__(self, rows: int) -> None:
        self.pairs = pairs(rows)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.pairs[index]
        return inputs + 0.1 * torch.randn(4), targets


def tree(virtual: int = 4) -> TorchBackend:
    made: TorchBackend = TorchBackend("cpu", topology=Topology(virtual=virtual, reduction="tree"))
    return made


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.LayerNorm(16), nn.Linear(16, 1))


def virtual(run: Path | None, *handlers: Any, count: int = 4, model: nn.Module | None = None, **config: Any) -> Trainer:
    """Dropout, augmentation, AdamW, clipping, accumulation, and a last batch of one sample; saves each iteration."""
    saving = [] if run is None else [
        Checkpointer(run, Every(iterations=1), keep_last=99), EventRecorder(run, grad_norm=True),
        Fingerprints(Every(updates=1), batches=True),
    ]  # fmt: skip
    settings: dict[str, Any] = {
        "max_epochs": 3, "optimizer": "adamw", "learning_rate": 0.01, "clip_grad_norm": 0.5, "accumulate": 2,
        "log_every_n_steps": 4, "schedule": "cosine",
    }  # fmt: skip
    return make_with(
        net() if model is None else model, DataLoader(Noisy(17), 4, shuffle=True), DataLoader(pairs(9), 2),
        *saving, *handlers, backend=tree(count), **{**settings, **config},
    )  # fmt: skip


def bits_of(trainer: Trainer) -> dict[str, bytes]:
    """The bytes of the weights and of the optimizer's state."""
    state = trainer.optimizer.state_dict()["state"]
    named = {
        **trainer.model.state_dict(),
        **{f"{at} {name}": each for at, of in state.items() for name, each in of.items()},
    }
    return {name: torch.as_tensor(each).numpy().tobytes() for name, each in named.items()}


def losses_in(run: Path) -> dict[str, Any]:
    """What the log of rank 0 says of losses, metrics, norms and the state, in training and in validations."""
    fields = {
        "iteration_completed": lambda event: (event.output, event.lr),
        "gradients_ready": lambda event: event.payload,
        "metrics_logged": lambda event: {
            name: value for name, value in event.payload["metrics"].items() if not name.endswith("per_second")
        },
        "validation_completed": lambda event: event.payload["metrics"],
        "state_fingerprinted": lambda event: event.payload,
    }
    log = EventLog(run, 0)
    return {
        name: [(event.engine, event.iteration, field(event)) for event in log.read(event=name) if event.ord >= 0]
        for name, field in fields.items()
    }


def run_on(processes: int, body: Callable[[int], Any], limit: float = 60.0) -> list[Any]:
    """What the body gives in each of so many processes, all forked, so that they compute alike."""

    def alone(rank: int) -> Any:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        return body(rank)

    ended = in_processes(body if processes > 1 else alone, processes, limit=limit)
    assert not any(each.error for each in ended), "\n".join(each.error + each.stderr for each in ended)
    return [each.value for each in ended]
