"""What a checkpoint of a trainer holds, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from engine import rng
from engine.bus import EventSignal
from engine.checkpoint.weights import compare_weights
from engine.environment import describe_environment, environment_differences
from engine.errors import CheckpointError
from engine.logs import get_logger
from handlers import LRScheduler
from pulsetrain.step import rates_of

if TYPE_CHECKING:
    from pulsetrain.config import TrainingConfig
    from pulsetrain.trainer import Trainer

__all__ = ["capture", "handler_states", "listeners", "restore", "restore_states", "state_of", "stateful"]

FORMAT = 3
_PARTS = (
    "environment", "settings", "model", "optimizer", "optimizer_type", "backend", "announced_skips", "accumulation",
    "counters", "learning_rates", "grad_norm", "position", "validated_at", "metrics", "history", "losses", "handlers",
    "rng",
)  # fmt: skip
# what may differ between two parts of one run: how long it is, what it tells, where it writes
_MAY_CHANGE = ("max_epochs", "max_iterations", "max_updates", "max_tokens", "log_every_n_steps", "run_dir")
COUNTERS = ("iteration", "epoch", "epoch_length", "update", "validation_round", "save", "tokens", "samples")


def capture(trainer: Trainer) -> dict[str, Any]:
    """Everything that the next iteration depends on, as tensors and plain containers."""
    state, position = trainer.state, trainer.position
    gradients = {}
    if trainer.accumulated:  # between two updates: their sum so far
        gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    counters = {name: getattr(state, name) for name in COUNTERS}
    return {
        "format": FORMAT,
        "environment": describe_environment(trainer.backend.device),
        "settings": plain_settings(trainer.config),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "optimizer_type": type(trainer.optimizer).__name__,
        "backend": trainer.backend.state_dict(),
        "announced_skips": trainer.announced_skips,
        "accumulation": {**trainer.accumulation.state_dict(), "gradients": gradients},
        "counters": {**counters, "iteration": position.trained, "epoch": position.epoch - (not position.epoch_done)},
        "learning_rates": [float(rate) for rate in trainer.learning_rates],
        "grad_norm": trainer.grad_norm,
        "position": position.state_dict(),
        "validated_at": trainer.validated_at,
        "metrics": {name: float(value) for name, value in state.metrics.items() if _is_scalar(value)},
        "history": trainer.history.state_dict(),
        "losses": trainer.losses.state_dict(),
        "handlers": handler_states(trainer),
        # of a checkpoint that was loaded and has not been gone on with: its own
        "rng": trainer.rng_to_restore or rng.capture(),
    }


def restore(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Take over a checkpoint's state; the next run goes on behind it.

    Raises:
        CheckpointError: it does not fit this trainer, which then is as it was; the message lists what is missing,
            unexpected or misshapen.
    """
    if saved.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint's state is of format {saved.get('format')!r}, this version reads {FORMAT}; go on with the "
            "version that wrote it, or begin a new run from its weights: model.load_state_dict(checkpoint['model'])"
        )
    lacking = [name for name in _PARTS if name not in saved]
    if lacking:
        raise CheckpointError(f"the checkpoint's state lacks {', '.join(lacking)}; load another checkpoint")
    problems = compare_weights(trainer.model.state_dict(), saved["model"])
    if problems:
        raise CheckpointError(f"the checkpoint's weights do not fit the model: {problems}")
    _check_optimizer(trainer.optimizer, saved)
    before = trainer.backend.state_dict()
    trainer.backend.load_state_dict(saved["backend"])
    try:
        _restore_handlers(trainer, saved["handlers"])  # the last that may refuse
    except Exception:
        trainer.backend.load_state_dict(before)
        raise
    trainer.model.load_state_dict(saved["model"])
    configured = rates_of(trainer.optimizer)
    trainer.optimizer.load_state_dict(saved["optimizer"])
    _tell_of_rates(trainer, configured)
    trainer.announced_skips = saved["announced_skips"]
    trainer.accumulation.load_state_dict(saved["accumulation"])
    gradients = saved["accumulation"]["gradients"]
    for name, parameter in trainer.model.named_parameters():
        parameter.grad = gradients[name].to(parameter.device) if name in gradients else None
    counters = saved["counters"]
    trainer.set_counters({**counters, "save": counters["save"] + 1})  # its own save, counted once it was durable
    trainer.learning_rates = tuple(saved["learning_rates"])
    trainer.grad_norm = saved["grad_norm"]
    trainer.position.load_state_dict(saved["position"])
    trainer.validated_at = saved["validated_at"]
    trainer.state.metrics = dict(saved["metrics"])
    trainer.history.load_state_dict(saved["history"])
    trainer.losses.load_state_dict(saved["losses"], trainer.backend.device)
    trainer.rng_to_restore = saved["rng"]
    trainer.states_to_restore = saved["handlers"]
    _tell_of_changes(trainer, saved)


def stateful(trainer: Trainer) -> dict[str, Any]:
    """What holds progress, by class name and metric, numbered where both come twice: those `listeners` with a state."""
    found: dict[str, Any] = {}
    for handler in listeners(trainer):
        if not (hasattr(handler, "state_dict") and hasattr(handler, "load_state_dict")):
            continue
        metric = getattr(handler, "metric", None)
        label = f"{type(handler).__name__}({metric})" if isinstance(metric, str) else type(handler).__name__
        key, number = label, 1
        while key in found:
            number += 1
            key = f"{label}_{number}"
        found[key] = handler
    return found


