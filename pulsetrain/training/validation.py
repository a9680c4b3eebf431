"""Validation: when it runs, and means kept on the device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from ignite.metrics import Metric as IgniteMetric
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pulsetrain.engine import Engine, EventBus, Events, Phase, TrainingRun, is_training_run
from pulsetrain.engine.backends.pipeline import pipeline_of
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.ranks import Ranks, is_sharded
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.payloads import MediaLogged, ValidationCompleted
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metrics import RunningMean
from pulsetrain.engine.named_values import NamedValues
from pulsetrain.engine.step.backend import InPlaceBackend
from pulsetrain.engine.step.first_batch import FirstBatch
from pulsetrain.engine.step.model_outputs import predictions_of
from pulsetrain.engine.step.protocols import AlternatingStrategy, DerivesMetrics, TrainingBatch, TrainingStrategy
from pulsetrain.handlers.attachment.cadence import shared_events
from pulsetrain.handlers.metric_values.step_values import on_host, scalars
from pulsetrain.state.current_metrics import metrics_to_save
from pulsetrain.state.part import StateDict, require
from pulsetrain.state.validation_sets import load_states_of_sets, states_of_sets
from pulsetrain.training.evaluator import Evaluator, check_sets, no_batch
from pulsetrain.training.heap import Heap
from pulsetrain.training.rank_parts import RankParts, unmerged
from pulsetrain.training.reporter import MetricsReporter
from pulsetrain.training.stepper import Stepper

if TYPE_CHECKING:
    from pulsetrain.engine.step.backend import Backend, ModelStore

__all__ = ["Evaluation", "Validator"]


class Validator:
    """Validates a run: on its sets, by its cadence, and at most once after each iteration by itself.

    Args:
        evaluation: computes a set's metrics.
        loaders: validation set by name.
        every: how often; None only when asked.
        reporter: has the run's history, and leaves the time out of the throughput.
    """

    evaluation: Evaluation
    loaders: Mapping[str, Iterable[Any]]
    every: Every | None
    validated_at: int

    def __init__(
        self,
        evaluation: Evaluation,
        loaders: Mapping[str, Iterable[Any]],
        every: Every | None,
        reporter: MetricsReporter,
    ) -> None:
        self.evaluation, self.loaders, self.every, self._reporter = evaluation, loaders, every, reporter
        self._heap = Heap()
        self.reset()

    def attach(self, engine: Engine) -> None:
        assert is_training_run(engine)
        self._engine: Engine = engine
        self._run: TrainingRun = engine
        if self.loaders and self.every is not None:
            control, is_timed = self.evaluation.control, self.every.seconds is not None
            flag = engine.shared_flag(self) if is_timed and control.is_shared else None
            events = shared_events(self.every, flag, is_main=control.ranks.is_main)
            engine.add_event_handler(events, self.validate_once, phase=Phase.COMPUTE)

    def validate(self) -> dict[str, float]:
        """One round over every set; fires VALIDATION_STARTED and VALIDATION_COMPLETED, and returns the metrics.

        Raises:
            ConfigurationError: there is no set.
        """
        if not self.loaders:
            raise ConfigurationError("Trainer.validate(): no validation set; pass val_loader to the Trainer")
        engine, start = self._engine, time.perf_counter()
        engine.fire(Events.VALIDATION_STARTED)
        metrics: NamedValues[float] = NamedValues()
        for name, loader in self.loaders.items():
            metrics.update(self.evaluation.run(name, loader))
            for matrix, value in self.evaluation.matrices.items() if engine.hears(Events.MEDIA_LOGGED) else ():
                engine.fire(Events.MEDIA_LOGGED, MediaLogged(name=matrix, kind="matrix", value=value.tolist()))
        metrics = NamedValues({**self._reporter.values_of_sets(), **metrics})
        self._heap.trim()
        self.validated_at = engine.state.iteration
        engine.state.metrics.update(metrics)
        self._reporter.history.update(metrics)
        seconds = time.perf_counter() - start
        engine.fire(Events.VALIDATION_COMPLETED, ValidationCompleted(metrics=metrics, seconds=seconds))
        self._reporter.pause(time.perf_counter() - start)  # with what the handlers of the event computed and wrote
        return metrics

    def validate_once(self) -> None:
        """Validate, unless there is no set or this iteration has been validated."""
        if self.loaders and self.validated_at != self._engine.state.iteration:
            self.validate()

    def reset(self) -> None:
        self.validated_at = -1  # the iteration of the last validation

    def state_dict(self) -> StateDict:
        """When the last validation was, the run's current metrics, and the states of the sets."""
        metrics = metrics_to_save(self._engine.state.metrics)
        sets = states_of_sets(self.loaders, self._run.train_loader)
        return {"validated_at": self.validated_at, "metrics": metrics, **({"sets": sets} if sets else {})}

    def check_state_dict(self, state: StateDict) -> None:
        require("validation", state, ("validated_at", "metrics"))
        for name, each in state.get("sets", {}).items():
            require(f"validation.sets.{name}", each, ("parts", "generators"))

    def load_state_dict(self, state: StateDict) -> None:
        self.validated_at = state["validated_at"]
        self._engine.state.metrics = NamedValues(metrics_to_save(state["metrics"]))  # copies, which the run may change
        load_states_of_sets(self.loaders, self._run.train_loader, state.get("sets", {}))


