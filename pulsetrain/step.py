"""One iteration of a trainer: forward, backward, and an update when its batches are together.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.events import Events
from engine.gradients import clip_grad_norm, clip_grad_value, grad_norm, scale_grads
from engine.payloads import GradientsReady, OptimizerStepCompleted
from engine.protocols import TrainingResult

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
        loss = backend.forward_backward(trainer.model, prepared, strategy, scale)
        state.samples += prepared.samples
        state.tokens += tokens
        trainer.losses.add(loss, size)
        if accumulation.add(size, tokens, state.update):
            update(trainer)
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
    return TrainingResult({"loss": loss})


def update(trainer: Trainer) -> None:
    """One optimizer step over the gradients of the accumulated batches."""
    config, optimizer, backend, state = trainer.config, trainer.optimizer, trainer.backend, trainer.state
    correction = trainer.accumulation.close()
    backend.unscale_gradients(optimizer)
    if type(correction) is not float or correction != 1.0:
        scale_grads(_parameters(optimizer), correction)
    heard = trainer.gradients_plan
    if config.clip_grad_norm is not None or (
        heard.live and (heard.busy or not heard.low <= state.update + 1 < heard.high)
    ):
        trainer.grad_norm = norm = grad_norm(_parameters(optimizer))
        trainer.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=norm))  # it advances state.update
        if config.clip_grad_norm is not None:
            clip_grad_norm(_parameters(optimizer), config.clip_grad_norm, norm)
    else:
        state.update += 1
    if config.clip_grad_value is not None:
        clip_grad_value(_parameters(optimizer), config.clip_grad_value)
    trainer.learning_rates = rates_of(optimizer)
    backend.apply_gradients(optimizer)
    if trainer.checking:
        trainer.stop_checking()
    if trainer.stepped_plan.live:
        trainer.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=trainer.learning_rates))


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """Each group's rate; a copy of one that is a tensor on a device, which a schedule will fill with the next."""
    return tuple([rate if type(rate := group["lr"]) is float else _as_number(rate) for group in optimizer.param_groups])


def _as_number(rate: Any) -> Any:
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return rate.detach().clone()
    return float(rate)


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
