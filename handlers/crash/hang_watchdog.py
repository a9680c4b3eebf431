"""Notices a run that hangs, and reports where."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from pulsetrain.engine import FIRST, LAST, Engine, Event, EventBus, Events, Phase
from pulsetrain.engine.argument_checks import check_choice, check_positive
from pulsetrain.engine.checkpoint.digests import PROGRESS
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import reject_replay
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder

__all__ = ["EXIT_STATUS", "HangWatchdog", "Silence"]

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: another attempt may succeed
LOOKS = 10  # per time limit: a hang is noticed at most two looks after the limit


class HangWatchdog(Handler):
    """Writes the stacks of all threads to FOLDER/hang-TIME.txt when a run fires no event for this many seconds.

    A thread reads the number of the bus's last event at intervals: an event costs nothing more. Every event of every
    engine on the bus is a sign of life, whether or not anything subscribes to it, validation events included. So is
    each piece of a checkpoint that is written or read. Outside runs, no event is expected. Time in which the process
    was stopped or the machine slept does not count.

    A hang is reported once, by a warning; the next one is reported if events were fired in between. This works if
    the code that hangs has released Python's global lock, as waiting for a device, a lock, a file or the network does.

    Args:
        folder: the run folder.
        seconds: time without an event; choose more than the slowest step takes, including first batches and
            compilation.
        policy: what follows the report. "report": nothing. "stop": the run ends at the next safe point, as after
            `terminate()`, if it reaches one. "exit": the process ends at once with status 75, without a checkpoint.
        clock: seconds, never running backwards.

    Raises:
        ConfigurationError: not a positive number of seconds, or an unknown policy.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> engine = Engine(lambda engine, batch: None)
    >>> watchdog = HangWatchdog(folder.name, seconds=600).attach(engine)
    >>> _ = engine.run([1, 2, 3])
    >>> watchdog.detach()
    >>> watchdog.reports
    []
    >>> folder.cleanup()
    """

    seconds: float
    clock: Callable[[], float]

    def __init__(
        self,
        folder: str | Path,
        seconds: float = 600.0,
        policy: Literal["report", "stop", "exit"] = "report",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_positive("HangWatchdog", "seconds", seconds, below=threading.TIMEOUT_MAX)
        check_choice("HangWatchdog", "policy", policy, ("report", "stop", "exit"))
        self.folder: Path = local_folder("HangWatchdog", folder)
        self.seconds, self.policy, self.clock = seconds, policy, clock
        self.reports: list[Path] = []
        self._under_way: set[str] = set()  # names of engines between STARTED and their end
        self._engine: weakref.ref[Engine] | None = None  # None for every engine of the bus
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = 0

    def attach(self, engine_or_bus: Engine | EventBus) -> Self:
        """Watch the runs of one engine, or of all engines of a bus.

        If the folder cannot be written, a warning says so, and the run continues without the handler.

        Raises:
            RecordingError: the engine or bus is a replay's.
        """
        with self._attachment.to(engine_or_bus, needed=False) as subscribe:
            reject_replay("HangWatchdog", engine_or_bus, "process that trains")
            make_folder("HangWatchdog", self.folder)
            self._engine = None if isinstance(engine_or_bus, EventBus) else weakref.ref(engine_or_bus)
            self._log = get_logger("handlers")  # here: making a logger reads Python's random generator
            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE, on_error="warn", order=FIRST)
            ends = Events.TERMINATE | Events.COMPLETED | Events.INTERRUPT | Events.EXCEPTION_RAISED
            subscribe(ends, self._on_end, phase=Phase.PERSIST, on_error="warn", order=LAST)
        return self

    def detach(self) -> None:
        """Stop watching; the thread ends."""
        super().detach()
        self._stopped.set()
        self._thread = None
        self._under_way.clear()

    @property
    def bus(self) -> EventBus | None:
        """The bus it watches; None while it is not attached."""
        return self._attachment.bus

    def _on_started(self, engine: Engine) -> None:
        self._under_way.add(engine.name)
        if self._thread is None or not self._thread.is_alive() or self._process != os.getpid():
            self._stopped, self._process = threading.Event(), os.getpid()
            self._thread = threading.Thread(
                target=_watch,
                args=(weakref.ref(self), self._stopped, self.seconds / LOOKS),
                name="hang watchdog",
                daemon=True,
            )
            self._thread.start()

    def _on_end(self, engine: Engine, event: Event) -> None:
        self._under_way.discard(engine.name)  # after TERMINATE, until COMPLETED, engine.is_running is still true

    def runs(self, bus: EventBus) -> list[Engine]:
        """The watched engines that are running, in the order in which they joined the bus."""
        mine = bus.engines if self._engine is None else [self._engine()]
        return [each for each in mine if each is not None and (each.is_running or each.name in self._under_way)]

    def report(self, silent: float, runs: list[Engine]) -> None:
        """Write the stacks, and do what the policy says."""
        first = runs[0]
        where = f"{first.name!r} at epoch {first.state.epoch}, iteration {first.state.iteration}"
        message = f"no event for {silent:.1f} s: the run hangs"
        here = ranks()
        whose = f"-rank{here.rank}" if here.world_size > 1 else ""  # all of them may hang at once
        path = self.folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{len(self.reports) + 1}{whose}.txt"
        try:
            with path.open("w", encoding="utf-8") as file:
                file.write(f"{message}; {where}, last event {first.last_event_name}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.flush()
                os.fsync(file.fileno())
            self.reports.append(path)
            written = str(path)
        except OSError as error:  # on a full disk, the policy still applies
            written = f"could not be written: {error}"
        if self.policy == "exit":  # not through the logger: the code that hangs may hold its lock
            os.write(2, f"HangWatchdog: {message} ({where}); stacks: {written}; exit status {EXIT_STATUS}\n".encode())
            os._exit(EXIT_STATUS)
        if self.policy == "stop":
            for each in runs:
                each.terminate(reason=f"hang watchdog: no event for {silent:.1f} s", observed=True)
        self._log.warning(message, stacks=written, at=where)


class Silence:
    """Measures how long there was no sign of life; a gap between two looks counts as two intervals at most.

    Args:
        interval: seconds between two looks.
    """

    def __init__(self, interval: float) -> None:
        self.seconds: float = 0.0
        self._interval = interval
        self._last: float | None = None
        self._sign: object = None

    def look(self, sign: object, now: float) -> float:
        """Seconds of silence so far.

        Args:
            sign: a value that changes when there is life.
            now: seconds, by a clock that never runs backwards.
        """
        if self._last is None or sign != self._sign:
            self.seconds = 0.0
        else:
            self.seconds += min(now - self._last, 2 * self._interval)
        self._sign, self._last = sign, now
        return self.seconds


def _watch(watchdog: weakref.ref[HangWatchdog], stopped: threading.Event, interval: float) -> None:
    """The thread: ends when the watchdog is detached or gone."""
    silence, reported = Silence(interval), False
    while not stopped.wait(interval):
        mine = watchdog()
        bus = mine.bus if mine is not None else None
        if mine is None or bus is None:
            return
        try:
            runs = mine.runs(bus)
        except RuntimeError:  # an engine joined or left the bus at this moment
            continue
        sign: object = (bus.sequence.last, PROGRESS.pieces) if runs else object()
        silent = silence.look(sign, mine.clock())
        if silent == 0.0:
            reported = False
        elif silent >= mine.seconds and not reported:
            reported = True
            mine.report(silent, runs)
        del mine, bus, runs
