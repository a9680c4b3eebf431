"""Measures the memory of the process and its device, and warns when it keeps growing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self

import torch

from pulsetrain.engine import FIRST, AnomalyDetected, Engine, Events, Every
from pulsetrain.engine.argument_checks import check_number, check_whole_number
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import device_of, reject_replay
from pulsetrain.handlers.attachment.publishing import publish

__all__ = ["MemoryMonitor"]

_LASTING = ("memory/host_rss_bytes", "memory/device_allocated_bytes")  # growth of these means that something is kept
_COUNTERS = {"allocated": "memory_allocated", "peak": "max_memory_allocated", "reserved": "memory_reserved"}
_KEPT_ALIVE = "look for tensors kept with their graph (a loss without .detach()), and for lists and caches that grow"


class MemoryMonitor(Handler):
    """Publishes how many bytes are in use, without waiting for the device.

    memory/host_rss_bytes: resident memory of this process, without its DataLoader's workers (memory/host_peak_bytes,
    the maximum so far, on systems that do not report the current value);
    memory/device_allocated_bytes, memory/device_peak_bytes, memory/device_reserved_bytes: tensors now, their maximum so
    far, and what torch has reserved on the device.

    When `leak_after` readings in a row each exceed the previous one, and together grow by more than the share `growth`,
    it warns once per run and fires ANOMALY_DETECTED("memory_growth") with the growth in bytes. The first reading of a
    run does not count: optimizers and allocators have not reached their full size by then.

    Args:
        every: when to read.
        leak_after: growing readings in a row.
        growth: a share, such as 0.05.
        read: a function that returns the readings by name, instead of those above.

    Raises:
        ConfigurationError: a number is out of range.
        TypeError: the cadence is not an Every.

    >>> engine = Engine(lambda engine, batch: None)
    >>> monitor = MemoryMonitor(Every(iterations=1), read=lambda: {"memory/host_rss_bytes": 1024.0}).attach(engine)
    >>> subscription = engine.on(Events.METRICS_LOGGED)(lambda engine, event: print(event.payload.metrics))
    >>> state = engine.run([1])
    {'memory/host_rss_bytes': 1024.0}
    """

    every: Every
    leak_after: int
    growth: float
    read: Callable[[], Mapping[str, float]] | None

    def __init__(
        self,
        every: Every | None = None,
        leak_after: int = 10,
        growth: float = 0.05,
        *,
        read: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        every = Every(iterations=50) if every is None else every
        check_every("MemoryMonitor", every)
        check_whole_number("MemoryMonitor", "leak_after", leak_after, at_least=2)
        check_number("MemoryMonitor", "growth", growth)
        self.every, self.leak_after, self.growth, self.read = every, leak_after, growth, read
        self._recent: dict[str, deque[float]] = {}
        self._warned: set[str] = set()
        self._readings = 0

    def attach(self, engine: Engine) -> Self:
        """Read at this engine's cadence, in phase OBSERVE.

        Raises:
            RecordingError: the engine is a replay.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            reject_replay("MemoryMonitor", engine, "process that trains")
            subscribe(Events.STARTED, self._on_started, on_error="warn")
            subscribe(reading_events(self.every), self._read, order=FIRST, on_error="warn")
        return self

    def _on_started(self) -> None:
        self._recent, self._warned, self._readings = {}, set(), 0

    def _read(self, engine: Engine) -> None:
        found = dict(self.read()) if self.read is not None else {**_of_host(), **_of_device(device_of(engine))}
        publish(engine, found, measured=True)
        self._readings += 1
        if self._readings == 1:
            return
        for name, value in found.items():
            if (self.read is not None or name in _LASTING) and name not in self._warned:
                self._judge(engine, name, value)

    def _judge(self, engine: Engine, name: str, value: float) -> None:
        recent = self._recent.setdefault(name, deque(maxlen=self.leak_after + 1))
        if recent and value <= recent[-1]:
            recent.clear()
        recent.append(value)
        grown = recent[-1] - recent[0]
        if len(recent) <= self.leak_after or grown <= self.growth * recent[0]:
            return
        self._warned.add(name)
        get_logger("handlers").warning(
            f"memory has grown from each reading to the next; {_KEPT_ALIVE}",
            of=name,
            readings=self.leak_after,
            grown=f"{grown / 2**20:.1f} MiB",
            now=f"{value / 2**20:.1f} MiB",
            iteration=engine.state.iteration,
        )
        if engine.hears(Events.ANOMALY_DETECTED):
            anomaly = AnomalyDetected(kind="memory_growth", value=float(grown), batch_indices=())
            engine.fire(Events.ANOMALY_DETECTED, anomaly, observed=True)  # memory differs between machines


def _of_host() -> dict[str, float]:
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return {"memory/host_rss_bytes": float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))}
    try:
        import resource
    except ImportError:  # not a Unix system
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory/host_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}


def _of_device(device: torch.device | None) -> dict[str, float]:
    """The allocator's counters; empty if the device is the CPU or has none."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or (device is not None and device.type != kind.type):
        return {}
    if kind.type == "mps":
        return {
            "memory/device_allocated_bytes": float(torch.mps.current_allocated_memory()),
            "memory/device_reserved_bytes": float(torch.mps.driver_allocated_memory()),
        }
    module = torch.get_device_module(kind)
    return {
        f"memory/device_{name}_bytes": float(getattr(module, function)(device))
        for name, function in _COUNTERS.items()
        if hasattr(module, function)
    }
