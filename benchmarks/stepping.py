"""The response time of `pulsetrain debug` anywhere in a long log.

    python -m benchmarks stepping                 # prints a table and exits with 1 if a bound is missed
    python -m benchmarks stepping --events 1e7    # the log whose figures have the bound

The log is that of a trainer: four events per iteration, and every 1,000 iterations a validation by an evaluator, with
its own events. Each response is a move from a random position, and the text that the prompt prints after it: the
event and a watched metric. Each response is timed in several passes, and its best pass counts, since other processes
may disturb a pass; the bound applies to the slowest response.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.results import Row, make_parser, report
from pulsetrain.debugger.commands import Commands
from pulsetrain.debugger.recorded import Debugger
from pulsetrain.engine import Events
from pulsetrain.engine.events.names import EventType
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter

BOUND = 100.0  # ms, of the slowest response
VALIDATION = 1000  # iterations between validations
START = 1_700_000_000_000_000_000


def write_log(folder: Path, events: int) -> None:
    """The log of a run, cut off after this many events."""
    writer = LogWriter(folder)
    number, iteration = 0, 0

    def add(event: EventType, at: int, engine: str = "trainer", **fields: Any) -> None:
        nonlocal number
        writer.add(LoggedEvent(number, engine, event.value, 1, at, seq=number, t=START + 250_000 * number, **fields))
        number += 1

    add(Events.STARTED, 0)
    while number < events:
        iteration += 1
        loss = 1.0 + iteration * 0.37 % 3.0
        add(Events.ITERATION_STARTED, iteration)
        add(Events.GRADIENTS_READY, iteration, payload={"grad_norm": loss * 0.37})
        add(Events.OPTIMIZER_STEP_COMPLETED, iteration, payload={"learning_rates": [3e-4]})
        add(Events.ITERATION_COMPLETED, iteration, output={"loss": loss}, lr=[3e-4])
        if iteration % VALIDATION == 0:
            metrics = {"val/loss": iteration // VALIDATION * 0.73 % 3.0}
            add(Events.VALIDATION_STARTED, iteration)
            for batch in (1, 2):
                add(Events.ITERATION_COMPLETED, batch, "evaluator", output={"loss": loss})
            add(Events.VALIDATION_COMPLETED, iteration, payload={"metrics": metrics}, metrics=metrics)
    writer.end()
    writer.close()


def answers(folder: Path, rounds: int, seed: int) -> dict[str, list[float]]:
    """Milliseconds of every response by its kind, opening the log included."""
    times: dict[str, list[float]] = {}
    draw = random.Random(seed)

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        return result

    debugger = timed("open", lambda: Debugger(folder))
    commands = Commands(debugger)

    def answer(name: str, line: str) -> None:
        timed(name, lambda: list(commands.run(line)))

    answer("watch", "watch train/loss")
    gc.freeze()  # as the command does
    last, iterations = debugger.log.headers[-1].seq[1], debugger.replay.last_iteration
    debugger.add_break("validation_completed", 'metrics["val/loss"] > 2.5')
    for _ in range(rounds):
        for name, line in (
            ("goto seq", f"goto seq {draw.randrange(last)}"),
            ("next", "next"),
            ("back", "back"),
            ("state", "state"),
            ("events", "events"),
            ("goto iteration", f"goto iteration {draw.randrange(1, iterations)}"),
            ("back", "back"),
            ("next", "next"),
            ("next 10000", "next 10000"),
            ("back 10000", "back 10000"),
            ("break", "continue"),
            ("break, backwards", "reverse-continue"),
            ("back to validation_started", "back to validation_started"),
        ):
            answer(name, line)
    return times


def best(passes: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The time of the best pass, for each response."""
    return {name: [min(times) for times in zip(*(each[name] for each in passes), strict=True)] for name in passes[0]}


def main() -> int:
    """Measure and print; the exit status is 1 if the bound is missed."""
    parser = make_parser("stepping", __doc__)
    parser.add_argument(
        "--events", type=lambda text: int(float(text)), default=1_000_000, help="events of the log [%(default)s]"
    )
    parser.add_argument("--rounds", type=int, default=50, help="random positions")
    parser.add_argument("--passes", type=int, default=3, help="passes over the same positions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="a run folder to step through instead")
    options = parser.parse_args()
    if options.events < 10 * VALIDATION or min(options.rounds, options.passes) < 1:
        parser.error(f"choose at least {10 * VALIDATION} events, 1 round and 1 pass")

    def rows() -> tuple[list[Row], list[str]]:
        with tempfile.TemporaryDirectory() as name:
            folder = options.log or Path(name)
            if options.log is None:
                write_log(folder / "events", options.events)
            times = best([answers(folder, options.rounds, options.seed) for _ in range(options.passes)])
            events = len(EventLog(folder))
        bound = {kind: BOUND for kind in times if kind not in ("open", "watch")}
        return [
            Row(
                name=kind,
                measured=max(each),
                kind="absolute",
                bound=bound.get(kind),
                also={"median": statistics.median(each)},
            )
            for kind, each in times.items()
        ], [f"a log of {events:,} events"]

    return report(options, "the slowest response, ms", rows)


if __name__ == "__main__":
    raise SystemExit(main())
