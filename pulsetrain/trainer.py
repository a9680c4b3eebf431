"""The trainer: an Engine whose step is a strategy on a backend, with its validation and handlers on one bus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import Engine, Event, EventBus, Events, Every, Phase, rng
from engine.backends.torch import TorchBackend
from engine.checkpoint import CheckpointManager, load_checkpoint
from engine.errors import ConfigurationError
from engine.gradients import clip_grad_norm, clip_grad_value, grad_norm
from engine.optimizers import resolve_optimizer
from engine.payloads import (
    CheckpointLoaded,
    GradientsReady,
    MetricsLogged,
    OptimizerStepCompleted,
    ValidationCompleted,
)
from engine.protocols import TrainingResult, TrainingStrategy
from engine.schedules import build_schedule
from handlers import Callback, CallbackList, Checkpointer, EarlyStopping, LRScheduler
from handlers.readings import reading_events
from pulsetrain.arguments import check_kinds, named_loaders, resolve_strategy
from pulsetrain.bounds import Bound
from pulsetrain.config import TrainingConfig
from pulsetrain.evaluation import Evaluation
from pulsetrain.history import History, Rate, Window
from pulsetrain.position import DataPosition
from pulsetrain.resume import capture, restore

__all__ = ["Trainer"]

Loader = Iterable[Any]


class Trainer(Engine):
    """Trains a model: everything that an Engine does, and the step, the validation and the checkpoints as well.

    Args:
        model: an nn.Module; it is moved to the backend's device.
        train_loader: gives batches, as often as asked; a length is not needed.
        val_loader: one set, whose metrics are called "val/...", or a mapping name -> set ("name/...").
        strategy: what is optimised: a name, or an object (TrainingStrategy).
        optimizer: a name, a torch optimizer over the model's parameters, or a factory called with them; by default
            what the configuration says.
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
        model: nn.Module,
        train_loader: Loader,
        val_loader: Loader | Mapping[str, Loader] | None = None,
        *,
        strategy: str | TrainingStrategy = "supervised",
        optimizer: str
        | torch.optim.Optimizer
        | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
        | None = None,
        backend: TorchBackend | None = None,
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
        super().__init__(_step, name=name, bus=bus)
        self.strategy = resolve_strategy(strategy)
        self.backend = backend or TorchBackend()
        self.backend.configure(config.device, config.precision)
        self.seed = config.seed if config.seed is not None else int.from_bytes(os.urandom(7), "big")
        self.model = self.backend.place(model)
        self.optimizer = resolve_optimizer(
            optimizer if optimizer is not None else config.optimizer,
            self.model,
            config.learning_rate,
            config.weight_decay,
            **self._optimizer_options(optimizer),
        )
        self.train_loader = train_loader
        self.val_loaders = named_loaders(val_loader)
        self.bound = Bound(config, train_loader)
        self.evaluation = Evaluation(self.model, self.strategy, self.backend, metrics or {}, self.bus)
        self.evaluator = self.evaluation.engine
        self.history = History()
        self.position = DataPosition(self.seed)
        self.epoch_losses, self.log_losses, self._rate = Window(), Window(), Rate()
        self.accumulated = 0  # batches whose gradients await the next update
        self.rng_to_restore: dict[str, Any] | None = None
        self._grad_norm: Tensor | None = None
        self._validated_at = -1
        self.state.tokens = self.state.samples = 0
        self.learning_rates = tuple(group["lr"] for group in self.optimizer.param_groups)  # of the last update made
        self._scale = 1.0 / config.accumulate
        self.bound.measure(self.strategy, self.backend)
        self.handlers = [*handlers, *self._configured_handlers(handlers)]
        self._check_handlers()
        self._subscribe()
        for handler in self.handlers:
            handler.attach(self)
        self.callbacks = CallbackList(list(callbacks))
        self.callbacks.attach(self)

    def train(self, resume: str | os.PathLike[str] | None = None) -> History:
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
            self._resume(resume)
        state = self.state
        if self.position.resuming:
            state.max_epochs, state.max_iters = self.bound.max_epochs, self.bound.max_iterations
            if self._is_done(state) or self._tokens_reached():
                return self.history
            self.run(self.train_loader)
        else:
            rng.seed_everything(self.seed)
            state.max_epochs = state.max_iters = None
            self.run(
                self.train_loader,
                max_epochs=self.bound.max_epochs,
                max_iters=self.bound.max_iterations,
            )
        return self.history

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
        self._validated_at = self.state.iteration
        self.state.metrics.update(metrics)
        self.history.record(metrics)
        self.history.settle()
        seconds = time.perf_counter() - start
        self.fire(Events.VALIDATION_COMPLETED, ValidationCompleted(metrics=metrics, seconds=seconds))
        self._rate.paused += time.perf_counter() - start  # with what its handlers drew and wrote
        return metrics

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on; `state_dict()` stays ignite's three keys."""
        return capture(self)

    def save_checkpoint(self, name: str = "checkpoint", is_best: bool = False) -> Path:
        """Save now, into the folder of the trainer's Checkpointer; returns the checkpoint's path."""
        path: Path = self._checkpointer("save_checkpoint()").save(self, name, is_best)
        return path

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Take over a checkpoint; the next `train()` goes on behind it.

        Raises:
            CheckpointError: it is damaged, or does not fit this trainer.
        """
        folder = Path(path)
        restore(self, load_checkpoint(folder))
        self.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=folder, iteration=self.state.iteration))

    def _resume(self, source: str | os.PathLike[str]) -> None:
        if source != "latest":
            self.load_checkpoint(source)
            return
        latest = self._checkpointer("train(resume='latest')").manager.get_latest()
        if latest is not None:
            self.load_checkpoint(latest)

    def _checkpointer(self, asked_by: str) -> Any:
        found = [
            handler for handler in self.handlers if isinstance(getattr(handler, "manager", None), CheckpointManager)
        ]
        if len(found) != 1:
            raise ConfigurationError(
                f"Trainer.{asked_by}: needs exactly one Checkpointer among the handlers, and there are {len(found)}; "
                "pass handlers=[Checkpointer('runs/a')], or name the checkpoint's path"
            )
        return found[0]

    def _optimizer_options(self, optimizer: Any) -> dict[str, Any]:
        config = self.config
        options = dict(config.optimizer_options)
        if config.no_decay is not None:
            options["no_decay"] = config.no_decay
        name = config.optimizer if optimizer is None else optimizer
        if name == "sgd" and self.backend.scaler is not None:
            # torch's fused SGD leaves its momentum uninitialised when the gradient scale skips the very first step
            options.setdefault("fused", False)
        return options

    def _configured_handlers(self, given: Sequence[Any]) -> list[Any]:
        config, added = self.config, list[Any]()
        if config.schedule is not None and (config.schedule != "constant" or config.warmup_steps):
            if any(isinstance(handler, LRScheduler) for handler in given):
                raise ConfigurationError(
                    f"TrainingConfig(schedule={config.schedule!r}) and an LRScheduler handler: give one; "
                    "schedule=None leaves the rate to the handler"
                )
            schedule = build_schedule(
                config.schedule,
                config.learning_rate,
                total_steps=self.bound.total_updates,
                warmup_steps=config.warmup_steps,
                min_lr_ratio=config.min_lr_ratio,
                **config.schedule_options,
            )
            added.append(LRScheduler(schedule))
        if config.early_stopping_patience is not None:
            added.append(EarlyStopping(patience=config.early_stopping_patience))
        if config.save_every_n_epochs is not None:
            assert config.run_dir is not None  # the configuration has checked that
            added.append(Checkpointer(config.run_dir, every=Every(epochs=config.save_every_n_epochs)))
        return added

    def _check_handlers(self) -> None:
        waits = [h for h in self.handlers if isinstance(h, EarlyStopping)]
        if waits and not self.val_loaders:
            raise ConfigurationError(
                f"EarlyStopping(metric={waits[0].metric!r}): waits for a validation, and the Trainer has no val_loader"
            )

    def _subscribe(self) -> None:
        config = self.config
        self.add_event_handler(Events.STARTED, self._train_mode, phase=Phase.COMPUTE)
        self.add_event_handler(Events.PREEMPTED, self._stop_when_preempted)
        self.add_event_handler(Events.EPOCH_STARTED, self._epoch_started, phase=Phase.COMPUTE)
        self.add_event_handler(Events.EPOCH_COMPLETED, self._epoch_completed, phase=Phase.COMPUTE)
        if config.max_tokens is not None:
            self.add_event_handler(Events.ITERATION_COMPLETED, self._stop_at_tokens)
        if self.val_loaders and config.validate_every is not None:
            self.add_event_handler(reading_events(config.validate_every), self._validate_once, phase=Phase.COMPUTE)
        log_point = Events.ITERATION_COMPLETED(every=config.log_every_n_steps)
        self.add_event_handler(log_point, self._log, phase=Phase.OBSERVE)
        self.add_event_handler(Events.COMPLETED, self._finish, phase=Phase.COMPUTE)
        self._gradients_plan = self._plan(Events.GRADIENTS_READY)
        self._stepped_plan = self._plan(Events.OPTIMIZER_STEP_COMPLETED)

    def _update(self) -> None:
        """One optimizer step over the gradients of `accumulate` batches."""
        config, optimizer = self.config, self.optimizer
        self.accumulated = 0
        self.backend.unscale_gradients(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if config.clip_grad_norm is not None or self._gradients_plan.live:
            self._grad_norm = grad_norm(parameters)
            self.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=self._grad_norm))  # it advances state.update
            if config.clip_grad_norm is not None:
                clip_grad_norm(parameters, config.clip_grad_norm, self._grad_norm)
        else:
            self.state.update += 1
        if config.clip_grad_value is not None:
            clip_grad_value(parameters, config.clip_grad_value)
        self.learning_rates = tuple(group["lr"] for group in optimizer.param_groups)
        self.backend.apply_gradients(optimizer)
        if self._stepped_plan.live:
            self.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=self.learning_rates))

    def _train_mode(self) -> None:
        self.model.train()
        self._rate.restart(self.state.samples, self.state.tokens)

    def _epoch_started(self) -> None:
        self.position.begin_epoch(self.state.iteration)

    def _epoch_completed(self) -> None:
        self.position.epoch_done = True
        self._record_epoch()

    def _record_epoch(self) -> None:
        if len(self.epoch_losses):
            self.history.record({"train/loss": self.epoch_losses.take(), "learning_rate": self.learning_rates[0]})

    def _validate_once(self) -> None:
        if self._validated_at != self.state.iteration:  # two cadences met
            self.validate()

    def _stop_at_tokens(self) -> None:
        if self._tokens_reached():
            self.terminate(reason=f"max_tokens={self.config.max_tokens} was reached")

    def _tokens_reached(self) -> bool:
        return self.config.max_tokens is not None and self.state.tokens >= self.config.max_tokens

    def _stop_when_preempted(self, engine: Engine, event: Event) -> None:
        self.terminate(reason=f"{event.payload.signal} was received")

    def _log(self) -> None:
        """A log point: the one place where the loop waits for the device, and only for somebody who listens."""
        if not len(self.log_losses) or not self.hears(Events.METRICS_LOGGED):
            return
        self.history.settle()
        metrics = {"train/loss": self.log_losses.take().item(), "learning_rate": self.learning_rates[0]}
        if self._grad_norm is not None:
            metrics["grad_norm"] = self._grad_norm.item()
        metrics.update(self._rate.read(self.state.samples, self.state.tokens))
        self.fire(Events.METRICS_LOGGED, MetricsLogged(metrics=metrics))

    def _finish(self) -> None:
        """At the run's end: what has not been said yet; a run that reached its bound ends with a validation."""
        self._log()
        self._record_epoch()
        self.history.settle()
        reason = self.state.stop_reason
        if self.val_loaders and (reason is None or reason.startswith("max_")):
            self._validate_once()

    def _is_done(self, state: Any) -> bool:  # type: ignore[override]  # ignite's is static
        position = self.position
        if (
            position.resuming
            and not position.epoch_done
            and state.iteration - position.epoch_start == state.epoch_length
        ):
            return False  # the last epoch's batches are behind, its EPOCH_COMPLETED is not
        return bool(Engine._is_done(state))

    def _setup_engine(self) -> None:
        if not self.position.resuming:
            super()._setup_engine()
            return
        state = self.state
        self._dataloader_iter = self.position.find_back(state.dataloader, state.iteration)
        self._init_iter = state.iteration - self.position.epoch_start  # 0 where an epoch begins
        if self.rng_to_restore is not None:  # last: making the iterator draws from the generators
            rng.restore(self.rng_to_restore)
            self.rng_to_restore = None

    def _setup_dataloader_iter(self) -> None:
        self._dataloader_iter = self.position.begin_pass(self.state.dataloader, self.state.iteration)


def _step(trainer: Trainer, batch: Any) -> TrainingResult:
    """One iteration: forward, backward, and an update when `accumulate` batches are together. Nothing waits here."""
    strategy, backend, state = trainer.strategy, trainer.backend, trainer.state
    prepared = strategy.prepare_batch(backend.to_device(batch))
    loss = backend.forward_backward(trainer.model, prepared, strategy, trainer._scale)
    state.samples += prepared.samples
    state.tokens += prepared.tokens
    trainer.epoch_losses.add(loss)
    trainer.log_losses.add(loss)
    trainer.accumulated += 1
    if trainer.accumulated == trainer.config.accumulate:
        trainer._update()
    trainer.position.trained = state.iteration
    return TrainingResult({"loss": loss})
