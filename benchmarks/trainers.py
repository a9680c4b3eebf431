"""What a trainer adds to a step: ours with each handler, ours with the full set, and the other frameworks.

    python -m benchmarks trainers             # prints a table and exits with 1 if a bound is missed
    python -m benchmarks trainers --json      # the same as one JSON object
    python -m benchmarks trainers --only ours ignite "handlers: EMA"

Each contestant trains the same linear model with SGD on the same DataLoader, on the CPU with one thread. The model
notes the time of two of its calls, between which lie the measured iterations: so whatever owns the loop is measured
alike, without its start and end. All take turns in every round; a figure is the median over the rounds of the
difference from the bare loop of that round. "Nothing computed" is a model without a computation, compared with a bare
loop over the same model: what is added is Python code alone. "A dataset that may draw" is one of the user's own, for
which the generators are seeded for each batch; in the other rows the dataset declares that it draws nothing.
Frameworks that are not installed are named
(pip install -e '.[bench]').
"""

from __future__ import annotations

import io
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import pulsetrain.handlers as shipped
from benchmarks.harness.frameworks import (
    Batch,
    Contestant,
    Nothing,
    Timed,
    accelerate,
    bare,
    fabric,
    hugging_face,
    ignite,
    lightning,
    some_batches,
    torchtnt,
)
from benchmarks.harness.results import Row, make_parser, ratios, report
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Every, SupervisedStrategy
from pulsetrain.engine.schedules import Cosine

MEASURED = 1_000  # iterations
PAIRS = 20  # of runs with and without the progress line
SLICE = 50  # iterations: several slices lie between two drawings
BATCHES = 100  # in an epoch
# microseconds that may be added: the bound and the goal
FULL_SET, COMPUTES_NOTHING = (85.0, 20.0), (16.0, 4.0)
PROGRESS_LINE = 2.0
NOISE = 0.02  # of the bare step: what a framework adds can be compared with another one if it is more

# ------------------------------------------------------------------------------------------------ the contestants


class Terminal(io.StringIO):
    """A stream on which a progress bar is drawn."""

    def isatty(self) -> bool:
        return True


def ours(*make: Callable[[Path], Any], progress: bool = False) -> Contestant:
    """Our Trainer with these handlers, and with its default progress line where the stream is a terminal."""

    def train(model: Timed, batches: DataLoader[Batch], folder: Path) -> None:
        Trainer(
            model,
            batches,
            strategy=SupervisedStrategy(model.strategy_loss),
            optimizer=model.optimizer(),
            config=TrainingConfig(max_iterations=model.last, device="cpu", seed=0, progress=progress),
            handlers=[each(folder) for each in make],
        ).train()

    return train


def validated(*make: Callable[[Path], Any]) -> Contestant:
    """Our Trainer with these handlers, which judge a validation at the end of the run."""

    def train(model: Timed, batches: DataLoader[Batch], folder: Path) -> None:
        Trainer(
            model,
            batches,
            some_batches(1),
            strategy=SupervisedStrategy(model.strategy_loss),
            optimizer=model.optimizer(),
            config=TrainingConfig(
                max_iterations=model.last,
                device="cpu",
                seed=0,
                progress=False,
                validate_every=Every(iterations=model.last),
            ),
            handlers=[each(folder) for each in make],
        ).train()

    return train


def schedule(folder: Path) -> Any:
    """A rate that changes with each update."""
    return shipped.LRScheduler(Cosine(initial_lr=0.01, total_steps=10**6))


def console(folder: Path) -> Any:
    """A line each 50 iterations."""
    return shipped.ConsoleLogger(Every(iterations=50), stream=io.StringIO())


def checkpointer(folder: Path) -> Any:
    """It saves at the end."""
    return shipped.Checkpointer(folder, Every(seconds=1000))


