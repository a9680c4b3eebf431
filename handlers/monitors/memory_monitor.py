"""How much memory the process and its device hold, and whether that grows without end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from pulsetrain.engine.argument_checks import check_number, check_whole_number
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.payloads import AnomalyDetected
from pulsetrain.engine.events.subscription import FIRST
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import reject_replay
from pulsetrain.handlers.attachment.publishing import publish

__all__ = ["MemoryMonitor"]

_LASTING = ("memory/host_rss_bytes", "memory/device_allocated_bytes")  # of which growing means that something is kept
_COUNTERS = {"allocated": "memory_allocated", "peak": "max_memory_allocated", "reserved": "memory_reserved"}
_KEPT_ALIVE = "look for tensors kept with their graph (a loss without .detach()), and for lists and caches that grow"


class MemoryMonitor:
    """Publishes how many bytes are held, and never waits for the device.

    memory/host_rss_bytes: what this process holds of the machine's memory, its DataLoader's workers left out ("peak" in
    place of "rss", the most so far, where the system does not tell);
    memory/device_allocated_bytes, memory/device_peak_bytes, memory/device_reserved_bytes: tensors now, the most so far,
    and what torch has taken from the device.

    Of what is now held it warns, once a run, and fires ANOMALY_DETECTED("memory_growth") with the bytes that came to
    it, where each of `leak_after` readings in a row was above the one before and all together came to more than
    `growth` of what was there. The first reading of a run comes before optimizers and allocators have what they need,
    and does not count.

    Args:
        every: how often.
        leak_after: readings in a row.
        growth: a share, such as 0.05.
        read: gives the readings by their names, in place of those above.

    Raises:
        ConfigurationError: a number out of range.
        TypeError: the cadence is no Every.
    """

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
        self._attachment = Attachment("MemoryMonitor")

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

    def detach(self) -> None:
        self._attachment.cancel()

    def _on_started(self) -> None:
        self._recent, self._warned, self._readings = {}, set(), 0

    def _read(self, engine: Any) -> None:
        device = getattr(getattr(engine, "backend", None), "device", None)
        found = dict(self.read()) if self.read is not None else {**_of_host(), **_of_device(device)}
        publish(engine, found, measured=True)
        self._readings += 1
        if self._readings == 1:
            return
        for name, value in found.items():
            if (self.read is not None or name in _LASTING) and name not in self._warned:
                self._judge(engine, name, value)

    def _judge(self, engine: Any, name: str, value: float) -> None:
        recent = self._recent.setdefault(name, deque())
        if recent and value <= recent[-1]:
            recent.clear()
        recent.append(value)
        if len(recent) > self.leak_after + 1:
            recent.popleft()
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
    except ImportError:  # a system that is no Unix
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory/host_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}


def _of_device(device: torch.device | None) -> dict[str, float]:
    """The allocator's own counters; nothing where the device is the CPU or does not tell."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or (device is not None and device.type != kind.type):
        return {}
    if kind.type == "mps":
        return {
            "memory/device_allocated_bytes": float(torch.mps.current_allocated_memory()),
            "memory/device_reserved_bytes": float(torch.mps.driver_allocated_memory()),
        }
    tells: Any = getattr(torch, kind.type)
    return {
        f"memory/device_{name}_bytes": float(getattr(tells, function)(device))
        for name, function in _COUNTERS.items()
        if hasattr(tells, function)
    }
