"""The trainer: an Engine whose step optimises a strategy on a backend, with validation, handlers and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pulsetrain.config import TrainingConfig
from pulsetrain.engine import Engine, EventBus, Events
from pulsetrain.engine.argument_checks import answers_unknown_keywords, check_type
from pulsetrain.engine.backends.core import TrainerCore
from pulsetrain.engine.backends.module_view import reading_once
from pulsetrain.engine.backends.torch import TorchBackend
from pulsetrain.engine.checkpoint import Location, load_checkpoint, resolve
from pulsetrain.engine.data.virtual_loader import order_facts
from pulsetrain.engine.distributed.joining import join
from pulsetrain.engine.distributed.pulse import SharedFlag
from pulsetrain.engine.distributed.ranks import check_shared, check_virtual, is_sharded
from pulsetrain.engine.distributed.shards import resharded
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.events.payloads import CheckpointLoaded
from pulsetrain.engine.notebook import shorten_traceback
from pulsetrain.engine.optimizers import NamedOptimizers, averaged_weights, parts_of
from pulsetrain.engine.step.backend import Backend
from pulsetrain.engine.step.protocols import (
    AlternatingStrategy,
    ModelState,
    Optimizer,
    TrainingResult,
    TrainingStrategy,
)
from pulsetrain.familiar_names import OF_TRAIN, OF_TRAINER, knows_familiar_names
from pulsetrain.handlers import Callback, CallbackList
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.state.handler_registry import HandlerRegistry
from pulsetrain.state.module_state import ModulesPart
from pulsetrain.state.optimizer_state import OptimizerPart
from pulsetrain.state.resume import Resumer
from pulsetrain.state.run_state import (
    IN_PIECES,
    BackendPart,
    Counters,
    MadeWith,
    ModelPart,
    StrategyPart,
)
from pulsetrain.state.unsaved import UnsavedState
from pulsetrain.training.agreement import Agreement
from pulsetrain.training.arguments import (
    check_kinds,
    check_metric_names,
    check_ranks,
    configured_handlers,
    named_loaders,
    resolve_strategy,
    warn_of_unused_metrics,
)
from pulsetrain.training.attaching import attach_handlers, attach_rollouts
from pulsetrain.training.evaluated_run import EvaluatedRun
from pulsetrain.training.evaluator import check_sets
from pulsetrain.training.fixed import fix
from pulsetrain.training.initial_state import make_store
from pulsetrain.training.no_data import NoTrainingData
from pulsetrain.training.rank_share import RankShare
from pulsetrain.training.reporter import MetricsReporter
from pulsetrain.training.run_driver import RunDriver
from pulsetrain.training.run_length import RunLength
from pulsetrain.training.stepper import Stepper
from pulsetrain.training.validation import Evaluation, Validator

if TYPE_CHECKING:
    from pulsetrain.engine.step.backend import ModelStore

__all__ = ["Trainer"]

Loader = Iterable[Any]
OptimizerChoice = str | torch.optim.Optimizer | Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@knows_familiar_names(OF_TRAINER)
class Trainer(EvaluatedRun):
    """Trains a model: an Engine with a training step, validation and checkpoints.

    >>> from pulsetrain.engine import SupervisedStrategy
    >>> data = [(torch.ones(4, 2), torch.ones(4, 1))] * 5
    >>> config = TrainingConfig(max_epochs=3)
    >>> trainer = Trainer(nn.Linear(2, 1), data, strategy=SupervisedStrategy("mse"), config=config)
    >>> history = trainer.train()
    >>> len(history["train/loss"]), trainer.state.iteration
    (3, 15)

    Args:
        model: an nn.Module, which is moved to the backend's device, or any other model that the backend accepts.
            For a strategy that trains several modules in turns, a mapping name -> module.
        train_loader: gives batches each time it is iterated; it needs no length. None for a trainer that only
            evaluates: `validate`, `test` and `predict`.
        val_loader: one set, whose metrics are called "val/...", or a mapping name -> set ("name/...").
        strategy: what is optimised: a name, or an object (TrainingStrategy; AlternatingStrategy for several modules).
        optimizer: a name; a torch optimizer over the model's parameters; or a class or factory, called with them and,
            if it accepts them, the configured learning rate and weight decay. By default that of the configuration. For
            several modules, a mapping name -> optimizer. On a backend that computes with values, a name or an object
            with init and update.
        backend: what computes; by default PyTorch on the configuration's device.
        config: the settings.
        metrics: name -> metric, for validation: ignite's, torchmetrics', or anything with reset, update and compute.
        handlers: objects with `attach(engine)`, attached in this order.
        callbacks: `Callback` objects.
        name: the engine's name in the trainer's events.
        bus: pass one to share it with other engines.

    Raises:
        ConfigurationError: a setting, a name or a device is wrong; the message says what to do.
        TypeError: an argument has the wrong type.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    optimizers: NamedOptimizers | None
    agreement: Agreement
    data: DataCursor
    driver: RunDriver
    evaluation: Evaluation
    evaluator: Engine
    length: RunLength
    reporter: MetricsReporter
    resumer: Resumer
    source: Resumer
    stepper: Stepper
    validator: Validator
    handlers: list[Any]
    config: TrainingConfig

    wraps_model = True
    """Whether a plain model is wrapped where several processes train it: its gradients are averaged in every step."""

    def __init__(
        self,
        model: Any,
        train_loader: Loader | None = None,
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
        of_subclass = list(vars(self))
        check_kinds(config, metrics, handlers, callbacks, backend)
        self.config = config = config or TrainingConfig()
        train_loader = NoTrainingData() if train_loader is None else train_loader
        check_type("Trainer", "train_loader", train_loader, Iterable, "an iterable of batches, such as a DataLoader")
        self.backend: Backend = backend or TorchBackend()
        wraps = self.wraps_model and isinstance(self.backend, TorchBackend)
        whole = {} if self.backend.builds_model else model
        check_shared("Trainer", whole, train_loader, wraps=wraps, shares=self.backend.data_rank.count)
        virtual = self.backend.virtual_ranks
        if virtual is not None:
            check_virtual(train_loader, virtual.total)
        self.agreement = Agreement(join(), config.log_every_n_steps)  # first: the seed may be that of the main process
        self.strategy: Any = resolve_strategy(strategy)
        check_metric_names(metrics, self.strategy)
        self.data = DataCursor(
            config.chosen_seed,
            config.skip_batches,
            chosen=config.seed is not None,
            control=self.agreement.control,
            same_number="" if self.wraps_model else "the body of a Loop would count one that is repeated",
            rank=self.backend.data_rank,
            virtual=virtual,
        )
        order = order_facts(train_loader, self.seed) if virtual is not None and self.agreement.is_shared else {}
        self.agreement.check_alike(config, model, self.strategy, train_loader, self.backend.device, order)
        with self.agreement.explained("giving the model to all processes"):
            self.model_store: ModelStore = make_store(self.backend, model, optimizer, self.strategy, config, self.seed)
        self.model, self.optimizer = self.model_store.module, self.model_store.optimizer
        self.stepper = Stepper(
            self.backend,
            self.strategy,
            self.model_store,
            accumulate=config.accumulation,
            clip_grad_norm=config.clip_grad_norm,
            on_step=lambda batch, result: self.driver.on_step(batch, result),
            ranks=RankShare(self.agreement.control, self.data) if self.agreement.is_shared and not virtual else None,
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
        warn_of_unused_metrics(metrics, train_loader, val_loaders)
        attach_rollouts(self, train_loader, val_loaders)
        self.length = RunLength(config, train_loader, optimizers=len(parts_of(self.optimizer)))
        self.evaluation = Evaluation(
            self.stepper, metrics or {}, self.bus, trainer_name=self.name, control=self.agreement.control,
            shares_out=virtual is None,
        )  # fmt: skip
        self.evaluator = self.evaluation.engine
        self.evaluator.contexts.append(partial(averaged_weights, self.optimizer))
        self.evaluator.contexts.append(partial(resharded, self.model))
        with self.agreement.explained("measuring the first batches"):
            self.length.measure(self.strategy, self.backend, self.agreement.control)
        self.length.check()
        self.handlers = [
            *handlers,
            *configured_handlers(config, self.optimizer, self.length, handlers, list(val_loaders)),
        ]
        if self.agreement.is_shared:
            check_ranks(self.model, self.handlers, self.backend.data_rank.count)
        self.callbacks: CallbackList = CallbackList(list(callbacks))
        self.reporter = MetricsReporter(
            self.stepper, config.log_every_n_steps, self.agreement, measures=config.log_strategy_metrics
        )
        self.reporter.validation_sets = val_loaders.keys()
        self.validator = Validator(self.evaluation, val_loaders, config.validate_every, self.reporter)
        self.registry: HandlerRegistry = HandlerRegistry(self, self.handlers, self.callbacks)
        self.registry.leave_out([self.model, self.optimizer, self.strategy, self.evaluation, self.evaluator])
        modules = ModulesPart(self.model, self.strategy)
        self.source = self.resumer = Resumer(
            {
                "made_with": MadeWith(self),
                "backend": BackendPart(self.backend),
                "strategy": StrategyPart(self.strategy),
                "handlers": self.registry,
                "model": ModelPart(self.model),
                "modules": modules,
                "optimizer": OptimizerPart(
                    self.optimizer, self.model, lambda: self.is_rewinding or self.registry.sets_learning_rates()
                ),
                "counters": Counters(self),
                "stepper": self.stepper,
                "data": self.data,
                "validation": self.validator,
                "reporter": self.reporter,
                "unsaved": UnsavedState(self.registry, self.data, of_subclass, self.variables_of_loop),
            },
            self.data,
            self.registry,
            modules,
        )
        self.driver = RunDriver(
            self, self.length, self.resumer, self.registry, self.reporter, self.validator, self.agreement
        )
        self.registry.leave_out([self.driver])
        self.resumer.attach(self)
        self.driver.attach(self)
        self.agreement.attach(self, self.stepper, self.data)
        attach_handlers(self, self.model, self.handlers, self.agreement.control)
        self.callbacks.attach(self)
        self.registry.remember()
        self._is_made = True

    def variables_of_loop(self) -> Mapping[str, object]:
        """The variables of a hand-written loop that keep state; a Trainer has none."""
        return {}

    @answers_unknown_keywords(lambda trainer: f"{type(trainer).__name__}.train", OF_TRAIN)
    def train(self, resume: str | os.PathLike[str] | None = None, *, wait: bool = False) -> dict[str, list[float]]:
        """Train to the configured bound.

        Ctrl-C ends the run at the next safe point, with a checkpoint if a Checkpointer saves at the end, and then
        raises KeyboardInterrupt; a second Ctrl-C raises it at once.

        Args:
            resume: "latest" continues from the newest valid checkpoint of the trainer's Checkpointer, or starts if
                there is none yet; a path names a checkpoint.
            wait: if another process owns a run folder, wait until it ends.

        Returns:
            Metric name -> values: train/loss and learning_rate of each epoch, validation metrics of each validation.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit.
            ConfigurationError: resume="latest" without exactly one Checkpointer.
            RunFolderError: another run owns a run folder, or a new run would begin in a folder that holds one.
        """
        try:
            self.driver.train(resume, wait=wait)
        except BaseException as error:  # Ctrl-C, too
            shorten_traceback(error)
            raise
        finally:
            self.model_store.publish()
        return self.history.get_history()

    def rewind(self, first: int, last: int, reason: str) -> None:
        """From a handler: end here, and let `train()` continue after the newest checkpoint before iteration `first`.

        The batches of the iterations `first` to `last` are left out from then on. A run that already ends does not
        rewind.

        Raises:
            ConfigurationError: there is not exactly one Checkpointer.
            CheckpointError: there is no checkpoint before that iteration.
        """
        self.driver.rewind(first, last, reason)

    def terminate(
        self,
        skip_completed: bool = False,
        *,
        reason: str = "terminate() was called",
        observed: bool = False,
        alike: bool = False,
    ) -> None:
        self.driver.cancel_rewind()
        if self.agreement.is_shared and not alike:
            self.agreement.ask(reason, observed=observed, skip_completed=skip_completed)
        else:
            super().terminate(skip_completed, reason=reason, observed=observed)

    def skip_update(self, where: Tensor) -> None:
        """From a handler of GRADIENTS_READY: skip this update if the condition holds.

        Args:
            where: of shape (), bool, on the device; the host does not wait for it if the optimizer's kernel can skip a
                step on the device (fused Adam, AdamW, SGD).
        """
        self.stepper.skip_update(where)

    @property
    def model_state(self) -> ModelState:
        """Weights, optimizer state and metadata as they are now, as values: further training does not change them."""
        state = self.model_store.snapshot()
        counted = {"step": self.state.update, "learning_rate": float(self.learning_rates[0])}
        return replace(state, metadata={**counted, **state.metadata})

    def train_step(self, batch: Any, model_state: ModelState, optimizer_state: Any = None) -> TrainingResult:
        """One update over one batch as a pure function, see `TrainerCore.train_step`; the trainer does not change.

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
            self.driver.reset()
        if model_state is not None:
            self.model_store.restore(model_state)
            self.stepper.discard()  # what waited was of another state
        try:
            self.driver.train_epoch(loader)
        finally:
            self.model_store.publish()
        return self.model_state

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on; `state_dict()` has only ignite's three keys.

        Weights and accumulated gradients are the live tensors, not copies: write or copy them before training
        continues. If the model is sharded, they are this process's shards.
        """
        with reading_once(self.model):
            return self.resumer.state.state_dict()

    def sharing(self) -> AbstractContextManager[None]:
        """A block that all processes enter at the same event: in it, `checkpoint_state` has the state of each process.

        That is its losses since the last log point and in the epoch, and the state of its loader. Without the block,
        only those of the main process are saved.
        """
        return self.resumer.sharing(self.agreement.control)

    def shared_flag(self, owner: object) -> SharedFlag:
        """The owner's flag, which all processes create, any may raise, and all see from their next pulse on."""
        return self.agreement.pulse.flag(owner)

    def files_to_sync(self) -> list[Path]:
        """Files that the run's handlers have written and that a checkpoint relies on, such as the event log."""
        return self.registry.files_to_sync()

    def save_checkpoint(self, name: str = "checkpoint", is_best: bool = False) -> Location:
        """Save now, into the folder of the trainer's Checkpointer; returns the checkpoint's path."""
        path: Location = self.registry.checkpointer("save_checkpoint()").save(self, name, is_best)
        return path

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Restore a checkpoint; the next `train()` continues after it.

        Args:
            path: the checkpoint's folder; or a run folder, for its latest checkpoint; or `best` or `latest` in it.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not fit this trainer.
        """
        folder = resolve(path)
        in_pieces = IN_PIECES if is_sharded(self.model) else ()
        state = load_checkpoint(folder, in_pieces=in_pieces, checked=self.driver.has_checked(folder))
        try:
            self.load_checkpoint_state(state)
        except CheckpointError as error:
            named = error.with_text(f"{folder}: {error}")
            shorten_traceback(named)
            raise named.with_traceback(error.__traceback__) from error.__cause__
        self.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=folder, iteration=self.state.iteration))

    def load_checkpoint_state(self, state: Mapping[str, object]) -> None:
        """Restore a state of `checkpoint_state`, also of an earlier version; the next `train()` continues from there.

        Raises:
            CheckpointError: the state does not fit this trainer, which is then unchanged.
        """
        self.resumer.load(state, self.train_loader)
        self.abandon()

    def around_epoch(self, done: int) -> AbstractContextManager[None]:
        return self.driver.around_epoch(done)

    def report_exhausted(self) -> None:
        super().report_exhausted()
        if not self.is_done:
            self.terminate(reason=f"the data ended after {self.state.iteration} iterations, before the run's bound")


fix(Trainer)
