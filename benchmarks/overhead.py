"""The cost of an iteration of the run loop, compared with pytorch-ignite in the same process.

    python -m benchmarks overhead            # prints a table and exits with 1 if a bound is missed
    python -m benchmarks overhead --json     # the same as one JSON object

How many times less than ignite's an iteration of our Engine costs. Each figure is the median of rounds in which both
engines take turns, so that a drifting machine affects both.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents

from benchmarks.harness.results import Row, make_parser, ratios, report
from pulsetrain.engine import Engine, Events

ROWS = {  # name -> (handlers on ITERATION_COMPLETED, every, largest fraction of ignite's cost)
    "no handlers": (0, None, 1 / 16),
    "10 handlers": (10, None, 1 / 10),
    "10 handlers, every=100": (10, 100, 1 / 50),
}


def build(engine_class: Any, events: Any, handlers: int, every: int | None) -> Any:
    """An engine whose step does nothing, with this many handlers that do nothing."""
    engine = engine_class(lambda engine, batch: None)
    event = events.ITERATION_COMPLETED if every is None else events.ITERATION_COMPLETED(every=every)
    for _ in range(handlers):
        engine.add_event_handler(event, lambda engine: None)
    return engine


def seconds_an_iteration(engine: Any, iterations: int) -> float:
    """Wall time of one run per iteration."""
    start = time.perf_counter()
    engine.run(range(iterations))
    return (time.perf_counter() - start) / iterations


def measure(iterations: int, rounds: int) -> list[Row]:
    """The ratio of ignite's cost of an iteration to ours, and both."""
    rows = []
    for name, (handlers, every, bound) in ROWS.items():
        ours = build(Engine, Events, handlers, every)
        theirs = build(IgniteEngine, IgniteEvents, handlers, every)
        own_cost, peer_cost = [], []
        for _ in range(rounds + 1):  # the first warms up
            own_cost.append(seconds_an_iteration(ours, iterations))
            peer_cost.append(seconds_an_iteration(theirs, iterations // 10))
        rows.append(
            Row(
                name=name,
                kind="ratio",
                **ratios(peer_cost[1:], own_cost[1:]),
                bound=1 / bound,
                at_least=True,
                also={
                    "ours, us": statistics.median(own_cost[1:]) * 1e6,
                    "ignite, us": statistics.median(peer_cost[1:]) * 1e6,
                },
            )
        )
    return rows


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("overhead", __doc__)
    parser.add_argument("--iterations", type=int, default=200_000, help="iterations per round [%(default)s]")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    return report(options, "ignite / ours, an iteration", lambda: (measure(options.iterations, options.rounds), []))


if __name__ == "__main__":
    raise SystemExit(main())
