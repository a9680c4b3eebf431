"""Pytorch-ignite's factories of supervised trainers and evaluators, with Pulsetrain's Engine.

The steps are ignite's own. See `ignite.engine.create_supervised_trainer` for what each argument does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import (
    supervised_evaluation_step,
    supervised_evaluation_step_amp,
    supervised_training_step,
    supervised_training_step_amp,
    supervised_training_step_apex,
    supervised_training_step_tpu,
)
from ignite.metrics import Metric
from ignite.utils import convert_tensor
from torch import Tensor, nn

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.engine import Engine

__all__ = ["convert_tensor", "create_supervised_evaluator", "create_supervised_trainer"]

_Device = str | torch.device | None


def _to_device(batch: Any, device: _Device = None, non_blocking: bool = False) -> tuple[Any, Any]:
    """A batch (inputs, targets) on the device."""
    inputs, targets = (convert_tensor(each, device=device, non_blocking=non_blocking) for each in batch)
    return inputs, targets


def create_supervised_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor] | nn.Module,
    device: _Device = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., Any] = _to_device,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = lambda x, y, y_pred, loss: loss.item(),
    deterministic: bool = False,
    amp_mode: str | None = None,
    scaler: bool | torch.amp.GradScaler = False,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
) -> Engine:
    """An Engine that trains the model: `ignite.engine.create_supervised_trainer`, argument for argument.

    If `scaler` is True, the gradient scaler that was made is `state.scaler`.

    >>> model = nn.Linear(1, 1)
    >>> for parameter in model.parameters():
    ...     _ = nn.init.zeros_(parameter)
    >>> trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), nn.MSELoss())
    >>> trainer.run([(torch.ones(2, 1), torch.ones(2, 1))], max_epochs=1).output
    1.0

    Raises:
        ValueError: `deterministic` is true, `amp_mode` is unknown or not for this device, `scaler` is given without
            `amp_mode="amp"`, or `gradient_accumulation_steps` is not positive.
        RuntimeError: the device is an XLA device, and torch_xla is not installed.
        ModuleNotFoundError: `amp_mode` is "apex", which is not installed.
    """
    place = "create_supervised_trainer"
    if deterministic:
        rule = (
            "ignite's DeterministicEngine replaces parts of ignite's loop; use pulsetrain.Trainer, which reproduces "
            "the order of the data from its seed, or ignite's factory"
        )
        raise ConfigurationError(rule, place, deterministic=deterministic)
    if scaler and amp_mode != "amp":
        raise ConfigurationError('is for amp_mode="amp" alone', place, scaler=scaler, amp_mode=amp_mode)
    on_xla = _check_amp_mode(place, device, amp_mode)
    made = torch.amp.GradScaler() if scaler is True else None
    given = made if isinstance(scaler, bool) else scaler
    factory: Callable[..., Any] = supervised_training_step_tpu if on_xla else supervised_training_step
    if amp_mode == "amp":
        factory = partial(supervised_training_step_amp, scaler=given)
    elif amp_mode == "apex":
        factory = supervised_training_step_apex
    trainer = Engine(
        factory(
            model,
            optimizer,
            loss_fn,
            device=device,
            non_blocking=non_blocking,
            prepare_batch=prepare_batch,
            model_transform=model_transform,
            output_transform=output_transform,
            gradient_accumulation_steps=gradient_accumulation_steps,
            model_fn=model_fn,
        )
    )
    if made is not None:
        trainer.state.scaler = made
    return trainer


def create_supervised_evaluator(
    model: nn.Module,
    metrics: Mapping[str, Metric] | None = None,
    device: _Device = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., Any] = _to_device,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any], Any] = lambda x, y, y_pred: (y_pred, y),
    amp_mode: str | None = None,
    model_fn: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
) -> Engine:
    """An Engine that evaluates the model: `ignite.engine.create_supervised_evaluator`, argument for argument.

    >>> from ignite.metrics import MeanSquaredError
    >>> evaluator = create_supervised_evaluator(nn.Identity(), {"mse": MeanSquaredError()})
    >>> evaluator.run([(torch.zeros(2, 1), torch.ones(2, 1))]).metrics
    {'mse': 1.0}

    Raises:
        ValueError: `amp_mode` is unknown or not for this device.
        RuntimeError: the device is an XLA device, and torch_xla is not installed.
    """
    _check_amp_mode("create_supervised_evaluator", device, amp_mode)
    factory = supervised_evaluation_step_amp if amp_mode == "amp" else supervised_evaluation_step
    evaluator = Engine(
        factory(
            model,
            device,
            non_blocking=non_blocking,
            prepare_batch=prepare_batch,
            model_transform=model_transform,
            output_transform=output_transform,
            model_fn=model_fn,
        )
    )
    for name, metric in (metrics or {}).items():
        metric.attach(evaluator, name)
    return evaluator


def _check_amp_mode(place: str, device: _Device, amp_mode: str | None) -> bool:
    """Whether the device is an XLA device.

    Raises:
        ConfigurationError: the mode is unknown, or not for this device.
        RuntimeError: torch_xla is not installed.
    """
    kind = device.type if isinstance(device, torch.device) else device or ""
    if amp_mode not in (None, "amp", "apex"):
        raise ConfigurationError('choose "amp", "apex" or None', place, amp_mode=amp_mode)
    if amp_mode is not None and ("mps" in kind or "xla" in kind):
        raise ConfigurationError("is for CUDA devices; pass None", place, amp_mode=amp_mode, device=device)
    if "xla" in kind and not idist.has_xla_support:
        raise RuntimeError(f"{place}(device={device!r}): needs torch_xla, which is not installed")
    return "xla" in kind
