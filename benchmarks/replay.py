"""The speed of replaying a recorded run through handlers.

    python -m benchmarks replay          # prints a table and exits with 1 if a bound is missed

The log is that of a trainer: four events per iteration (start, gradients, update, end) and a validation every 1,000.
Rates count all events of the log; events without a subscriber are skipped without decoding. Each rate is the best of
several passes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.results import Row, make_parser, report
from pulsetrain.engine import Events
from pulsetrain.engine.events.names import EventType
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EarlyStopping

VALIDATION = 1000  # iterations between validations
START = 1_700_000_000_000_000_000
BOUNDS = {  # events per second, at least
    "through one handler of each iteration": 1_500_000.0,
    "through ten handlers of each iteration": 800_000.0,
    "through ten handlers of trainer events": 800_000.0,
    "through EarlyStopping": 1_500_000.0,
}


def write_log(folder: Path, iterations: int) -> None:
    """The log of a run with this many iterations."""
    writer = LogWriter(folder)
    number = 0

    def add(event: EventType, iteration: int, **fields: Any) -> None:
        nonlocal number
        writer.add(
            LoggedEvent(number, "trainer", event.value, 1, iteration, seq=number, t=START + 250_000 * number, **fields)
        )
        number += 1

    for iteration in range(1, iterations + 1):
        loss = 4.0 / (1.0 + 1e-4 * iteration)
        rate = 3e-4 * (1.0 - iteration / iterations)
        add(Events.ITERATION_STARTED, iteration)
        add(Events.GRADIENTS_READY, iteration, payload={"grad_norm": loss * 0.37})
        add(Events.OPTIMIZER_STEP_COMPLETED, iteration, payload={"learning_rates": [rate]})
        add(Events.ITERATION_COMPLETED, iteration, output={"loss": loss}, lr=[rate])
        if iteration % VALIDATION == 0:
            metrics = {"val/loss": loss * 1.1, "val/accuracy": 1.0 / (1.0 + loss)}
            add(Events.VALIDATION_STARTED, iteration)
            seconds = {"seconds": 1.5}
            add(Events.VALIDATION_COMPLETED, iteration, payload={"metrics": metrics}, metrics=metrics, observed=seconds)
    writer.end()
    writer.close()


def rate(folder: Path, attach: Callable[[Replay], Any], passes: int) -> float:
    """Events per second, without opening the log."""
    log = EventLog(folder)
    best = 0.0
    for _ in range(passes):
        replay = Replay(log)
        attach(replay)
        start = time.perf_counter()
        replay.run()
        best = max(best, len(log) / (time.perf_counter() - start))
    return best


def receive_iterations(handlers: int) -> Callable[[Replay], None]:
    """Attaches this many handlers that read the iteration."""

    def attach(replay: Replay) -> None:
        for _ in range(handlers):
            counts: dict[str, int] = {"received": 0}

            def count(engine: Replay, counts: dict[str, int] = counts) -> None:
                counts["received"] += 1

            replay.add_event_handler(Events.ITERATION_COMPLETED, count)

    return attach


def read_losses(replay: Replay) -> None:
    """Attaches a handler that reads the loss."""
    replay.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: engine.state.output["loss"])


def receive_trainer_events(replay: Replay) -> None:
    """Attaches ten handlers of the events to which a trainer's usual handlers subscribe."""
    for event in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.VALIDATION_COMPLETED):
        for _ in range(3):
            replay.add_event_handler(event, lambda: None)
    replay.add_event_handler(Events.ITERATION_COMPLETED(every=100), lambda: None)


def measure(folder: Path, iterations: int, passes: int) -> dict[str, float]:
    """All figures by name, in events per second; those with a bound have the names of BOUNDS."""
    write_log(folder, iterations)
    return {
        "through one handler of each iteration": rate(folder, receive_iterations(1), passes),
        "through ten handlers of each iteration": rate(folder, receive_iterations(10), passes),
        "through ten handlers of trainer events": rate(folder, receive_trainer_events, passes),
        "through a handler that reads the loss": rate(folder, read_losses, passes),
        "through EarlyStopping": rate(folder, lambda replay: EarlyStopping(patience=10**9).attach(replay), passes),
    }


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("replay", __doc__)
    parser.add_argument("--iterations", type=int, default=250_000, help="iterations of the run [%(default)s]")
    parser.add_argument("--passes", type=int, default=5, help="passes per figure, of which the best counts")
    options = parser.parse_args()
    if options.iterations < VALIDATION or options.passes < 1:
        parser.error(f"choose at least {VALIDATION} iterations and 1 pass")

    def rows() -> tuple[list[Row], list[str]]:
        with tempfile.TemporaryDirectory() as name:
            rates = measure(Path(name), options.iterations, options.passes)
        return [
            Row(name=name, measured=rate, kind="absolute", bound=BOUNDS.get(name), at_least=True)
            for name, rate in rates.items()
        ], []

    return report(options, f"events/s, {options.iterations:,} iterations replayed", rows)


if __name__ == "__main__":
    raise SystemExit(main())
