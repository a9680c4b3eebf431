"""Warns of parameters that require gradients and are in no group of the optimizer, so that nothing trains them."""

from __future__ import annotations

import torch
from torch import nn

from pulsetrain.engine.backends.module_view import reading_once
from pulsetrain.engine.logs import get_logger

__all__ = ["UntrainedParameters"]


class UntrainedParameters:
    """Finds the parameters of a model that were frozen when the optimizer was made, and are not any more.

    Args:
        model: whose parameters.
        optimizer: what trains them. One that holds other objects, such as values, is not looked at.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._reported = False
        self._outside: list[tuple[str, nn.Parameter]] | None = None  # in no group when they were last looked for

    def begin_epoch(self) -> None:
        """Look for the parameters outside of all groups again: a handler may have added some of either."""
        self._outside = None

    def warn(self) -> None:
        """Warn once if a parameter requires gradients and is in no group."""
        if self._reported:
            return
        if self._outside is None:
            self._outside = self._find()
        if not any(parameter.requires_grad for _, parameter in self._outside):
            return
        self._outside = self._find()  # a handler may have added a group for them
        untrained = [name for name, parameter in self._outside if parameter.requires_grad]
        if untrained:
            self._reported = True
            get_logger("pulsetrain").warning(
                "parameters that require gradients are not trained, since they are in no group of the optimizer: it "
                "was made while they were frozen, or they were added later; freeze parameters after the Trainer is "
                "made, or add them with optimizer.add_param_group()",
                first=untrained[0],
                parameters=len(untrained),
            )

    def _find(self) -> list[tuple[str, nn.Parameter]]:
        groups = getattr(self._optimizer, "param_groups", ())
        with reading_once(self._model):
            held = {id(parameter) for group in groups for parameter in group["params"]}
            parameters = list(self._model.named_parameters())
        outside = [(name, parameter) for name, parameter in parameters if id(parameter) not in held]
        return outside if len(outside) < len(parameters) else []
