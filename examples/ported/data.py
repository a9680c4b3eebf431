"""The data of the ported programs: scikit-learn's digits, and the source of Python's standard library."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, random_split

from examples.byte_lm.data import ByteWindows, standard_library

Batches = Iterable[Any]
"""Gives its batches each time it is iterated."""
Loaders = tuple[Batches, Batches]
"""For training and for validation."""

WORDS = 2000  # the commonest ones have a number each; all others share the number 0


def digits() -> Loaders:
    """Images (batch, 64) from 0 to 1, and labels (batch,)."""
    pixels, labels = load_digits(return_X_y=True)
    return _split(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))


def images() -> Loaders:
    """Pairs of the same images (batch, 64): what an autoencoder reads, and what it should return."""
    pixels = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    return _split(pixels, pixels)


def real_images() -> DataLoader[Any]:
    """Images (batch, 64) from -1 to 1, in a list with one entry."""
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    return DataLoader(TensorDataset(pixels), batch_size=64, shuffle=True, drop_last=True)


def words(length: int = 32, windows: int = 400) -> Loaders:
    """Words (batch, length + 1) of the standard library, cut at white space; the last one is only a target."""
    texts = [
        " ".join(file.read_text(encoding="utf-8", errors="replace") for file in files).split()
        for files in standard_library()
    ]
    numbers = {word: number for number, (word, _) in enumerate(Counter(texts[0]).most_common(WORDS - 1), start=1)}
    tokens = [torch.tensor([numbers.get(word, 0) for word in text]) for text in texts]
    return _loaders(*(each.unfold(0, length + 1, length)[:windows] for each in tokens))


def text(context: int = 64, windows: int = 400) -> Loaders:
    """Bytes (batch, context + 1) of the standard library; the last one is only a target."""
    sources = [ByteWindows(files, context=context) for files in standard_library()]
    return _loaders(*(torch.stack([each[number] for number in range(windows)]) for each in sources))


def _split(inputs: Tensor, targets: Tensor) -> Loaders:
    parts = random_split(TensorDataset(inputs, targets), [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(parts[0], batch_size=32, shuffle=True), DataLoader(parts[1], batch_size=256)


def _loaders(training: Any, validation: Any) -> Loaders:
    return DataLoader(training, batch_size=16, shuffle=True), DataLoader(validation, batch_size=64)
