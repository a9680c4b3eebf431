"""SIGINT, SIGTERM, SIGUSR1 and, in a Slurm job, SIGUSR2 end a run at a safe point, with a checkpoint."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

from pulsetrain.engine import ConfigurationError, Engine, Event, Events, Preempted
from pulsetrain.engine.data.workers import release_workers
from pulsetrain.engine.distributed.launcher import slurm_job
from pulsetrain.engine.events.ignite import Handle

__all__ = ["SignalWatch", "interrupted_safely"]

Handler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` takes and returns."""

NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")
_OF_SLURM = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # what Slurm sends before it ends a job, by its settings or --signal
FORWARDED = 2.0  # seconds in which launchers forward a signal that they got: such a one is not a second request


class SignalWatch:
    """In its `with` block, the first SIGINT, SIGTERM or SIGUSR1 ends a trainer's run at the next safe point.

    In a Slurm job, so does SIGUSR2, unless the program handles it.

    The trainer fires PREEMPTED. A SIGINT after another signal, and a SIGTERM 2 s or more after the first SIGTERM or
    SIGINT, end the run at once, without a checkpoint: KeyboardInterrupt, or SystemExit with the status, is raised.
    SIGUSR1 and SIGUSR2 are warnings of a scheduler, which sends SIGTERM later: that one counts as the first. Any signal
    before there is a trainer ends the program at once, too. A signal between two runs ends the next run, if that starts
    within the block. Leaving the block restores the previous signal handlers; but for the rest of those 2 s, a SIGTERM
    that is sent again does not kill the process while it ends.

    Args:
        trainer: the trainer whose run to end; `follow` sets it later.
        names: the signals; by default those above.
        clock: monotonic, in seconds.

    Raises:
        ConfigurationError: entered outside the main thread.

    >>> import torch
    >>> from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
    >>> data = [(torch.ones(2, 4), torch.zeros(2, 1))] * 5
    >>> config = TrainingConfig(max_epochs=1)
    >>> trainer = Trainer(torch.nn.Linear(4, 1), data, strategy=SupervisedStrategy("mse"), config=config)
    >>> @trainer.on(Events.ITERATION_COMPLETED(once=3))
    ... def stop_from_outside():
    ...     signal.raise_signal(signal.SIGTERM)
    >>> with SignalWatch(trainer) as watch:
    ...     history = trainer.train()
    >>> trainer.state.iteration, watch.status  # a program ends with sys.exit(watch.status)
    (3, 143)
    """

    status: int

    def __init__(
        self,
        trainer: Engine | None = None,
        *,
        names: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.received: signal.Signals | None = None  # the first
        self.status = 0  # for the process to exit with: 128 + the number of the signal that ended the run
        self._named, self._clock = trainer, clock
        self._names = (*NAMES, *(each for each in _free_of_slurm() if each not in NAMES)) if names is None else names
        self._trainer: Engine | None = None
        self._first_at: dict[int, float] = {}  # by signal
        self._previous = contextlib.ExitStack()  # restores the handlers that were there before
        self._handle: Handle | None = None
        self._posted: Preempted | None = None  # PREEMPTED's payload, to the trainer
        self._process = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                f"SignalWatch: entered in the thread {threading.current_thread().name!r}, and Python handles signals "
                "only in the main thread; enter it there, in whichever thread the training runs"
            )
        self._process = os.getpid()
        if self._named is not None:
            self.follow(self._named)
        for name in self._names:
            number = getattr(signal, name, None)
            # None: a handler that Python did not install, and could not restore
            if number is not None and signal.getsignal(number) is not None:
                self._previous.callback(self._restore, number, signal.signal(number, self._receive))
        return self

    def __exit__(self, *error: object) -> None:
        self._previous.close()
        if self._trainer is not None and self._posted is not None:
            self._trainer.withdraw(self._posted)  # no run has obeyed it: it would end the next one, of another caller
        self._trainer = self._posted = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def follow(self, trainer: Engine) -> None:
        """From now on a signal ends this trainer's run."""
        self._handle = trainer.add_event_handler(Events.PREEMPTED, self._obey)
        self._trainer = trainer

    def _obey(self, trainer: Engine, event: Event) -> None:
        if self.received is not None:
            self.status = 128 + self.received
        elif event.payload.rank is not None:  # all processes end for it; else the event was posted by other code
            self.status = 128 + signal.Signals[event.payload.signal]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child, forked with this handler, which does not own the run
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        now = self._clock()
        self._first_at.setdefault(number, now)
        # SIGUSR1 and SIGUSR2 do not count: schedulers send them as a warning, and SIGTERM some time later
        since = now - min(self._first_at.get(each, now) for each in (signal.SIGINT, signal.SIGTERM))
        again = number == signal.SIGINT or (number == signal.SIGTERM and since >= FORWARDED)
        first, self.received = self.received is None, self.received or signal.Signals(number)
        if self._trainer is None or (again and not first):
            self._stop(number)
        if first:
            name = signal.Signals(number).name
            self._posted = Preempted(signal=name)
            self._trainer.post(Events.PREEMPTED, self._posted)
            term = f"SIGTERM after {FORWARDED:g} s" if number in (signal.SIGINT, signal.SIGTERM) else "a second SIGTERM"
            more = "another Ctrl-C" if number == signal.SIGINT else "Ctrl-C"
            said = f"\n{name}: stopping at the next safe point; {more} stops at once, and so does {term}\n"
            with contextlib.suppress(OSError):  # the reader may be gone
                os.write(2, said.encode())  # not through sys.stderr: the signal may have interrupted a write

    def _restore(self, number: signal.Signals, previous: Handler) -> None:
        at = self._first_at.get(number)
        if at is None or previous is not signal.SIG_DFL:
            signal.signal(number, previous)
            return

        def ignore_repeated(number: int, frame: FrameType | None) -> None:
            if self._clock() - at >= FORWARDED:
                signal.signal(number, previous)
                signal.raise_signal(number)

        signal.signal(number, ignore_repeated)
        atexit.register(signal.signal, number, signal.SIG_IGN)  # Python itself restores the default too early

    def _stop(self, number: int) -> NoReturn:
        self.status = 128 + number
        release_workers()  # those that hang are ended by SIGTERM
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(self.status)