# the handlers at the cadence of their defaults, where that has none per iteration
ALONE: dict[str, Contestant] = {
    "BestModel": validated(lambda folder: shipped.BestModel("val/loss")),
    "CSVLogger": ours(shipped.CSVLogger),
    "Checkpointer": ours(checkpointer),
    "ConsoleLogger": ours(console),
    "CrashBundle": ours(shipped.CrashBundle),
    "EMA": ours(lambda folder: shipped.EMA()),
    "EarlyStopping": validated(lambda folder: shipped.EarlyStopping("val/loss")),
    "EventRecorder": ours(shipped.EventRecorder),
    "EventRecorder with norms": ours(lambda folder: shipped.EventRecorder(folder, grad_norm=True)),
    "Garbage": ours(lambda folder: shipped.Garbage()),
    "GradientMonitor": ours(lambda folder: shipped.GradientMonitor()),
    "HangWatchdog": ours(shipped.HangWatchdog),
    "JSONLinesLogger": ours(shipped.JSONLinesLogger),
    "LRMonitor": ours(lambda folder: shipped.LRMonitor()),
    "LRScheduler": ours(schedule),
    "LossSpikeGuard": ours(checkpointer, lambda folder: shipped.LossSpikeGuard()),
    "MemoryMonitor": ours(lambda folder: shipped.MemoryMonitor()),
    "NaNGuard": ours(lambda folder: shipped.NaNGuard()),
    "ProgressBar": ours(lambda folder: shipped.ProgressBar(stream=Terminal())),
    "ReduceLROnPlateau": validated(lambda folder: shipped.ReduceLROnPlateau("val/loss")),
    "SWA": ours(lambda folder: shipped.SWA(after_epoch=1)),
    "StepLimit": ours(lambda folder: shipped.StepLimit(iterations=10**6)),
    "Throughput": ours(lambda folder: shipped.Throughput()),
    "TimeLimit": ours(lambda folder: shipped.TimeLimit("1h")),
}
# they draw, send or stop a run, or need a service: not a cost of an iteration, or not one of this machine's
NOT_ALONE = (
    "Alert", "Fingerprints", "LRFinder", "MLflowLogger", "Plots", "Profiler", "SampleText", "TensorBoardLogger",
    "TrackioLogger", "WandbLogger",
)  # fmt: skip
BARE = "bare loop"
PROGRESS = "ours, its default progress line"
SEEDED = "ours, a dataset that may draw"
BARE_NOTHING, OURS_NOTHING = "bare loop, nothing computed", "ours, nothing computed"
CONTESTANTS: dict[str, Contestant] = {
    BARE: bare,
    "ours": ours(),
    PROGRESS: ours(progress=True),
    SEEDED: ours(),
    "ours, the full set": validated(
        schedule,
        console,
        shipped.EventRecorder,
        lambda folder: shipped.EarlyStopping("val/loss", patience=10**6),
        checkpointer,
    ),
    "ignite": ignite,
    "Fabric": fabric,
    "Lightning": lightning,
    "accelerate": accelerate,
    "HF Trainer": hugging_face,
    "torchtnt": torchtnt,
    BARE_NOTHING: bare,
    OURS_NOTHING: ours(),
    **{f"handlers: {name}": contestant for name, contestant in ALONE.items()},
}
BASES = {OURS_NOTHING: BARE_NOTHING, BARE_NOTHING: BARE_NOTHING}  # of the others: the bare loop
NO_BOUNDS = (None, None)
BOUNDS = {"ours, the full set": FULL_SET, OURS_NOTHING: COMPUTES_NOTHING}
COMPARED = [("ours", "ignite", 1.0, None), ("ours, the full set", "Fabric", 2.5, 1.0)]  # times, the bound and the goal


# ------------------------------------------------------------------------------------------------- the measurement


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the frameworks print, log and warn of."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(Terminal()):
        warnings.simplefilter("ignore")
        yield


