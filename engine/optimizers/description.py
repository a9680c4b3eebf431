"""An optimizer as a text of one line."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from pulsetrain.engine.optimizers.named import parts_of

__all__ = ["describe_optimizer"]

_SHOWN = ("lr", "momentum", "betas", "weight_decay")


def describe_optimizer(optimizer: Optimizer) -> str:
    """Its class, and the rate, momentum and weight decay of its groups, before any schedule.

    >>> import torch
    >>> describe_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))
    'SGD(lr=0.1, momentum=0.9, weight_decay=0)'
    """
    parts = parts_of(optimizer).items()
    return "; ".join(f"{name}: {_one(each)}" if name else _one(each) for name, each in parts)


def _one(optimizer: Optimizer) -> str:
    shown = []
    for key in _SHOWN:
        groups = [group for group in optimizer.param_groups if key in group]
        values = [group.get("initial_lr", group[key]) if key == "lr" else group[key] for group in groups]
        texts = dict.fromkeys(_text(value) for value in values)
        if texts:
            shown.append(f"{key}={' or '.join(texts)}")
    kind = getattr(optimizer, "kind", type(optimizer).__name__)
    return f"{kind}({', '.join(shown)})"


def _text(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    return f"{float(value):.6g}" if isinstance(value, (float, Tensor)) else str(value)
