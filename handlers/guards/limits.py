"""End a run after a time or after a number of steps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from pulsetrain.engine import ConfigurationError, Engine, Event, Events, Phase, is_training_run
from pulsetrain.engine.argument_checks import check_choice, check_whole_number
from pulsetrain.engine.errors import refused
from pulsetrain.engine.recording.replay.engine import ReplayedEngine
from pulsetrain.handlers.attachment.attachment import Handler

__all__ = ["StepLimit", "TimeLimit"]

_UNITS = re.compile(r"(?:(\d+)d)? *(?:(\d+)h)? *(?:(\d+)m)? *(?:(\d+(?:\.\d+)?)s)?")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")  # SLURM's notation, days first


class TimeLimit(Handler):
    """Terminates the engine after the first iteration at which its time has run out.

    Time counts from STARTED. Use `margin` for the time that a process needs before that, as for imports, and after the
    last iteration, as for a last checkpoint. `TimeLimit("24h", margin="10m", of="process")` ends each job of a queue in
    time; the next job continues with `train(resume="latest")`. A run that is rewound to a checkpoint does not regain
    the time that it used after that checkpoint.

    Args:
        seconds: a number, or text such as "2h30m", "90s", "1d12h", or SLURM's "HH:MM:SS" and "D-HH:MM:SS".
        margin: end this much earlier; seconds or text.
        of: whose time. "run" adds that of earlier processes, up to their last checkpoint; "process" does not.
        clock: seconds, never running backwards; by default the times of the events, from the host's wall clock, so
            that a replay ends where the run did.

    Raises:
        ConfigurationError: not a duration, one that is not positive, or a margin that leaves no time.

    >>> ticks = iter(range(100))
    >>> limit = TimeLimit("5s", margin=1, clock=lambda: next(ticks))
    >>> engine = Engine(lambda engine, batch: None)
    >>> _ = limit.attach(engine)
    >>> engine.run([0] * 100).iteration
    4
    """

    def __init__(
        self,
        seconds: float | str,
        margin: float | str = 0.0,
        *,
        of: Literal["run", "process"] = "run",
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.seconds: float = _duration("seconds", seconds)
        self.margin: float = _duration("margin", margin)
        if not self.seconds > 0.0:
            raise ConfigurationError("needs a positive time", "TimeLimit", seconds=seconds)
        if self.margin >= self.seconds:
            raise ConfigurationError(
                "leaves nothing of {seconds}; give less", "TimeLimit", margin=margin, seconds=seconds
            )
        check_choice("TimeLimit", "of", of, ("run", "process"))
        self.of = of
        self.clock = clock
        self._before = 0.0  # used in earlier runs and processes
        self._began = self._last = 0.0  # when this run started, and when its last iteration was completed
        self._ended = False

    def attach(self, engine: Engine) -> Self:
        """Read the clock after each iteration, in phase ACT."""
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            subscribe(Events.STARTED, self._on_started, phase=Phase.ACT)
            subscribe(Events.ITERATION_COMPLETED, self._on_iteration, phase=Phase.ACT)
            subscribe(Events.CHECKPOINT_LOADED, self._on_loaded, phase=Phase.ACT)
        return self

    @property
    def used(self) -> float:
        """Seconds up to the last iteration."""
        return self._before + (self._last - self._began)

    def state_dict(self) -> dict[str, float]:
        """The seconds used so far."""
        return {"used": self.used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count the seconds used before, if the limit is that of the run."""
        if self.of == "run":
            self._before = max(float(state["used"]), self.used)  # a rewound run does not get its time back
            self._began = self._last

    def _on_started(self, engine: Engine, event: Event) -> None:
        self._before = self.used if engine.state.iteration > 0 or self.of == "process" else 0.0
        self._began = self._last = self._now(event)
        self._ended = False
        self._judge(engine)  # the time may be used up before the first iteration

    def _on_iteration(self, engine: Engine, event: Event) -> None:
        self._last = self._now(event)
        self._judge(engine)

    def _on_loaded(self, engine: Engine) -> None:
        if self.of == "process" and isinstance(engine, ReplayedEngine):  # in a log this event starts a process
            self._before, self._began = 0.0, self._last

    def _judge(self, engine: Engine) -> None:
        if not self._ended and self.used >= self.seconds - self.margin:
            self._ended = True  # in a replay the run may continue
            left = f", {self.margin:g} s before it" if self.margin else ""
            reason = f"time limit of {self.seconds:g} s{left}: {self.used:.1f} s are used"
            engine.terminate(reason=reason, observed=True)

    def _now(self, event: Event) -> float:
        return event.time_ns / 1e9 if self.clock is None else self.clock()


