"""What each handler of the demo takes of its run, start and end included.

    python -m benchmarks handlers                   # prints a table and exits with 1 if a bound is missed
    python -m benchmarks handlers --tokens 200000   # a shorter run, without bounds

It trains examples/byte_lm/config.yaml as `pulsetrain train` does, and measures the time in the handlers' attach() and
in the receivers of each one, without that of other handlers' receivers that run meanwhile. What a handler makes others
do is not in its row, such as measuring a norm. `Plots` draws in a process of its own, whose processor time is a row as
well: on a machine with a free core it takes no time from the run.
"""

from __future__ import annotations

import functools
import io
import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pulsetrain.handlers as shipped
from benchmarks.harness.results import Row, make_parser, report
from pulsetrain.cli import main as command
from pulsetrain.engine.events.bus import EventBus

CONFIG = Path(__file__).parents[1] / "examples" / "byte_lm" / "config.yaml"
HANDLERS = (
    "Checkpointer", "EarlyStopping", "NaNGuard", "LossSpikeGuard", "GradientMonitor", "Throughput", "EventRecorder",
    "CSVLogger", "Plots", "ProgressBar", "CrashBundle", "SampleText",
)  # fmt: skip
TOKENS, BOUND = 1_200_000, 1.0  # of the demo's run, and percent of the time of a run that is at least as long
AT_THE_END = ("SampleText",)  # it writes a text when the run has ended: that is its purpose, and has no bound


class Times:
    """Seconds in the receivers of each handler."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.begun = 0.0  # when the first handler was attached
        self._inside: list[float] = []  # of the receivers that run, the seconds of those inside of them
        self._attached: str | None = None

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is added to that of the handler."""

        @functools.wraps(function)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            self.begun = self.begun or begun
            self._inside.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                took = time.perf_counter() - begun
                self.seconds[name] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return wrapper

    def watch(self, name: str) -> None:
        """Measure this handler from its attach() on."""
        kind = getattr(shipped, name)
        attach, subscribe = self.timed(name, kind.attach), EventBus.subscribe

        @functools.wraps(kind.attach)
        def attaching(handler: Any, engine: Any) -> Any:
            def subscribing(bus: EventBus, event: Any, receiver: Any, *arguments: Any, **options: Any) -> Any:
                return subscribe(bus, event, self.timed(name, receiver), *arguments, **options)

            EventBus.subscribe = subscribing  # type: ignore[method-assign, assignment]
            try:
                return attach(handler, engine)
            finally:
                EventBus.subscribe = subscribe  # type: ignore[method-assign]

        kind.attach = attaching


def measure(tokens: int) -> tuple[dict[str, float], float, float]:
    """Seconds of each handler, of the processes that they start, and of the run."""
    times = Times()
    for name in HANDLERS:
        times.watch(name)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        words = ["train", str(CONFIG), f"--run={folder}/run", f"--training.max_tokens={tokens}"]
        status = command(words)
        took = time.perf_counter() - times.begun
    if status:
        raise RuntimeError(f"pulsetrain {' '.join(words)}: exit status {status}")
    helpers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return dict(times.seconds), helpers.ru_utime + helpers.ru_stime, took


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("handlers", __doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the run [%(default)s]")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def rows() -> tuple[list[Row], list[str]]:
        seconds, helpers, run = measure(options.tokens)
        absent = [name for name in HANDLERS if name not in seconds]
        if absent:
            raise RuntimeError(f"{CONFIG} attaches no {', '.join(absent)}")
        made = [
            Row(
                name=name, measured=100 * seconds[name] / run, kind="ratio",
                bound=None if name in AT_THE_END or options.tokens < TOKENS else BOUND, also={"s": seconds[name]},
            )
            for name in HANDLERS
        ]  # fmt: skip
        made.append(Row(name="processes of handlers", measured=100 * helpers / run, kind="ratio", also={"s": helpers}))
        return made, [f"a run of {options.tokens:,} tokens, {run:.1f} s"]

    return report(options, "% of the demo's run", rows)


if __name__ == "__main__":
    raise SystemExit(main())
