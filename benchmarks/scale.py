"""Whether recording, memory, the log and seeking stay flat as a run grows to millions of events.

    python -m benchmarks scale                # prints a table and exits with 1 if a bound is missed
    python -m benchmarks scale --events 1e7   # the full run: several minutes

One engine is recorded, whose step returns a loss: two events an iteration. Where a power of ten has been reached, the
table shows the cost of an iteration (the median over windows of 500), the process's private memory, the size of the
log, how long a reader takes to open the log, which is still being written and has no table, and to find an iteration.
The costs of iterations are compared in passes of a loop that is timed after each window, since the speed of a core
varies while the log grows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from operator import truediv
from pathlib import Path

from benchmarks.harness.machine import reference_loop
from benchmarks.harness.results import Row, make_parser, report
from pulsetrain.engine import Engine
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import EventRecorder

FIRST, WINDOW, EVENTS_OF_ITERATION = 10_000, 500, 2
LOOP = 5_000  # steps of the reference loop, a tenth of a millisecond
OPEN, SEEK = 200.0, 5.0  # milliseconds
SLOWER, LARGER, GROWN = 1.5, 1.3, 16.0  # times the first row's; times the first row's; MB above the second row's
COLUMNS = {
    "iteration_us": "us",
    "memory_mb": "MB",
    "bytes_per_event": "bytes/event",
    "open_ms": "open, ms",
    "seek_ms": "seek, ms",
}

Figures = dict[str, float]


def anonymous_memory() -> float:
    """The process's private memory in MB, without pages of mapped files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon:")).split()[1]) / 1024


def size_of(folder: Path) -> int:
    """Bytes of the log that are sealed; the tail has a fixed size."""
    return (folder / "events" / "events.jsonl.zst").stat().st_size


def find(folder: Path, iteration: int) -> tuple[float, float]:
    """Milliseconds to open the log, and to find an iteration in it: medians of five."""
    opening, seeking = [], []
    for offset in range(5):
        start = time.perf_counter()
        log = EventLog(folder)
        opened = time.perf_counter()
        found = list(log.read(iteration=(iteration + offset, iteration + offset)))
        opening.append((opened - start) * 1e3)
        seeking.append((time.perf_counter() - opened) * 1e3)
        assert len(found) == EVENTS_OF_ITERATION, "an iteration is missing in the log"
    return statistics.median(opening), statistics.median(seeking)


class Batches:
    """As many iterations as make these events; measures where a multiple of ten is reached."""

    def __init__(self, folder: Path, events: int) -> None:
        self.folder, self.iterations, self.rows = folder, events // EVENTS_OF_ITERATION, list[Figures]()
        self._windows: list[float] = []  # seconds, since the last row
        self._loops: list[float] = []  # seconds of the reference loop after each of them

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[int]:
        mark, start = FIRST // EVENTS_OF_ITERATION, time.perf_counter()
        for number in range(self.iterations):
            if number % WINDOW == 0 and number:
                ended = time.perf_counter()
                self._windows.append(ended - start)
                reference_loop(LOOP)
                self._loops.append(time.perf_counter() - ended)
                if number == mark:
                    self._measure(number)
                    mark *= 10
                start = time.perf_counter()
            if number == self.iterations - 1 and self._windows:
                self._measure(number)
            yield number

    def _measure(self, iterations: int) -> None:
        events = iterations * EVENTS_OF_ITERATION
        opening, seeking = find(self.folder, iterations // 2)
        self.rows.append(
            {
                "events": events,
                "iteration_us": statistics.median(self._windows) / WINDOW * 1e6,
                "iteration_loops": statistics.median(map(truediv, self._windows, self._loops)),
                "memory_mb": anonymous_memory(),
                "bytes_per_event": size_of(self.folder) / events,
                "open_ms": opening,
                "seek_ms": seeking,
            }
        )
        self._windows.clear()
        self._loops.clear()


def measure(events: int) -> list[Figures]:
    """The figures at each multiple of ten up to this number of events."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batches = Batches(folder, events)
        engine = Engine(lambda engine, batch: {"loss": batch * 0.37 % 7}, name="trainer")
        EventRecorder(folder).attach(engine)
        engine.run(batches, max_epochs=1)
        return batches.rows


def compared(marks: list[Figures]) -> list[Row]:
    """An iteration at each mark, in times the first one's, and the largest value of the other figures."""
    first, grown = marks[0], marks[min(1, len(marks) - 1)]  # what is made once is made by the second mark
    rows = [
        Row(
            name=f"an iteration after {mark['events']:,.0f} events",
            measured=mark["iteration_loops"] / first["iteration_loops"],
            kind="ratio",
            bound=SLOWER,
            also={name: mark[key] for key, name in COLUMNS.items()},
        )
        for mark in marks
    ]
    larger = max(mark["bytes_per_event"] for mark in marks) / first["bytes_per_event"]
    more = max(mark["memory_mb"] for mark in marks[1:] or marks) - grown["memory_mb"]
    return [
        *rows,
        Row(name="bytes per event, the most / the first", measured=larger, kind="size", bound=LARGER),
        Row(name=f"memory, MB more than after {grown['events']:,.0f} events", measured=more, kind="size", bound=GROWN),
        Row(name="opening the log, ms", measured=max(mark["open_ms"] for mark in marks), kind="absolute", bound=OPEN),
        Row(name="seeking, ms", measured=max(mark["seek_ms"] for mark in marks), kind="absolute", bound=SEEK),
    ]


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("scale", __doc__)
    parser.add_argument("--events", type=lambda text: int(float(text)), default=1_000_000, help="[%(default)s]")
    options = parser.parse_args()
    if options.events < FIRST:
        parser.error(f"--events: needs at least {FIRST:,}")
    return report(options, "in times the first", lambda: (compared(measure(options.events)), []))


if __name__ == "__main__":
    raise SystemExit(main())
