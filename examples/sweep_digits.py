"""The model and the data of examples/sweep.yaml: handwritten digits, which come with scikit-learn.

pulsetrain sweep examples/sweep.yaml
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """1,438 digits for training, and 359 for validation."""
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    training, validation = random_split(digits, [0.8, 0.2])
    return DataLoader(training, batch_size=32, shuffle=True), DataLoader(validation, batch_size=256)


def model(width: int = 128) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
