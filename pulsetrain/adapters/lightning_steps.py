"""The steps and hooks of a LightningModule, called at the places of a run where Lightning calls them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from pulsetrain.adapters.lightning_checks import overrides
from pulsetrain.adapters.lightning_log import ModuleLog, set_name_left_out
from pulsetrain.adapters.lightning_optimizers import ModuleScheduler
from pulsetrain.adapters.lightning_view import ModuleView
from pulsetrain.engine import Engine, Events, Phase
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.step.protocols import TrainingBatch, describe
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import batch_number

__all__ = ["ModuleHooks", "ModuleStrategy", "StepCall", "redirect_forward"]


class StepCall:
    """What a module is called with where a step of it is meant, and not its forward pass."""

    hooks: ModuleHooks
    batch: Any
    number: int
    stage: str

    def __init__(self, hooks: ModuleHooks, batch: Any, number: int, stage: str) -> None:
        self.hooks, self.batch, self.number, self.stage = hooks, batch, number, stage

    def run(self, module: Any) -> Any:
        """What the step returns."""
        return self.hooks.step(module, self)


def redirect_forward(module: nn.Module) -> None:
    """Let the module, called with a StepCall, make that step; called otherwise, it computes its forward pass.

    The step so passes through whatever wraps the module. A copy of the module makes its own steps.
    """
    vars(module)["forward"] = types.MethodType(_forward, module)


def _forward(module: Any, *arguments: Any, **keywords: Any) -> Any:
    if len(arguments) == 1 and type(arguments[0]) is StepCall:
        return arguments[0].run(module)
    return type(module).forward(module, *arguments, **keywords)


class ModuleStrategy:
    """The loss that `training_step` returns, and in evaluation that of `validation_step` or `test_step`.

    In evaluation, a loss that the step logs ("val_loss") is preferred to the one that it returns; NaN if there is
    neither.
    """

    def __init__(self, hooks: ModuleHooks) -> None:
        self._hooks = hooks

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        hooks = self._hooks
        samples = _samples(batch)
        stage, number = hooks.current()
        # in training, batches weigh the same where their gradients are added up, as in Lightning
        weight = samples if stage else 1
        return TrainingBatch((StepCall(hooks, batch, number, stage),), None, samples, weight=weight)

    def compute_loss(self, outputs: Any, batch: TrainingBatch) -> Tensor:
        """The loss, shape ().

        Raises:
            ArgumentTypeError: `training_step` returned neither a loss nor a mapping with one.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not batch.inputs[0].stage:
            if not isinstance(loss, Tensor):
                rule = (
                    "needs to return the loss, or a mapping with 'loss'; to leave a batch out, leave it out of the data"
                )
                raise ArgumentTypeError(rule, "training_step", returned=describe(outputs))
            return loss
        logged = self._hooks.log.of_batch
        found = next((value for name, value in logged.items() if set_name_left_out(name) == "loss"), loss)
        return found.detach().float() if isinstance(found, Tensor) else torch.tensor(float("nan"))

    def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> Mapping[str, Tensor]:
        return {}


