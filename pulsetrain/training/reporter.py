"""The training metrics of a run: mean losses, learning rates, throughput and skipped updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine import AnomalyDetected, Engine, Events, MetricsLogged, Phase, TrainingResult, is_training_run
from pulsetrain.engine.backends.pipeline import pipeline_of
from pulsetrain.engine.backends.trees import LaterMetrics
from pulsetrain.engine.events.filters import NEVER, EventFilter
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metrics import MetricTracker
from pulsetrain.engine.named_values import NamedValues
from pulsetrain.engine.step.log_point import LogPoint
from pulsetrain.engine.training_run import total_iterations_of
from pulsetrain.handlers import LossSpikeGuard, NaNGuard
from pulsetrain.state.part import StateDict, require
from pulsetrain.training.agreement import Agreement
from pulsetrain.training.logged_values import LoggedValues
from pulsetrain.training.running_stats import Losses, Rate
from pulsetrain.training.stepper import Stepper
from pulsetrain.training.untrained import UntrainedParameters

__all__ = ["MetricsReporter"]


class MetricsReporter:
    """Keeps the losses of a run, fires METRICS_LOGGED at its log points, and owns its history.

    Args:
        stepper: has the learning rates and the gradient norms; its strategy may derive further metrics from the loss,
            its backend knows of skipped updates, and if it has several optimizers, each has a loss of its own.
        every: iterations between two log points.
        agreement: of several processes, whose losses and metrics are averaged.
        measures: at log points, also report the metrics that the strategy computes from the outputs of that step. Not
            of a pipeline, whose last process alone has outputs, of virtual ranks, or of several optimizers.
    """

    named_losses: dict[str, Losses]
    announced_skips: int
    history: MetricTracker

    def __init__(self, stepper: Stepper, every: int, agreement: Agreement, *, measures: bool = False) -> None:
        self._derive: Callable[[Any], Mapping[str, Any]] = getattr(stepper.strategy, "derive_metrics", lambda loss: {})
        self._backend, self._stepper, self._every = stepper.backend, stepper, every
        self.losses: Losses = Losses()
        self.named_losses = {f"{name}_loss": Losses() for name in stepper.optimizers or ()}  # whose sum is the loss
        self.logged: LoggedValues = LoggedValues(agreement)
        self.validation_sets: Collection[str] = ()  # their names
        self._rate = Rate()
        self._untrained = UntrainedParameters(stepper.store.module, stepper.store.optimizer)
        self._agreement = agreement
        whole = stepper.backend.virtual_ranks is None and pipeline_of(stepper.store.module) is None
        self._measures = measures and whole and stepper.optimizers is None
        self._names: list[str] = []  # of the metrics that any process has had at a log point, in the same order in all
        self._last = NEVER  # the last iteration of the run, if it is known
        self._warned = False  # of a loss that is not finite
        self.reset()

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        engine.add_event_handler(Events.STARTED, self.start, phase=Phase.COMPUTE)
        logged_at = Events.ITERATION_COMPLETED(every=self._every)
        engine.add_event_handler(logged_at, self.log, phase=Phase.OBSERVE)
        if self._measures:  # after the iteration before a log point, and before the last one: nothing in between
            completed = Events.ITERATION_COMPLETED
            before = completed(every=self._every, after=self._every - 2) if self._every > 1 else completed(every=1)
            engine.add_event_handler(before, self._measure, phase=Phase.OBSERVE)
            end = completed(once=NEVER)
            self._before_end = engine.bus.subscribe(end, self._measure, sender=engine, phase=Phase.OBSERVE)

    def start(self) -> None:
        """A run starts or continues: measure its throughput from here."""
        if self._measures:
            self._last = total_iterations_of(self._engine) or NEVER
            self._before_end.refilter(EventFilter(once=(self._last - 1,)))
            self._measure()
        self._rate.restart(self._engine.state.samples, self._engine.state.tokens)

    def pause(self, seconds: float) -> None:
        """Leave out seconds that were not training."""
        self._rate.paused += seconds

    def log(self, *, provisional: bool = False) -> None:
        """Report what has come since the last log point: fires METRICS_LOGGED.

        Only here does training wait for the device: for what is reported, to count what fp16 skipped, and to warn of a
        loss that is not finite.

        Args:
            provisional: the run ends before its bound. The next log point of a run that continues reports these losses,
                too, as if it had never ended; so this event is an observed one.
        """
        engine, stepper = self._engine, self._stepper
        point = stepper.take_measured(engine.state.iteration)
        if self._backend.skips_updates:
            self._announce_skipped()
        if not self._counts("log"):
            return
        if not stepper.by_hand:  # else other code may have optimizers of its own
            self._untrained.warn()
        if not engine.hears(Events.METRICS_LOGGED) and not self._agreement.is_shared:
            if self._would_warn() and not self.losses.are_finite("log"):  # nobody else needs the loss on the host
                self._warn_unless_finite(self.losses.peek("log").item())
            for losses in self._all_losses() if not provisional else ():
                losses.forget("log")
            if not provisional:
                self.logged.forget("log", self._is_of_training)  # the others are for the next validation
            return
        means = self._means("log", point, keep=provisional)
        if not means:
            return
        metrics = NamedValues((name, float(value)) for name, value in means.items())
        self._warn_unless_finite(metrics["train/loss"])
        if stepper.grad_norm is not None:
            metrics["grad_norm"] = stepper.grad_norm.item()
        metrics.update({f"grad_norm/{name}": norm.item() for name, norm in stepper.grad_norms.items()})
        if self._backend.skips_updates:
            metrics["skipped_updates"] = float(self.announced_skips)
        metrics.update(self._rate.read(engine.state.samples, engine.state.tokens))
        engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics=metrics), observed=provisional)

    def _measure(self) -> None:
        """Let the next step compute the strategy's metrics, if they are to be reported after it."""
        following = self._engine.state.iteration + 1
        is_read = self._engine.hears(Events.METRICS_LOGGED) or self._agreement.is_shared
        self._stepper.measure_next(is_read and (following % self._every == 0 or following == self._last))

    def _would_warn(self) -> bool:
        """Whether a loss that is not finite is to be warned of: once, and only if no handler guards against it."""
        if self._warned:
            return False
        handlers: Sequence[object] = self._engine.handlers if is_training_run(self._engine) else ()
        return not any(isinstance(each, (NaNGuard, LossSpikeGuard)) for each in handlers)

    def _warn_unless_finite(self, loss: float) -> None:
        if math.isfinite(loss) or not self._would_warn():
            return
        self._warned = True
        get_logger("pulsetrain").warning(
            "the loss is not finite, and no handler guards against it; NaNGuard() skips updates with such gradients, "
            "LossSpikeGuard() also returns to a checkpoint",
            loss=loss,
            iteration=self._engine.state.iteration,
        )

    def add(self, result: TrainingResult, size: int | Tensor) -> None:
        """Count a step's losses.

        Args:
            result: of the step.
            size: what its losses are means over.
        """
        if not self._stepper.counts:
            return
        if isinstance(result.metrics, LaterMetrics):
            self.losses.add_later(partial(result.metrics.__getitem__, "loss"), size)
        else:
            self.losses.add(result.metrics["loss"], size)
        for name, losses in self.named_losses.items():
            if name in result.metrics:
                losses.add(result.metrics[name], size)

    def begin_epoch(self) -> None:
        """An epoch begins with its first batch: the losses of a discarded epoch are not in its mean."""
        for losses in self._all_losses():
            losses.forget("epoch")
        self.logged.forget("epoch")
        self._untrained.begin_epoch()
        self.history.keep_provisional()

    def end_epoch(self) -> None:
        """Add the epoch's means to the history."""
        if self._counts("epoch") and (means := self._means("epoch")):
            self.history.update(means)

    def add_unfinished_epoch(self) -> None:
        """Add the means of an epoch that the run ended in; continuing the epoch replaces them."""
        if self._counts("epoch") and (means := self._means("epoch", keep=True)):
            self.history.update(means, provisional=True)

    def reset(self) -> None:
        """Return to before the first loss; the last run's history stays with its readers."""
        self.announced_skips = 0  # fp16 updates known to have been skipped
        for losses in self._all_losses():
            losses.reset()
        self.logged.reset()
        self.history = MetricTracker()

    def state_dict(self) -> StateDict:
        return {
            "losses": self.losses.state_dict(),
            "named_losses": {name: losses.state_dict() for name, losses in self.named_losses.items()},
            "logged": self.logged.state_dict(),
            "announced_skips": self.announced_skips,
            "history": self.history.state_dict(),
        }

    def check_state_dict(self, state: StateDict) -> None:
        require("reporter", state, ("losses", "named_losses", "announced_skips", "history"))
        require("reporter.named_losses", state["named_losses"], self.named_losses)

    def load_state_dict(self, state: StateDict) -> None:
        if "losses" in state:
            self.losses.load_state_dict(state["losses"], self._backend.device)
            for name, losses in self.named_losses.items():
                losses.load_state_dict(state["named_losses"][name], self._backend.device)
            self.logged.load_state_dict(state.get("logged", {}), self._backend.device)
        else:  # another process takes them
            for losses in self._all_losses():
                losses.reset()
            self.logged.reset()
        for other in state.get("others", ()):
            self.losses.absorb(other["losses"])
            for name, losses in self.named_losses.items():
                losses.absorb(other["named_losses"][name])
            self.logged.absorb(other.get("logged", {}))
        self.announced_skips = state["announced_skips"]
        self.history.load_state_dict(state["history"])

    def _all_losses(self) -> Iterable[Losses]:
        return self.losses, *self.named_losses.values()

    def _counts(self, reader: str) -> bool:
        """Whether there is a loss to report; of several processes, another one may have it."""
        return self._agreement.is_shared or self.losses.count(reader) > 0

    def _means(self, reader: str, point: LogPoint | None = None, *, keep: bool = False) -> dict[str, Any]:
        """The mean losses, what derives from them, the learning rates and logged values; on the device if they are.

        It is empty if no rank has a loss.

        Args:
            reader: "log" or "epoch".
            point: has the strategy's metrics of the last step.
            keep: the reader's next mean has these losses, too.
        """
        named = {"loss": self.losses, **self.named_losses}
        anywhere: float | None = None
        if self._agreement.is_shared:
            means, anywhere = self._means_of_all_ranks(reader, named, point)
        else:
            means = {name: of.peek(reader) for name, of in named.items() if of.count(reader)}
            if point is not None:
                means = {**means, **self._metrics_of(point), **means}  # the losses first
        for losses in named.values() if not keep else ():
            losses.forget(reader)
        if "loss" not in means:
            return {}
        derived = {f"train/{name}": value for name, value in self._derive(means["loss"]).items()}
        found = {**{f"train/{name}": value for name, value in means.items()}, **derived, **self._rates()}
        logged = self.logged.means(reader, self._is_of_training, keep=keep, anywhere=anywhere)
        return {**found, **{name: value for name, value in logged.items() if name not in found}}

    def log_value(self, name: str, value: Any) -> None:
        """Report a value by name: with the next validation if the name is of a validation set, else when logging.

        Raises:
            ArgumentTypeError, ConfigurationError: it is not one number.
        """
        self._engine.state.metrics[name] = self.logged.add(name, value)

    def values_of_sets(self) -> dict[str, float]:
        """The means of what was logged under the names of validation sets since the last validation."""
        found = self.logged.means("log", lambda name: not self._is_of_training(name))
        return {name: float(value) for name, value in found.items()}

    def _is_of_training(self, name: str) -> bool:
        return name.partition("/")[0] not in self.validation_sets

    def _metrics_of(self, point: LogPoint) -> dict[str, Any]:
        found: dict[str, Any] = self._backend.to_torch(dict(point.metrics))
        return found

    def _means_of_all_ranks(
        self, reader: str, named: Mapping[str, Losses], point: LogPoint | None
    ) -> tuple[dict[str, Any], float]:
        """The means over the global batches, the same bits on every rank; and how many names the ranks have logged."""
        sums = {name: losses.sums(reader) for name, losses in named.items()}
        measured = {} if point is None else self._weighted(point)
        if point is not None:
            sums.update({name: measured.get(name, (0.0, 0.0)) for name in self._names})
        new = {name: pair for name, pair in measured.items() if name not in sums}
        logged = float(self.logged.count(reader, self._is_of_training))
        numbers = [*(each for pair in sums.values() for each in pair), float(len(new)), logged]
        *totals, are_new, anywhere = self._agreement.sums(numbers)
        found = dict(zip(sums, zip(totals[::2], totals[1::2], strict=True), strict=True))
        if are_new:  # to one rank at least: from now on they are summed with the losses
            further = self._agreement.control.sum_by_name(new, "new metrics at a log point")
            self._names += further
            found.update(further)
        means = {
            name: torch.tensor(total / weight, dtype=torch.float64) for name, (total, weight) in found.items() if weight
        }
        return means, anywhere

    def _weighted(self, point: LogPoint) -> dict[str, tuple[float, float]]:
        """The metrics of a step in this process: each times what it is a mean over, and that number."""
        weight = float(point.size) if point.metrics and self._stepper.counts else 0.0
        metrics = self._metrics_of(point)
        return {name: (float(value) * weight if weight else 0.0, weight) for name, value in metrics.items()}

    def _rates(self) -> dict[str, float]:
        rates = self._stepper.learning_rates
        if self._stepper.optimizers is None:
            return {"learning_rate": rates[0]}
        pairs = list(zip(self._stepper.optimizers.param_groups, rates, strict=True))
        return {f"learning_rate/{group['optimizer']}": rate for group, rate in reversed(pairs)}

    def _announce_skipped(self) -> None:
        """Report how many fp16 updates have overflowed since the last report."""
        before, self.announced_skips = self.announced_skips, self._backend.skipped_updates()
        new = self.announced_skips - before
        if new > 0:
            get_logger("pulsetrain").warning(
                "fp16 gradients overflowed: updates were skipped and the gradient scale was lowered",
                skipped=new,
                updates=self._engine.state.update,
            )
            anomaly = AnomalyDetected(kind="update_skipped", value=float(new), batch_indices=())
            self._engine.fire(Events.ANOMALY_DETECTED, anomaly)