@contextlib.contextmanager
def interrupted_safely(trainer: Engine) -> Iterator[None]:
    """Ctrl-C ends the trainer's run at the next safe point, with a checkpoint; KeyboardInterrupt is raised after that.

    It is raised also if no safe point was left. A second Ctrl-C raises it at once. In a Slurm job, SIGTERM, SIGUSR1 and
    SIGUSR2 end the run likewise, and SystemExit is raised with 128 + the signal's number. Nothing changes for a signal
    that the program handles itself, or in another thread.
    """
    names: list[str] = []
    if threading.current_thread() is threading.main_thread():
        names = ["SIGINT"] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else []
        names += _free_of_slurm()
    if not names:
        yield
        return
    with SignalWatch(trainer, names=names) as watch:
        yield
    status = watch.status or (128 + watch.received if watch.received else 0)  # another process may have got it
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status:
        raise SystemExit(status)


def _free_of_slurm() -> list[str]:
    """In a Slurm job, which of its signals would end this process, since nothing handles them."""
    names = _OF_SLURM if slurm_job() else ()
    return [each for each in names if hasattr(signal, each) and _is_free(signal.Signals[each])]


def _is_free(number: int) -> bool:
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    try:  # Python does not know of handlers in C, such as those of faulthandler.register
        status = Path("/proc/self/status").read_text(encoding="ascii")
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    except (OSError, ValueError, IndexError):
        return True
    return not caught >> (number - 1) & 1
