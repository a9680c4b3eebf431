"""Training steps in PyTorch on values, by torch.func: the module is a description, its weights are arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from pulsetrain.engine.backends.functional import FunctionalBackend
from pulsetrain.engine.backends.module_view import TensorsView
from pulsetrain.engine.backends.torch_computation import TorchComputation, no_gradient
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers.functional import create_functional
from pulsetrain.engine.optimizers.groups import decay_rule, trainable_of
from pulsetrain.engine.step.log_point import LogPoint, split_loss
from pulsetrain.engine.step.model_call import call, eval_mode, evaluating
from pulsetrain.engine.step.protocols import BackendSettings, Optimizer, TrainingBatch, TrainingStrategy, Tree

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["FunctionalTorchBackend"]


class FunctionalTorchBackend(TorchComputation, FunctionalBackend):
    """nn.Module on values: `TorchBackend(functional=True)` makes it.

    Parameters and buffers are found under the module's names for them. A step may be used under torch.vmap; its random
    draws (dropout) come from torch's global generator, as in place.

    Raises:
        ConfigurationError: fp16, torch.compile, activation checkpointing or offload, which work in place.
    """

    module: Module

    def __init__(self, *arguments: Any, **options: Any) -> None:
        FunctionalBackend.__init__(self)
        TorchComputation.__init__(self, *arguments, **options)

    def _configure(self, settings: BackendSettings) -> None:
        super()._configure(settings)
        self.settings = settings
        in_place = {
            "precision": "fp16" if self.scaler is not None else None,
            "compile": self.compile or None,
            "activation_checkpointing": self.activation_checkpointing,
            "activation_offload": self.activation_offload,
            "optimizer_offload": self.optimizer_offload,
            "topology": None if self.topology == Topology() else self.topology,
        }
        for setting, value in in_place.items():
            if value is not None:
                given = {setting: value, "functional": True}
                raise ConfigurationError("works in place; leave it out, or functional=True", "TorchBackend", **given)

    def split(self, model: object) -> dict[str, Tree]:
        """The module's parameters that learn, and everything else it saves or computes with, copied, by name."""
        self.module = self.module_to_device(model)
        return weights_of(self.module, copy=True)

    def loss_and_gradients(
        self, weights: Mapping[str, Tree], batch: TrainingBatch, strategy: TrainingStrategy, draw: tuple[int, int]
    ) -> tuple[Tensor, Tree, Tree]:
        """By torch.func.grad_and_value."""
        point = strategy if isinstance(strategy, LogPoint) else None

        def compute(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> tuple[Tensor, tuple[Tree, Tree]]:
            changed = {name: each.clone() for name, each in buffers.items()}  # a forward pass writes into them
            _, found = self.outputs_and_loss({**parameters, **changed}, batch, strategy)
            loss, _ = split_loss(found, strategy)
            if not loss.requires_grad:  # torch.func would return gradients of 0
                raise no_gradient()
            metrics = {} if point is None else {name: torch.as_tensor(each) for name, each in point.metrics.items()}
            return loss, (changed, metrics)

        differentiate = grad_and_value(compute, has_aux=True)
        gradients, (loss, (buffers, metrics)) = differentiate(weights["parameters"], weights["buffers"])
        if point is not None:
            point.keep(metrics, batch)  # those that it holds are of the transformation
        return loss, gradients, buffers

    def evaluate(
        self, weights: Mapping[str, Tree], batch: TrainingBatch, strategy: TrainingStrategy
    ) -> tuple[Tree, Any]:
        """The module in eval mode."""
        with evaluating(strategy), eval_mode(self.module):
            return self.outputs_and_loss({**weights["parameters"], **weights["buffers"]}, batch, strategy)

    def forward(self, model: Tree, batch: TrainingBatch) -> Tree:
        """The module's outputs for the batch with these weights, by name."""
        return call(lambda *args, **kwargs: functional_call(self.module, model, args, kwargs), batch.inputs)

    def create_optimizer(
        self, model: Any, name: str, learning_rate: float | Tensor, weight_decay: float, **options: Any
    ) -> Optimizer:
        """sgd, adam, adamw or rmsprop, as pure functions."""
        spares = decay_rule(model, options.pop("no_decay", None))
        mask = None if spares is None else {key: not spares(key, each) for key, each in trainable_of(model)}
        return create_functional(name, learning_rate, weight_decay, decay_mask=mask, **options)

    def module_view(self, model: object, weights: Tree) -> TensorsView:
        """The module itself, which holds the newest weights."""
        return TensorsView(self.module, weights_of)


def weights_of(module: nn.Module, copy: bool = False) -> dict[str, dict[str, Tensor]]:
    """A module's weights as values: the tensors that it holds, or copies of them."""
    weights: dict[str, dict[str, Tensor]] = {"parameters": {}, "buffers": {}}
    for name, parameter in module.named_parameters():
        weights["parameters" if parameter.requires_grad else "buffers"][name] = parameter.detach()
    weights["buffers"].update({name: buffer.detach() for name, buffer in module.named_buffers()})
    if copy:
        return {kind: {name: each.clone() for name, each in tensors.items()} for kind, tensors in weights.items()}
    return weights
