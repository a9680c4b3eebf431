"""What the machine is, and what else it did during a measurement."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = [
    "BOUNDS_REFERENCE_MS",
    "Load",
    "Watch",
    "describe_machine",
    "own_seconds_until_now",
    "reference_loop",
    "seconds_of_tree",
]

# most that the reference loop took on the cores on which the bounds of absolute times were set (AMD EPYC); on cores
# where it took 3.2 ms, a step took 1.6 times as long
BOUNDS_REFERENCE_MS = 2.8
OTHERS, SPREAD = 0.15, 1.25  # cores that other processes may use; times the fastest pass that a median pass may take
PASSES, STEPS = 20, 100_000  # of the reference loop: each pass takes some milliseconds


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy the machine was during a measurement."""

    average: float  # of the last minute before it, as `uptime` shows it; includes what this shell ran before
    others: float | None  # cores that other processes used, or another virtual machine took; None if unknown
    reference_ms: float  # the fastest pass of the reference loop
    spread: float  # the median pass, in times the fastest

    @property
    def is_slow(self) -> bool:
        """Whether this processor is slower than the one that the bounds of absolute times were set on."""
        return self.reference_ms > BOUNDS_REFERENCE_MS

    @property
    def is_idle(self) -> bool:
        """Whether nothing else ran."""
        others = self.average if self.others is None else self.others
        return others <= OTHERS and self.spread <= SPREAD

    def __str__(self) -> str:
        others = "unknown" if self.others is None else f"{self.others:.2f} cores"
        return (
            f"load average {self.average:.2f}, other processes {others}, reference loop {self.reference_ms:.2f} ms"
            f" (median {self.spread:.2f} times that): {'idle' if self.is_idle else 'busy'}"
            f"{f'; bounds of absolute times apply up to {BOUNDS_REFERENCE_MS} ms' if self.is_slow else ''}"
        )


class Watch:
    """Observes the machine from its creation on.

    Args:
        busy_seconds: returns the seconds that all cores have worked since the start of the machine, None if unknown.
        own_seconds: returns the seconds of processor time of this process and its children that have ended.
        clock: returns seconds.
        reference: makes one pass of the reference loop.
    """

    def __init__(
        self,
        busy_seconds: Callable[[], float | None] | None = None,
        own_seconds: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        reference: Callable[[], object] | None = None,
    ) -> None:
        self._busy, self._own = busy_seconds or _busy_seconds, own_seconds or own_seconds_until_now
        self._clock, self._reference = clock, reference or reference_loop
        self._average = os.getloadavg()[0]
        self._begun = self._clock(), self._busy(), self._own()
        self._passes = self._measure()

    def load(self) -> Load:
        """The load until now."""
        passes = self._passes + self._measure()
        clock, busy, own = self._begun
        elapsed, busy_now = self._clock() - clock, self._busy()
        others = None
        if busy is not None and busy_now is not None and elapsed > 0:
            others = max(0.0, (busy_now - busy - (self._own() - own)) / elapsed)
        fastest = min(passes)
        spread = statistics.median(passes) / fastest if fastest > 0 else 1.0
        return Load(
            average=self._average,
            others=others,
            reference_ms=1e3 * fastest,
            spread=spread,
        )

    def _measure(self) -> list[float]:
        passes = []
        for _ in range(PASSES):
            begun = self._clock()
            self._reference()
            passes.append(self._clock() - begun)
        return passes


def describe_machine() -> str:
    """The cores and the versions that a figure depends on."""
    packages = [f"{name} {found}" for name in ("torch", "pytorch-ignite") if (found := _version(name))]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ", ".join([f"{cores} cores ({_processor()})", f"Python {platform.python_version()}", *packages])


def seconds_of_tree(process: int) -> float:
    """The processor time of a process and its descendants until now; 0 where it has ended.

    >>> seconds_of_tree(os.getpid()) > 0
    True
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        tasks = Path(f"/proc/{process}/task").iterdir()
        children = [int(each) for task in tasks for each in (task / "children").read_text().split()]
    except OSError:
        return 0.0
    own = sum(int(each) for each in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(seconds_of_tree, children))


def reference_loop(steps: int = STEPS) -> int:
    """Plain Python code whose time shows the speed of a core."""
    total = 0
    for number in range(steps):
        total += number & 7
    return total


def own_seconds_until_now() -> float:
    """The processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _busy_seconds() -> float | None:
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system, _, _, irq, softirq, steal = (int(each) for each in file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
