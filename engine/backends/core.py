"""The functional core: (weights, data, optimizer) -> new weights, without events, loaders or files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.arrays import Array
from pulsetrain.engine.backends.functional import FunctionalBackend
from pulsetrain.engine.backends.value_states import step_of
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.schedules.formula import Schedule
from pulsetrain.engine.step.backend import Backend
from pulsetrain.engine.step.first_batch import FirstBatch
from pulsetrain.engine.step.protocols import (
    BackendSettings,
    BindsModel,
    ModelState,
    Optimizer,
    TrainingResult,
    TrainingStrategy,
    Tree,
)

__all__ = ["TrainerCore"]


class TrainerCore:
    """Training steps as pure functions, which do not change their arguments.

    Args:
        backend: computes with values, as TorchBackend(functional=True) and JaxBackend() do.
        strategy: what is optimised.
        settings: the backend's, such as clip_grad_norm; None if it has been configured already.
        check: check the values of batches before the first update, which waits for the device. Under torch.vmap values
            cannot be read: pass False.

    Raises:
        ConfigurationError: the backend computes in place, or cannot do what a setting asks for.

    >>> import torch
    >>> from pulsetrain.engine import SupervisedStrategy, TorchBackend
    >>> core = TrainerCore(TorchBackend("cpu", functional=True), SupervisedStrategy("mse"))
    >>> state = core.init(torch.nn.Linear(2, 1), "sgd", learning_rate=0.1)
    >>> result = core.train_step((torch.ones(4, 2), torch.zeros(4, 1)), state)
    >>> state.metadata["step"], result.state.metadata["step"]
    (0, 1)
    """

    backend: FunctionalBackend
    strategy: TrainingStrategy
    check: bool

    def __init__(
        self,
        backend: Backend,
        strategy: TrainingStrategy,
        settings: BackendSettings | None = None,
        *,
        check: bool = True,
    ) -> None:
        if not isinstance(backend, FunctionalBackend):
            raise ConfigurationError(
                "computes in place, and a pure step does not change its arguments; pass TorchBackend(functional=True)",
                "TrainerCore",
                backend=type(backend),
            )
        needs = "an object with prepare_batch, compute_loss and compute_metrics"
        check_type("TrainerCore", "strategy", strategy, TrainingStrategy, needs)
        if settings is not None:
            backend.configure(settings)
        self.backend, self.strategy, self.check = backend, strategy, check

    def init(
        self,
        model: object,
        optimizer: str | Optimizer = "adamw",
        *,
        learning_rate: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        schedule: Schedule | None = None,
        **options: object,
    ) -> ModelState:
        """The state before the first update.

        Steps use the model and the optimizer of the last call; the states of an ensemble's members share them.

        Args:
            model: an nn.Module, or what the backend takes for a model.
            optimizer: a name, or an object with init(params) and update(grads, opt_state, params).
            learning_rate: of an optimizer given by name; a tensor of shape () where updates are to be differentiated.
            weight_decay: likewise.
            schedule: of `pulsetrain.engine.schedules`; sets the rate of each update.
            options: further keywords of an optimizer given by name.

        Raises:
            ConfigurationError: no such optimizer, or one that works in place.
            TypeError: the backend cannot use the model.
        """
        if schedule is not None and not callable(getattr(schedule, "get_lr", None)):
            rule = "needs a schedule of pulsetrain.engine.schedules, such as Cosine(1e-3, 1000)"
            raise ArgumentTypeError(rule, "TrainerCore.init", schedule=schedule)
        state = self.backend.begin("TrainerCore.init", model, optimizer, learning_rate, weight_decay, **options)
        if isinstance(self.strategy, BindsModel):
            self.strategy.bind(self.backend.module_view(model, state.weights).module, self.backend)
        return state if schedule is None else replace(state, metadata={**state.metadata, "schedule": schedule})

    def train_step(self, batch: Tree, model_state: ModelState, optimizer_state: Tree = None) -> TrainingResult:
        """One update over one batch.

        Args:
            batch: as a loader gives it, or a TrainingBatch.
            model_state: is not changed.
            optimizer_state: replaces the one in model_state.

        Returns:
            `state` is the next state; metrics are "loss", "grad_norm" (before clipping), both of shape () on the
            device, and "seconds", the duration of the call, which on an accelerator is less than that of the step;
            diagnostics are "memory_bytes" that the device holds (None if it does not report them) and
            "communication_bytes".

        Raises:
            ConfigurationError: the optimizer's state is not of these weights.
            TypeError: an array of another backend, or a batch that the strategy cannot read.
            ValueError: an empty batch.
        """
        start = time.perf_counter()
        if optimizer_state is not None:
            model_state = replace(model_state, optimizer=optimizer_state)
        self.backend.check(model_state)
        strategy = FirstBatch(self.strategy) if self.check and step_of(model_state) == 0 else self.strategy
        result = self.backend.train_step(model_state, self.backend.prepare_batch(batch, strategy), strategy)
        metrics: dict[str, Array] = {**result.metrics, "seconds": time.perf_counter() - start}
        diagnostics = {"memory_bytes": self.backend.memory(), "communication_bytes": 0}
        return replace(result, metrics=metrics, diagnostics=diagnostics)

    def eval_step(self, batch: Tree, model_state: ModelState) -> dict[str, Array]:
        """The loss and the strategy's metrics by name, each a mean over the batch, of shape ()."""
        self.backend.check(model_state)
        strategy = FirstBatch(self.strategy) if self.check else self.strategy
        prepared = self.backend.prepare_batch(batch, strategy)
        return dict(self.backend.eval_step(model_state, prepared, strategy)[1])

    def train_epoch(
        self,
        batches: Iterable[Tree],
        model_state: ModelState,
        on_step: Callable[[TrainingResult], object] | None = None,
    ) -> ModelState:
        """One update per batch; returns the state after the last.

        Args:
            batches: as `train_step` takes them.
            model_state: is not changed.
            on_step: called with each step's result.

        Raises:
            ValueError: there was no batch.
        """
        state = model_state
        for batch in batches:
            result = self.train_step(batch, state)
            assert result.state is not None
            state = result.state
            if on_step is not None:
                on_step(result)
        if state is model_state:
            raise ValueError("TrainerCore.train_epoch(batches): no batch was given; an iterator can be read only once")
        return state