class ModuleHooks(Handler):
    """Calls the module's hooks and steps its schedulers at the events of a trainer; checkpoints hold the schedulers.

    Args:
        module: the LightningModule.
        schedulers: of its optimizers.
        manual: whether the module makes its optimizers' steps itself, and steps the schedulers.
    """

    view: ModuleView
    manual: bool

    def __init__(self, module: Any, view: ModuleView, *, manual: bool) -> None:
        self._module, self.view, self.manual = module, view, manual
        self.schedulers: list[ModuleScheduler] = []
        self.log: ModuleLog = ModuleLog(self._report)
        self._run: Any = None
        self._set_batches, self._kind = 0, "validation"  # of the evaluation: batches so far, "validation" or "test"
        self.losses: list[Tensor] = []  # that the current batch has differentiated by hand

    def __deepcopy__(self, memo: object) -> ModuleHooks:
        return self  # a copy of the module has the same trainer

    def attach(self, engine: Engine) -> Self:
        """Follow the trainer and its evaluator."""
        self._run = run = engine
        evaluator = self._run.evaluator
        evaluator.contexts.append(self._evaluating)
        evaluator.add_event_handler(Events.COMPLETED, self._on_set_completed, phase=Phase.ACT)
        hooks: list[tuple[Any, tuple[str, ...]]] = [
            (Events.STARTED, ("on_fit_start", "on_train_start")),
            (Events.EPOCH_STARTED, ("on_train_epoch_start",)),
            (Events.VALIDATION_STARTED, ("on_validation_start",)),
            (Events.VALIDATION_COMPLETED, ("on_validation_end",)),
            (Events.COMPLETED, ("on_train_end", "on_fit_end")),
        ]
        with self._attachment.to(run, whole_bus=False) as subscribe:
            for event, names in hooks:
                if wanted := [name for name in names if overrides(self._module, name)]:
                    subscribe(event, self._caller(wanted), phase=Phase.ACT)
            if overrides(self._module, "on_before_optimizer_step"):
                subscribe(Events.GRADIENTS_READY, self._before_update, phase=Phase.ACT)
            if overrides(self._module, "on_train_batch_end") or self.schedulers:
                subscribe(Events.ITERATION_COMPLETED, self._after_batch, phase=Phase.ACT)
            subscribe(Events.EPOCH_COMPLETED, self._after_epoch, phase=Phase.ACT)
        self._updates = engine.state.update
        return self

    def state_dict(self) -> dict[str, Any]:
        """The states of the schedulers and of torchmetrics' metrics, and what was logged for the epoch so far."""
        states = [dict(each.scheduler.state_dict()) for each in self.schedulers]
        metrics = {path: dict(each.metric_state) for path, each in self._metrics().items()}
        return {"schedulers": states, "log": self.log.state_dict(self._metrics()), "metrics": metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for each, saved in zip(self.schedulers, state["schedulers"], strict=True):
            each.scheduler.load_state_dict(dict(saved))
        metrics = self._metrics()
        for path, values in state["metrics"].items():
            for name, value in values.items():
                setattr(metrics[path], name, value)
        self.log.load_state_dict(state["log"], metrics)
        self._updates = self._run.state.update

    def _metrics(self) -> dict[str, Any]:
        """Metrics of torchmetrics that are modules of the module, by path: what they hold is not in its state."""
        return {path: each for path, each in self._module.named_modules() if hasattr(each, "metric_state")}

    def current(self) -> tuple[str, int]:
        """The stage of the step that comes next, "" for training, and its batch's number."""
        if self.log.stage != "evaluate":
            return "", batch_number(self._run)
        self._set_batches += 1
        return self._kind + "_step", self._set_batches - 1

    def step(self, module: Any, call: StepCall) -> Any:
        """Make the module's step."""
        log = self.log
        log.of_batch, log.batch_size = {}, _samples(call.batch)
        if not call.stage:
            log.stage = "train"
            hook = overrides(module, "on_train_batch_start")
            if hook and module.on_train_batch_start(call.batch, call.number) == -1:
                rule = (
                    "on_train_batch_start returned -1, which ends the epoch in Lightning; call engine.terminate_epoch()"
                )
                raise ConfigurationError(f"{type(module).__name__}: {rule} in a handler of ITERATION_COMPLETED")
        step = getattr(module, call.stage or "training_step")
        log.in_step = True
        try:
            return step(call.batch, *_numbers_of(step, call.number))
        finally:
            log.in_step = False

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Around an evaluation."""
        self.log.stage, self._set_batches = "evaluate", 0
        name = self._run.evaluator.set_name
        tests = name not in (None, "val") and overrides(self._module, "test_step")
        self._kind = "test" if tests else "validation"
        self.log.begin_set()
        self._call(f"on_{self._kind}_epoch_start")
        try:
            yield
        finally:
            self.log.stage = ""

    def _on_set_completed(self, evaluator: Engine) -> None:
        self._call(f"on_{self._kind}_epoch_end")
        evaluator.state.metrics.update({k: v for k, v in self.log.end_set().items() if k != "loss"})

    def _call(self, hook: str, *arguments: Any) -> None:
        if overrides(self._module, hook):
            getattr(self._module, hook)(*arguments)

    def _caller(self, hooks: list[str]) -> Any:
        def receive() -> None:
            for hook in hooks:
                self._call(hook)

        return receive

    def _before_update(self, engine: Engine, event: Any) -> None:
        optimizer = self._run.optimizer
        self.view.updating = True
        try:
            name = event.payload.optimizer
            self._module.on_before_optimizer_step(optimizer[name] if name else optimizer)
        finally:
            self.view.updating = False

    def _after_batch(self, engine: Engine) -> None:
        number, length = batch_number(engine), engine.state.epoch_length
        if engine.state.update != self._updates:  # else gradients wait
            self._updates = engine.state.update
            self._advance("step", number + 1)
        if number + 1 == length:
            self._advance("epoch", engine.state.epoch)
        if overrides(self._module, "on_train_batch_end"):
            outputs = engine.state.output
            outputs = dict(outputs) if isinstance(outputs, Mapping) else outputs
            self._module.on_train_batch_end(outputs, engine.state.batch, number)

    def _after_epoch(self, engine: Engine) -> None:
        if engine.state.epoch_length is None:
            self._advance("epoch", engine.state.epoch)
        self._call("on_train_epoch_end")
        self.log.end_epoch()
        for each in self.schedulers if not self.manual else ():
            if each.monitor is not None and engine.state.epoch % each.frequency == 0:
                self._follow_metric(each, each.monitor)

    def _advance(self, interval: str, count: int) -> None:
        """Step the schedulers that do not follow a metric."""
        for each in self.schedulers if not self.manual else ():
            if each.monitor is None and each.interval == interval and count % each.frequency == 0:
                each.scheduler.step()

    def _follow_metric(self, scheduler: ModuleScheduler, monitor: str) -> None:
        metrics = self.view.callback_metrics
        if monitor in metrics:
            scheduler.scheduler.step(metrics[monitor])
        elif scheduler.strict:
            rule = f"the scheduler follows {monitor!r}, which nothing has logged; there is {', '.join(metrics)}"
            raise ConfigurationError(f"configure_optimizers: {rule}")

    def _report(self, name: str, value: Any, logs: bool) -> None:
        if logs:
            self._run.log(name, value)
            if not self.log.in_step:  # of the epoch, whose means are in the history already
                self._run.history.update({name: float(value)})
        else:
            self._run.state.metrics[name] = float(value)


def _numbers_of(step: Any, batch: int) -> list[int]:
    """What a step takes after the batch, by position, as Lightning gives it: its number, and that of its data set."""
    signature = inspect.signature(step)
    if list(signature.parameters)[2:3] == ["dataloader_idx"]:
        return [batch, 0]
    try:
        signature.bind("a batch", batch)
    except TypeError:
        return []
    return [batch]


def _samples(batch: Any) -> int:
    """The rows of the batch's first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for found in map(_samples, values) if found), 1 if not values else 0)
