"""A loss, samplers and datasets that change while a run uses them; some of them save it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from tests.support.models import pairs
from tests.support.runs_hidden_state import ROWS


class Averaging(nn.Module):
    """A loss relative to its average so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = (outputs - targets).square().mean()
        self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean


class Sampling(Sampler[int]):
    def __init__(self) -> None:
        self.rows, self.passed = list(range(ROWS)), 0

    def __len__(self) -> int:
        return ROWS


class Shuffling(Sampling):
    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(ROWS).tolist()
        self.rows = [self.rows[place] for place in order]
        return iter(list(self.rows))


class SavedShuffling(Shuffling):
    """Leaves out some rows, too, from the second epoch on."""

    level = 0

    def __iter__(self) -> Iterator[int]:
        for row in super().__iter__():
            yield row - row % (self.level + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.level = list(state["rows"]), state["level"]


class Rows(Dataset[Any]):
    """Its rows depend on what it remembers."""

    def __init__(self) -> None:
        self.pairs, self.cache, self.count, self.level = pairs(ROWS), {}, 0, 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        inputs, targets = self.pairs[row]
        return inputs + self.level, targets


class CountingRows(Rows):
    def __getitem__(self, row: int) -> Any:
        self.count += 1
        inputs, targets = self.pairs[row]
        return inputs + self.count / 10, targets


class SavedRows(CountingRows):
    def __getitem__(self, row: int) -> Any:
        inputs, targets = super().__getitem__(row)
        return inputs + self.level, targets

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.level = state["count"], state["level"]
