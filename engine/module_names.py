"""Modules of a model by patterns of their names."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

__all__ = ["names_like"]


def names_like(model: nn.Module, pattern: str) -> list[str]:
    """The names of a model's modules that fit a pattern, in which `*` matches anything between two dots.

    >>> names_like(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())), "*.0")
    ['1.0']
    """
    wanted = pattern.split(".")
    parts = {name: name.split(".") for name, _ in model.named_modules() if name}
    return [name for name, each in parts.items() if len(each) == len(wanted) and all(map(fnmatchcase, each, wanted))]
