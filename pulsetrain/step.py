"""One iteration of a trainer: forward, backward, and an update when its batches are together.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.events import Events
from engine.gradients import clip_grad_norm, clip_grad_value, grad_norm, scale_grads
from engine.payloads import GradientsReady, OptimizerStepCompleted
from engine.protocols import TrainingBatch, TrainingResult

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = ["rates_of", "step", "update"]


def step(trainer: Trainer, batch: Any) -> TrainingResult:
    """One batch; the trainer's process function. Where it fails, gradients that were waiting are given up."""
    strategy, backend, state, accumulation = trainer.strategy, trainer.backend, trainer.state, trainer.accumulation
    prepared = strategy.prepare_batch(backend.to_device(batch))
    size, tokens = prepared.size, prepared.tokens
    trainer.in_step = True
    try:
        scale = accumulation.weigh(size, tokens, state.update)
        if trainer.optimizers is not None:
            losses = _alternate(trainer, prepared, scale)
        else:
            losses = {"loss": backend.forward_backward(trainer.model, prepared, strategy, scale)}
            if accumulation.add(size, tokens, state.update):
                update(trainer, accumulation.close())
        state.samples += prepared.samples
        state.tokens += tokens
        trainer.losses.add(losses["loss"], size)
    except BaseException:  # a part of this batch's gradients may be among them
        accumulation.restart()
        backend.discard_gradients(trainer.optimizer)
        raise
    finally:
        trainer.in_step = False
    trainer.position.trained = state.iteration
    if trainer.bound.counted:
        reason = trainer.bound.reached(state)
        if reason is not None:
            trainer.terminate(reason=reason)
    return TrainingResult(losses)


def _alternate(trainer: Trainer, batch: TrainingBatch, scale: Any) -> dict[str, Tensor]:
    """Each of the strategy's losses to its own optimizer; returns their sum, and each by its name, detached."""
    backend, accumulation, optimizers = trainer.backend, trainer.accumulation, trainer.optimizers
    assert optimizers is not None
    correction = None
    if accumulation.add(batch.size, batch.tokens, trainer.state.update):
        correction = accumulation.close()
    found: dict[str, Tensor] = {}
    for name, loss in backend.losses(trainer.model, batch, trainer.strategy):
        if name not in optimizers.parts:
            raise ValueError(
                f"{type(trainer.strategy).__name__}.compute_losses: gave a loss for {name!r}, and the optimizers are "
                f"{', '.join(optimizers)}"
            )
        optimizer = optimizers[name]
        if f"{name}_loss" in found and not accumulation.rule.batches == 1:
            raise ValueError(
                f"{type(trainer.strategy).__name__}.compute_losses: gave two losses for {name!r} of one batch, which "
                "cannot be accumulated over several; set accumulate=1"
            )
        found[f"{name}_loss"] = backend.backward(loss, scale, _parameters(optimizer))
        if correction is not None:
            update(trainer, correction, optimizer, name)
    if not found:
        raise ValueError(f"{type(trainer.strategy).__name__}.compute_losses: gave no loss")
    for name, value in found.items():
        trainer.named_losses[name].add(value, batch.size)
    return {"loss": sum(found.values(), torch.zeros_like(value)), **found}


def update(trainer: Trainer, correction: Any, optimizer: Any = None, name: str = "") -> None:
    """One optimizer step over the gradients of the accumulated batches.

    Args:
        correction: what the gradients are to be multiplied by first.
        optimizer: by default the trainer's only one.
        name: what it is called, where there are several.
    """
    config, backend, state = trainer.config, trainer.backend, trainer.state
    optimizer = trainer.optimizer if optimizer is None else optimizer
    backend.unscale_gradients(optimizer)
    if type(correction) is not float or correction != 1.0:
        scale_grads(_parameters(optimizer), correction)
    heard = trainer.gradients_plan
    skip = None
    if config.clip_grad_norm is not None or (
        heard.live and (heard.busy or not heard.low <= state.update + 1 < heard.high)
    ):
        norm, trainer.skip = grad_norm(_parameters(optimizer)), None
        if name:
            trainer.grad_norms[name] = norm
        else:
            trainer.grad_norm = norm
        trainer.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=norm, optimizer=name))  # it counts the update
        skip, trainer.skip = trainer.skip, None
        if config.clip_grad_norm is not None:
            clip_grad_norm(_parameters(optimizer), config.clip_grad_norm, norm)
    else:
        state.update += 1
    if config.clip_grad_value is not None:
        clip_grad_value(_parameters(optimizer), config.clip_grad_value)
    rates = rates_of(optimizer)
    trainer.learning_rates = rates if not name else _with_rates(trainer, rates, name)
    if skip is None:
        backend.apply_gradients(optimizer)
    else:
        backend.apply_gradients(optimizer, skip)
    if trainer.checking:
        trainer.stop_checking()
    if trainer.stepped_plan.live:
        trainer.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=rates, optimizer=name))


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """Each group's rate; a copy of one that is a tensor on a device, which a schedule will fill with the next."""
    return tuple([rate if type(rate := group["lr"]) is float else _as_number(rate) for group in optimizer.param_groups])


def _with_rates(trainer: Trainer, rates: tuple[float, ...], name: str) -> tuple[float, ...]:
    """The rates of the last update of each optimizer, this one's being new."""
    new, groups = iter(rates), trainer.optimizer.param_groups
    old = trainer.learning_rates if len(trainer.learning_rates) == len(groups) else rates_of(trainer.optimizer)
    return tuple([next(new) if group["optimizer"] == name else rate for group, rate in zip(groups, old, strict=True)])


def _as_number(rate: Any) -> Any:
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return rate.detach().clone()
    return float(rate)


def _parameters(optimizer: Any) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
