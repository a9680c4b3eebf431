"""The trainer: an Engine whose step is a strategy on a backend, with its validation and handlers on one bus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.config import TrainingConfig
from pulsetrain.engine import Engine, Event, EventBus, Events, Phase
from pulsetrain.engine.backends.core import TrainerCore
from pulsetrain.engine.backends.torch import TorchBackend
from pulsetrain.engine.checkpoint import Place, load_checkpoint, place_of
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import workers_begin, workers_outlive_signals
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.payloads import CheckpointLoaded, MediaLogged, ValidationCompleted
from pulsetrain.engine.events.subscription import LAST
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
from pulsetrain.handlers import Callback, CallbackList
from pulsetrain.handlers.metric_values.step_values import reading_events
from pulsetrain.state.data_cursor import DataPosition
from pulsetrain.state.handler_registry import handler_settings, handler_states, restore_as_it_starts
from pulsetrain.state.resume import capture, restore
from pulsetrain.state.rewind import Rewind, go_back, plan_rewind
from pulsetrain.state.unsaved import check_unsaved, tell_of_changed_numbers
from pulsetrain.training.arguments import (
    check_kinds,
    check_metric_names,
    configured_handlers,
    named_loaders,
    resolve_strategy,
)
from pulsetrain.training.initial_state import current_state, make_store, train_epoch
from pulsetrain.training.reporter import log_point, mean_losses
from pulsetrain.training.run_length import Bound
from pulsetrain.training.run_start import begin_anew, checkpointer_of, go_on, resume_from
from pulsetrain.training.running_stats import Losses, Rate
from pulsetrain.training.stepper import Stepper
from pulsetrain.training.validation import Evaluation, check_sets

__all__ = ["Trainer"]

Loader = Iterable[Any]
OptimizerChoice = str | torch.optim.Optimizer | Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Trainer(Engine):
    """Trains a model: everything that an Engine does, and the step, the validation and the checkpoints as well.

    Args:
        model: an nn.Module, which is moved to the backend's device, or what else the backend takes for a model.
            Several by name for a strategy that trains them in turns.
        train_loader: gives batches, as often as asked; a length is not needed.
        val_loader: one set, whose metrics are called "val/...", or a mapping name -> set ("name/...").
        strategy: what is optimised: a name, or an object (TrainingStrategy; AlternatingStrategy for several modules).
        optimizer: a name, a torch optimizer over the model's parameters, or a factory called with them; by default
            what the configuration says. Of several modules, such a one for each by its name. On a backend that computes
            with values, a name or an object with init and update.
        backend: what computes; by default PyTorch on the configuration's device.
        config: the settings.
        metrics: name -> metric, for validation: ignite's, torchmetrics', or anything with reset, update and compute.
        handlers: objects with `attach(engine)`, attached in this order.
        callbacks: `Callback` objects.
        name: what the trainer's events carry.
        bus: share one with other engines.

    Raises:
        ConfigurationError: settings, names or a device that cannot be; the message says what to do.
        TypeError: an argument of another kind.
    """

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
            raise TypeError(
                f"Trainer(train_loader={train_loader!r}): needs an iterable of batches, such as a DataLoader"
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
        self.val_loaders = named_loaders(val_loader)
        check_sets(self.val_loaders)
        self.train_loader = train_loader
        source: Any = train_loader
        if getattr(source, "fires_rollouts", False):  # the policy that it lets act is this trainer's
            source.attach(self)
        self.bound = Bound(config, train_loader, optimizers=len(parts_of(self.optimizer)))
        self.evaluation = Evaluation(
            self.model_store, self.strategy, self.backend, metrics or {}, self.bus, trainer_name=self.name
        )
        self.evaluator = self.evaluation.engine
        self.evaluator.contexts.append(partial(averaged_weights, self.optimizer))
        self.history = MetricTracker()
        self.position = DataPosition(self.seed, config.skip_batches)
        self.losses, self._rate = Losses(), Rate()
        self.named_losses = {f"{name}_loss": Losses() for name in self.optimizers or ()}  # of which that is the sum
        self.rng_to_restore: dict[str, Any] | None = None
        self.states_to_restore: tuple[dict[str, Any], dict[str, str]] | None = None  # with the handlers' settings
        self.settings_at_first: dict[int, tuple[Any, str]] = {}  # of handlers, by id
        self.watched_numbers: dict[str, float] = {}  # that no checkpoint holds, as they were when the run started
        self.environment_changes: list[str] = []  # since the checkpoint was made that the run goes on from
        self.rewinding: Rewind | None = None  # the run ends here, and train() goes on behind that checkpoint
        self.validated_at = -1  # iteration of the last validation
        self.state.tokens = self.state.samples = 0
        self.announced_skips = 0  # fp16 updates known to have been left out
        self.bound.measure(self.strategy, self.backend)
        self.bound.check()
        self.handlers = [*handlers, *configured_handlers(config, self.optimizer, self.bound, handlers)]
        self.callbacks = CallbackList(list(callbacks))
        self._subscribe()
        for handler in self.handlers:
            handler.attach(self)
        self.callbacks.attach(self)
        self.states_at_first = handler_states(self)  # for a run that begins anew
        handler_settings(self)  # as they are now

    def train(self, resume: str | os.PathLike[str] | None = None) -> dict[str, list[float]]:
        """Train to the configured bound.

        Args:
            resume: "latest" goes on from the newest valid checkpoint of the trainer's Checkpointer, or starts when
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
            resume_from(self, resume)
        self.rewinding = None
        try:
            self._train()
            while self.rewinding is not None:
                go_back(self, self.rewinding)
                self.rewinding = None
                self._train()
        finally:
            self.model_store.publish()
        return self.history.get_history()

    def rewind(self, first: int, last: int, reason: str) -> None:
        """From a handler: end here, and let `train()` go on behind the newest checkpoint before iteration `first`.

        The batches of the iterations `first` to `last` are left out from then on. A run that ends does not go back.

        Raises:
            ConfigurationError: there is not exactly one Checkpointer.
            CheckpointError: there is no checkpoint before it.
        """
        if self.should_terminate or self.state.stop_reason is not None:
            get_logger("pulsetrain").warning("the run ends, and does not go back", reason=reason)
            return
        rewind = plan_rewind(self, first, last)
        self.terminate(skip_completed=True, reason=reason)
        self.rewinding = rewind

    def terminate(self, skip_completed: bool = False, *, reason: str = "terminate() was called") -> None:
        self.rewinding = None  # whoever ends the run ends it for good
        super().terminate(skip_completed, reason=reason)

    @property
    def rewinds(self) -> int:
        """How often the run has gone back."""
        return self.position.rewinds

    def skip_update(self, where: Tensor) -> None:
        """From a receiver of GRADIENTS_READY: leave this update out where the condition holds.

        Args:
            where: of shape (), bool, on the device; it is not waited for where the optimizer's kernel can leave a step
                out on the device (fused Adam, AdamW, SGD).
        """
        self.stepper.skip_update(where)

    @property
    def model_state(self) -> ModelState:
        """Weights, optimizer state and metadata as they are now, as values: training on leaves them as they are."""
        return current_state(self)

    def train_step(self, batch: Any, model_state: ModelState, optimizer_state: Any = None) -> TrainingResult:
        """One update over one batch as a pure function, see `TrainerCore.train_step`; nothing here changes.

        Raises:
            ConfigurationError: the trainer's backend computes in place.
        """
        return TrainerCore(self.backend, self.strategy).train_step(batch, model_state, optimizer_state)

    def train_epoch(self, loader: Loader | None = None, model_state: ModelState | None = None) -> ModelState:
        """One epoch with all its events and handlers, from this state on; returns the state behind it.

        Args:
            loader: by default the trainer's.
            model_state: where to go on from; by default where the trainer is.
        """
        return train_epoch(self, self.train_loader if loader is None else loader, model_state)

    def _train(self) -> None:
        state, bound = self.state, self.bound
        if self.position.resuming:
            go_on(self, self.train_loader, bound.max_epochs, bound.max_iterations)
            state.stop_reason = state.stop_reason or bound.reached_inside(state, self.position.epoch_done)
        elif self._internal_run_generator is not None or (
            (state.max_epochs or state.max_iters) and not self._is_done(state)
        ):
            self.run(self.train_loader)  # goes on behind an interruption, a termination or an error
        else:
            begin_anew(self)
            self.run(self.train_loader, max_epochs=bound.max_epochs, max_iters=bound.max_iterations)

    def _report_exhausted(self) -> None:
        super()._report_exhausted()
        if not self._is_done(self.state):
            self.terminate(reason=f"the data ended after {self.state.iteration} iterations, before the run's bound")

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Put the run's counters; events that share one are told, or they would count a step twice."""
        for name, value in counters.items():
            setattr(self.state, name, value)
        for plan in self._plans.values():
            if plan.counter is not None:
                plan.seen = getattr(self.state, plan.counter)

    @property
    def total_iterations(self) -> int | None:
        """How many batches the run will take, or None where that is not known."""
        return self.bound.total_iterations

    def validate(self) -> dict[str, float]:
        """One round over every validation set; fires VALIDATION_STARTED and VALIDATION_COMPLETED.

        Returns:
            The metrics by their full names, which are also in `state.metrics` from then on.

        Raises:
            ConfigurationError: the trainer has no validation set.
        """
        if not self.val_loaders:
            raise ConfigurationError("Trainer.validate(): no validation set; pass val_loader to the Trainer")
        start = time.perf_counter()
        self.fire(Events.VALIDATION_STARTED)
        metrics: dict[str, float] = {}
        for name, loader in self.val_loaders.items():
            metrics.update(self.evaluation.run(name, loader))
            for matrix, value in self.evaluation.matrices.items() if self.hears(Events.MEDIA_LOGGED) else ():
                self.fire(Events.MEDIA_LOGGED, MediaLogged(name=matrix, kind="matrix", value=value.tolist()))
        self.validated_at = self.state.iteration
        self.state.metrics.update(metrics)
        self.history.update(metrics)
        seconds = time.perf_counter() - start
        self.fire(Events.VALIDATION_COMPLETED, ValidationCompleted(metrics=metrics, seconds=seconds))
        self._rate.paused += time.perf_counter() - start  # with what its handlers drew and wrote
        return metrics

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on; `state_dict()` stays ignite's three keys.

        Weights and waiting gradients are the live tensors, no copies: write or copy them before training goes on.
        """
        return capture(self)

    def save_checkpoint(self, name: str = "checkpoint", is_best: bool = False) -> Place:
        """Save now, into the folder of the trainer's Checkpointer; returns the checkpoint's path."""
        path: Place = checkpointer_of(self, "save_checkpoint()").save(self, name, is_best)
        return path

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Take over a checkpoint; the next `train()` goes on behind it.

        Raises:
            CheckpointError: it is damaged, or does not fit this trainer.
        """
        folder = place_of(path)
        restore(self, load_checkpoint(folder))
        self.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=folder, iteration=self.state.iteration))

    def _subscribe(self) -> None:
        config = self.config
        self.add_event_handler(Events.STARTED, self._train_mode, phase=Phase.COMPUTE)
        self.add_event_handler(Events.STARTED, check_unsaved, phase=Phase.COMPUTE)
        self.add_event_handler(Events.CHECKPOINT_SAVED, tell_of_changed_numbers, phase=Phase.OBSERVE)
        self.add_event_handler(Events.PREEMPTED, self._stop_when_preempted)
        for event in (Events.STARTED, Events.EPOCH_STARTED):
            self.bus.subscribe(event, restore_as_it_starts, sender=self, phase=Phase.PERSIST, order=LAST)
        if self.val_loaders and config.validate_every is not None:
            self.add_event_handler(reading_events(config.validate_every), self._validate_once, phase=Phase.COMPUTE)
        logged_at = Events.ITERATION_COMPLETED(every=config.log_every_n_steps)
        self.add_event_handler(logged_at, self._log, phase=Phase.OBSERVE)
        self.add_event_handler(Events.COMPLETED, self._finish, phase=Phase.COMPUTE)

    def _on_step(self, batch: TrainingBatch, result: TrainingResult) -> None:
        """After each step: its losses are added, and a bound that counts samples or updates is looked at."""
        self.losses.add(result.metrics["loss"], batch.size)
        for name, losses in self.named_losses.items():
            if name in result.metrics:
                losses.add(result.metrics[name], batch.size)
        self.position.trained = self.state.iteration
        if self.bound.counted:
            reason = self.bound.reached(self.state)
            if reason is not None:
                self.terminate(reason=reason)

    @property
    def accumulated(self) -> int:
        """Batches whose gradients await the next update."""
        return self.stepper.accumulated

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates of the last update, one per parameter group."""
        return self.stepper.learning_rates

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient norm of the last update for which it was measured, shape ()."""
        return self.stepper.grad_norm

    @property
    def grad_norms(self) -> dict[str, Tensor]:
        """The same of each optimizer, if there are several."""
        return self.stepper.grad_norms

    @property
    def in_step(self) -> bool:
        """Whether a step is in progress, when nothing can be saved."""
        return self.stepper.is_stepping

    @in_step.setter
    def in_step(self, value: bool) -> None:
        self.stepper.is_stepping = value

    def _train_mode(self) -> None:
        train = getattr(self.optimizer, "train", None)  # of a schedule-free one
        if callable(train):
            train()
        if not self.model.training:  # else leave alone: parts of it may be frozen in eval mode
            self.model.train()
        self._rate.restart(self.state.samples, self.state.tokens)
        self.stepper.check_first_batches()

    def _epoch(self) -> Generator[Any, None, float]:
        """An epoch's batches, and what the trainer has to remember of them whoever listens."""
        state, position = self.state, self.position
        if position.begin_epoch(state.epoch, state.iteration):
            for losses in (self.losses, *self.named_losses.values()):
                losses.forget("epoch")  # of an epoch that was given up
            self.history.keep_provisional()
        with workers_outlive_signals(state.dataloader):  # some loaders begin theirs at the first batch
            elapsed = yield from super()._epoch()
        position.epoch_done = True
        if self.losses.count("epoch"):
            self.history.update(mean_losses(self, "epoch", Losses.take))
        return elapsed

    def _validate_once(self) -> None:
        if self.validated_at != self.state.iteration:  # two cadences met
            self.validate()

    def _stop_when_preempted(self, engine: Engine, event: Event) -> None:
        self.terminate(reason=f"{event.payload.signal} was received")

    def _log(self) -> None:
        log_point(self, self._rate)

    def _finish(self) -> None:
        """At the run's end: what has not been said yet; a run that reached its bound ends with a validation."""
        self._log()
        if not self.position.epoch_done and self.losses.count("epoch"):  # a run that goes on takes this back
            self.history.update(mean_losses(self, "epoch", Losses.peek), provisional=True)
        if self.val_loaders and self._is_done(self.state):
            self._validate_once()

    def _is_done(self, state: Any) -> bool:  # type: ignore[override]  # ignite's is static
        position = self.position
        if self.bound.reached(state) is not None:
            return True
        if (
            position.resuming
            and not position.epoch_done
            and state.iteration - position.epoch_start == state.epoch_length
        ):
            return False  # the last epoch's batches are behind, its EPOCH_COMPLETED is not
        # not by iterations that epochs make, as ignite does: over other data than before they are of another length
        ended = state.max_epochs is not None and state.epoch >= state.max_epochs
        return bool(ended or (state.max_iters is not None and state.iteration >= state.max_iters))

    def _setup_engine(self) -> None:
        if not self.position.resuming:
            super()._setup_engine()
            return
        state = self.state
        with workers_outlive_signals(state.dataloader):
            self._dataloader_iter = self.position.find_back(state.dataloader, state.iteration)
        self._init_iter = 0 if self.position.epoch_done else state.iteration - self.position.epoch_start
        if self.rng_to_restore is not None:  # last: making the iterator draws from the generators
            rng.restore(self.rng_to_restore)
            self.rng_to_restore = None

    def _setup_dataloader_iter(self) -> None:
        with workers_begin(self.state.dataloader):
            self._dataloader_iter = self.position.begin_pass(self.state.dataloader, self.state.iteration)
