"""The curves and marks of one run, read from its log in one pass, in memory that does not grow with the run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from pulsetrain.engine import Events, RecordingError
from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.engine.recording.log.non_finite import NON_FINITE
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.export.event_formats import format_count, format_error, format_rows
from pulsetrain.report.curve import Curve, Floats
from pulsetrain.report.marks import ROWS, Mark, Marks

__all__ = ["EACH_ITERATION", "RATES", "RunRecord"]

EACH_ITERATION = "each iteration"  # ends the names of values in the outputs of iterations
RATES = ("samples_per_second", "tokens_per_second")
_AT_A_LIMIT = re.compile(r"max_\w+=.* was reached")  # a planned reason to terminate
_TEXTS, _CHARACTERS = 32, 4000  # as many names of texts are kept, and as much of each
_PER_UPDATE = ("learning_rate", "grad_norm")  # taken from every update if recorded, and else from logged metrics


class RunRecord:
    """The curves and marks of a run, and how it ended.

    Args:
        log: the run's log; superseded events are left out.

    Raises:
        RecordingError: the log holds no event.
    """

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.folder: Path = log.run_folder
        if not log.engines:
            damaged = f"; damaged: {log.damage[0]}" if log.damage else ""
            raise RecordingError(
                f"{log.folder}: the log holds no event{damaged}; name a run that has started with an EventRecorder"
            )
        self.engine = log.main_engine
        self.curves: dict[str, Curve] = {}
        self.validated: dict[str, None] = {}  # names of validation metrics, in order
        self.rolled_out: dict[str, None] = {}  # names of rollout metrics
        self.texts: dict[str, tuple[int, str]] = {}  # the latest text of each name, and its iteration
        self.marks = {row: Marks() for row in ROWS}
        self.iteration = self.epoch = 0
        self.first_iteration: int | None = None
        self.times: tuple[int, int] | None = None  # ns since 1970, of the first event and the last
        self.ending: tuple[str, str] | None = None  # "completed", "stopped" or "failed", and why
        # state.metrics after epochs, for names without another source: of this engine, and of others
        self._after_epochs: tuple[dict[str, Curve], dict[str, Curve]] = ({}, {})
        self._streaks: dict[str, Mark] = {}  # curves whose latest values are not finite
        self._groups: list[Curve] = []  # learning rates
        self._read_log()

    @property
    def damage(self) -> list[str]:
        """The damaged parts of the log."""
        return [str(damage) for damage in self.log.damage]

    def _read_log(self) -> None:
        of_the_engine: dict[str, Callable[[LoggedEvent], None]] = {
            Events.ITERATION_COMPLETED.value: self._on_iteration,
            Events.GRADIENTS_READY.value: self._on_gradients,
            Events.STARTED.value: self._on_started,
            Events.EPOCH_STARTED.value: self._on_epoch_started,
            Events.COMPLETED.value: self._on_completed,
            Events.TERMINATE.value: self._on_terminate,
            Events.INTERRUPT.value: self._on_interrupt,
            Events.CHECKPOINT_SAVED.value: self._on_checkpoint,
            Events.CHECKPOINT_LOADED.value: self._on_loaded,
        }
        of_any: dict[str, Callable[[LoggedEvent], None]] = {
            Events.METRICS_LOGGED.value: self._on_metrics,
            Events.MEDIA_LOGGED.value: self._on_media,
            Events.VALIDATION_COMPLETED.value: self._on_validation,
            Events.ROLLOUT_COMPLETED.value: self._on_rollout,
            Events.POLICY_UPDATED.value: self._on_metrics,
            Events.EPOCH_COMPLETED.value: self._on_epoch,
            Events.EXCEPTION_RAISED.value: self._on_exception,
            Events.HANDLER_FAILED.value: self._on_handler_failed,
            Events.ANOMALY_DETECTED.value: self._on_anomaly,
            Events.PREEMPTED.value: self._on_preempted,
        }
        both = {**of_the_engine, **of_any}
        main, first, last = self.engine, 0, 0
        for event in self.log.read(event=frozenset(both)):
            last = event.t
            first = first or last
            if event.engine == main:
                iteration = event.iteration
                if self.first_iteration is None:
                    self.first_iteration = iteration
                self.iteration, self.epoch = iteration, event.epoch
                both[event.event](event)
            elif (handle := of_any.get(event.event)) is not None:
                handle(event)
        self.times = (first, last) if first else None
        self._add_learning_rates()
        own, others = self._after_epochs
        # validations repeat the metrics of other engines under their own names
        for name, curve in {**own, **({} if self.validated else others)}.items():
            self.curves.setdefault(name, curve)
        for curve in self.curves.values():
            curve.settle()

    def _on_iteration(self, event: LoggedEvent) -> None:
        output = event.output
        if output is not None:
            values = output.items() if type(output) is dict else [("output", output)]
            for name, value in values:
                self._put(f"{name}, {EACH_ITERATION}", value)
        if event.lr:
            groups = self._groups
            while len(groups) < len(event.lr):
                groups.append(Curve())
            for curve, rate in zip(groups, event.lr, strict=False):
                if type(rate) is float or type(rate) is int:
                    curve.add(event.iteration, rate)

    def _on_gradients(self, event: LoggedEvent) -> None:
        self._put("grad_norm", _payload(event).get("grad_norm"))  # published before the end of its iteration

    def _on_metrics(self, event: LoggedEvent) -> None:
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
            self.ending = ("completed", f"completed after {format_count(event.epoch, 'epoch')}")
            self._mark("start and end", self.ending[1], kind="completed")

    def _on_terminate(self, event: LoggedEvent) -> None:
        text = str(_payload(event).get("reason") or "no reason was given")
        kind = "completed" if _AT_A_LIMIT.fullmatch(text) else "stopped"
        self.ending = (kind, text)
        self._mark("start and end", f"{kind}: {text}", kind=kind)

    def _on_interrupt(self, event: LoggedEvent) -> None:
        self.ending = ("stopped", "interrupted")
        self._mark("start and end", "interrupted", kind="stopped")

    def _on_checkpoint(self, event: LoggedEvent) -> None:
        saved = _payload(event)
        name = Path(str(saved.get("path", ""))).name
        size = saved.get("bytes")
        text = f"checkpoint {name} saved" + (f", {size / 1e6:,.1f} MB" if isinstance(size, int) else "")
        best, kind = (", the best so far", "best") if saved.get("is_best") else ("", "")
        self._mark("checkpoints", text + best, saved.get("iteration"), kind)

    def _on_loaded(self, event: LoggedEvent) -> None:
        self._mark("start and end", f"loaded checkpoint {Path(str(_payload(event).get('path', ''))).name}")

    def _on_exception(self, event: LoggedEvent) -> None:
        engine = "" if event.engine == self.engine else f" in {event.engine}"
        text = _error(event.payload)
        self._mark("anomalies", f"exception{engine}: {text}")
        if event.engine == self.engine:
            self.ending = ("failed", text)
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

    def _on_preempted(self, event: LoggedEvent) -> None:
        self._mark("start and end", f"received {_payload(event).get('signal')}")

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
            curve = curves[name] = Curve()
        curve.add(self.iteration, value)

    def _note_non_finite(self, name: str, value: str) -> None:
        streak = self._streaks.get(name)
        if streak is None:
            self._streaks[name] = self._mark("anomalies", f"{name}: {_number(value)}")
        else:
            streak.last, streak.count = self.iteration, streak.count + 1

    def _add_learning_rates(self) -> None:
        """Add a curve for each parameter group whose rates differ from those of the groups before."""
        found: list[Curve] = []
        for curve in self._groups:
            at, rates = curve.points()
            if not any(_same(at, rates, other.points()) for other in found):
                found.append(curve)
        for number, curve in enumerate(found):
            self.curves["learning_rate" if number == 0 else f"learning_rate, group {number}"] = curve


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
