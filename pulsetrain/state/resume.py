"""What a checkpoint of a trainer holds, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any

import torch

from pulsetrain.engine.backends.model_store import check_optimizer_state, optimizer_type
from pulsetrain.engine.checkpoint.snapshot import Snapshot
from pulsetrain.engine.checkpoint.weights import compare_weights
from pulsetrain.engine.data import rng
from pulsetrain.engine.environment import describe_environment, environment_differences
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers import LRScheduler, ReduceLROnPlateau
from pulsetrain.state.data_change import describe_data, follow_data
from pulsetrain.state.data_cursor import STATE as POSITION
from pulsetrain.state.handler_registry import (
    handler_settings,
    handler_states,
    restore_states,
    restore_strategy,
    stateful,
    strategy_state,
    tell_of_pairs,
)
from pulsetrain.training.stepper import rates_of

if TYPE_CHECKING:
    from pulsetrain.config import TrainingConfig
    from pulsetrain.trainer import Trainer

__all__ = ["COUNTERS", "capture", "check_optimizer", "restore"]

FORMAT = 4
_SET_RATES = (LRScheduler, ReduceLROnPlateau)
_PARTS = (
    "environment", "settings", "model", "optimizer", "optimizer_type", "backend", "announced_skips", "accumulation",
    "counters", "learning_rates", "grad_norm", "position", "data", "validated_at", "metrics", "history", "losses",
    "strategy", "handlers", "handler_settings", "rng",
)  # fmt: skip
# what may differ between two parts of one run: how long it is, what it tells, where it writes
_MAY_CHANGE = ("max_epochs", "max_iterations", "max_updates", "max_tokens", "log_every_n_steps", "run_dir")
COUNTERS = (
    "iteration", "epoch", "epoch_length", "update", "validation_round", "rollout_round", "save", "tokens", "samples",
)  # fmt: skip


def capture(trainer: Trainer) -> dict[str, Any]:
    """Everything that the next iteration depends on, as tensors and plain containers."""
    state, position = trainer.state, trainer.position
    gradients = trainer.model_store.gradients() if trainer.accumulated else {}  # between two updates: their sum so far
    counters = {name: getattr(state, name) for name in COUNTERS}
    stepper = trainer.stepper.state_dict()
    return {
        "format": FORMAT,
        "environment": _environment(trainer),
        "settings": plain_settings(trainer.config),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "optimizer_type": optimizer_type(trainer.optimizer),
        "backend": trainer.backend.state_dict(),
        "announced_skips": trainer.announced_skips,
        "accumulation": {**stepper["accumulation"], "gradients": gradients},
        "counters": {**counters, "iteration": position.trained, "epoch": position.epoch - (not position.epoch_done)},
        "learning_rates": stepper["learning_rates"],
        "grad_norm": stepper["grad_norm"],
        "position": position.state_dict(),
        "data": describe_data(trainer.train_loader),
        "validated_at": trainer.validated_at,
        "metrics": {name: float(value) for name, value in state.metrics.items() if _is_scalar(value)},
        "history": trainer.history.state_dict(),
        "losses": trainer.losses.state_dict(),
        **_named_losses(trainer),
        "strategy": strategy_state(trainer),
        "handlers": handler_states(trainer),
        "handler_settings": handler_settings(trainer),
        # of a checkpoint that was loaded and has not been gone on with: its own
        "rng": trainer.rng_to_restore or rng.capture(),
    }


def restore(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Take over a checkpoint's state; the next run goes on behind it.

    Raises:
        CheckpointError: it does not fit this trainer, which then is as it was; the message lists what is missing,
            unexpected or misshapen.
    """
    saved = _of_this_format(saved)
    lacking = [name for name in _PARTS if name not in saved]
    for part, names in () if lacking else (("counters", COUNTERS), ("position", POSITION)):
        lacking += [f"{part}.{name}" for name in names if name not in saved[part]]
    if lacking:
        raise CheckpointError(f"the checkpoint's state lacks {', '.join(lacking)}; load another checkpoint")
    problems = compare_weights(trainer.model.state_dict(), saved["model"])
    if problems:
        raise CheckpointError(f"the checkpoint's weights do not fit the model: {problems}")
    check_optimizer(trainer.optimizer, saved)
    fewer = rng.missing_devices(saved["rng"])
    saved = follow_data(saved, trainer.train_loader)
    put_gradients_back = trainer.model_store.load_gradients(
        saved["accumulation"]["gradients"], saved["accumulation"]["batches"]
    )
    _restore_what_may_refuse(trainer, saved)
    trainer.model.load_state_dict(saved["model"])
    configured = rates_of(trainer.optimizer)
    trainer.optimizer.load_state_dict(saved["optimizer"])
    _tell_of_rates(trainer, configured)
    trainer.announced_skips = saved["announced_skips"]
    trainer.stepper.load_state_dict(saved)
    put_gradients_back()
    counters = saved["counters"]
    trainer.set_counters({**counters, "save": counters["save"] + 1})  # its own save, counted once it was durable
    trainer.position.load_state_dict(saved["position"])
    trainer.validated_at = saved["validated_at"]
    trainer.state.metrics = dict(saved["metrics"])
    trainer.history.load_state_dict(saved["history"])
    trainer.losses.load_state_dict(saved["losses"], trainer.backend.device)
    for name, losses in trainer.named_losses.items():
        losses.load_state_dict(saved["named_losses"][name], trainer.backend.device)
    trainer.rng_to_restore = saved["rng"]
    trainer.states_to_restore = saved["handlers"], saved["handler_settings"]
    tell_of_pairs(trainer, saved["handlers"], saved["handler_settings"])
    if fewer:
        get_logger("pulsetrain").warning(
            "this process sees fewer devices than the checkpoint holds generators of: what is drawn there is another "
            "from here on",
            devices=fewer,
        )
    _tell_of_changes(trainer, saved)


