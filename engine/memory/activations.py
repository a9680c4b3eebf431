"""Activation checkpointing: activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.memory.operators import changes_arguments, draws, operators_of
from pulsetrain.engine.module_names import names_like
from pulsetrain.engine.step.memory_settings import ActivationCheckpointing

__all__ = ["recompute_activations"]

_SAVES = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class _Selection:
    """Decides which results of operators are kept; a policy of torch's."""

    def __init__(self, setting: ActivationCheckpointing) -> None:
        self._setting = setting
        self._keep, self._policy = operators_of(tuple(setting.keep)), setting.policy

    def __reduce__(self) -> tuple[object, ...]:
        return _Selection, (self._setting,)  # operators cannot be pickled

    def __call__(self, context: Any, operator: Any, /, *arguments: Any, **named: Any) -> CheckpointPolicy:
        is_kept = operator in self._keep
        if self._policy is not None:
            is_kept = self._policy(context, operator, *arguments, **named) in _SAVES
        if is_kept and not _has_effects(operator, arguments, named):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _has_effects(operator: Any, arguments: Sequence[object], named: Mapping[str, object]) -> bool:
    """Whether leaving a call out would change what follows it: random numbers, or a tensor that it writes into."""
    is_overload = isinstance(operator, OpOverload)
    return is_overload and (changes_arguments(operator) or draws(operator, arguments, named))


class _Recomputed:
    """A module's forward that keeps only its inputs; costs a second forward pass (Chen et al. 2016)."""

    def __init__(self, module: nn.Module, setting: ActivationCheckpointing) -> None:
        self.module, self.forward = module, module.forward
        selects = setting.keep or setting.policy is not None
        self._selecting = partial(create_selective_checkpoint_contexts, _Selection(setting)) if selects else None

    def __call__(self, *args: object, **kwargs: Any) -> object:
        contexts: dict[str, Any] = {"context_fn": self._contexts}
        if torch.compiler.is_compiling():  # a compiled graph has no side effects to undo, and takes no other contexts
            contexts = {} if self._selecting is None else {"context_fn": self._selecting}
        return checkpoint(self.forward, *args, use_reentrant=False, **contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if self._selecting is None:
            return nullcontext(), _statistics_kept(self.module)
        saving, reading = self._selecting()
        return saving, _statistics_kept(self.module, reading)


@contextmanager
def _statistics_kept(module: nn.Module, inside: AbstractContextManager[Any] | None = None) -> Iterator[None]:
    """Normalisation updates copies of its running statistics, so that it does not count the batch twice."""
    counting = [each for each in module.modules() if getattr(each, "track_running_stats", False) and each.training]
    kept = [(each, dict(each.named_buffers(recurse=False))) for each in counting]
    for each, buffers in kept:
        for name, buffer in buffers.items():
            setattr(each, name, buffer.clone())
    try:
        with inside or nullcontext():  # entered last: it counts the operators that are called
            yield
    finally:
        for each, buffers in kept:
            for name, buffer in buffers.items():
                setattr(each, name, buffer)


def recompute_activations(model: nn.Module, setting: str | ActivationCheckpointing | None) -> list[str]:
    """Let modules recompute their activations; the effect of an earlier call is undone first.

    Outputs, gradients, random draws (dropout) and running statistics stay the same bit for bit.

    Args:
        setting: the names of modules, alone or with what they keep; None for no module.

    Returns:
        The names of the modules.

    Raises:
        ConfigurationError: no module has such a name, or no operator has one of the names to keep.

    >>> recompute_activations(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "*")
    ['0', '1']
    """
    modules = dict(model.named_modules())
    for module in modules.values():
        if isinstance(module.__dict__.get("forward"), _Recomputed):
            earlier = module.__dict__.pop("forward")
            if getattr(earlier.forward, "__func__", None) is not type(module).forward:
                module.forward = earlier.forward  # which was the user's own
    if setting is None:
        return []
    if isinstance(setting, str):
        setting = ActivationCheckpointing(setting)
    pattern = setting.modules
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
    operators_of(tuple(setting.keep))  # it refuses unknown ones
    found = found[:: setting.every]
    for name in found:
        modules[name].forward = _Recomputed(modules[name], setting)
    return found
