"""Activation checkpointing: activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.module_names import names_like

__all__ = ["recompute_activations"]


class _Recomputed:
    """A module's forward that keeps only its inputs; costs a second forward pass (Chen et al. 2016)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = module.forward

    def __call__(self, *args: object, **kwargs: Any) -> object:
        if torch.compiler.is_compiling():  # a compiled graph has no side effects to undo, and takes no contexts
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(self.module)


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """Normalisation updates copies of its running statistics, so that it does not count the batch twice."""
    counting = [each for each in module.modules() if getattr(each, "track_running_stats", False) and each.training]
    kept = [(each, dict(each.named_buffers(recurse=False))) for each in counting]
    for each, buffers in kept:
        for name, buffer in buffers.items():
            setattr(each, name, buffer.clone())
    try:
        yield
    finally:
        for each, buffers in kept:
            for name, buffer in buffers.items():
                setattr(each, name, buffer)


def recompute_activations(model: nn.Module, pattern: str | None) -> list[str]:
    """Let the modules with these names recompute their activations; the effect of an earlier call is undone first.

    Outputs, gradients, random draws (dropout) and running statistics stay the same bit for bit.

    Args:
        pattern: a name, in which `*` matches anything between two dots: "blocks.*"; None for no module.

    Returns:
        The names of the modules.

    Raises:
        ConfigurationError: no module has such a name.

    >>> recompute_activations(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "*")
    ['0', '1']
    """
    modules = dict(model.named_modules())
    for module in modules.values():
        if isinstance(module.__dict__.get("forward"), _Recomputed):
            earlier = module.__dict__.pop("forward")
            if getattr(earlier.forward, "__func__", None) is not type(module).forward:
                module.forward = earlier.forward  # which was the user's own
    if pattern is None:
        return []
    found = names_like(model, pattern)
    if not found:
        raise ConfigurationError(
            f"no module of {type(model).__name__} has such a name; "
            f"there are: {', '.join(list(modules)[1:9]) or 'none at all'}{' ...' if len(modules) > 9 else ''}",
            activation_checkpointing=pattern,
        )
    idle = [name for name in found if type(modules[name]).forward is nn.Module.forward]
    if idle:
        raise ConfigurationError(
            f"{idle[0]!r} is a {type(modules[idle[0]]).__name__}, which computes nothing itself; name what is in it: "
            f"{idle[0] + '.*'!r}",
            activation_checkpointing=pattern,
        )
    for name in found:
        modules[name].forward = _Recomputed(modules[name])
    return found
