"""What the memory of a run depends on, also as tensors without values, for which nothing is allocated."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers import NamedOptimizers
from pulsetrain.engine.step.backend import InPlaceBackend
from pulsetrain.engine.step.protocols import BackendSettings, Strategy, TrainingBatch, TrainingStrategy, Tree

__all__ = ["Setup", "SettledBackend", "faked", "mode_of", "model_without_values", "no_values", "without_values"]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)  # other kinds know themselves how they are copied


class SettledBackend(InPlaceBackend, Protocol):
    """A backend that trains in place and shows its settings, as TorchBackend does."""

    settings: BackendSettings
    """What it was configured with, and what its constructor was given in place of that."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run that need memory.

    Args:
        model: on the backend's device, or on any device if it has no values.
        optimizer: over the model's parameters.
        strategy: one with a single loss.
        backend: computes in place.
        batch: as the loader gives it.
        accumulate: batches per update.

    Raises:
        ConfigurationError: the strategy trains several modules in turns.
    """

    model: nn.Module
    optimizer: Optimizer
    strategy: Strategy
    backend: SettledBackend
    batch: Tree
    accumulate: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, NamedOptimizers) or not isinstance(self.strategy, TrainingStrategy):
            raise ConfigurationError(
                "trains several modules in turns, and the memory of a run is estimated for one loss alone",
                "Setup",
                strategy=type(self.strategy),
            )

    def with_settings(self, **changes: Any) -> Setup:
        """The same with other settings of the backend; activation checkpointing has to be applied separately."""
        backend = type(self.backend)()
        backend.configure(replace(self.backend.settings, **changes))
        return replace(self, backend=backend)


def no_values() -> FakeTensorMode:
    """A context in which tensors have a shape, a type and a device, and neither values nor memory.

    >>> with no_values():
    ...     weight = torch.empty(2**20, 2**20)
    >>> weight.nbytes, weight.device
    (4398046511104, device(type='cpu'))
    """
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def mode_of(setup: Setup) -> FakeTensorMode | None:
    """The context in which all tensors of the model were made; None if one of them has values."""
    modes = {
        each.fake_mode if isinstance(each, FakeTensor) else None
        for each in (*setup.model.parameters(), *setup.model.buffers())
    }
    return modes.pop() if len(modes) == 1 else None


def without_values(setup: Setup) -> Setup:
    """A copy of the model, the optimizer and the strategy without values; the optimizer has made no update yet."""
    memo: dict[int, object] = {id(setup.optimizer.state): defaultdict(dict)}
    parts = setup.model, setup.optimizer, setup.strategy
    model, optimizer, strategy = _copied(parts, setup.model, no_values(), memo, setup.backend.device)
    return replace(setup, model=model, optimizer=optimizer, strategy=strategy)


def model_without_values(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy of a model as if all of it were on that device.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(2**20, 2**20)
    >>> model_without_values(model, no_values(), torch.device("cpu")).weight.device
    device(type='cpu')
    """
    copied: nn.Module = _copied(model, model, mode, {}, device, moves=True)
    return copied


def _copied(
    value: Any,
    model: nn.Module,
    mode: FakeTensorMode,
    memo: dict[int, object],
    device: torch.device,
    moves: bool = False,
) -> Any:
    """A copy in which the model's tensors without a device, or all of them, are on this one."""
    held = {id(each): each for part in model.modules() for each in vars(part).values() if isinstance(each, Tensor)}
    held |= {id(each): each for each in (*model.parameters(), *model.buffers())}
    with mode:
        for each in held.values():
            if (moves or each.is_meta) and type(each) in _PLAIN:
                made = torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device=device)
                memo[id(each)] = nn.Parameter(made, each.requires_grad) if isinstance(each, nn.Parameter) else made
    with mode, FakeCopyMode(mode):
        return copy.deepcopy(value, memo)


def faked(value: Tree, mode: FakeTensorMode) -> Tree:
    """A batch, or what a strategy made of it, without values; what shares memory still does."""

    def fake(each: object) -> object:
        if not isinstance(each, Tensor) or isinstance(each, FakeTensor):
            return each
        return mode.from_tensor(each, static_shapes=True)

    if isinstance(value, TrainingBatch):
        inputs, targets, weight = (tree_map(fake, each) for each in (value.inputs, value.targets, value.weight))
        return TrainingBatch(inputs, targets, value.samples, value.tokens, weight)
    return tree_map(fake, value)
