"""The curves and marks of one run, in memory that does not grow with the run: from its events, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.diff.ranks import describe_divergence
from pulsetrain.engine.recording.ending import Ending, ending_of, format_error
from pulsetrain.engine.recording.log.non_finite import NON_FINITE
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.export.event_formats import format_rows
from pulsetrain.report.curve import Curve, Floats
from pulsetrain.report.marks import CUSTOM_ROWS, OTHERS, ROWS, Mark, Marks

__all__ = ["EACH_ITERATION", "RATES", "RunCurves"]

EACH_ITERATION = "each iteration"  # ends the names of values in the outputs of iterations
RATES = ("samples_per_second", "tokens_per_second")
_TEXTS, _CHARACTERS = 32, 4000  # as many names of texts are kept, and as much of each
_PER_UPDATE = ("learning_rate", "grad_norm")  # taken from every update if recorded, and else from logged metrics
_NOT_SHOWN = frozenset({
    "get_batch_started", "get_batch_completed", "iteration_started", "dataloader_stop_iteration",
    "terminate_single_epoch", "optimizer_step_completed", "validation_started", "rollout_started", "rewards_computed",
    "state_fingerprinted", "batch_fingerprinted", "log_resumed", "log_thinned", "log_lost",
})  # fmt: skip  # of our own events; any other type that is not read is an event of the user


class RunCurves:
    """The curves and marks of a run, and how it ended.

    >>> curves = RunCurves("trainer")
    >>> for iteration in (1, 2):
    ...     output = {"loss": 1 / iteration}
    ...     curves.add(LoggedEvent(engine="trainer", event="iteration_completed", iteration=iteration, output=output))
    >>> {name: curve.last for name, curve in curves.shown().items()}
    {'loss, each iteration': (2, 0.5)}

    Args:
        engine: the name of the training engine; the metrics of other engines get its name.
    """

    iteration: int
    epoch: int

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.curves: dict[str, Curve] = {}
        self.validated: dict[str, None] = {}  # names of validation metrics, in order
        self.rolled_out: dict[str, None] = {}  # names of rollout metrics
        self.texts: dict[str, tuple[int, str]] = {}  # the latest text of each name, and its iteration
        self.marks: dict[str, Marks] = {row: Marks() for row in ROWS}
        self.custom: dict[str, Marks] = {}  # of the user's own events, by type
        self._best: dict[Path, Mark] = {}  # the best checkpoint of each folder
        self.iteration = self.epoch = 0
        self.first_iteration: int | None = None
        self.times: tuple[int, int] | None = None  # ns since 1970, of the first event and the last
        self.ending: Ending | None = None  # "completed", "stopped" or "failed", and why
        # state.metrics after epochs, for names without another source: of this engine, and of others
        self._after_epochs: tuple[dict[str, Curve], dict[str, Curve]] = ({}, {})
        self._streaks: dict[str, Mark] = {}  # curves whose latest values are not finite
        self._groups: list[Curve] = []  # learning rates
        self.tokens: Curve = self.make_curve()  # that were trained until an iteration; empty if the run counts none
        self._of_the_engine: dict[str, Callable[[LoggedEvent], None]] = {
            "iteration_completed": self._on_iteration,
            "gradients_ready": self._on_gradients,
            "started": self._on_started,
            "epoch_started": self._on_epoch_started,
            "completed": self._on_completed,
            "terminate": self._on_terminate,
            "interrupt": self._on_interrupt,
            "checkpoint_saved": self._on_checkpoint,
            "checkpoint_loaded": self._on_loaded,
        }
        of_any: dict[str, Callable[[LoggedEvent], None]] = {
            "metrics_logged": self._on_metrics,
            "media_logged": self._on_media,
            "validation_completed": self._on_validation,
            "rollout_completed": self._on_rollout,
            "policy_updated": self._on_metrics,
            "epoch_completed": self._on_epoch,
            "exception_raised": self._on_exception,
            "handler_failed": self._on_handler_failed,
            "anomaly_detected": self._on_anomaly,
            "ranks_diverged": self._on_diverged,
            "preempted": self._on_preempted,
        }
        self._of_both = {**self._of_the_engine, **of_any}

    def reads(self, event_type: str) -> bool:
        """Whether it reads events of this type."""
        return event_type not in _NOT_SHOWN

    def add(self, event: LoggedEvent) -> None:
        """Read the next event, in the order of the log; any type that it does not read is ignored."""
        if event.event in _NOT_SHOWN:
            return
        self.times = (self.times[0] if self.times else event.t, event.t)
        if event.engine == self.engine:
            if self.first_iteration is None:
                self.first_iteration = event.iteration
            self.iteration, self.epoch = event.iteration, event.epoch
        elif event.event in self._of_the_engine:
            return
        self._of_both.get(event.event, self._on_custom)(event)

    def make_curve(self) -> Curve:
        """An empty curve."""
        return Curve()

    def shown(self) -> dict[str, Curve]:
        """All curves, with those of the learning rates and of metrics that only epochs have reported."""
        own, others = self._after_epochs
        # validations repeat the metrics of other engines under their own names
        found = {**self.curves, **self._learning_rates()}
        for name, curve in {**own, **({} if self.validated else others)}.items():
            found.setdefault(name, curve)
        return found

    def _on_iteration(self, event: LoggedEvent) -> None:
        output = event.output
        if output is not None:
            values = output.items() if type(output) is dict else [("output", output)]
            for name, value in values:
                self._put(f"{name}, {EACH_ITERATION}", value)
        if event.lr:
            groups = self._groups
            while len(groups) < len(event.lr):
                groups.append(self.make_curve())
            for curve, rate in zip(groups, event.lr, strict=False):
                if type(rate) is float or type(rate) is int:
                    curve.add(event.iteration, rate)

    def _on_gradients(self, event: LoggedEvent) -> None:
        self._put("grad_norm", _payload(event).get("grad_norm"))  # published before the end of its iteration

    def _on_metrics(self, event: LoggedEvent) -> None:
        if event.engine == self.engine and type(tokens := _payload(event).get("tokens")) is int:
            self.tokens.add(event.iteration, tokens)
        for name, value in _metrics(event).items():
            if event.engine != self.engine:
                name = f"{event.engine}: {name}"
            elif name in _PER_UPDATE and (name in self.curves or (self._groups and name == "learning_rate")):
                continue
            self._put(name, value)

    def _on_media(self, event: LoggedEvent) -> None:
        media = _payload(event)
        name, text = str(media.get("name")), media.get("value")
        if media.get("kind") == "text" and isinstance(text, str) and (name in self.texts or len(self.texts) < _TEXTS):
            self.texts[name] = event.iteration, text[:_CHARACTERS]

    def _on_validation(self, event: LoggedEvent) -> None:
        self._mark("validations", f"validated: {self._put_round(event, self.validated)}")

    def _on_rollout(self, event: LoggedEvent) -> None:
        self._mark("rollouts", f"rollout: {self._put_round(event, self.rolled_out)}")

    def _put_round(self, event: LoggedEvent, names: dict[str, None]) -> str:
        """Add its metrics to the curves, and their names to `names`; returns the text of its mark."""
        metrics = _metrics(event)
        for name, value in metrics.items():
            name = name if event.engine == self.engine else f"{event.engine}: {name}"
            names[name] = None
            self._put(name, value)
        return ", ".join(f"{name} {_number(value)}" for name, value in list(metrics.items())[:6]) or "no metrics"

    def _on_epoch(self, event: LoggedEvent) -> None:
        if event.engine == self.engine:
            self._mark("epochs", f"epoch {event.epoch:,} completed")
        for name, value in (event.metrics if type(event.metrics) is dict else {}).items():
            if event.engine != self.engine:
                self._put(f"{event.engine}: {name}", value, self._after_epochs[1])
            elif name not in self.validated:
                self._put(name, value, self._after_epochs[0])

    def _on_started(self, event: LoggedEvent) -> None:
        self.ending = None
        self._mark("start and end", "started" if not event.iteration else "resumed")

    def _on_epoch_started(self, event: LoggedEvent) -> None:
        self._mark("epochs", f"epoch {event.epoch:,} started")

    def _on_completed(self, event: LoggedEvent) -> None:
        if self.ending is None:
            _, reason = self._end(event)
            self._mark("start and end", reason, kind="completed")

    def _on_terminate(self, event: LoggedEvent) -> None:
        kind, text = self._end(event)
        self._mark("start and end", f"{kind}: {text}", kind=kind)

    def _on_interrupt(self, event: LoggedEvent) -> None:
        self._end(event)
        self._mark("start and end", "interrupted", kind="stopped")

    def _on_checkpoint(self, event: LoggedEvent) -> None:
        saved = _payload(event)
        name = Path(str(saved.get("path", ""))).name
        size = saved.get("bytes")
        text = f"checkpoint {name} saved" + (f", {size / 1e6:,.1f} MB" if isinstance(size, int) else "")
        if not saved.get("is_best"):
            self._mark("checkpoints", text, saved.get("iteration"))
            return
        mark = self._mark("checkpoints", text, saved.get("iteration"), "best")
        folder = Path(str(saved.get("path", ""))).parent
        before, self._best[folder] = self._best.get(folder), mark
        if before is not None and before is not mark:
            before.kind = ""
            before.text += f", best until {mark.last:,}" if before.count == 1 else ""

    def _on_loaded(self, event: LoggedEvent) -> None:
        self._mark("start and end", f"loaded checkpoint {Path(str(_payload(event).get('path', ''))).name}")

    def _on_exception(self, event: LoggedEvent) -> None:
        engine = "" if event.engine == self.engine else f" in {event.engine}"
        text = _error(event.payload)
        self._mark("anomalies", f"exception{engine}: {text}")
        if event.engine == self.engine:
            self._end(event)
            self._mark("start and end", f"failed: {text}", kind="failed")

    def _on_handler_failed(self, event: LoggedEvent) -> None:
        failed = _payload(event)
        self._mark(
            "anomalies", f"handler {failed.get('handler')} failed at {failed.get('event')}: {_error(event.payload)}"
        )

    def _on_anomaly(self, event: LoggedEvent) -> None:
        found = _payload(event)
        rows = found.get("batch_indices") or ()
        batch = f", batch {format_rows(rows, limit=8)}" if rows else ""
        self._mark("anomalies", f"{found.get('kind')}: {_number(found.get('value'))}{batch}")

    def _on_diverged(self, event: LoggedEvent) -> None:
        self._mark("anomalies", f"the processes differ: {describe_divergence(_payload(event))}")

    def _on_custom(self, event: LoggedEvent) -> None:
        row = event.event if event.event in self.custom or len(self.custom) < CUSTOM_ROWS else OTHERS
        engine = "" if event.engine == self.engine else f" of {event.engine}"
        values = event.payload.items() if type(event.payload) is dict else [("", event.payload)]
        texts = [f"{name} {_number(value)}".strip()[:80] for name, value in values if value is not None][:6]
        text = f"{event.event}{engine}" + (f": {', '.join(texts)}" if texts else "")
        self.custom.setdefault(row, Marks()).add(self.iteration, text)

    def _on_preempted(self, event: LoggedEvent) -> None:
        self._mark("start and end", f"received {_payload(event).get('signal')}")

    def _end(self, event: LoggedEvent) -> Ending:
        ending = ending_of(event)
        assert ending is not None
        self.ending = ending
        return ending

    def _mark(self, row: str, text: str, iteration: object = None, kind: str = "") -> Mark:
        return self.marks[row].add(iteration if isinstance(iteration, int) else self.iteration, text, kind)

    def _put(self, name: str, value: Json, curves: dict[str, Curve] | None = None) -> None:
        """Add a value to a curve; a non-finite value is a gap, and the first of several in a row gets a mark."""
        curves = self.curves if curves is None else curves
        kind = type(value)
        if kind is float or kind is int:
            if self._streaks and curves is self.curves:
                self._streaks.pop(name, None)
        elif kind is str and value in NON_FINITE:
            if curves is self.curves:
                self._note_non_finite(name, value)
            value = math.nan
        else:  # text, a list, or a value that was lost on a device
            return
        curve = curves.get(name)
        if curve is None:
            curve = curves[name] = self.make_curve()
        curve.add(self.iteration, value)

    def _note_non_finite(self, name: str, value: str) -> None:
        streak = self._streaks.get(name)
        if streak is None:
            self._streaks[name] = self._mark("anomalies", f"{name}: {_number(value)}")
        else:
            streak.last, streak.count = self.iteration, streak.count + 1

    def _learning_rates(self) -> dict[str, Curve]:
        """A curve for each parameter group whose rates differ from those of the groups before."""
        found: list[Curve] = []
        for curve in self._groups:
            at, rates = curve.points()
            if not any(_same(at, rates, other.points()) for other in found):
                found.append(curve)
        names = ("learning_rate" if number == 0 else f"learning_rate, group {number}" for number in range(len(found)))
        return dict(zip(names, found, strict=True))


def _same(at: Floats, values: Floats, other: tuple[Floats, Floats]) -> bool:
    return at.shape == other[0].shape and bool((at == other[0]).all()) and bool((values == other[1]).all())


def _payload(event: LoggedEvent) -> dict[str, Json]:
    return event.payload if type(event.payload) is dict else {}


def _metrics(event: LoggedEvent) -> Mapping[str, Json]:
    metrics = _payload(event).get("metrics")
    return metrics if type(metrics) is dict else {}


def _error(payload: Json) -> str:
    return format_error(payload.get("error") if type(payload) is dict else payload)


def _number(value: Json) -> str:
    if type(value) is str and value in NON_FINITE:
        return "NaN" if value == "NaN" else f"{'minus ' if value[0] == '-' else ''}infinite"
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)