def step_of(name: str, batches: DataLoader[Batch], iterations: int, slices: int = 1) -> float:
    """Microseconds per measured iteration: the median of its slices."""
    model = (Nothing if name in (BARE_NOTHING, OURS_NOTHING) else Timed)(iterations, slices)
    if name == SEEDED:
        batches = some_batches(BATCHES, draws_nothing=False)
    with tempfile.TemporaryDirectory() as folder, quiet():
        CONTESTANTS[name](model, batches, Path(folder))
    taken = statistics.median(after - before for before, after in pairwise(model.noted))
    return taken / (iterations // slices) * 1e6


def progress_line(iterations: int) -> list[float]:
    """What the default progress line adds between two drawings, in microseconds, of each of many pairs.

    It is less than a round's noise. Median slices leave out those that draw, and those that something else delayed.
    """
    batches, found = some_batches(BATCHES), []
    for number in range(PAIRS):
        both = ["ours", PROGRESS] if number % 2 else [PROGRESS, "ours"]
        steps = {name: step_of(name, batches, iterations, slices=max(1, iterations // SLICE)) for name in both}
        found.append(steps[PROGRESS] - steps["ours"])
    return found


def measure(names: list[str], rounds: int, iterations: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The microseconds of each contestant in each round, and why the others are absent."""
    batches = some_batches(BATCHES)
    found: dict[str, list[float]] = {name: [] for name in names}
    absent: dict[str, str] = {}
    for number in range(rounds + 1):  # the first warms up
        for name in names:
            if name in absent:
                continue
            try:
                step = step_of(name, batches, iterations)
            except ImportError as error:
                absent[name] = str(error)
                del found[name]
                continue
            if number:
                found[name].append(step)
    return found, absent


def summary(found: dict[str, list[float]], line: list[float] | None = None, absent: Container[str] = ()) -> list[Row]:
    """What each contestant adds to the bare loop's step, and how ours compare with the others.

    Args:
        found: steps of each contestant, in microseconds, of each round.
        line: what the default progress line adds; by default, by the rounds.
        absent: those that were asked for and are not installed.
    """
    rows, medians = [], dict[str, float]()
    for name, steps in found.items():
        bases = found[BASES.get(name, BARE)]
        added = [step - base for step, base in zip(steps, bases, strict=True)]
        medians[name] = statistics.median(added)
        rows.append(
            Row(
                name=name,
                kind="absolute",
                measured=medians[name],
                least=min(added),
                most=max(added),
                bound=BOUNDS.get(name, NO_BOUNDS)[0],
                goal=BOUNDS.get(name, NO_BOUNDS)[1],
                also={"step, us": statistics.median(steps), "/ bare": ratios(steps, bases)["measured"]},
            )
        )
    if {PROGRESS, "ours"} <= medians.keys():
        differences = line or [a - b for a, b in zip(found[PROGRESS], found["ours"], strict=True)]
        rows.append(
            Row(
                name="the default progress line",
                kind="absolute",
                measured=statistics.median(differences),
                least=min(differences),
                most=max(differences),
                bound=PROGRESS_LINE,
            )
        )
    for mine, peer, bound, goal in COMPARED:
        if mine in medians and (peer in medians or peer in absent):
            differs = peer in medians and medians[peer] > NOISE * statistics.median(found[BARE])
            ratio = medians[mine] / medians[peer] if differs else float("nan")
            rows.append(Row(name=f"{mine} / {peer}", measured=ratio, kind="ratio", bound=bound, goal=goal))
    return rows


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("trainers", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=MEASURED, help="measured iterations of a run [%(default)s]")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bases = {BARE, *(BASES[name] for name in options.only if name in BASES)}

    def rows() -> tuple[list[Row], list[str]]:
        names = [name for name in CONTESTANTS if name in bases or name in options.only]
        found, absent = measure(names, options.rounds, options.iterations)
        line = progress_line(options.iterations) if {PROGRESS, "ours"} <= found.keys() else None
        return summary(found, line, absent), [f"{name}: absent: {why}" for name, why in absent.items()]

    return report(options, "added to a step of a linear model, us", rows)


if __name__ == "__main__":
    raise SystemExit(main())
