"""The cost of a report of a long run: time, size of the page, and memory.

    python -m benchmarks report            # prints a table and exits with 1 if a bound is missed

The log is that of a training run: output, learning rates and gradient norm of each iteration, metrics every tenth, a
validation and a checkpoint every thousandth. The time includes importing plotly.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.results import Row, make_parser, report
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.report import write_report

BOUNDS = {
    "report, s": 10.0,
    "page, MB": 15.0,
    "memory, MB": 100.0,
}
T = 1_790_000_000_000_000_000
METRICS = 8  # besides the loss, in each METRICS_LOGGED


def write_log(folder: Path, count: int) -> Path:
    """A log of this many events."""
    writer = LogWriter(folder / "events")
    for seq, (event, iteration, values) in enumerate(training(count)):
        logged = LoggedEvent(seq, "trainer", event, 1 + iteration // 10_000, iteration, **values)
        logged.seq, logged.t = seq, T + 1_000_003 * seq
        writer.add(logged)
    writer.end()
    writer.close()
    return folder


def training(count: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The events of a run: type, iteration, values."""
    made = 0
    iteration = 0
    while made < count:
        iteration += 1
        loss = 1 + 3 * math.exp(-iteration / 50_000) + 0.37 * iteration % 0.5
        events: list[tuple[str, int, dict[str, Any]]] = [
            ("iteration_started", iteration, {}),
            ("gradients_ready", iteration, {"payload": {"grad_norm": loss / 3}}),
            ("optimizer_step_completed", iteration, {"payload": {"learning_rates": [1e-3 / iteration]}}),
            ("iteration_completed", iteration, {"output": {"loss": loss}, "lr": [1e-3 / iteration]}),
        ]
        if iteration % 10 == 0:
            metrics = {"train/loss": loss, **{f"train/metric_{n}": loss * n for n in range(METRICS)}}
            rates = {"samples_per_second": 4000 + loss, "tokens_per_second": 500_000 + loss}
            events.append(
                ("metrics_logged", iteration, {"payload": {"metrics": metrics}, "observed": {"metrics": rates}})
            )
        if iteration % 1000 == 0:
            validated = {"val/loss": loss, **{f"val/metric_{n}": loss * n for n in range(METRICS)}}
            saved = {"path": f"checkpoints/{iteration:09d}", "iteration": iteration, "bytes": 10**8, "is_best": False}
            events.append(("validation_completed", iteration, {"payload": {"metrics": validated, "seconds": 1.0}}))
            events.append(("checkpoint_saved", iteration, {"payload": saved}))
        if iteration % 10_000 == 0:
            events.append(("epoch_completed", iteration, {"metrics": {"val/loss": loss}}))
        yield from events[: count - made]
        made += len(events)


class Memory:
    """The peak of the process's private memory in this block, in MB above its value before."""

    def __enter__(self) -> Memory:
        self._before = self._most = anonymous_memory()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._watch.join()
        self.megabytes = (self._most - self._before) / 1e6

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self._most = max(self._most, anonymous_memory())


def anonymous_memory() -> int:
    """The process's private memory in bytes, without pages of mapped files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon:")).split()[1])


def measure(events: int) -> dict[str, float]:
    """All figures by name, as in BOUNDS."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_log(Path(name) / "run", events)
        with Memory() as memory:
            start = time.perf_counter()
            report = write_report(folder, Path(name) / "report.html")
            seconds = time.perf_counter() - start
        return {"report, s": seconds, "page, MB": report.bytes / 1e6, "memory, MB": memory.megabytes}


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("report", __doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="events of the log [%(default)s]")
    options = parser.parse_args()
    if options.events < 1:
        parser.error(f"--events {options.events}: choose at least 1")

    def rows() -> tuple[list[Row], list[str]]:
        figures = measure(options.events)
        return [
            Row(name=name, measured=value, kind="absolute" if name.endswith(", s") else "size", bound=BOUNDS[name])
            for name, value in figures.items()
        ], []

    return report(options, f"a log of {options.events:,} events", rows)


if __name__ == "__main__":
    raise SystemExit(main())