def _environment(trainer: Trainer) -> dict[str, Any]:
    return describe_environment(trainer.backend.device, trainer.backend.environment())


def _named_losses(trainer: Trainer) -> dict[str, Any]:
    if not trainer.named_losses:  # a run with one optimizer has none
        return {}
    losses = {name: losses.state_dict() for name, losses in trainer.named_losses.items()}
    return {"named_losses": losses, "grad_norms": dict(trainer.grad_norms)}


def _of_this_format(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state as this version would have written it, without what an older one did not know."""
    counters = saved.get("counters")
    if isinstance(counters, Mapping):
        saved = {**saved, "counters": {"rollout_round": 0, **counters}}  # there were none before it was counted
    if saved.get("format") == 3 and isinstance(counters, Mapping):
        data = {"batches": counters.get("epoch_length")}
        return {**saved, "format": FORMAT, "strategy": None, "handler_settings": {}, "data": data}
    if saved.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint's state is of format {saved.get('format')!r}, this version reads 3 and {FORMAT}; go on "
            "with the version that wrote it, or begin a new run from its weights: "
            "model.load_state_dict(checkpoint['model'])"
        )
    return saved


def _restore_what_may_refuse(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """The states of the backend, the strategy and the handlers: all, or none where one raises."""
    parts = {"backend": trainer.backend.state_dict(), "handlers": handler_states(trainer)}
    before = Snapshot().take({**parts, "strategy": strategy_state(trainer)})  # of what may be loaded in place
    try:
        trainer.backend.load_state_dict(saved["backend"])
        restore_strategy(trainer, saved["strategy"])
        restore_states(trainer, saved["handlers"], saved["handler_settings"])
    except Exception:
        trainer.backend.load_state_dict(before["backend"])
        if before["strategy"] is not None:
            trainer.strategy.load_state_dict(before["strategy"])
        for key, handler in stateful(trainer).items():
            handler.load_state_dict(before["handlers"][key])
        raise


def check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse the state of another optimizer, or of other parameters.

    Raises:
        CheckpointError: it is one; the message names the difference.
    """
    mine, theirs = optimizer_type(optimizer), saved["optimizer_type"]
    if mine != theirs:
        raise CheckpointError(f"the checkpoint was made with {theirs}, this trainer has {mine}; use the same optimizer")
    check_optimizer_state(optimizer, saved["optimizer"])


def plain_settings(config: TrainingConfig) -> dict[str, Any]:
    """The settings as text, those that are the default left out."""
    return {
        each.name: repr(value) for each in fields(config) if (value := getattr(config, each.name)) != _default(each)
    }


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _tell_of_changes(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Say what is another than when the checkpoint was made: from it on the run may be another, too."""
    now = _environment(trainer)
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
    if loaded != configured and not any(isinstance(handler, _SET_RATES) for handler in trainer.handlers):
        get_logger("pulsetrain").warning(
            "the run goes on with the learning rates of its checkpoint; update_optimizer() writes others",
            checkpoint=[float(rate) for rate in loaded],
            configured=[float(rate) for rate in configured],
        )


def _is_scalar(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
