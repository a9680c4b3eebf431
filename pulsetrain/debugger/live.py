"""Steps through the computation of a run, repeated from a checkpoint: `pulsetrain debug --live`."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pulsetrain.debugger.command import Command
from pulsetrain.debugger.stepping import SteppingDebugger
from pulsetrain.engine import LAST, ConfigurationError, Engine, Event, Events, Phase
from pulsetrain.engine.checkpoint import Location
from pulsetrain.engine.events.names import EventType, identify
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.handlers.metric_values.event_values import EventValues
from pulsetrain.handlers.metric_values.step_values import learning_rates, scalars
from pulsetrain.reproduce.rerun import Rerun
from pulsetrain.trainer import Trainer

__all__ = ["LiveDebugger"]

_KEPT = 1000  # past events that `back_to`, `reverse_continue` and `around` can reach
_Wanted = Callable[[LoggedEvent], bool]


class _Abandoned(BaseException):
    """Ends a run that is no longer needed."""


class LiveDebugger(SteppingDebugger):
    """Runs a trainer up to an event and pauses it after the event's handlers; its tensors can then be inspected.

    Moving back runs again from the checkpoint, so it costs as much as moving there from the start.

    Args:
        build: makes the trainer, as for `verify`.
        checkpoint: where the run starts; None for its beginning.
        run: the run folder, if the run skipped batches after a rewind.

    Raises:
        ConfigurationError: `build` did not make a Trainer with an EventRecorder.
        CheckpointError: the checkpoint is damaged, or does not fit the trainer.
    """

    def __init__(
        self, build: Callable[..., Trainer], checkpoint: Location | None = None, run: Path | None = None
    ) -> None:
        super().__init__()
        self._build, self._checkpoint, self._run = build, checkpoint, run
        self.faults: list[str] = []
        self._thread: threading.Thread | None = None
        self._begin()

    def _begin(self) -> None:
        self.close()
        self.faults.clear()
        self._folder = tempfile.TemporaryDirectory(prefix="pulsetrain-debug-")
        self._rerun = Rerun(self._build, Path(self._folder.name) / "live", self._checkpoint, self._run)
        self._past: list[LoggedEvent] = []
        self._count = 0  # events so far
        self._until: _Wanted = _always
        self._abandoned = self._over = False
        self._resume, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        bus = self.trainer.bus
        known = {identify(event)[0]: event for event in (*Events, *self.trainer.registered_events)}
        for event in known.values():
            if event not in (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED):
                bus.subscribe(event, self._on_event, phase=Phase.PERSIST, order=LAST)
        self._thread = threading.Thread(target=self._train, name="live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the run."""
        if self._thread is not None:
            self._abandoned = True
            self._resume.release()
            self._thread.join()
            self._thread = None
            self._folder.cleanup()

    @property
    def trainer(self) -> Trainer:
        """The trainer; it is paused, and its tensors can be inspected, between two moves."""
        return self._rerun.trainer

    def _train(self) -> None:
        self._resume.acquire()
        try:
            if not self._abandoned:
                self.trainer.train()
        except _Abandoned:
            pass
        except BaseException as error:
            self.faults.append(f"{type(error).__name__}: {error}")
        finally:
            self._over = True
            self._rerun.recorder.detach()
            self._stopped.release()

    def _on_event(self, engine: Engine, event: Event) -> None:
        if self._abandoned:
            raise _Abandoned
        logged = LoggedEvent(-1, event.engine, event.type, event.epoch, event.iteration, seq=event.seq, t=event.time_ns)
        values = EventValues()
        values.put(logged, "payload", event.payload)
        if event.type == Events.ITERATION_COMPLETED.value:
            values.put(logged, "output", dict(scalars(engine.state.output)))
            values.put(logged, "lr", learning_rates(engine))
        elif engine.state.metrics:
            values.put(logged, "metrics", dict(engine.state.metrics))
        values.settle()
        self._count += 1
        self._past.append(logged)
        del self._past[:-_KEPT]
        if self._until(logged):
            self._stopped.release()
            self._resume.acquire()
            if self._abandoned:
                raise _Abandoned

    def _advance(self, until: _Wanted) -> LoggedEvent | None:
        """Compute up to an event; None if the run ended before."""
        if self._over:
            return None
        self._until = until
        self._resume.release()
        try:
            self._stopped.acquire()
        except KeyboardInterrupt:
            self._until = _always  # wait until the trainer pauses at the next event
            self._stopped.acquire()
            raise
        return None if self._over else self.event

    def _restart(self, count: int) -> LoggedEvent | None:
        """Run again from the start, by this many events."""
        self._begin()
        return self._advance(lambda event: self._count >= count) if count > 0 else None

    @property
    def event(self) -> LoggedEvent | None:
        """The current event; None before the first."""
        return self._past[-1] if self._past else None

    @property
    def here(self) -> str:
        """The current position in words."""
        event = self.event
        if event is None:
            return f"live, after iteration {self._rerun.start}: nothing has been computed yet"
        end = f"; {self.end}" if self._over else ""
        return f"live: {event.engine}'s {event.event}, epoch {event.epoch}, iteration {event.iteration}{end}"

    @property
    def end(self) -> str:
        """How the run has ended."""
        return f"the run has ended{f' in {self.faults[-1]}' if self.faults else ''}"

    def next(self, count: int = 1) -> LoggedEvent | None:
        """Move forward by this many events; None if the run ends before."""
        target = self._count + count
        return self._advance(lambda event: self._count >= target)

    def back(self, count: int = 1) -> LoggedEvent | None:
        """Move back by this many events; None at the beginning."""
        return self._restart(self._count - count)

    def search(self, wanted: _Wanted, types: set[str] | None, *, forward: bool, or_end: bool) -> LoggedEvent | None:
        """Move forward to a wanted event, or to the end of the run; or back, among the last thousand events."""
        if forward:
            return self._advance(wanted)
        steps = next((n for n, each in enumerate(reversed(self._past[:-1]), start=1) if wanted(each)), None)
        if steps is not None:
            return self.back(steps)
        return self._restart(0) if or_end else None

    def move_to(self, name: str, value: int) -> LoggedEvent | None:
        if name == "seq":
            rule = "a live run has other numbers than the log; choose an iteration"
            raise ConfigurationError(rule, "goto", seq=value)
        if name == "start":
            return self._restart(0)
        if name == "end":
            return self._advance(lambda event: False)
        first = self._rerun.start if name == "iteration" else 0
        if value <= first:
            rule = f"this run starts after {name} {first}; choose a later one"
            raise ConfigurationError(rule, "goto", **{name: value})
        if getattr(self.event, name, 0) >= value:
            self._begin()
        found = self._advance(lambda each: each.engine == self.trainer.name and getattr(each, name) >= value)
        if found is None:
            raise ConfigurationError("the run ended before; choose an earlier one", "goto", **{name: value})
        return found

    def check_watch(self, caller: str, name: str) -> None:
        """Evaluate the expression once."""
        self.evaluate(name)

    def watched(self) -> Mapping[str, object]:
        """The current values of the watched expressions."""
        values = {name: self.evaluate(name) for name in self.watches}
        return {name: value if isinstance(value, (int, float, str)) else _text(value) for name, value in values.items()}

    def evaluate(self, expression: str) -> object:
        """The value of a Python expression over trainer, model, optimizer, state, batch, event and torch.

        Raises:
            ConfigurationError: it raised an exception.
        """
        trainer = self.trainer
        names = {
            "trainer": trainer, "model": trainer.model, "optimizer": trainer.optimizer, "state": trainer.state,
            "batch": trainer.state.batch, "event": self.event, "torch": torch,
        }  # fmt: skip
        try:
            value: object = eval(expression, names)
            return value
        except Exception as error:
            raise ConfigurationError(f"{expression}: {type(error).__name__}: {error}") from error

    def facts(self) -> Mapping[str, object]:
        """The trainer's state by name."""
        state, trainer = self.trainer.state, self.trainer
        rates = learning_rates(trainer)
        facts: dict[str, object] = {name: getattr(state, name) for name in ("epoch", "iteration", "update")}
        facts["rows"] = self._rerun.rows(state.iteration) if state.iteration > self._rerun.start else None
        facts["learning_rate"] = float(rates[0]) if rates else None
        return {**facts, "metrics": dict(state.metrics), "stop_reason": state.stop_reason}

    def around(self, count: int = 5) -> tuple[list[LoggedEvent], list[LoggedEvent]]:
        """The last events up to the current one; the next ones are not computed yet."""
        return self._past[-max(count, 1) :], []

    def handlers(self, *, max_bytes: int | None = None) -> LiveHandlers:
        """The trainer's handlers with their states."""
        return LiveHandlers(self.trainer.registry.states())

    @property
    def engines(self) -> list[str]:
        """Names of the engines on the trainer's bus."""
        return [engine.name for engine in self.trainer.bus.engines]

    @property
    def event_names(self) -> list[str]:
        """The types of events."""
        own = [identify(event)[0] for event in self.trainer.registered_events]
        return sorted({*(event.value for event in Events), *own})

    @property
    def metric_names(self) -> Collection[str]:
        """Names of the metrics so far."""
        return [*self.trainer.state.metrics]

    def commands(self) -> dict[str, Command]:
        """The commands that only a live run has."""

        def to(event: EventType) -> Callable[[str], Iterator[str]]:
            def run(rest: str) -> Iterator[str]:
                self.next_to(event.value)
                yield self.here

            return run

        return {
            "print": Command("print EXPRESSION", "evaluate Python: print model[0].weight.grad.norm()",
                             lambda rest: _text(self.evaluate(rest or "event")).splitlines()),
            "forward": Command("forward", "move to the next batch, before its forward pass",
                               to(Events.ITERATION_STARTED)),
            "backward": Command("backward", "move past the next backward pass", to(Events.GRADIENTS_READY)),
            "update": Command("update", "move past the next optimizer update", to(Events.OPTIMIZER_STEP_COMPLETED)),
        }  # fmt: skip


@dataclass(frozen=True)
class LiveHandlers:
    """The handlers of a live run."""

    states: Mapping[str, object]

    def lines(self) -> Iterator[str]:
        """As text, a line for each handler."""
        return (f"{name}: {_text(state)}" for name, state in self.states.items())


def _text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 2000 else text[:1997] + "..."


def _always(event: LoggedEvent) -> bool:
    return True
