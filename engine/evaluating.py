"""A model in eval mode for a while, and every module afterwards in the mode it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["eval_mode"]


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
