"""The time to find the first difference of two long logs.

    python -m benchmarks diff          # prints a table and exits with 1 if a bound is missed

Two runs of a million events differ from an event in the middle on, or from one near the end. The benchmark measures the
time that `diff` takes from two paths to the first difference, including opening both logs: the median of several calls,
with the files in the page cache. For comparison: reading both logs, and measuring how the difference grows.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.harness.results import Row, make_parser, report
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.diff.compare import diff

ROUNDS = 7
START = 1_763_000_000_000_000_000  # ns
BOUNDS = {
    "first difference, in the middle, ms": 50.0,
    "first difference, near the end, ms": 50.0,
}


def write_log(folder: Path, count: int, parts_at: int) -> Path:
    """Iterations with a loss and a learning rate, two events each; the last bits of losses differ from an event on."""
    draw = random.Random(1)
    writer = LogWriter(folder / "events")
    for ord in range(count):
        iteration = ord // 2 + 1
        event = LoggedEvent(
            ord,
            "trainer",
            "iteration_completed" if ord % 2 else "iteration_started",
            1 + iteration // 1000,
            iteration,
            seq=ord,
            t=START + ord * 500_000,
        )
        if ord % 2:
            event.output = {"loss": draw.random() + (1e-15 * ord if ord >= parts_at else 0.0)}
            event.lr = [0.1]
        writer.add(event)
    writer.end()
    writer.close()
    return folder


def milliseconds(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The median duration of a call."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3


def reading_both(a: Path, b: Path) -> int | None:
    """The first difference, found by reading the logs."""
    for x, y in zip_longest(EventLog(a).read(), EventLog(b).read()):
        if x is None or y is None or (x.event, x.output, x.lr) != (y.event, y.output, y.lr):
            return int((x or y).ord)
    return None


def measure(count: int) -> dict[str, float]:
    """All figures by name; those with a bound have the names of BOUNDS."""
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ords = {"in the middle": count // 2 | 1, "near the end": count * 99 // 100 | 1}
        a = b = write_log(folder / "a", count, count)
        for where, ord in ords.items():
            b = write_log(folder / where, count, ord)
            found = diff(a, b)
            assert found.divergence is not None, "no difference was found"
            assert found.divergence.ord == ord == found.agreed, "a different event was found"
            results[f"first difference, {where}, ms"] = milliseconds(partial(diff, a, b))
        results["opening both, ms"] = milliseconds(lambda: (EventLog(a), EventLog(b)))
        results["reading both, to near the end, ms"] = milliseconds(partial(reading_both, a, b), 1)
        results["growth from the middle, ms"] = milliseconds(lambda: diff(a, folder / "in the middle").growth, 1)
    return results


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("diff", __doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="events of each log [%(default)s]")
    options = parser.parse_args()
    if options.events < 100:
        parser.error(f"--events {options.events}: choose at least 100")

    def rows() -> tuple[list[Row], list[str]]:
        times = measure(options.events)
        return [Row(name=name, measured=ms, kind="absolute", bound=BOUNDS.get(name)) for name, ms in times.items()], []

    return report(options, f"2 logs of {options.events:,} events", rows)


if __name__ == "__main__":
    raise SystemExit(main())
