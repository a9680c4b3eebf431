"""Validation: an engine without gradients on the trainer's bus, and means kept on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from ignite.metrics import Metric as IgniteMetric
from torch import Tensor

from engine import Engine, EventBus, Events, Phase
from engine.errors import ConfigurationError
from engine.protocols import Backend, TrainingStrategy

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Evaluation"]


class Evaluation:
    """Runs the model over validation sets and brings the means to the host once a set.

    The evaluator's `state.output` is a mapping with "y_pred", "y" and "loss", which pytorch-ignite's metrics read
    as they are.

    Args:
        model: evaluated in eval mode, and left in the mode it was in.
        strategy: makes batches, losses and metrics.
        backend: computes them.
        metrics: name -> an ignite metric, or anything with reset(), update(y_pred, y) and compute().
        bus: shared with the trainer.

    Raises:
        ConfigurationError: a metric is neither.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: TrainingStrategy,
        backend: Backend,
        metrics: Mapping[str, Any],
        bus: EventBus,
    ) -> None:
        self.model, self.strategy, self.backend = model, strategy, backend
        self.engine = Engine(self._step, name="evaluator", bus=bus)
        self._sums: dict[str, Tensor] = {}
        self._size = 0
        for name, metric in metrics.items():
            self._attach(name, metric)

    def run(self, name: str, loader: Iterable[Any]) -> dict[str, float]:
        """The set's means as "name/metric"; an empty set is an error."""
        self._sums, self._size = {}, 0
        was_training = self.model.training
        self.model.eval()
        self.engine.state.max_epochs = self.engine.state.epoch_length = None  # from the start, of another length
        self.engine.state.metrics = {}
        try:
            self.engine.run(loader)
        finally:
            self.model.train(was_training)
        means = {metric: (total / self._size).item() for metric, total in self._sums.items()}
        derive = getattr(self.strategy, "derive_metrics", None)
        if derive is not None:
            means.update(derive(means["loss"]))
        for metric, value in self.engine.state.metrics.items():
            means[metric] = float(value)
        return {f"{name}/{metric}": value for metric, value in means.items()}

    def _step(self, engine: Engine, batch: Any) -> dict[str, Any]:
        prepared = self.strategy.prepare_batch(self.backend.to_device(batch))
        outputs, loss = self.backend.eval_step(self.model, prepared, self.strategy)
        with torch.no_grad():
            self._add("loss", loss, prepared.size)
            for name, value in self.strategy.compute_metrics(outputs, prepared).items():
                self._add(name, value, prepared.size)
        self._size += prepared.size
        return {"y_pred": outputs, "y": prepared.targets, "loss": loss}

    def _add(self, name: str, value: Tensor, size: int) -> None:
        total = value.detach().double() if value.device.type != "mps" else value.detach()
        self._sums[name] = self._sums[name] + total * size if name in self._sums else total * size

    def _attach(self, name: str, metric: Any) -> None:
        if isinstance(metric, IgniteMetric):
            metric.attach(self.engine, name)
            return
        if not all(callable(getattr(metric, method, None)) for method in ("reset", "update", "compute")):
            raise ConfigurationError(
                f"Trainer(metrics={{{name!r}: {type(metric).__name__}}}): needs an ignite or torchmetrics metric, "
                "or an object with reset(), update(y_pred, y) and compute()"
            )
        if isinstance(metric, torch.nn.Module):
            metric.to(getattr(self.backend, "device", "cpu"))

        def update(engine: Engine) -> None:
            metric.update(engine.state.output["y_pred"], engine.state.output["y"])

        def compute(engine: Engine) -> None:
            engine.state.metrics[name] = metric.compute()

        self.engine.add_event_handler(Events.EPOCH_STARTED, metric.reset, phase=Phase.COMPUTE)
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, update, phase=Phase.COMPUTE)
        self.engine.add_event_handler(Events.EPOCH_COMPLETED, compute, phase=Phase.COMPUTE)
