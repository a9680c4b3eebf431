"""A small configuration for the command line to train."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

from pulsetrain.cli import main
from tests.support.ranks import in_processes

MODEL = """
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width: int = 8):
            if width % 2:
                raise ValueError(f"Net(width={width}): needs an even width")
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, 1))

        def forward(self, x):
            return self.layers(x)

    class Late(Net):
        calls = 0

        def forward(self, x):
            Late.calls += 1
            if Late.calls > 3:
                raise RuntimeError("it broke in the middle")
            return super().forward(x)
"""
DATA = """
    import time
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def loaders(rows: int = 20, features: int = 4):
        inputs = torch.randn(rows, features)
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)

    def nothing():
        return []

    class Endless:  # each batch a little late, until a file says that it is enough
        def __iter__(self):
            while True:
                time.sleep(0.01)
                print("batch", flush=True)
                yield torch.ones(4, 4), torch.ones(4, 1)

    class Stuck:
        def __iter__(self):
            yield torch.ones(4, 4), torch.ones(4, 1)
            print("batch", flush=True)
            time.sleep(60)
"""
CONFIG = """
    run: runs/tiny-{n}
    model: {class_path: model.Net, init_args: {width: 8}}
    data: data.loaders
    strategy: {class_path: SupervisedStrategy, init_args: {loss: mse}}
    training: {max_epochs: 2, learning_rate: 1e-2, optimizer: sgd, seed: 3}
    handlers: [{class_path: Checkpointer, init_args: {metric: val/loss}}, CSVLogger]
"""


def train(*words: str) -> int:
    return main(["train", "config.yaml", *words])


def files() -> list[str]:
    """The files in the current folder, without caches."""
    return sorted(str(path) for path in Path().rglob("*") if "__pycache__" not in path.parts)


def by_two(words: list[str]) -> list[tuple[int, str]]:
    """The status of each process, and what it wrote to stdout."""

    ended = in_processes(lambda rank: main_and_said(words))
    assert [each.error for each in ended] == ["", ""]
    return [each.value for each in ended]


def main_and_said(words: list[str]) -> tuple[int, str]:
    """The status of a command line in this process, and what it wrote to stdout."""
    with redirect_stdout(io.StringIO()) as out:
        return main(words), out.getvalue()