class Evaluation:
    """Runs the model over validation sets and brings the means to the host once a set.

    `engine` may be run directly, too: `engine.run(loader).metrics` holds the loss and the metrics. Its `state.output`
    is a mapping with "y_pred" (the logits, if a model of transformers returns a `ModelOutput`), "y" and "loss", which
    pytorch-ignite's metrics read as they are.

    Args:
        stepper: whose store's module is evaluated, in eval mode; each of its modules is left in the mode it was in. Its
            strategy makes batches, losses and metrics, its backend computes them.
        metrics: name -> an ignite metric, or anything with reset(), update(y_pred, y) and compute().
        bus: shared with the trainer.
        control: of several processes, which share out the sets.
        shares_out: whether they do; else each evaluates all of them, and the means are not merged.
        trainer_name: the engine is "evaluator" for a trainer named "trainer", else "NAME.evaluator".

    Raises:
        ConfigurationError: a metric is neither.
    """

    store: ModelStore
    backend: Backend
    control: ControlGroup

    def __init__(
        self,
        stepper: Stepper,
        metrics: Mapping[str, Any],
        bus: EventBus,
        trainer_name: str,
        control: ControlGroup,
        *,
        shares_out: bool = True,
    ) -> None:
        self.store, self.backend = stepper.store, stepper.backend
        self.strategy: TrainingStrategy = cast(TrainingStrategy, stepper.strategy)
        self._alternates = isinstance(stepper.strategy, AlternatingStrategy)  # looking costs as much as a small batch
        name = "evaluator" if trainer_name == "trainer" else f"{trainer_name}.evaluator"
        meets = control if is_sharded(self.store.module) else None  # it gathers its weights with each batch
        self.engine: Evaluator = Evaluator(self._step, self.store.module, name=name, bus=bus, control=meets)
        self.control, self._merges = control, control.is_shared and shares_out
        self._parts = RankParts(control.ranks if shares_out else Ranks())
        self._running: defaultdict[str, RunningMean] = defaultdict(RunningMean)
        self._means: dict[str, Any] = {}  # of the last set, by the strategy's names
        self.metrics: dict[str, Any] = dict(metrics)
        self._left_out: set[str] = set()  # warned about already
        self.matrices: dict[str, Tensor] = {}  # of the last set, on the host, by their full names
        self._checks = True  # the next batch is a set's first
        # before the metrics and every handler of the user, so that they find the means
        self.engine.add_event_handler(Events.STARTED, self._clear, phase=Phase.COMPUTE)
        self.engine.add_event_handler(Events.EPOCH_STARTED, self._reset, phase=Phase.COMPUTE)
        for event in (Events.EPOCH_COMPLETED, Events.COMPLETED):  # a terminated run has the second alone
            self.engine.add_event_handler(event, self._average, phase=Phase.COMPUTE)
        for metric_name, metric in metrics.items():
            self._attach(metric_name, metric)

    def run(self, name: str, loader: Iterable[object]) -> dict[str, float]:
        """The set's scalars as "name/metric"; those of a metric that gives a mapping as "name/metric/key".

        Other values stay in `engine.state.metrics`. A matrix, such as a confusion matrix, is in `matrices` as well;
        anything else is warned about once.

        Raises:
            ConfigurationError: the set gave no batch.
        """
        if getattr(loader, "judges_policy", False):
            return self._of_policy(name, loader)
        check_sets({name: loader})
        engine, state = self.engine, self.engine.state
        state.max_epochs = state.max_iters = state.epoch_length = None  # from the start, of another length
        engine.set_name = name
        self.matrices = {}
        self._means = {}  # a run that ends before it has begun must not leave the last set's
        part = self._parts.of(loader, self.store.eval_state.weights, self.metrics.values())
        try:
            with unmerged(self.metrics.values()) if part is loader and self.control.is_shared else nullcontext():
                engine.run(part)
        finally:
            engine.set_name = None
        self._average()  # a run that was paused, or ended without COMPLETED, has come to neither of its handlers
        if "loss" not in self._means:
            raise no_batch(name, state.stop_reason)
        if state.stop_reason is not None or engine.is_paused:
            get_logger("pulsetrain").warning(
                "validation ended early: its means are over a part of the set",
                set=name,
                batches=state.iteration,
                reason=state.stop_reason or "interrupted",
            )
        if not engine.is_paused:
            # Logits that stay would be the last block of a heap grown by this set, which then cannot be given back.
            state.output, state.batch = on_host(scalars(state.output)), None
        found = {f"{name}/{metric}": value for metric, value in self._scalars(name).items()}
        return NamedValues(self.control.broadcast(found))

    def _of_policy(self, name: str, rollouts: Any) -> dict[str, float]:
        """The metrics of a set whose texts the policy writes; its engine does not run, since there is no batch."""
        with self.engine.around_run():
            self._clear()
            return NamedValues(self.control.broadcast(rollouts.evaluate_policy(name)))

    def _step(self, engine: Engine, batch: object) -> dict[str, Any]:
        backend = self.backend
        strategy, self._checks = FirstBatch(self.strategy) if self._checks else self.strategy, False
        prepared = backend.prepare_batch(batch, strategy)
        outputs: object = None
        if self._alternates:
            means: Mapping[str, Tensor] = self._alternate(cast(AlternatingStrategy, self.strategy), prepared)
        else:
            outputs, means = backend.eval_step(self.store.eval_state, prepared, strategy)
            if getattr(strategy, "needs_gradients", False):  # their graphs would be kept until the end of the set
                outputs, means = tree_map_only(Tensor, Tensor.detach, (outputs, dict(means)))
        means = backend.to_torch(means)
        for name, value in means.items():
            self._running[name].update(value, prepared.size)
        return {
            "y_pred": backend.to_torch(predictions_of(outputs)),
            "y": backend.to_torch(prepared.targets),
            "loss": means["loss"],
        }

    def _alternate(self, strategy: AlternatingStrategy, batch: TrainingBatch) -> dict[str, Tensor]:
        """The sum of its losses, and each, with whatever more it has to say."""
        losses: dict[str, Tensor] = {}
        backend = cast(InPlaceBackend, self.backend)
        for name, loss in backend.losses(self.store.state, batch, strategy):  # with gradients: a penalty may need some
            losses[name] = loss.detach()
        means = {"loss": torch.stack(list(losses.values())).sum()}
        means.update({f"{name}_loss": loss for name, loss in losses.items()})
        compute_metrics = getattr(strategy, "compute_metrics", None)
        if compute_metrics is not None:
            with torch.no_grad():
                means.update(compute_metrics(None, batch))
        return means

    def _clear(self) -> None:
        self._means, self.engine.state.metrics = {}, NamedValues()
        if self.control.is_shared:  # inside of the contexts: of averaged weights, those that are validated
            pipeline = pipeline_of(self.store.module)
            if pipeline is not None:
                pipeline.broadcast_buffers()
            else:
                self.control.broadcast_tensors(list(self.store.module.buffers()))

    def _reset(self) -> None:
        self._running.clear()
        self._checks = True

    def _average(self) -> None:
        """Put the means since `_reset` where the metrics are; a second call finds nothing more to do."""
        if not self._running:
            return
        self._means = (
            self._merged() if self._merges else {name: running.compute() for name, running in self._running.items()}
        )
        if isinstance(self.strategy, DerivesMetrics):
            self._means.update(self.strategy.derive_metrics(self._means["loss"]))
        self.engine.state.metrics.update(self._means)
        self._reset()

    def _merged(self) -> dict[str, float]:
        """The means over what all ranks have evaluated."""
        sums = {name: running.sums() for name, running in self._running.items()}
        merged = self.control.sum_by_name(sums, "the means of a validation")
        return {name: total / weight if weight else float("nan") for name, (total, weight) in merged.items()}

    def _scalars(self, set_name: str) -> dict[str, float]:
        """The metrics as numbers, mappings flattened; matrices go to `matrices`."""
        metrics = dict(self.engine.state.metrics)
        for value in list(metrics.values()):
            if isinstance(value, Mapping):
                for key, item in value.items():  # ignite puts a mapping's items beside it, without its name
                    if key not in self.metrics and metrics.get(key) is item:
                        del metrics[key]
        # such an item, or one of a metric attached by hand, does not replace the loss
        metrics = {**self._means, **metrics, **{k: v for k, v in self._means.items() if k not in self.metrics}}
        found: dict[str, float] = {}
        for name, value in metrics.items():
            for full_name, item in _flat(name, value):
                number = _number(item)
                if number is not None:
                    found[full_name] = number
                elif name in self.metrics or name in self._means:  # else attached to the evaluator, by who knows
                    if isinstance(item, Tensor) and item.ndim == 2 and min(item.shape) > 1:
                        self.matrices[f"{set_name}/{full_name}"] = item.cpu()
                    elif full_name not in self._left_out:
                        self._left_out.add(full_name)
                        get_logger("pulsetrain").warning(
                            "a metric is not a scalar and is left out of the trainer's metrics; "
                            f"read it at the end of the set from trainer.evaluator.state.metrics[{name!r}]",
                            metric=full_name,
                            type=type(item).__name__,
                            shape=tuple(item.shape) if hasattr(item, "shape") else None,
                        )
        return found

    def _attach(self, name: str, metric: Any) -> None:
        if isinstance(metric, IgniteMetric):
            metric.attach(self.engine, name)
            return
        if not all(callable(getattr(metric, method, None)) for method in ("reset", "update", "compute")):
            raise ConfigurationError(
                "needs an ignite or torchmetrics metric, or an object with reset(), update(y_pred, y) and compute()",
                "Trainer",
                metrics={name: type(metric)},
            )
        if isinstance(metric, nn.Module):
            metric.to(getattr(self.backend, "device", "cpu"))

        def update(engine: Engine) -> None:
            metric.update(engine.state.output["y_pred"], engine.state.output["y"])

        def compute(engine: Engine) -> None:
            engine.state.metrics[name] = metric.compute()

        self.engine.add_event_handler(Events.EPOCH_STARTED, metric.reset, phase=Phase.COMPUTE)
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, update, phase=Phase.COMPUTE)
        self.engine.add_event_handler(Events.EPOCH_COMPLETED, compute, phase=Phase.COMPUTE)


def _flat(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """The value under its name; a mapping's under name/key, however deep."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}/{key}", item)
    else:
        yield name, value


def _number(value: Any) -> float | None:
    """The value of a number or of an array of one element, else None."""
    try:
        if callable(getattr(value, "item", None)):
            value = value.item()
        return float(value) if hasattr(type(value), "__float__") else None  # text has none
    except (RuntimeError, TypeError, ValueError):
        return None
