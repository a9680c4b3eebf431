"""The cost of an iteration of the run loop, compared with pytorch-ignite in the same process.

    python benchmarks/overhead.py            # prints a table and exits with 1 if a bound is missed
    python benchmarks/overhead.py --json     # the same as one JSON object

Each figure is the median of rounds in which both engines take turns, so that a drifting machine affects both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents

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


def measure(iterations: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds per iteration, ours and ignite's, and the ratio of ignite's to ours."""
    results = {}
    for name, (handlers, every, bound) in ROWS.items():
        ours = build(Engine, Events, handlers, every)
        theirs = build(IgniteEngine, IgniteEvents, handlers, every)
        own_cost, peer_cost = [], []
        for _ in range(rounds + 1):  # the first warms up
            own_cost.append(seconds_an_iteration(ours, iterations))
            peer_cost.append(seconds_an_iteration(theirs, iterations // 10))
        ratios = [peer / own for own, peer in zip(own_cost[1:], peer_cost[1:], strict=True)]
        results[name] = {
            "us": statistics.median(own_cost[1:]) * 1e6,
            "ignite_us": statistics.median(peer_cost[1:]) * 1e6,
            "times_less": statistics.median(ratios),
            "bound_times_less": 1 / bound,
        }
    return results


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200_000, help="iterations per round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = measure(arguments.iterations, arguments.rounds)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print(f"{'an iteration with':<26}{'ours, us':>10}{'ignite, us':>12}{'ratio':>12}{'bound':>8}")
        for name, row in results.items():
            print(
                f"{name:<26}{row['us']:>10.3f}{row['ignite_us']:>12.2f}"
                f"{row['times_less']:>12.1f}{row['bound_times_less']:>8.0f}"
            )
    return int(any(row["times_less"] < row["bound_times_less"] for row in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
