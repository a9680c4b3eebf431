"""What a checkpoint of a trainer holds, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine import rng
from engine.errors import CheckpointError
from engine.logs import get_logger

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = ["capture", "restore"]

FORMAT = 1
COUNTERS = ("iteration", "epoch", "epoch_length", "update", "validation_round", "save", "tokens", "samples")


def capture(trainer: Trainer) -> dict[str, Any]:
    """Everything that the next iteration depends on, as tensors and plain containers."""
    state = trainer.state
    trainer.history.settle()
    gradients = {}
    if trainer.accumulated:  # between two updates: their sum so far
        gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {
        "format": FORMAT,
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "backend": trainer.backend.state_dict(),
        "accumulation": {"batches": trainer.accumulated, "gradients": gradients},
        "counters": {**{name: getattr(state, name) for name in COUNTERS}, "iteration": trainer.position.trained},
        "learning_rates": list(trainer.learning_rates),
        "position": trainer.position.state_dict(),
        "metrics": {name: float(value) for name, value in state.metrics.items()},
        "history": {name: list(values) for name, values in trainer.history.items()},
        "windows": {"epoch": trainer.epoch_losses.state_dict(), "log": trainer.log_losses.state_dict()},
        "handlers": {key: handler.state_dict() for key, handler in _stateful(trainer).items()},
        "rng": rng.capture(),
    }


def restore(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Take over a checkpoint's state; the next run goes on behind it.

    Raises:
        CheckpointError: it does not fit this trainer; the message lists what is missing, unexpected or misshapen.
    """
    if saved.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint of format {saved.get('format')!r}; this version reads {FORMAT}")
    _check_weights(trainer.model.state_dict(), saved["model"])
    trainer.model.load_state_dict(saved["model"])
    try:
        trainer.optimizer.load_state_dict(saved["optimizer"])
    except ValueError as error:
        groups = [len(group["params"]) for group in trainer.optimizer.param_groups]
        theirs = [len(group["params"]) for group in saved["optimizer"]["param_groups"]]
        raise CheckpointError(
            f"the optimizer's state does not fit: {theirs} parameters a group in it, {groups} here ({error})"
        ) from error
    trainer.backend.load_state_dict(saved["backend"])
    trainer.accumulated = saved["accumulation"]["batches"]
    gradients = saved["accumulation"]["gradients"]
    for name, parameter in trainer.model.named_parameters():
        parameter.grad = gradients[name].to(parameter.device) if name in gradients else None
    for name, value in saved["counters"].items():
        setattr(trainer.state, name, value)
    trainer.learning_rates = tuple(saved["learning_rates"])
    trainer.position.load_state_dict(saved["position"])
    if not trainer.position.epoch_done:
        trainer.state.epoch -= 1  # the loop counts it again when it goes on inside it
    trainer.state.metrics.update(saved["metrics"])
    trainer.history.clear()
    trainer.history.update({name: list(values) for name, values in saved["history"].items()})
    trainer.epoch_losses.load_state_dict(saved["windows"]["epoch"])
    trainer.log_losses.load_state_dict(saved["windows"]["log"])
    handlers = _stateful(trainer)
    for key in sorted(saved["handlers"].keys() | handlers.keys()):
        if key in handlers and key in saved["handlers"]:
            handlers[key].load_state_dict(saved["handlers"][key])
        else:
            get_logger("pulsetrain").warning(
                "handler begins anew" if key in handlers else "saved state of a handler that is not here any more",
                handler=key,
            )
    trainer.rng_to_restore = saved["rng"]


def _stateful(trainer: Trainer) -> dict[str, Any]:
    """The handlers that hold progress, by class name, numbered where a class comes twice."""
    found: dict[str, Any] = {}
    for handler in trainer.handlers:
        if not (hasattr(handler, "state_dict") and hasattr(handler, "load_state_dict")):
            continue
        key, number = type(handler).__name__, 1
        while key in found:
            number += 1
            key = f"{type(handler).__name__}_{number}"
        found[key] = handler
    return found


def _check_weights(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    problems = [f"missing: {name} {_shape(mine[name])}" for name in mine.keys() - saved.keys()]
    problems += [f"unexpected: {name} {_shape(saved[name])}" for name in saved.keys() - mine.keys()]
    problems += [
        f"shape: {name} is {_shape(saved[name])} in the checkpoint, {_shape(mine[name])} in the model"
        for name in mine.keys() & saved.keys()
        if _shape(mine[name]) != _shape(saved[name])
    ]
    if problems:
        raise CheckpointError("the checkpoint's weights do not fit the model: " + "; ".join(sorted(problems)))


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