class StepLimit(Handler):
    """Terminates the engine after this many more iterations or updates, whichever comes first.

    The count starts at STARTED: a run that continues from a checkpoint makes as many again. A run that
    `Trainer.rewind` returns to a checkpoint keeps its count.

    Args:
        iterations: batches.
        updates: optimizer steps; the run ends after the iteration of the last one.

    Raises:
        ConfigurationError: neither is given, or a number below 1.

    >>> engine = Engine(lambda engine, batch: None)
    >>> _ = StepLimit(iterations=3).attach(engine)
    >>> engine.run([0] * 100).iteration
    3
    """

    iterations: int | None
    updates: int | None

    def __init__(self, iterations: int | None = None, updates: int | None = None) -> None:
        self.iterations, self.updates = iterations, updates
        if iterations is None and updates is None:
            raise refused(self, "needs iterations or updates, such as iterations=1000", "iterations", "updates")
        for argument, number in (("iterations", iterations), ("updates", updates)):
            check_whole_number("StepLimit", argument, number, or_none=True)
        self._at_start: tuple[int, int] | None = None  # iteration and update
        self._made = (0, 0)  # of each, before a rewind
        self._ended = False

    def attach(self, engine: Engine) -> Self:
        """Count after each iteration, in phase ACT; from now on if the engine is running."""
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            subscribe(Events.STARTED, self._on_started, phase=Phase.ACT)
            subscribe(Events.ITERATION_COMPLETED, self._on_iteration, phase=Phase.ACT)
            subscribe(Events.TERMINATE, self._on_terminate, phase=Phase.ACT)
            self._made, self._ended = (0, 0), False
            self._at_start = (engine.state.iteration, engine.state.update) if engine.is_running else None
        return self

    def _on_started(self, engine: Engine) -> None:
        made, self._made = self._made, (0, 0)
        self._at_start = engine.state.iteration - made[0], engine.state.update - made[1]
        self._ended = False

    def _on_terminate(self, engine: Engine) -> None:
        if is_training_run(engine) and engine.is_rewinding and self._at_start is not None:
            self._made = engine.state.iteration - self._at_start[0], engine.state.update - self._at_start[1]

    def _on_iteration(self, engine: Engine) -> None:
        if self._at_start is None or self._ended:
            return
        state = engine.state
        made = state.iteration - self._at_start[0], state.update - self._at_start[1]
        for name, count, limit in zip(("iterations", "updates"), made, (self.iterations, self.updates), strict=True):
            if limit is not None and count >= limit:
                self._ended = True  # in a replay the run may continue
                engine.terminate(reason=f"step limit: {limit} {name} of this run are made", alike=True)
                return


def _duration(argument: str, value: object) -> float:
    """The seconds that a number or a text names."""
    if isinstance(value, str):
        found = _UNITS.fullmatch(value.strip()) or _CLOCK.fullmatch(value.strip())
        if found is not None and any(found.groups()):
            days, hours, minutes, rest = (float(part or 0) for part in found.groups())
            return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value < math.inf:
        return float(value)
    raise ConfigurationError(
        "needs seconds, or a time such as '2h30m', '90s' or '1-12:00:00'", "TimeLimit", **{argument: value}
    )
