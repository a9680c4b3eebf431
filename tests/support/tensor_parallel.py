"""A small model with attention that several processes can compute together, and trainers for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer
from pulsetrain.engine import Every, TorchBackend
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.handlers import Checkpointer
from tests.support.runs_of_ranks import make_with

__all__ = ["TOPOLOGIES", "Attending", "Stack", "attending", "sequences"]


class Layout(NamedTuple):
    """How many processes there are, and how they share the model out; None for copies of it."""

    processes: int
    topology: dict[str, Any] | None = None


TOPOLOGIES = {
    "one": Layout(1),
    "copies": Layout(2),
    "shards": Layout(2, {"shard": 2}),
    "tensor": Layout(2, {"tensor": 2}),
    "sequence": Layout(2, {"tensor": 2, "sequence_parallel": True}),
    "shards of tensor": Layout(4, {"shard": 2, "tensor": 2}),
    "copies of tensor": Layout(4, {"replicate": 2, "tensor": 2}),
    "pipeline": Layout(2, {"pipeline": 2}),
    "tensor 4": Layout(4, {"tensor": 4, "sequence_parallel": True}),
}


class Attending(nn.Module):
    """One block of a transformer, with its queries, keys and values in one layer, between two linear layers."""

    tensor_plan: ClassVar[dict[str, Any]] = {
        "enter": "sequence_split",
        "norms.*": "sequence",
        "qkv": {"style": "colwise", "parts": 3, "units": 4},
        "mix": "rowwise",
        "up": "colwise",
        "down": "rowwise",
        "head": {"style": "colwise", "gather": True},
    }

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        # without a bias: the gradient for that of the keys is 0 but for rounding, which AdamW would enlarge
        self.qkv, self.mix = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, 3) to (batch, length, 4)."""
        x = self.enter(x)
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 2)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.mix(attended))
        x = x + self.dropout(self.down(self.up(self.norms[1](x)).relu()))
        found: Tensor = self.head(self.norms[2](x))
        return found.tanh()


class Stack(nn.Module):
    """Layers of which each process may have some, or a part of each."""

    tensor_plan: ClassVar[dict[str, Any]] = {"blocks.*.0": {"style": "colwise", "gather": True}}
    pipeline_plan = "blocks"

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.leave(x)
        return found.tanh()


def sequences(rows: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    drawn = torch.Generator().manual_seed(7)
    inputs = torch.randn(rows, 4, 3, generator=drawn, dtype=torch.float64)
    return TensorDataset(inputs.to(dtype), inputs.cumsum(1)[..., :1].expand(-1, -1, 4).sin().to(dtype))


def attending(
    layout: str,
    rank: int,
    *handlers: Any,
    dtype: torch.dtype = torch.float64,
    run: Path | None = None,
    rows: int = 17,
    model: nn.Module | None = None,
    **config: Any,
) -> Trainer:
    """A trainer of one of several processes; the model of each begins with other weights, of which rank 0's count."""
    torch.manual_seed(rank)
    topology = TOPOLOGIES[layout].topology
    settings = {"optimizer": "adamw", "learning_rate": 0.01, "clip_grad_norm": 0.5, **config}
    if run is not None:
        handlers = (*handlers, Checkpointer(run, every=Every(iterations=3), keep_last=20))
    return make_with(
        (Attending() if model is None else model).to(dtype),
        DataLoader(sequences(rows, dtype), 4, shuffle=True),
        DataLoader(sequences(6, dtype), 2),
        *handlers,
        backend=None if topology is None else TorchBackend("cpu", topology=Topology(**topology)),
        **settings,
    )
