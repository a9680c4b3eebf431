"""Notices a run that has stopped going on, and says where it stands."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.subscription import FIRST, LAST, Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.engine_queries import reject_replay
from pulsetrain.handlers.run_files.run_folder import make_folder

__all__ = ["EXIT_STATUS", "HangWatchdog", "Silence"]

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: another attempt may succeed
LOOKS = 10  # in the time after which silence is a hang; one that begins behind a look is noticed a look later
_SAVING = f"{os.sep}engine{os.sep}checkpoint{os.sep}"  # in the path of what saves and loads


class HangWatchdog:
    """Writes the stacks of all threads to FOLDER/hang-TIME.txt when no event comes for so many seconds of a run.

    A thread looks at the number of the bus's last event now and then: an event costs nothing more. Every event of every
    engine on the bus is a sign of life, heard or not: those of a validation are. So is being in the midst of a
    checkpoint's saving or loading. Outside of runs nothing is expected; time in which the process was stopped or the
    machine slept does not count.

    It tells of a hang once, by a warning, and again when there has been life and silence anew. It works as long as what
    hangs has let go of Python's lock, as waiting for a device, a lock, a file or the network does.

    Args:
        folder: the run folder.
        seconds: without an event; longer than the slowest step, first batches and compiling among them.
        policy: what follows the report. "report": nothing. "stop": the run is to end at the next safe point, as by
            `terminate()`, should it come to one. "exit": the process ends at once with status 75, without a checkpoint.
        clock: seconds, never running backwards.

    Raises:
        ConfigurationError: no positive number of seconds, or an unknown policy.
    """

    def __init__(
        self,
        folder: str | Path,
        seconds: float = 600.0,
        policy: Literal["report", "stop", "exit"] = "report",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not 0.0 < seconds < threading.TIMEOUT_MAX:
            raise ConfigurationError(f"HangWatchdog(seconds={seconds!r}): needs a positive number, such as 600")
        if policy not in ("report", "stop", "exit"):
            raise unknown_name("HangWatchdog", "policy", policy, ("report", "stop", "exit"))
        self.folder = Path(folder)
        self.seconds, self.policy, self.clock = seconds, policy, clock
        self.reports: list[Path] = []
        self._under_way: set[str] = set()  # names of engines that have said STARTED, and no end
        self._engine: weakref.ref[Engine] | None = None  # None: every one of the bus
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._attachment = Attachment("HangWatchdog")

    def attach(self, engine_or_bus: Engine | EventBus) -> Self:
        """Watch over the runs of one engine, or of all of a bus.

        Where the folder cannot be written, that is said, and the run goes on without it.

        Raises:
            RecordingError: it is a replay's.
        """
        with self._attachment.to(engine_or_bus, needed=False) as subscribe:
            reject_replay("HangWatchdog", engine_or_bus, "process that trains")
            make_folder("HangWatchdog", self.folder)
            self._engine = None if isinstance(engine_or_bus, EventBus) else weakref.ref(engine_or_bus)
            self._log = get_logger("handlers")  # now: getting one looks at Python's random generator
            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE, on_error="warn", order=FIRST)
            ends = Events.TERMINATE | Events.COMPLETED | Events.INTERRUPT
            subscribe(ends, self._on_end, phase=Phase.PERSIST, on_error="warn", order=LAST)
            subscribe(Events.EXCEPTION_RAISED, self._on_failure, phase=Phase.PERSIST, on_error="warn", order=LAST)
        return self

    def detach(self) -> None:
        """Watch no more; the thread ends."""
        self._attachment.cancel()
        self._stopped.set()
        self._thread = None
        self._under_way.clear()

    def _on_started(self, engine: Engine) -> None:
        self._under_way.add(engine.name)
        if self._thread is None or not self._thread.is_alive() or self._process != os.getpid():
            bus = self._attachment.bus
            assert bus is not None
            self._stopped, self._process = threading.Event(), os.getpid()
            self._thread = threading.Thread(
                target=_watch,
                args=(weakref.ref(self), weakref.ref(bus), self._stopped, self.seconds / LOOKS),
                name="hang watchdog",
                daemon=True,
            )
            self._thread.start()

    def _on_end(self, engine: Engine) -> None:
        self._under_way.discard(
            engine.name
        )  # COMPLETED comes behind TERMINATE: until then the engine says that it runs

    def _on_failure(self, engine: Engine, event: Event) -> None:
        self._on_end(engine)

    def _runs(self, bus: EventBus) -> list[Engine]:
        """The engines that are expected to go on, in the order in which they joined the bus."""
        mine = bus.engines if self._engine is None else [self._engine()]
        return [each for each in mine if each is not None and (each.is_running or each.name in self._under_way)]

    def _report(self, silent: float, runs: list[Engine]) -> None:
        first = runs[0]
        where = f"{first.name!r} at epoch {first.state.epoch}, iteration {first.state.iteration}"
        message = f"no event for {silent:.1f} s: the run hangs"
        path = self.folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{len(self.reports) + 1}.txt"
        try:
            with path.open("w", encoding="utf-8") as file:
                file.write(f"{message}; {where}, last event {first.last_event_name}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.flush()
                os.fsync(file.fileno())
            self.reports.append(path)
            told = str(path)
        except OSError as error:  # a full disk must not cost what follows
            told = f"could not be written: {error}"
        if self.policy == "exit":  # not through the logger: what hangs may hold a lock of it
            os.write(2, f"HangWatchdog: {message} ({where}); stacks: {told}; exit status {EXIT_STATUS}\n".encode())
            os._exit(EXIT_STATUS)
        if self.policy == "stop":
            for each in runs:
                each.terminate(reason=f"hang watchdog: no event for {silent:.1f} s")
        self._log.warning(message, stacks=told, at=where)


class Silence:
    """Measures how long nothing has come, in looks: a gap between two of them counts as two intervals at most.

    Args:
        interval: seconds between two looks.
    """

    def __init__(self, interval: float) -> None:
        self.seconds = 0.0
        self._interval = interval
        self._last: float | None = None
        self._sign: object = None

    def look(self, sign: object, now: float) -> float:
        """Seconds of silence so far.

        Args:
            sign: what changes where there is life.
            now: seconds, by a clock that never runs backwards.
        """
        if self._last is None or sign != self._sign:
            self.seconds = 0.0
        else:
            self.seconds += min(now - self._last, 2 * self._interval)
        self._sign, self._last = sign, now
        return self.seconds


def _watch(
    watchdog: weakref.ref[HangWatchdog], bus: weakref.ref[EventBus], stopped: threading.Event, interval: float
) -> None:
    """The thread: ends when the watchdog is detached, or it or the bus is gone."""
    silence, told = Silence(interval), False
    while not stopped.wait(interval):
        mine, its_bus = watchdog(), bus()
        if mine is None or its_bus is None:
            return
        try:
            runs = mine._runs(its_bus)
        except RuntimeError:  # an engine has joined the bus or left it in this very moment
            continue
        alive = not runs or _is_saving()
        sign: Any = object() if alive else its_bus.sequence.last
        silent = silence.look(sign, mine.clock())
        if silent == 0.0:
            told = False
        elif silent >= mine.seconds and not told:
            told = True
            mine._report(silent, runs)
        del mine, its_bus, runs


def _is_saving() -> bool:
    """Whether the main thread is in the midst of a checkpoint."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if _SAVING in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
