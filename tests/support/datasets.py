"""Datasets that show which samples are read and what is drawn for them, and the values of their batches."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Reading(Dataset[torch.Tensor]):
    """Knows which samples were read; the value is the index."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor(index)


class Augmenting(Dataset[torch.Tensor]):
    """Each sample with what python, numpy and torch draw for it."""

    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def flat(lists: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]
