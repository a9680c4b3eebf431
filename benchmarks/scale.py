"""Whether recording, memory, the log and seeking stay flat as a run grows to ten million events.

    python -m benchmarks scale               # prints a table and exits with 1 if a bound is missed
    python benchmarks/scale.py --events 1e6  # a shorter run

One engine is recorded, whose step returns a loss: two events an iteration. Where a power of ten has been reached, the
table shows the cost of an iteration (the median over windows of 500), the process's private memory, the size of the
log, how long a reader takes to open the log, which is still being written and has no table, and to find an iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pulsetrain.engine import Engine
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import EventRecorder

FIRST, WINDOW, EVENTS_OF_ITERATION = 10_000, 500, 2
OPEN, SEEK = 200.0, 5.0  # milliseconds
SLOWER, LARGER, GROWN = 1.5, 1.3, 16.0  # times the first row's; times the first row's; MB above the second row's

Row = dict[str, float]


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
        self.folder, self.iterations, self.rows = folder, events // EVENTS_OF_ITERATION, list[Row]()
        self._windows: list[float] = []  # seconds since the last row

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[int]:
        mark, start = FIRST // EVENTS_OF_ITERATION, time.perf_counter()
        for number in range(self.iterations):
            if number % WINDOW == 0 and number:
                self._windows.append(time.perf_counter() - start)
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
                "memory_mb": anonymous_memory(),
                "bytes_per_event": size_of(self.folder) / events,
                "open_ms": opening,
                "seek_ms": seeking,
            }
        )
        self._windows.clear()


def measure(events: int) -> list[Row]:
    """A row for each multiple of ten up to this number of events."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batches = Batches(folder, events)
        engine = Engine(lambda engine, batch: {"loss": batch * 0.37 % 7}, name="trainer")
        EventRecorder(folder).attach(engine)
        engine.run(batches, max_epochs=1)
        return batches.rows


def missed(rows: list[Row]) -> list[str]:
    """The bounds that do not hold."""
    found = []
    first, grown = rows[0], rows[min(1, len(rows) - 1)]  # what is made once is made by the second row
    for row in rows:
        events = f"after {row['events']:,.0f} events"
        for name, times in (("iteration_us", SLOWER), ("bytes_per_event", LARGER)):
            if row[name] > times * first[name]:
                found.append(f"{events}: {name} {row[name]:.2f}; at first {first[name]:.2f}, and the bound is {times}")
        if row["memory_mb"] > grown["memory_mb"] + GROWN:
            more = row["memory_mb"] - grown["memory_mb"]
            found.append(f"{events}: {more:.1f} MB more memory; the bound is {GROWN}")
        for what, bound in (("open", OPEN), ("seek", SEEK)):
            if row[f"{what}_ms"] > bound:
                found.append(f"{events}: {row[f'{what}_ms']:.1f} ms to {what}; the bound is {bound}")
    return found


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=lambda text: int(float(text)), default=10_000_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.events < FIRST:
        parser.error(f"--events: needs at least {FIRST:,}")
    load = os.getloadavg()[0]
    rows = measure(arguments.events)
    problems = missed(rows)
    if arguments.json:
        print(json.dumps({"rows": rows, "missed": problems, "load": load}, indent=2))
        return int(bool(problems))
    print(f"{'events':>12}{'iteration, us':>16}{'memory, MB':>12}{'bytes/event':>13}{'open, ms':>10}{'seek, ms':>10}")
    for row in rows:
        print(
            f"{row['events']:>12,.0f}{row['iteration_us']:>16.2f}{row['memory_mb']:>12.1f}"
            f"{row['bytes_per_event']:>13.2f}{row['open_ms']:>10.2f}{row['seek_ms']:>10.2f}"
        )
    print(f"the machine's load before: {load:.1f}")
    for problem in problems:
        print(f"missed: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
