"""The trainer: an Engine whose step optimises a strategy on a backend, with validation, handlers and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.config import TrainingConfig
from pulsetrain.engine import Engine, Event, EventBus, Events, Phase
from pulsetrain.engine.backends.core import TrainerCore
from pulsetrain.engine.backends.torch import TorchBackend
from pulsetrain.engine.checkpoint import Location, load_checkpoint, location_of
from pulsetrain.engine.data.workers import workers_outlive_signals
from pulsetrain.engine.errors import ArgumentTypeError
from pulsetrain.engine.events.payloads import CheckpointLoaded
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metrics import MetricTracker
from pulsetrain.engine.optimizers import NamedOptimizers, averaged_weights, parts_of
from pulsetrain.engine.step.backend import Backend
from pulsetrain.engine.step.protocols import (
    AlternatingStrategy,
    ModelState,
    Optimizer,
    TrainingBatch,
    TrainingResult,
    TrainingStrategy,
)
from pulsetrain.handlers import Callback, CallbackList, Checkpointer, LRScheduler, MetricLogger, ReduceLROnPlateau
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.state.handler_registry import HandlerRegistry
from pulsetrain.state.resume import Resumer
from pulsetrain.state.rewind import Rewind, go_back, plan_rewind
from pulsetrain.state.run_state import (
    BackendPart,
    Counters,
    MadeWith,
    ModelPart,
    OptimizerPart,
    StrategyPart,
)
from pulsetrain.state.unsaved import UnsavedState
from pulsetrain.training.arguments import (
    check_kinds,
    check_metric_names,
    configured_handlers,
    named_loaders,
    resolve_strategy,
)
from pulsetrain.training.initial_state import make_store
from pulsetrain.training.reporter import MetricsReporter
from pulsetrain.training.run_length import RunLength
from pulsetrain.training.stepper import Stepper
from pulsetrain.training.validation import Evaluation, Validator, check_sets

__all__ = ["Trainer"]

Loader = Iterable[Any]
OptimizerChoice = str | torch.optim.Optimizer | Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Trainer(Engine):
    """Trains a model: an Engine with a training step, validation and checkpoints.

    >>> from pulsetrain.engine import SupervisedStrategy
    >>> data = [(torch.ones(4, 2), torch.ones(4, 1))] * 5
    >>> config = TrainingConfig(max_epochs=3)
    >>> trainer = Trainer(nn.Linear(2, 1), data, strategy=SupervisedStrategy("mse"), config=config)
    >>> history = trainer.train()
    >>> len(history["train/loss"]), trainer.state.iteration
    (3, 15)

    Args:
        model: an nn.Module, which is moved to the backend's device, or whatever else the backend takes for a model.
            Several by name for a strategy that trains them in turns.
        train_loader: gives batches, each time it is iterated; it needs no length.
        val_loader: one set, whose metrics are called "val/...", or a mapping name -> set ("name/...").
        strategy: what is optimised: a name, or an object (TrainingStrategy; AlternatingStrategy for several modules).
        optimizer: a name, a torch optimizer over the model's parameters, or a factory called with them; by default
            that of the configuration. For several modules, one for each by its name. On a backend that computes with
            values, a name or an object with init and update.
        backend: what computes; by default PyTorch on the configuration's device.
        config: the settings.
        metrics: name -> metric, for validation: ignite's, torchmetrics', or anything with reset, update and compute.
        handlers: objects with `attach(engine)`, attached in this order.
        callbacks: `Callback` objects.
        name: what the trainer's events carry.
        bus: share one with other engines.

    Raises:
        ConfigurationError: a setting, a name or a device is wrong; the message says what to do.
        TypeError: an argument is of a wrong type.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    optimizers: NamedOptimizers | None
    data: DataCursor
    evaluator: Engine
    handlers: list[Any]

    def __init__(
        self,
        model: Any,
        train_loader: Loader,
        val_loader: Loader | Mapping[str, Loader] | None = None,
        *,
        strategy: str | TrainingStrategy | AlternatingStrategy = "supervised",
        optimizer: OptimizerChoice | Mapping[str, OptimizerChoice] | None = None,
        backend: Backend | None = None,
        config: TrainingConfig | None = None,
        metrics: Mapping[str, Any] | None = None,
        handlers: Sequence[Any] = (),
        callbacks: Sequence[Callback] = (),
        name: str = "trainer",
        bus: EventBus | None = None,
    ) -> None:
        check_kinds(config, metrics, handlers, callbacks)
        self.config = config = config or TrainingConfig()
        if not isinstance(train_loader, Iterable):
            raise ArgumentTypeError(
                "needs an iterable of batches, such as a DataLoader", "Trainer", train_loader=train_loader
            )
        self.strategy = resolve_strategy(strategy)
        check_metric_names(metrics, self.strategy)
        self.seed = config.seed if config.seed is not None else int.from_bytes(os.urandom(7), "big")
        self.backend: Backend = backend or TorchBackend()
        self.model_store = make_store(self.backend, model, optimizer, self.strategy, config, self.seed)
        self.model, self.optimizer = self.model_store.module, self.model_store.optimizer
        self.stepper = Stepper(
            self.backend,
            self.strategy,
            self.model_store,
            accumulate=config.accumulation,
            clip_grad_norm=config.clip_grad_norm,
            on_step=self._on_step,
        )
        try:
            super().__init__(self.stepper, name=name, bus=bus)
        except ValueError:  # the name is taken
            self.backend.release()
            raise
        self.optimizers = self.optimizer if isinstance(self.optimizer, NamedOptimizers) else None
        self.train_loader = train_loader
        val_loaders = named_loaders(val_loader)
        check_sets(val_loaders)
        source: Any = train_loader
        if getattr(source, "fires_rollouts", False):  # this trainer's policy acts in it
            source.attach(self)
        self.length = RunLength(config, train_loader, optimizers=len(parts_of(self.optimizer)))
        self.evaluation = Evaluation(self.stepper, metrics or {}, self.bus, trainer_name=self.name)
        self.evaluator = self.evaluation.engine
        self.evaluator.contexts.append(partial(averaged_weights, self.optimizer))
        self.state.tokens = self.state.samples = 0
        self.length.measure(self.strategy, self.backend)
        self.length.check()
        self.handlers = [*handlers, *configured_handlers(config, self.optimizer, self.length, handlers)]
        self.callbacks = CallbackList(list(callbacks))
        self.reporter = MetricsReporter(self.stepper, config.log_every_n_steps)
        self.validator = Validator(self.evaluation, val_loaders, config.validate_every, self.reporter)
        self.data = DataCursor(self.seed, config.skip_batches)
        own = [self.model, self.optimizer, self.strategy, self.evaluation, self.evaluator]
        own += [self.reporter, self.validator]
        self.registry = HandlerRegistry(self, self.handlers, self.callbacks, own)
        self.source = self.resumer = Resumer(
            {
                "made_with": MadeWith(self),
                "backend": BackendPart(self.backend),
                "strategy": StrategyPart(self.strategy),
                "handlers": self.registry,
                "model": ModelPart(self.model),
                "optimizer": OptimizerPart(self.optimizer, self._sets_learning_rates),
                "counters": Counters(self),
                "stepper": self.stepper,
                "data": self.data,
                "validation": self.validator,
                "reporter": self.reporter,
            },
            self.data,
            self.registry,
        )
        self._rewind: Rewind | None = None  # the run ends here, and train() continues after that checkpoint
        self._subscribe()
        for handler in self.handlers:
            handler.attach(self)
        self.callbacks.attach(self)
        self.registry.remember()

    def train(self, resume: str | os.PathLike[str] | None = None) -> dict[str, list[float]]:
        """Train to the configured bound.

        Args:
            resume: "latest" continues from the newest valid checkpoint of the trainer's Checkpointer, or starts if
                there is none yet; a path names one.

        Returns:
            Metric name -> values: train/loss and learning_rate an epoch, validation metrics a validation.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit.
            ConfigurationError: resume="latest" without exactly one Checkpointer.
        """
        if resume is not None:
            if not isinstance(resume, (str, os.PathLike)):
                raise TypeError(f"Trainer.train(resume={resume!r}): needs 'latest' or a checkpoint's path")
            self._load(resume)
        self._rewind = None
        try:
            self._train()
            while self._rewind is not None:
                go_back(self._rewind, self, self.registry.checkpointer("rewind()"), self.data)
                self._rewind = None
                self._train()
        finally:
            self.model_store.publish()
        return self.history.get_history()

    def rewind(self, first: int, last: int, reason: str) -> None:
        """From a handler: end here, and let `train()` continue after the newest checkpoint before iteration `first`.

        The batches of the iterations `first` to `last` are left out from then on. A run that already ends does not
        rewind.

        Raises:
            ConfigurationError: there is not exactly one Checkpointer.
            CheckpointError: there is no checkpoint before it.
        """
        if self.should_terminate or self.state.stop_reason is not None:
            get_logger("pulsetrain").warning("the run ends, and does not rewind", reason=reason)
            return
        rewind = plan_rewind(self.registry.checkpointer("rewind()"), self.data, first, last)
        self.terminate(skip_completed=True, reason=reason)
        self._rewind = rewind

    def terminate(self, skip_completed: bool = False, *, reason: str = "terminate() was called") -> None:
        self._rewind = None  # terminating cancels a rewind
        super().terminate(skip_completed, reason=reason)

    def skip_update(self, where: Tensor) -> None:
        """From a handler of GRADIENTS_READY: skip this update if the condition holds.

        Args:
            where: of shape (), bool, on the device; it is not waited for if the optimizer's kernel can skip a step on
                the device (fused Adam, AdamW, SGD).
        """
        self.stepper.skip_update(where)

    @property
    def is_resuming(self) -> bool:
        """Whether a checkpoint was loaded from which the run has not continued yet."""
        return self.resumer.is_resuming

    @property
    def is_stepping(self) -> bool:
        """Whether a training step is in progress, so that the state is between two updates."""
        return self.stepper.is_stepping

    def as_step(self) -> AbstractContextManager[None]:
        """Refuse checkpoints inside the block, as during a training step: the state is between two updates."""
        return self.stepper.as_step()

    @property
    def is_rewinding(self) -> bool:
        """Whether this run ends only to continue from an earlier checkpoint."""
        return self._rewind is not None

    @property
    def rewinds(self) -> int:
        """How often the run has returned to an earlier checkpoint."""
        return self.data.rewinds

    @property
    def accumulated(self) -> int:
        """How many batches wait for the next update."""
        return self.stepper.accumulated

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates of the last update, one per parameter group."""
        return self.stepper.learning_rates

    @property
    def total_iterations(self) -> int | None:
        """How many batches the run takes in all; None if that is not known."""
        return self.length.total_iterations

    @property
    def history(self) -> MetricTracker:
        """The values of every metric of the run."""
        return self.reporter.history

    @property
    def val_loaders(self) -> Mapping[str, Loader]:
        """The validation sets by name."""
        return self.validator.loaders

    @val_loaders.setter
    def val_loaders(self, loaders: Mapping[str, Loader]) -> None:
        self.validator.loaders = loaders

    @property
    def model_state(self) -> ModelState:
        """Weights, optimizer state and metadata as they are now, as values: further training does not change them."""
        state = self.model_store.snapshot()
        counted = {"step": self.state.update, "learning_rate": float(self.learning_rates[0])}
        return replace(state, metadata={**counted, **state.metadata})

    def train_step(self, batch: Any, model_state: ModelState, optimizer_state: Any = None) -> TrainingResult:
        """One update over one batch as a pure function, see `TrainerCore.train_step`; nothing here changes.

        Raises:
            ConfigurationError: the trainer's backend computes in place.
        """
        return TrainerCore(self.backend, self.strategy).train_step(batch, model_state, optimizer_state)

    def train_epoch(self, loader: Loader | None = None, model_state: ModelState | None = None) -> ModelState:
        """One epoch with all its events and handlers, from this state; returns the state after it.

        Args:
            loader: by default the trainer's.
            model_state: where to continue from; by default the trainer's current state.
        """
        loader = self.train_loader if loader is None else loader
        if self.state.max_epochs is None and not self.is_resuming:
            self._reset()
        if model_state is not None:
            self.model_store.restore(model_state)
            self.stepper.discard()  # what waited was of another state
        try:
            if self.is_resuming:  # perhaps inside an epoch
                self._resume(loader, self.state.epoch + 1)
            else:
                self.run(loader, max_epochs=self.state.epoch + 1)
        finally:
            self.model_store.publish()
        return self.model_state

    def validate(self) -> dict[str, float]:
        """One round over every validation set; fires VALIDATION_STARTED and VALIDATION_COMPLETED.

        Returns:
            The metrics by their full names, which are also in `state.metrics` from then on.

        Raises:
            ConfigurationError: the trainer has no validation set.
        """
        return self.validator.validate()

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on; `state_dict()` stays ignite's three keys.

        Weights and waiting gradients are the live tensors, not copies: write or copy them before training continues.
        """
        return self.resumer.state.state_dict()

    def save_checkpoint(self, name: str = "checkpoint", is_best: bool = False) -> Location:
        """Save now, into the folder of the trainer's Checkpointer; returns the checkpoint's path."""
        path: Location = self.registry.checkpointer("save_checkpoint()").save(self, name, is_best)
        return path

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Restore a checkpoint; the next `train()` continues after it.

        Raises:
            CheckpointError: it is damaged, or does not fit this trainer.
        """
        folder = location_of(path)
        self.load_checkpoint_state(load_checkpoint(folder))
        self.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=folder, iteration=self.state.iteration))

    def load_checkpoint_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `checkpoint_state` gave, or an earlier version of it; the next `train()` continues from there.

        Raises:
            CheckpointError: it does not fit this trainer, which then is as it was.
        """
        self.resumer.load(state, self.train_loader)
        self.abandon()

    @property
    def is_done(self) -> bool:
        """Whether the run has reached its bound."""
        state = self.state
        if self.length.reached(state) is not None:
            return True
        if self.resumer.finishes_epoch(state.epoch_length):
            return False  # EPOCH_COMPLETED is left
        # not by the iterations that epochs make, as ignite does: with other data than before their length changes
        ended = state.max_epochs is not None and state.epoch >= state.max_epochs
        return bool(ended or (state.max_iters is not None and state.iteration >= state.max_iters))

    @contextmanager
    def around_epoch(self, done: int) -> Iterator[None]:
        """Keep the run's books of an epoch. A handler could not: its events can be muted or left out."""
        state = self.state
        self.data.begin_epoch(state.epoch, state.iteration - done)
        if not done:
            self.reporter.begin_epoch()
        with workers_outlive_signals(state.dataloader):  # some loaders start theirs at the first batch
            yield
        self.data.epoch_done = True
        self.reporter.end_epoch()

    def report_exhausted(self) -> None:
        super().report_exhausted()
        if not self.is_done:
            self.terminate(reason=f"the data ended after {self.state.iteration} iterations, before the run's bound")

    # --------------------------------------------------------------------------------------------- how a run is started

    def _train(self) -> None:
        state, length = self.state, self.length
        if self.is_paused:
            self.run(self.train_loader)
        elif self.is_resuming:
            self._resume(self.train_loader, length.max_epochs, length.max_iterations)
        elif (state.max_epochs or state.max_iters) and not self.is_done:
            self.run(self.train_loader)  # after a termination or an error
        else:
            self._reset()
            self.run(self.train_loader, max_epochs=length.max_epochs, max_iters=length.max_iterations)

    def _load(self, source: str | os.PathLike[str]) -> None:
        """Load a checkpoint: "latest" if there is one yet, or that of a path."""
        if source != "latest":
            self.load_checkpoint(source)
            return
        latest = self.registry.checkpointer("train(resume='latest')").manager.get_latest()
        if latest is not None:
            self.load_checkpoint(latest)
            return
        for handler in self.handlers:
            if isinstance(handler, MetricLogger):
                handler.begin_again()

    def _resume(self, loader: Loader, max_epochs: int | None, max_iterations: int | None = None) -> None:
        """Continue from the checkpoint that was loaded, to this bound."""
        self.state.max_epochs, self.state.max_iters = max_epochs, max_iterations
        if not self.is_done:
            self.resume(loader, max_epochs, max_iterations)
            return
        self.state.epoch = self.data.epoch
        self.resumer.finish()
        try:
            self.resume(loader, max_epochs, max_iterations)
        finally:
            self.resumer.pending = None
        self.state.stop_reason = self.state.stop_reason or self.length.reached_inside(self.state, self.data.epoch_done)

    def _reset(self) -> None:
        """Return to iteration 0: counters, history, handlers, data order; weights, optimizer and fp16 scale stay."""
        for handler in self.handlers:
            if isinstance(handler, Checkpointer) and self.state.iteration > 0:
                handler.refuse_another_run()  # before anything of the finished run is touched
        self.state.max_epochs = self.state.max_iters = None
        self.resumer.reset(self.seed)

    # ------------------------------------------------------------------------------------------------- its own handlers

    def _subscribe(self) -> None:
        self.add_event_handler(Events.STARTED, self._train_mode, phase=Phase.COMPUTE)
        UnsavedState(self.registry, self.data).attach(self)
        self.add_event_handler(Events.PREEMPTED, self._stop_when_preempted)
        self.resumer.attach(self)
        self.validator.attach(self)
        self.reporter.attach(self)
        self.add_event_handler(Events.COMPLETED, self._finish, phase=Phase.COMPUTE)

    def _train_mode(self) -> None:
        train = getattr(self.optimizer, "train", None)  # of a schedule-free one
        if callable(train):
            train()
        if not self.model.training:  # else leave alone: parts of it may be frozen in eval mode
            self.model.train()
        self.reporter.start()
        self.stepper.check_first_batches()

    def _on_step(self, batch: TrainingBatch, result: TrainingResult) -> None:
        self.reporter.add(result, batch.size)
        self._commit_iteration()

    def _commit_iteration(self) -> None:
        """The iteration was trained; end the run at a bound that counts updates, samples or tokens."""
        self.data.commit(self.state.iteration)
        if self.length.counted:
            reason = self.length.reached(self.state)
            if reason is not None:
                self.terminate(reason=reason)

    def _stop_when_preempted(self, engine: Engine, event: Event) -> None:
        self.terminate(reason=f"{event.payload.signal} was received")

    def _finish(self) -> None:
        """At the run's end, report what no log point has; a run that reached its bound ends with a validation."""
        self.reporter.log()
        if not self.data.epoch_done:
            self.reporter.add_unfinished_epoch()
        if self.is_done:
            self.validator.validate_once()

    def _sets_learning_rates(self) -> bool:
        return any(isinstance(handler, (LRScheduler, ReduceLROnPlateau)) for handler in self.handlers)
