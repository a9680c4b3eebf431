"""Models and texts for pipelines of two processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.byte_lm.model import ByteGPT
from pulsetrain.engine import TorchBackend
from pulsetrain.engine.data.sequences import IGNORED
from tests.support.runs_of_shards import sharded

__all__ = ["gpt", "layers", "pipelined", "texts"]


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Dropout(0.0),
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1),
    ).double()  # fmt: skip


def pipelined(**topology: Any) -> TorchBackend:
    return sharded(**{"shard": 1, "pipeline": 2, **topology})


def texts(count: int, *, packed: bool = False) -> list[dict[str, Tensor]]:
    """Rows of which each has another number of trained tokens."""
    generator, rows = torch.Generator().manual_seed(1), []
    for at in range(count):
        tokens = torch.randint(1, 32, (13,), generator=generator)
        labels = torch.where(torch.arange(13) < at % 11, IGNORED, tokens)
        rows.append({"input_ids": tokens, "labels": labels})
        if packed:
            rows[-1]["position_ids"] = torch.cat([torch.arange(3 + at % 5), torch.arange(10 - at % 5)])
    return rows


def gpt(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return ByteGPT(layers=4, width=16, heads=2, context=16, vocabulary=32).to(dtype)
