"""Steps through the real computation of a recorded run, made again from a checkpoint: `pulsetrain debug --live`."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pulsetrain.debugger.commands import Command
from pulsetrain.debugger.recorded import Break, Breaks
from pulsetrain.engine import Events, Phase
from pulsetrain.engine.checkpoint import Place
from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.events.names import Event, event_key
from pulsetrain.engine.events.subscription import LAST
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.handlers.metric_values.event_values import EventValues
from pulsetrain.handlers.metric_values.step_values import learning_rates, scalars
from pulsetrain.reproduce.rerun import Again
from pulsetrain.trainer import Trainer

__all__ = ["LiveDebugger"]

_KEPT = 1000  # events behind this one
_Wanted = Callable[[LoggedEvent], bool]


class _Left(BaseException):
    """Ends the run that nobody looks at any more."""


class LiveDebugger:
    """A trainer that computes as far as it is told: it stands behind the handlers of an event, tensors and all.

    Going back runs again from the checkpoint, so it costs as much as going there.

    Args:
        build: makes the trainer, as for `verify`.
        checkpoint: where it begins; None for the run's beginning.

    Raises:
        ConfigurationError: it made no Trainer, or one without an EventRecorder.
        CheckpointError: the checkpoint is damaged, or does not fit.
    """

    def __init__(self, build: Callable[..., Trainer], checkpoint: Place | None = None, run: Path | None = None) -> None:
        self._build, self._checkpoint, self._run = build, checkpoint, run
        self.breaks = Breaks()
        self.watches: list[str] = []
        self.hit: Break | None = None
        self.faults: list[str] = []
        self._thread: threading.Thread | None = None
        self._begin()

    def _begin(self) -> None:
        self.close()
        self.faults.clear()
        self._folder = tempfile.TemporaryDirectory(prefix="pulsetrain-debug-")
        self._again = Again(self._build, Path(self._folder.name) / "live", self._checkpoint, self._run)
        self._passed: list[LoggedEvent] = []
        self._count = 0  # events that have come
        self._until: _Wanted = _always
        self._leaving = self._over = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        bus = self.trainer.bus
        known = {event_key(event): event for event in (*Events, *self.trainer.registered_events)}
        for event in known.values():
            if event not in (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED):
                bus.subscribe(event, self._hear, phase=Phase.PERSIST, order=LAST)
        self._thread = threading.Thread(target=self._train, name="live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the run under way."""
        if self._thread is not None:
            self._leaving = True
            self._go.release()
            self._thread.join()
            self._thread = None
            self._folder.cleanup()

    @property
    def trainer(self) -> Trainer:
        """The one that computes; look at its tensors as long as it stands."""
        return self._again.trainer

    def _train(self) -> None:
        self._go.acquire()
        try:
            if not self._leaving:
                self.trainer.train()
        except _Left:
            pass
        except BaseException as error:
            self.faults.append(f"{type(error).__name__}: {error}")
        finally:
            self._over = True
            self._again.recorder.detach()
            self._stopped.release()

    def _hear(self, engine: Any, event: Event) -> None:
        if self._leaving:
            raise _Left
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
        self._passed.append(logged)
        del self._passed[:-_KEPT]
        if self._until(logged):
            self._stopped.release()
            self._go.acquire()
            if self._leaving:
                raise _Left

    def _advance(self, until: _Wanted) -> LoggedEvent | None:
        """Compute up to an event; None where the run ended before."""
        if self._over:
            return None
        self._until = until
        self._go.release()
        try:
            self._stopped.acquire()
        except KeyboardInterrupt:
            self._until = _always  # it stands still before anything else is asked of it
            self._stopped.acquire()
            raise
        return None if self._over else self.event

    def _again_to(self, count: int) -> LoggedEvent | None:
        """Run again, to the event of this number; 0 is the beginning."""
        self._begin()
        return self._advance(lambda event: self._count >= count) if count > 0 else None

    @property
    def event(self) -> LoggedEvent | None:
        """The one that it stands at; None before the first."""
        return self._passed[-1] if self._passed else None

    @property
    def here(self) -> str:
        """The place in words."""
        event = self.event
        if event is None:
            start = self._again.start
            return f"live, behind iteration {start}: nothing has been computed yet"
        end = f"; {self.end}" if self._over else ""
        return f"live: {event.engine}'s {event.event}, epoch {event.epoch}, iteration {event.iteration}{end}"

    @property
    def end(self) -> str:
        """How the run has ended."""
        return f"the run has ended{f' in {self.faults[-1]}' if self.faults else ''}"

    def next(self, count: int = 1) -> LoggedEvent | None:
        """Go on by so many events; None where the run ends before."""
        target = self._count + count
        return self._advance(lambda event: self._count >= target)

    def back(self, count: int = 1) -> LoggedEvent | None:
        """Go back by so many events; None at the beginning."""
        return self._again_to(self._count - count)

    def next_to(self, event: str) -> LoggedEvent | None:
        """Go on to the next event of this type; None where none comes any more.

        Raises:
            ConfigurationError: there is no such event.
        """
        self._check_event("next_to", event)
        return self._advance(lambda each: each.event == event)

    def back_to(self, event: str) -> LoggedEvent | None:
        """Go back to the last event of this type; None, and no move, where there is none.

        Raises:
            ConfigurationError: there is no such event.
        """
        self._check_event("back_to", event)
        behind = next((n for n, each in enumerate(reversed(self._passed[:-1]), start=1) if each.event == event), None)
        return None if behind is None else self.back(behind)

    def goto(
        self,
        *,
        iteration: int | None = None,
        epoch: int | None = None,
        seq: int | None = None,
        start: bool = False,
        end: bool = False,
    ) -> LoggedEvent | None:
        """Go to the first event of an iteration or epoch of the trainer, to its start, or on to its end.

        Raises:
            ConfigurationError: it lies before the checkpoint, or the run ends before; a seq, which is the log's.
        """
        if seq is not None:
            raise ConfigurationError(f"goto(seq={seq}): a live run has other numbers than the log; choose an iteration")
        if start:
            return self._again_to(0)
        if end:
            return self._advance(_never)
        name, value = ("iteration", iteration) if iteration is not None else ("epoch", epoch)
        first = self._again.start if name == "iteration" else 0
        if value is None or value <= first:
            raise ConfigurationError(f"goto({name}={value}): this live run begins behind {name} {first}")
        here = getattr(self.event, name, 0)
        if here >= value:
            self._begin()
        found = self._advance(lambda each: each.engine == self.trainer.name and getattr(each, name) >= value)
        if found is None:
            raise ConfigurationError(f"goto({name}={value}): the run ended before")
        return found

    def continue_(self) -> LoggedEvent | None:
        """Go on to the next break; None where the run ends before."""
        found = self._advance(lambda event: self.breaks.at(event) is not None)
        self.hit = self.breaks.at(found)
        return found

    def reverse_continue(self) -> LoggedEvent | None:
        """Go back to the last break, among the last thousand events; None where there is none: the beginning then."""
        for behind, event in enumerate(reversed(self._passed[:-1]), start=1):
            self.hit = self.breaks.at(event)
            if self.hit is not None:
                return self.back(behind)
        return self._again_to(0)

    def add_break(self, event: str | None = None, condition: str | None = None) -> Break:
        """Have `continue_` stop at events: of a type, or of which a condition is true, or both.

        Raises:
            ConfigurationError: there is no such event, or the condition cannot be understood.
        """
        if event is not None:
            self._check_event("add_break", event)
        return self.breaks.add(event, condition)

    def delete_break(self, number: int) -> None:
        """Stop there no more.

        Raises:
            ConfigurationError: there is no such break.
        """
        self.breaks.remove(number)

    def add_watch(self, name: str) -> None:
        """Have `watched` tell the value of an expression, such as model[0].weight.norm()."""
        self.evaluate(name)
        self.watches.append(name)

    def watched(self) -> Mapping[str, Any]:
        """What is watched, as it is here."""
        values = {name: self.evaluate(name) for name in self.watches}
        return {name: value if isinstance(value, (int, float, str)) else _text(value) for name, value in values.items()}

    def evaluate(self, expression: str) -> Any:
        """What a Python expression gives, in which trainer, model, optimizer, state, batch, event and torch are known.

        Raises:
            ConfigurationError: it raised.
        """
        trainer = self.trainer
        names = {
            "trainer": trainer, "model": trainer.model, "optimizer": trainer.optimizer, "state": trainer.state,
            "batch": trainer.state.batch, "event": self.event, "torch": torch,
        }  # fmt: skip
        try:
            return eval(expression, names)
        except Exception as error:
            raise ConfigurationError(f"{expression}: {type(error).__name__}: {error}") from error

    def facts(self) -> Mapping[str, Any]:
        """The state by name."""
        state, trainer = self.trainer.state, self.trainer
        rates = learning_rates(trainer)
        facts: dict[str, Any] = {name: getattr(state, name) for name in ("epoch", "iteration", "update")}
        facts["rows"] = self._again.rows(state.iteration) if state.iteration > self._again.start else None
        facts["learning_rate"] = float(rates[0]) if rates else None
        return {**facts, "metrics": dict(state.metrics), "stop_reason": state.stop_reason}

    def around(self, count: int = 5) -> tuple[list[LoggedEvent], list[LoggedEvent]]:
        """The last events up to this one, that included; what comes next is not known."""
        return self._passed[-max(count, 1) :], []

    def handlers(self, *, at_most: int | None = None) -> LiveHandlers:
        """The trainer's handlers with their state."""
        return LiveHandlers(self.trainer.registry.states())

    @property
    def engines(self) -> Sequence[str]:
        """Those of the trainer's bus."""
        return [engine.name for engine in self.trainer.bus.engines]

    @property
    def event_names(self) -> Sequence[str]:
        """The types of events that there are."""
        own = [event_key(event) for event in self.trainer.registered_events]
        return sorted({*(event.value for event in Events), *own})

    @property
    def metric_names(self) -> Mapping[str, Any]:
        """The metrics that there are so far."""
        return dict(self.trainer.state.metrics)

    def commands(self) -> dict[str, Command]:
        """What a live run can do beyond a recorded one."""

        def to(event: Events) -> Callable[[str], Iterator[str]]:
            def run(rest: str) -> Iterator[str]:
                self.next_to(event.value)
                yield self.here

            return run

        return {
            "print": Command("print EXPRESSION", "what it gives: print model[0].weight.grad.norm()",
                             lambda rest: _text(self.evaluate(rest or "event")).splitlines()),
            "forward": Command("forward", "to the next batch, before its forward pass", to(Events.ITERATION_STARTED)),
            "backward": Command("backward", "behind the next backward pass", to(Events.GRADIENTS_READY)),
            "update": Command("update", "behind the next update", to(Events.OPTIMIZER_STEP_COMPLETED)),
        }  # fmt: skip

    def _check_event(self, place: str, event: str) -> None:
        if event not in self.event_names:
            raise unknown_name(place, "event", event, self.event_names)


class LiveHandlers:
    """The handlers' states, as text."""

    def __init__(self, states: Mapping[str, Any]) -> None:
        self._states = states

    def lines(self) -> Iterator[str]:
        """A line each."""
        for name, state in self._states.items():
            yield f"{name}: {_text(state)}"


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 2000 else text[:1997] + "..."


def _always(event: LoggedEvent) -> bool:
    return True


def _never(event: LoggedEvent) -> bool:
    return False
