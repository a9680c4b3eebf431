"""Pytorch-ignite's factories of supervised trainers and evaluators, with Pulsetrain's Engine.

The steps and the signatures are ignite's own: see `ignite.engine.create_supervised_trainer` for each argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import ignite.distributed as idist
import ignite.engine
import torch
from ignite.utils import convert_tensor

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.engine import Engine

__all__ = ["convert_tensor", "create_supervised_evaluator", "create_supervised_trainer"]


def create_supervised_trainer(*args: Any, **kwargs: Any) -> Engine:
    """An Engine that trains a model: `ignite.engine.create_supervised_trainer`, argument for argument.

    If `scaler` is True, the gradient scaler that was made is `state.scaler`.

    >>> model = torch.nn.Linear(1, 1)
    >>> for parameter in model.parameters():
    ...     _ = torch.nn.init.zeros_(parameter)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss())
    >>> trainer.run([(torch.ones(2, 1), torch.ones(2, 1))], max_epochs=1).output
    1.0

    Raises:
        ValueError: `deterministic` is true, `amp_mode` is unknown or not for this device, `scaler` is given without
            `amp_mode="amp"`, or `gradient_accumulation_steps` is not positive.
        RuntimeError: the device is an XLA device, and torch_xla is not installed.
        ModuleNotFoundError: `amp_mode` is "apex", which is not installed.
    """
    place, given = "create_supervised_trainer", _bound(create_supervised_trainer, args, kwargs)
    deterministic, amp_mode, scaler = (given.pop(name) for name in ("deterministic", "amp_mode", "scaler"))
    if deterministic:
        rule = (
            "ignite's DeterministicEngine replaces parts of ignite's loop; use pulsetrain.Trainer, which reproduces "
            "the order of the data from its seed, or ignite's factory"
        )
        raise ConfigurationError(rule, place, deterministic=deterministic)
    if scaler and amp_mode != "amp":
        raise ConfigurationError('is for amp_mode="amp" alone', place, scaler=scaler, amp_mode=amp_mode)
    on_xla = _check_amp_mode(place, given["device"], amp_mode)
    made = torch.amp.GradScaler() if scaler is True else scaler or None
    step: Callable[..., Any] = ignite.engine.supervised_training_step
    if on_xla:
        step = ignite.engine.supervised_training_step_tpu
    elif amp_mode == "amp":
        step = partial(ignite.engine.supervised_training_step_amp, scaler=made)
    elif amp_mode == "apex":
        step = ignite.engine.supervised_training_step_apex
    trainer = Engine(step(**given))
    if scaler is True:
        trainer.state.scaler = made
    return trainer


def create_supervised_evaluator(*args: Any, **kwargs: Any) -> Engine:
    """An Engine that evaluates a model: `ignite.engine.create_supervised_evaluator`, argument for argument.

    >>> from ignite.metrics import MeanSquaredError
    >>> evaluator = create_supervised_evaluator(torch.nn.Identity(), {"mse": MeanSquaredError()})
    >>> evaluator.run([(torch.zeros(2, 1), torch.ones(2, 1))]).metrics
    {'mse': 1.0}

    Raises:
        ValueError: `amp_mode` is unknown or not for this device.
        RuntimeError: the device is an XLA device, and torch_xla is not installed.
    """
    given = _bound(create_supervised_evaluator, args, kwargs)
    metrics, amp_mode = given.pop("metrics") or {}, given.pop("amp_mode")
    _check_amp_mode("create_supervised_evaluator", given["device"], amp_mode)
    kind = "_amp" if amp_mode == "amp" else ""
    evaluator = Engine(getattr(ignite.engine, f"supervised_evaluation_step{kind}")(**given))
    for name, metric in metrics.items():
        metric.attach(evaluator, name)
    return evaluator


for _factory in (create_supervised_trainer, create_supervised_evaluator):
    _factory.__signature__ = inspect.signature(getattr(ignite.engine, _factory.__name__))  # type: ignore[attr-defined]


def _bound(factory: Callable[..., Engine], args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Any]:
    """The arguments by name, with ignite's defaults."""
    bound = inspect.signature(factory).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _check_amp_mode(place: str, device: torch.device | str | None, amp_mode: str | None) -> bool:
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
