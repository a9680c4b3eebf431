"""Calling a model with the inputs of a batch, and running it in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from pulsetrain.engine.step.protocols import Tree

__all__ = ["call", "eval_mode", "evaluating"]

T = TypeVar("T")


def call(model: Callable[..., T], inputs: Tree) -> T:
    """Call the model: a mapping as keyword arguments, a tuple or list as positional ones.

    >>> call(max, (1, 3)), call(dict, {"x": 1}), call(str, 2)
    (3, {'x': 1}, '2')
    """
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def evaluating(strategy: object) -> AbstractContextManager[object]:
    """Around what is computed to be reported: without gradients, unless the strategy declares `needs_gradients`."""
    return torch.enable_grad() if getattr(strategy, "needs_gradients", False) else torch.no_grad()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards each of its modules is in its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # through train(), which a module may override; outer modules first
            if module.training != training:
                module.train(training)
        for module, training in modes:  # train() also reaches modules that several others share
            if module.training != training:
                module.training = training
