"""The data: change it here."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


def loaders(batch_size: int = 32) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The training set and the validation set."""
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    training, validation = random_split(digits, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(training, batch_size=batch_size, shuffle=True), DataLoader(validation, batch_size=256)
