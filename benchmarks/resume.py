"""The time to resume inside a long epoch, compared with a loader that reads the earlier batches again.

    python -m benchmarks resume          # prints a table and exits with 1 if a bound is missed

A shuffled DataLoader over a million samples, and a checkpoint in the middle of the epoch. The benchmark measures the
time from CHECKPOINT_LOADED, when the weights are loaded, to the ITERATION_STARTED of the first batch; with workers,
most of it is the time to start them. The other loader is the same DataLoader, read by torch up to the same batch.
"""

from __future__ import annotations

import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.results import Row, make_parser, report
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy
from pulsetrain.handlers import Checkpointer

BATCH_SIZE = 100
FEATURES = 32
BOUNDS = {
    "first batch, 0 workers, s": 1.0,
    "first batch, 2 workers, s": 1.0,
}


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Computed on access, from the index and a random draw: costs about as much as reading a small record."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((FEATURES,), index / self.count) + torch.rand(FEATURES), torch.ones(1)


def make_loader(samples: int, workers: int) -> DataLoader[Any]:
    """Shuffled batches."""
    return DataLoader(Samples(samples), batch_size=BATCH_SIZE, shuffle=True, num_workers=workers)


def make_trainer(folder: Path, samples: int, workers: int, iterations: int) -> Trainer:
    """A run of this many iterations that saves checkpoints only when asked."""
    return Trainer(
        nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, 1)),
        make_loader(samples, workers),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_iterations=iterations, optimizer="adamw", seed=1),
        handlers=[Checkpointer(folder, at_end=False)],
    )


def train_to(folder: Path, samples: int, iterations: int) -> None:
    """Save a checkpoint after this many iterations of the epoch."""
    run = make_trainer(folder, samples, 0, iterations)
    run.train()
    run.save_checkpoint()


def first_batch(folder: Path, samples: int, workers: int, iteration: int) -> float:
    """Seconds from the loaded checkpoint to the first batch."""
    run = make_trainer(folder, samples, workers, iteration + 1)
    marks: list[tuple[float, int]] = []

    @run.on(Events.CHECKPOINT_LOADED | Events.ITERATION_STARTED)
    def mark(engine: Trainer) -> None:
        marks.append((time.perf_counter(), engine.state.iteration))

    run.train(resume="latest")
    (loaded, at), (started, first) = marks
    assert (at, first) == (iteration, iteration + 1), "the run resumed at a different iteration"
    return started - loaded


def reading_again(samples: int, workers: int, iteration: int) -> float:
    """Seconds that torch's own loader takes to the same batch, reading and discarding the earlier ones."""
    start = time.perf_counter()
    batches = islice(make_loader(samples, workers), iteration, None)
    batch = next(batches)
    seconds = time.perf_counter() - start
    assert len(batch[0]) == BATCH_SIZE
    return seconds


def measure(samples: int, position: int) -> dict[str, float]:
    """All figures by name; those with a bound have the names of BOUNDS."""
    results: dict[str, float] = {}
    iteration = position // BATCH_SIZE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_to(folder, samples, iteration)
        for workers in (0, 2):
            ours = first_batch(folder, samples, workers, iteration)
            theirs = reading_again(samples, workers, iteration)
            results[f"first batch, {workers} workers, s"] = ours
            results[f"reading again, {workers} workers, s"] = theirs
            results[f"reading again / first batch, {workers} workers"] = theirs / ours
    return results


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("resume", __doc__)
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of an epoch [%(default)s]")
    parser.add_argument("--position", type=int, default=500_000, help="samples before the checkpoint [%(default)s]")
    options = parser.parse_args()
    if not 0 < options.position <= options.samples - BATCH_SIZE:
        parser.error(f"--position {options.position}: choose 1 to {options.samples - BATCH_SIZE}")

    def rows() -> tuple[list[Row], list[str]]:
        figures = measure(options.samples, options.position)
        return [
            Row(name=name, measured=value, kind="absolute" if name.endswith(", s") else "ratio", bound=BOUNDS.get(name))
            for name, value in figures.items()
        ], []

    return report(options, f"{options.position:,} of {options.samples:,} samples", rows)


if __name__ == "__main__":
    raise SystemExit(main())
