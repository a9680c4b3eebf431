"""Calling a model: by whatever a batch holds for it, and in eval mode for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["call", "eval_mode"]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """What the model gives: a mapping goes to it as keyword arguments, a tuple or list as positional ones."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards each of its modules in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # by train(), which a module may override to do more, from the outside in
            if module.training != training:
                module.train(training)
        for module, training in modes:  # train() reaches into a module that several others share
            if module.training != training:
                module.training = training
