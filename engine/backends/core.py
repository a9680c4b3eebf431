"""The functional core: (weights, data, optimizer) -> new weights, without a loop's events, loaders or files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import (
    BackendSettings,
    ModelState,
    Optimizer,
    TrainingResult,
    TrainingStrategy,
    bind_strategy,
)

__all__ = ["TrainerCore"]


class TrainerCore:
    """Training steps as pure functions: what they are given stays what it is.

    Args:
        backend: computes with values, as TorchBackend(functional=True) and JaxBackend() do.
        strategy: what is optimised.
        settings: the backend's, such as clip_grad_norm; None where it has its own already.

    Raises:
        ConfigurationError: the backend computes in place, or cannot do what a setting asks for.

    Example:
        core = TrainerCore(TorchBackend(functional=True), SupervisedStrategy("mse"))
        state = core.init(model, "adamw", learning_rate=1e-3)
        for batch in batches:
            result = core.train_step(batch, state)
            state = result.state
    """

    def __init__(self, backend: Any, strategy: TrainingStrategy, settings: BackendSettings | None = None) -> None:
        if backend.in_place:
            raise ConfigurationError(
                f"TrainerCore(backend={type(backend).__name__}): computes in place, and a pure step leaves its "
                "arguments as they are; pass TorchBackend(functional=True)"
            )
        if not isinstance(strategy, TrainingStrategy):
            raise TypeError(
                f"TrainerCore(strategy={strategy!r}): needs an object with prepare_batch, compute_loss and "
                "compute_metrics"
            )
        if settings is not None:
            backend.configure(settings)
        self.backend, self.strategy = backend, strategy

    def init(
        self,
        model: Any,
        optimizer: Any = "adamw",
        *,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        schedule: Any = None,
        **options: Any,
    ) -> ModelState:
        """The state before the first update.

        Steps are computed with the model and the optimizer that were given last; states of several models of one kind,
        an ensemble's, go by the same ones.

        Args:
            model: an nn.Module, or what else the backend makes of a model.
            optimizer: a name, or an object with init(params) and update(grads, opt_state, params).
            learning_rate: of an optimizer by its name.
            weight_decay: likewise.
            schedule: of `pulsetrain.engine.schedules`; its rate holds for each update from the first.
            options: further keywords of an optimizer by its name.

        Raises:
            ConfigurationError: no such optimizer, or one that works in place.
            TypeError: a model of another kind.
        """
        rate = learning_rate if isinstance(optimizer, str) else None
        if schedule is not None and not callable(getattr(schedule, "get_lr", None)):
            raise TypeError(
                f"TrainerCore.init(schedule={schedule!r}): needs a schedule of pulsetrain.engine.schedules, "
                "such as Cosine(1e-3, 1000)"
            )
        if isinstance(optimizer, str):
            optimizer = self.backend.create_optimizer(model, optimizer, learning_rate, weight_decay, **options)
        elif not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"TrainerCore.init(optimizer={type(optimizer).__name__}): needs a name or an object with init(params) "
                "and update(grads, opt_state, params)"
            )
        state: ModelState = self.backend.init(model, optimizer, rate)
        if hasattr(self.strategy, "bind"):
            bind_strategy(self.strategy, self.backend.mirror(model, state.weights).module, self.backend)
        return state if schedule is None else replace(state, metadata={**state.metadata, "schedule": schedule})

    def train_step(self, batch: Any, model_state: ModelState, optimizer_state: Any = None) -> TrainingResult:
        """One update over one batch. Before the first update its values are looked at, which waits for the device.

        Args:
            batch: as a loader gives it, or a TrainingBatch.
            model_state: stays as it is.
            optimizer_state: in place of the one in model_state.

        Returns:
            `state` is the new one; metrics are "loss", "grad_norm" (before clipping), both of shape () on the device,
            and "seconds", how long the call took, which on an accelerator is less than the step; diagnostics are
            "memory_bytes" that the device holds (None where it does not tell) and "communication_bytes".

        Raises:
            ConfigurationError: the optimizer's state is not of these weights.
            TypeError: an array of another backend, or a batch that the strategy cannot read.
            ValueError: an empty batch.
        """
        start = time.perf_counter()
        if optimizer_state is not None:
            model_state = replace(model_state, optimizer=optimizer_state)
        self.backend.check(model_state)
        with _looking(self.strategy, model_state.metadata.get("step", 0) == 0):
            prepared = self.backend.prepare_batch(batch, self.strategy)
            result: TrainingResult = self.backend.train_step(model_state, prepared, self.strategy)
        metrics: dict[str, Any] = {**result.metrics, "seconds": time.perf_counter() - start}
        diagnostics = {"memory_bytes": self.backend.memory(), "communication_bytes": 0}
        return replace(result, metrics=metrics, diagnostics=diagnostics)

    def eval_step(self, batch: Any, model_state: ModelState) -> dict[str, Any]:
        """The loss and the strategy's metrics by name, each a mean over the batch, of shape ()."""
        self.backend.check(model_state)
        prepared = self.backend.prepare_batch(batch, self.strategy)
        return dict(self.backend.eval_step(model_state, prepared, self.strategy)[1])

    def train_epoch(
        self,
        batches: Iterable[Any],
        model_state: ModelState,
        on_step: Callable[[TrainingResult], object] | None = None,
    ) -> ModelState:
        """One update a batch; returns the state behind the last.

        Args:
            batches: as `train_step` takes them.
            model_state: stays as it is.
            on_step: called with each step's result, to report on the way.

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
            raise ValueError("TrainerCore.train_epoch(batches): gave no batch; an iterator can be read once")
        return state


@contextmanager
def _looking(strategy: Any, wanted: bool) -> Iterator[None]:
    """A strategy that may look at values does so inside only if it is wanted; afterwards its flag is what it was."""
    before = getattr(strategy, "check_values", False)
    if not before or wanted:
        yield
        return
    strategy.check_values = False
    try:
        yield
    finally:
        strategy.check_values = before
