"""DataLoader workers that ignore the signals this process handles, so that a run can still reach a safe point."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_byte
from multiprocessing import resource_tracker
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from types import FrameType

from torch.utils.data import DataLoader

__all__ = ["release_workers", "user_init_fn", "workers_begin", "workers_outlive_signals"]

WorkerInit = Callable[[int], None]
"""A `worker_init_fn`, called with the worker's number."""


@contextmanager
def workers_outlive_signals(loader: object) -> Iterator[tuple[int, ...]]:
    """Workers started inside ignore those of SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 that this process handles.

    A scheduler that stops a job signals every process of it. If a handler of this process lets the run continue to a
    safe point, the run needs its workers until then. Yields the numbers of those signals.
    """
    numbers = tuple(filter(_is_handled, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)))
    can_block = hasattr(signal, "pthread_sigmask")
    if not (numbers and can_block and isinstance(loader, DataLoader) and loader.num_workers > 0):
        yield ()
        return
    before = loader.worker_init_fn
    loader.worker_init_fn = _OutliveSignals(numbers, user_init_fn(before))
    try:
        yield numbers
    finally:
        loader.worker_init_fn = before


@contextmanager
def workers_begin(loader: object) -> Iterator[None]:
    """Wraps `iter(loader)`: also blocks the signals until each new worker has installed its handlers."""
    with workers_outlive_signals(loader) as numbers:
        if not numbers:
            yield
            return
        assert isinstance(loader, DataLoader)
        context = loader.multiprocessing_context or multiprocessing.get_context()
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # starting it later would unblock the signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # workers inherit the mask until they are ready
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_handled(number: int) -> bool:
    handler = signal.getsignal(number)
    return callable(handler) and handler is not signal.default_int_handler


def release_workers() -> None:
    """Lets the workers of this process obey SIGTERM again; torch and multiprocessing end hanging workers with it."""
    if _released is not None and _released[0] == os.getpid():
        _released[1].value = True


_released: tuple[int, c_byte] | None = None  # a process id, and the flag its workers read: whether they may exit


def _release_flag() -> c_byte:
    global _released
    if _released is None or _released[0] != os.getpid():  # a forked process has its own workers and its own exit
        _released = os.getpid(), RawValue(c_byte, 0)
        # at exit multiprocessing calls this, then sends SIGTERM to the remaining workers and waits for them
        Finalize(None, release_workers, exitpriority=100)
    return _released[1]


class _OutliveSignals:
    """A `worker_init_fn` that installs the handlers, then calls the user's own."""

    def __init__(self, numbers: tuple[int, ...], inner: WorkerInit | None) -> None:
        self.inner = inner
        self._numbers, self._released = numbers, _release_flag()

    def __call__(self, worker: int) -> None:
        for number in self._numbers:
            # a handler instead of SIG_IGN: programs that a dataset starts would inherit SIG_IGN
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        if self.inner is not None:
            self.inner(worker)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._released.value:
            os._exit(0)  # as torch's own handler does: its SIGCHLD handler reports any other status as an error


def user_init_fn(function: WorkerInit | None) -> WorkerInit | None:
    """The user's own `worker_init_fn`, without the signal handling that `workers_outlive_signals` wraps around it."""
    return function.inner if isinstance(function, _OutliveSignals) else function
