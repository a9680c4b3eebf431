"""What a trainer tells of itself at a log point, and of its losses at the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.payloads import AnomalyDetected, MetricsLogged
from pulsetrain.engine.logs import get_logger
from pulsetrain.training.running_stats import Losses, Rate

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = ["log_point", "mean_losses"]


def mean_losses(trainer: Trainer, reader: str, mean_of: Callable[[Losses, str], Any]) -> dict[str, Any]:
    """The mean training losses, what follows from them, and the learning rates; on the device if they are.

    Args:
        trainer: whose they are.
        reader: "log" or "epoch".
        mean_of: how the mean is read: `Losses.take`, or `Losses.peek`.
    """
    loss = mean_of(trainer.losses, reader)
    derive = getattr(trainer.strategy, "derive_metrics", None)
    derived = {} if derive is None else {f"train/{name}": value for name, value in derive(loss).items()}
    each = {f"train/{name}": mean_of(of, reader) for name, of in trainer.named_losses.items() if of.count(reader)}
    return {"train/loss": loss, **each, **derived, **_rates_by_name(trainer)}


def log_point(trainer: Trainer, rate: Rate) -> None:
    """Where the loop waits for the device, for somebody who listens (with fp16 in any case)."""
    if trainer.backend.skips_updates:
        _announce_skipped(trainer)
    if not trainer.losses.count("log") or not trainer.hears(Events.METRICS_LOGGED):
        return
    metrics = mean_losses(trainer, "log", _take_number)
    if trainer.grad_norm is not None:
        metrics["grad_norm"] = trainer.grad_norm.item()
    metrics.update({f"grad_norm/{name}": norm.item() for name, norm in trainer.grad_norms.items()})
    if trainer.backend.skips_updates:
        metrics["skipped_updates"] = float(trainer.announced_skips)
    metrics.update(rate.read(trainer.state.samples, trainer.state.tokens))
    trainer.fire(Events.METRICS_LOGGED, MetricsLogged(metrics=metrics))


def _announce_skipped(trainer: Trainer) -> None:
    """Say how many fp16 updates have overflowed since it was last said."""
    before, trainer.announced_skips = trainer.announced_skips, trainer.backend.skipped_updates()
    new = trainer.announced_skips - before
    if new > 0:
        get_logger("pulsetrain").warning(
            "fp16 gradients overflowed: updates were left out and the gradient scale was lowered",
            left_out=new,
            updates=trainer.state.update,
        )
        anomaly = AnomalyDetected(kind="update_skipped", value=float(new), batch_indices=())
        trainer.fire(Events.ANOMALY_DETECTED, anomaly)


def _rates_by_name(trainer: Trainer) -> dict[str, float]:
    if trainer.optimizers is None:
        return {"learning_rate": trainer.learning_rates[0]}
    rates = zip(trainer.optimizer.param_groups, trainer.learning_rates, strict=True)
    return {f"learning_rate/{group['optimizer']}": rate for group, rate in reversed(list(rates))}


def _take_number(losses: Losses, reader: str) -> float:
    return losses.take(reader).item()
