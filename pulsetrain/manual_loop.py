"""A training loop written by hand, with the events, checkpoints and recording of a Trainer around it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pulsetrain.engine import Events
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.payloads import GradientsReady, OptimizerStepCompleted, Terminated
from pulsetrain.engine.optimizers import parts_of
from pulsetrain.engine.step.backend import InPlaceBackend
from pulsetrain.engine.step.gradients import grad_norm
from pulsetrain.engine.step.protocols import TrainingResult
from pulsetrain.state.loop_variables import variables_with_state
from pulsetrain.trainer import Trainer
from pulsetrain.training.stepper import rates_of

__all__ = ["Loop"]

_OF_THE_STEP = (
    "clip_grad_norm",
    "clip_grad_value",
    "precision",
    "activation_offload",
)  # settings that the body decides


class Loop(Trainer):
    """Gives batches to your own loop, and fires the events around its body.

    >>> import torch
    >>> from pulsetrain import TrainingConfig
    >>> model = nn.Linear(2, 1)
    >>> loop = Loop(model, [torch.ones(4, 2)] * 3, optimizer="sgd", config=TrainingConfig(max_epochs=2))
    >>> for inputs in loop.batches():
    ...     loss = model(inputs).square().mean()
    ...     loss.backward()
    ...     loop.optimizer.step()
    ...     loop.optimizer.zero_grad()
    ...     loop.output = loss
    >>> loop.state.update, len(loop.history["train/loss"])
    (6, 2)

    The arguments are those of Trainer. The body computes, and calls the optimizer's `step` wherever it wants;
    GRADIENTS_READY and OPTIMIZER_STEP_COMPLETED are fired around that call. Gradients that it leaves for the next batch
    are in the checkpoints. A resumed loop continues with the same weights, bit for bit, as one that was never stopped,
    if they depend only on the run's own state. If a variable of the body has a `state_dict`, such as a scheduler or an
    average, and changes, a warning names it; subscribe its method, and checkpoints hold it:
    `loop.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, scheduler.step)`. Changes in numbers and lists are not
    noticed. `accumulate` in the configuration says after how many batches the body updates, for bounds and schedules in
    updates.

    Raises:
        ConfigurationError: as Trainer, or a setting for the step, which the body decides.
    """

    _variables: Mapping[str, object]

    wraps_model = False

    output: Any
    """The body's loss, or a mapping with one; read when the next batch is asked for."""

    def __init__(self, model: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        if self.backend.virtual_ranks is not None:
            rule = "adds up the gradients of the Trainer's steps; a loop's body makes its own, so leave it out"
            raise ConfigurationError(rule, "Loop", virtual=self.backend.virtual_ranks.total)
        if not isinstance(self.backend, InPlaceBackend):
            raise ConfigurationError(
                "makes the updates itself, and a loop's body computes in place; use a Trainer, or TorchBackend()",
                "Loop",
                backend=type(self.backend),
            )
        defaults = type(self.config)()
        for name in _OF_THE_STEP:
            value = getattr(self.config, name)
            if value != getattr(defaults, name):
                raise ConfigurationError(
                    "has no effect in a Loop, whose body does that", "TrainingConfig", **{name: value}
                )
        self.external_step = self.stepper.by_hand = True
        self._to_device = self.backend.to_device
        self._variables = {}
        self.output = None
        for name, optimizer in parts_of(self.optimizer).items():
            optimizer.register_step_pre_hook(partial(self._before_step, name))
            optimizer.register_step_post_hook(partial(self._after_step, name))

    def batches(self, resume: str | os.PathLike[str] | None = None, *, wait: bool = False) -> Iterator[Any]:
        """The batches, on the model's device, to the configured bound.

        If a loop is left early, its last batch does not count as trained in a checkpoint.

        Args:
            resume: as for `Trainer.train`.
            wait: likewise.

        Raises:
            CheckpointError, ConfigurationError: as `Trainer.train`.
        """
        frame = inspect.currentframe()
        self._variables = variables_with_state(frame.f_back if frame is not None else None)
        del frame
        try:
            super().train(resume, wait=wait)
            while self.awaits_step:
                self.output = None
                try:
                    with self.as_step():
                        yield self._to_device(self.state.batch)
                except GeneratorExit:
                    self.abandon()
                    self.state.stop_reason = "the loop was left"
                    self.fire(Events.TERMINATE, Terminated(reason=self.state.stop_reason))
                    raise
                self._read_output()
                self.driver.commit_iteration()
                self.proceed()
                self.driver.continue_rewound()
        finally:
            self._variables = {}

    def variables_of_loop(self) -> Mapping[str, object]:
        return self._variables

    @property
    def accumulated(self) -> int:
        """Whether gradients await the body's next update."""
        return int(any(parameter.grad is not None for parameter in self.model.parameters()))

    def _read_output(self) -> None:
        output = self.output
        if isinstance(output, Tensor):
            output = {"loss": output}
        if isinstance(output, Mapping):
            output = {name: value.detach() if isinstance(value, Tensor) else value for name, value in output.items()}
            loss = output.get("loss")
            if isinstance(loss, Tensor) and loss.ndim == 0:
                self.reporter.losses.add(loss, 1)
            output = TrainingResult(output)
        self.state.output = output

    def _before_step(
        self, name: str, optimizer: Optimizer, arguments: Sequence[object], named: Mapping[str, object]
    ) -> None:
        if not self.awaits_step:
            return
        norm, parameters = None, [each for group in optimizer.param_groups for each in group["params"]]
        if self.stepper.is_norm_wanted(self):
            norm = grad_norm(parameters)
            self.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=norm, optimizer=name))  # counts the update
        else:
            self.state.update += 1
        self.stepper.note_update(rates_of(self.optimizer), norm)
        skip = self.stepper.consume_skip()
        if skip is None:
            return
        if named.get("closure", arguments[1] if len(arguments) > 1 else None) is not None:  # the optimizer comes first
            rule = (
                "cannot skip a step with a closure, which computes the gradients inside the step; "
                "call step() without a closure, or remove NaNGuard or the handler that calls skip_update"
            )
            raise ConfigurationError(rule, "Loop.skip_update", optimizer=type(optimizer))
        if skip:  # waits for the device
            for parameter in parameters:
                parameter.grad = None  # an optimizer leaves such parameters and their state as they are

    def _after_step(self, name: str, optimizer: Optimizer, *_: object) -> None:
        if self.awaits_step and self.hears(Events.OPTIMIZER_STEP_COMPLETED):
            rates = self.learning_rates if not name else rates_of(optimizer)
            self.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=rates, optimizer=name))
