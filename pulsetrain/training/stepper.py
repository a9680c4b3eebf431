"""One iteration of a trainer: forward, backward, and an update when its batches are together.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.payloads import GradientsReady, OptimizerStepCompleted
from pulsetrain.engine.step.protocols import GradientInfo, TrainingBatch, TrainingResult

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = ["rates_of", "step"]


def step(trainer: Trainer, batch: Any) -> TrainingResult:
    """One batch; the trainer's process function. Where it fails, gradients that were waiting are given up."""
    backend, state = trainer.backend, trainer.state
    prepared = backend.prepare_batch(batch, trainer.strategy)
    trainer.in_step = True
    try:
        if trainer.optimizers is not None:
            result = TrainingResult(_alternate(trainer, prepared))
        elif trainer.gradients_plan.live or not trainer.accumulation.nothing_waits:
            result = TrainingResult({"loss": _step_in_parts(trainer, prepared)})
        else:
            result = _whole_step(trainer, prepared)
        state.samples += prepared.samples
        state.tokens += prepared.tokens
        trainer.losses.add(result.metrics["loss"], prepared.size)
    except BaseException:  # a part of this batch's gradients may be among them
        trainer.accumulation.restart()
        trainer.held.discard()
        raise
    finally:
        trainer.in_step = False
    trainer.position.trained = state.iteration
    if trainer.bound.counted:
        reason = trainer.bound.reached(state)
        if reason is not None:
            trainer.terminate(reason=reason)
    return result


def _whole_step(trainer: Trainer, batch: TrainingBatch) -> TrainingResult:
    """An update over one batch, where nobody asks for anything in between."""
    backend, held = trainer.backend, trainer.held
    model_state, rates = held.state, rates_of(trainer.optimizer)
    result: TrainingResult = backend.train_step(model_state, batch, trainer.strategy, donate=True)
    trainer.state.update += 1
    if not backend.in_place or len(result.metrics) > 1:
        held.take(result.state)
        found = backend.to_torch(result.metrics)
        if trainer.config.clip_grad_norm is not None:
            trainer.grad_norm = found["grad_norm"]
        result = TrainingResult({"loss": found["loss"]})  # a state that was kept would keep its memory
    trainer.learning_rates = rates
    if trainer.checking:
        trainer.stop_checking()
    if trainer.stepped_plan.live:
        trainer.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=rates))
    return result


def _step_in_parts(trainer: Trainer, batch: TrainingBatch) -> Tensor:
    """The batch's gradients, and an update where it is time for one; returns the loss, detached."""
    backend, held, accumulation = trainer.backend, trainer.held, trainer.accumulation
    scale = accumulation.weigh(batch.size, batch.tokens, trainer.state.update)
    gradients = backend.forward_backward(held.state, batch, trainer.strategy, scale, held.waiting)
    held.wait(gradients)
    if accumulation.add(batch.size, batch.tokens, trainer.state.update):
        _update(trainer, gradients, accumulation.close())
    loss: Tensor = backend.to_torch(gradients.loss)
    return loss


def _alternate(trainer: Trainer, batch: TrainingBatch) -> dict[str, Tensor]:
    """Each of the strategy's losses to its own optimizer; returns their sum, and each by its name, detached."""
    backend, accumulation, optimizers = trainer.backend, trainer.accumulation, trainer.optimizers
    assert optimizers is not None
    scale = accumulation.weigh(batch.size, batch.tokens, trainer.state.update)
    correction = None
    if accumulation.add(batch.size, batch.tokens, trainer.state.update):
        correction = accumulation.close()
    found: dict[str, Tensor] = {}
    for name, loss in backend.losses(trainer.held.state, batch, trainer.strategy):
        if name not in optimizers.parts:
            raise ValueError(
                f"{type(trainer.strategy).__name__}.compute_losses: gave a loss for {name!r}, and the optimizers are "
                f"{', '.join(optimizers)}"
            )
        if f"{name}_loss" in found and not accumulation.rule.batches == 1:
            raise ValueError(
                f"{type(trainer.strategy).__name__}.compute_losses: gave two losses for {name!r} of one batch, which "
                "cannot be accumulated over several; set accumulate=1"
            )
        found[f"{name}_loss"] = detached = backend.backward(loss, scale, optimizers[name])
        if correction is not None:
            _update(trainer, GradientInfo(detached), correction, name)
    if not found:
        raise ValueError(f"{type(trainer.strategy).__name__}.compute_losses: gave no loss")
    for name, value in found.items():
        trainer.named_losses[name].add(value, batch.size)
    return {"loss": sum(found.values(), torch.zeros_like(value)), **found}


def _update(trainer: Trainer, gradients: GradientInfo, correction: Any, name: str = "") -> None:
    """One optimizer step over the gradients of the accumulated batches.

    Args:
        correction: what the gradients are to be multiplied by first.
        name: of the optimizer, where there are several.
    """
    backend, held, state = trainer.backend, trainer.held, trainer.state
    measure = trainer.gradients_plan.wants(state.update + 1) or trainer.config.clip_grad_norm is not None
    model_state = held.parts[name] if name else held.state
    gradients = backend.finish_gradients(
        model_state, backend.all_reduce_gradients(gradients), correction, measure=measure
    )
    skip = None
    if measure:
        norm, trainer.skip = backend.to_torch(gradients.grad_norm), None
        if name:
            trainer.grad_norms[name] = norm
        else:
            trainer.grad_norm = norm
        ready = GradientsReady(grad_norm=norm, optimizer=name)
        # it counts the update
        gradients = held.showing(gradients, lambda: trainer.fire(Events.GRADIENTS_READY, ready))
        skip, trainer.skip = trainer.skip, None
        model_state = held.parts[name] if name else held.state  # who heard it may have written into the model
    else:
        state.update += 1
    rates = rates_of(held.optimizer if not name else held.optimizer[name])
    held.take(backend.apply_gradients(model_state, gradients, skip, donate=True))
    held.waiting = None
    trainer.learning_rates = rates if not name else _with_rates(trainer, rates, name)
    if trainer.checking:
        trainer.stop_checking()
    if trainer.stepped_plan.live:
        trainer.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=rates, optimizer=name))


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """Each group's rate; a copy of one that is a tensor on a device, which a schedule will fill with the next."""
    groups = optimizer.param_groups
    if len(groups) == 1 and type(rate := groups[0]["lr"]) is float:
        return (rate,)
    return tuple([rate if type(rate := group["lr"]) is float else _as_number(rate) for group in groups])


def _with_rates(trainer: Trainer, rates: tuple[float, ...], name: str) -> tuple[float, ...]:
    """The rates of the last update of each optimizer, this one's being new."""
    new, groups = iter(rates), trainer.optimizer.param_groups
    old = trainer.learning_rates if len(trainer.learning_rates) == len(groups) else rates_of(trainer.optimizer)
    return tuple([next(new) if group["optimizer"] == name else rate for group, rate in zip(groups, old, strict=True)])


def _as_number(rate: Any) -> Any:
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return rate.detach().clone()
    return float(rate)
