"""Trainers for processes that share one small model out, and what they have learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain import Trainer
from pulsetrain.engine import Every, TorchBackend
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.support.runs_of_ranks import double, make_with

__all__ = ["KINDS", "apart", "net", "saving", "sharded", "trained", "whole_of"]


class Kind(NamedTuple):
    """How many processes there are, their topology (None for copies of the whole model), and their global batch."""

    processes: int
    topology: dict[str, Any] | None = None
    batch_size: int = 4


KINDS = {
    "one": Kind(1),
    "ddp": Kind(2),
    "fsdp": Kind(2, {}),
    "three": Kind(3, {"shard": 3}, 6),
    "four": Kind(4, {"shard": 4}),
    "copies": Kind(4, {"replicate": 2}),
    "pipeline": Kind(2, {"shard": 1, "pipeline": 2}),
    "pipelines": Kind(4, {"shard": 1, "pipeline": 2}),
    "pipelines of shards": Kind(4, {"pipeline": 2}),
}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0), nn.Tanh(), nn.Linear(5, 1)).double()


def sharded(**topology: Any) -> TorchBackend:
    made: TorchBackend = TorchBackend("cpu", topology=Topology(**{"shard": 2, **topology}))
    return made


def trained(made: Trainer, resume: str | None = None) -> dict[str, Any]:
    history = made.train(resume=resume)
    here = {name: each for name, each in made.model.state_dict().items() if not each.is_meta}
    weights = {name: whole_of(each).tolist() for name, each in here.items()}
    return {"weights": weights, "val": history.get("val/loss"), "sharded": is_sharded(made.model)}


def whole_of(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of the weights and of the validations."""
    found = [
        (torch.tensor(each, dtype=torch.float64) - torch.tensor(b["weights"][name], dtype=torch.float64)).abs().max()
        for name, each in a["weights"].items()
    ]
    found += [(torch.tensor(a["val"]).double() - torch.tensor(b["val"]).double()).abs().max()]
    return float(max(found))


def saving(
    run: Path, rank: int, kind: str, saver: dict[str, Any] | None = None, *further: Any, **config: Any
) -> Trainer:
    settings = {"max_epochs": 4, "optimizer": "adamw", "learning_rate": 0.01, "clip_grad_norm": 0.5, "accumulate": 2}
    _, topology, batch_size = KINDS[kind]
    handlers = [
        Checkpointer(run, **{"every": Every(iterations=3), "keep_last": 20, "metric": "val/loss", **(saver or {})}),
        EventRecorder(run),
        *further,
    ]
    return make_with(
        net(rank), DataLoader(double(17), batch_size, shuffle=True), DataLoader(double(9), 2), *handlers,
        backend=None if topology is None else sharded(**topology), **{**settings, **config},
    )  # fmt: skip