def listeners(trainer: Trainer) -> list[Any]:
    """The trainer's handlers and callbacks, and whatever else hears its events, in the order of registration.

    An object hears by a method of its own or by being called: a metric of pytorch-ignite, a torch scheduler's `step`,
    an object of the user's. The trainer's own parts and those of handlers are left out.
    """
    given = [*trainer.handlers, *trainer.callbacks]
    own = [trainer, trainer.model, trainer.optimizer, trainer.evaluation, trainer.evaluator, trainer.callbacks]
    parts = {id(part) for part in own} | {id(part) for each in given for part in getattr(each, "__dict__", {}).values()}
    signals = [signal for signal in trainer.bus.values() if isinstance(signal, EventSignal)]
    heard = [each for signal in signals for each in signal.subscriptions(id(trainer), exclusive=True)]
    owners = {id(each): each for each in given}
    for subscription in sorted(heard, key=lambda each: each.position):
        owner = _owner(subscription.handler)
        if owner is not None and id(owner) not in parts:
            owners.setdefault(id(owner), owner)
    return list(owners.values())


def _owner(listener: Any) -> Any:
    """The object that hears by the listener; None for a function, which has no state."""
    while isinstance(listener, partial):
        listener = listener.func
    if isinstance(listener, FunctionType):
        return None
    owner = getattr(listener, "__self__", listener)
    return None if isinstance(owner, type) else owner


def handler_states(trainer: Trainer) -> dict[str, Any]:
    """The state of each that `stateful` names."""
    return {key: state_of(key, handler) for key, handler in stateful(trainer).items()}


def state_of(key: str, handler: Any) -> Any:
    """A handler's state; its error is told with its name."""
    try:
        return handler.state_dict()
    except Exception as error:
        error.add_note(f"in {key}.state_dict(), whose state is part of a checkpoint")
        raise


def restore_states(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Put what holds progress back once more, behind an event at which some of it begins anew."""
    handlers = stateful(trainer)
    for key in handlers.keys() & saved.keys():
        handlers[key].load_state_dict(saved[key])


def _restore_handlers(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    handlers = stateful(trainer)
    before = handler_states(trainer)
    try:
        for key in handlers.keys() & saved.keys():
            handlers[key].load_state_dict(saved[key])
    except Exception:
        for key, handler in handlers.items():
            handler.load_state_dict(before[key])
        raise
    for key in sorted(handlers.keys() ^ saved.keys()):
        get_logger("pulsetrain").warning(
            "handler begins anew" if key in handlers else "saved state of a handler that is not here any more",
            handler=key,
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    mine, theirs = type(optimizer).__name__, saved["optimizer_type"]
    if mine != theirs:
        raise CheckpointError(f"the checkpoint was made with {theirs}, this trainer has {mine}; use the same optimizer")
    groups = [len(group["params"]) for group in optimizer.param_groups]
    others = [len(group["params"]) for group in saved["optimizer"]["param_groups"]]
    if groups != others:
        raise CheckpointError(
            f"the optimizer's state does not fit: {others} parameters a group in the checkpoint, {groups} here"
        )

    check = getattr(optimizer, "check_state_dict", None)  # of those that are several in one
    if check is not None:
        check(saved["optimizer"])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, value in saved["optimizer"]["state"].get(index, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != parameter.shape:
                raise CheckpointError(
                    f"the optimizer's state does not fit: {name} of parameter {index} is {_shape(value)} in the "
                    f"checkpoint, the parameter is {_shape(parameter)} here"
                )


def plain_settings(config: TrainingConfig) -> dict[str, Any]:
    """The settings as text, those that are the default left out."""
    return {
        each.name: repr(value) for each in fields(config) if (value := getattr(config, each.name)) != _default(each)
    }


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _tell_of_changes(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Say what is another than when the checkpoint was made: from it on the run may be another, too."""
    now = describe_environment(trainer.backend.device)
    trainer.environment_changes = environment_differences(saved["environment"], now)
    if trainer.environment_changes:
        get_logger("pulsetrain").warning(
            "the environment differs from the checkpoint's: results need not be the same to the bit",
            differences=trainer.environment_changes,
        )
    settings = plain_settings(trainer.config)
    before = {name: text for name, text in saved["settings"].items() if name not in _MAY_CHANGE}
    changed = environment_differences(before, {n: text for n, text in settings.items() if n not in _MAY_CHANGE})
    if changed:
        get_logger("pulsetrain").warning("the run goes on under other settings than before", differences=changed)


def _tell_of_rates(trainer: Trainer, configured: tuple[float, ...]) -> None:
    """Without a schedule the checkpoint's learning rates go on: say so where others were asked for."""
    loaded = rates_of(trainer.optimizer)
    if loaded != configured and not any(isinstance(handler, LRScheduler) for handler in trainer.handlers):
        get_logger("pulsetrain").warning(
            "the run goes on with the learning rates of its checkpoint; update_optimizer() writes others",
            checkpoint=[float(rate) for rate in loaded],
            configured=[float(rate) for rate in configured],
        )


def _is_scalar(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
