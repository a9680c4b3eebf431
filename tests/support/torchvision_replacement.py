"""What pytorch-ignite's examples use of torchvision, over scikit-learn's digits: nothing is downloaded.

A program that finds this file under the name torchvision.py imports it in torchvision's place. Images are arrays of
uint8, shape (height, width, channels).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset


def digits(train: bool, size: int, channels: int) -> tuple[np.ndarray, list[int]]:
    """512 or 256 digits, enlarged to `size` pixels a side."""
    found = load_digits()
    chosen = slice(0, 512) if train else slice(512, 768)
    images = torch.from_numpy(found.images[chosen] * 15.9).float().unsqueeze(1)
    large = nn.functional.interpolate(images, size=(size, size)).movedim(1, 3).expand(-1, -1, -1, channels)
    return large.to(torch.uint8).numpy(), [int(each) for each in found.target[chosen]]


class _Images(Dataset):
    size, channels = 28, 1

    def __init__(
        self, root: object = ".", train: bool = True, transform: Callable[[Any], Any] | None = None, **_: object
    ) -> None:
        self.data, self.targets = digits(train, self.size, self.channels)
        self.transform = transform or (lambda image: image)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.data[index]), self.targets[index]


class MNIST(_Images):
    """Digits in the shape of MNIST's."""


class CIFAR10(_Images):
    """Digits in the shape of CIFAR-10's images."""

    size, channels = 32, 3


class FakeData(_Images):
    """200 digits of 64 pixels a side."""

    size, channels = 64, 3

    def __len__(self) -> int:
        return 200


class Compose:
    """One transform after the other."""

    def __init__(self, transforms: list[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for each in self.transforms:
            image = each(image)
        return image


class ToTensor:
    """To floats from 0 to 1, shape (channels, height, width)."""

    def __call__(self, image: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(image.copy()).movedim(2, 0).float() / 255


class Normalize:
    """Shifts and scales each channel."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std


class Unchanged:
    """A resize or a crop of images that have the size already."""

    def __init__(self, size: object) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        return image


def save_image(images: torch.Tensor, path: Path, **_: object) -> None:
    """Write the file, as a tensor."""
    torch.save(images, path)


def resnet34(weights: object = None) -> nn.Module:
    """A small network with a final layer `fc`, which the examples replace."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    network.add_module("fc", nn.Linear(64, 10))
    return network


def _submodule(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(f"{__name__}.{name}")
    vars(module).update(contents)
    sys.modules[module.__name__] = module
    return module


datasets = _submodule("datasets", MNIST=MNIST, CIFAR10=CIFAR10, FakeData=FakeData)
transforms = _submodule(
    "transforms",
    Compose=Compose,
    ToTensor=ToTensor,
    Normalize=Normalize,
    Resize=Unchanged,
    CenterCrop=Unchanged,
)
utils = _submodule("utils", save_image=save_image)
models = _submodule("models", resnet34=resnet34)
