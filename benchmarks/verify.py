"""The time to verify part of a run, compared with training it.

    python -m benchmarks verify          # prints a table and exits with 1 if the bound is missed

Both continue from the same checkpoint with the same handlers to the same iteration, and take turns: a Trainer that
resumes and records, and `verify`, which also compares every event. The medians count.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.results import Row, make_parser, ratios, report
from pulsetrain import Trainer, TrainingConfig, verify
from pulsetrain.engine import Every, SupervisedStrategy
from pulsetrain.handlers import Checkpointer, EventRecorder

BOUND, GOAL = 1.25, 1.03  # times the training
WIDTH = 512
BEGIN = 50  # iterations before the part to verify


def build(folder: Path, iterations: int) -> Trainer:
    """A step of several milliseconds."""
    torch.manual_seed(0)
    inputs = torch.randn(1024, WIDTH)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return Trainer(
        nn.Sequential(*layers, nn.Linear(WIDTH, 1)),
        DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=64, shuffle=True),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_iterations=BEGIN + iterations, seed=1, device="cpu"),
        handlers=[EventRecorder(folder), Checkpointer(folder, every=Every(iterations=BEGIN), keep_last=10**6)],
    )


def measure(iterations: int, rounds: int) -> list[Row]:
    """Seconds of both, and their ratio."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        build(run, iterations).train()
        checkpoint = next((run / "checkpoints").glob(f"{BEGIN:09}-*"))
        trained, verified = [], []
        rerun = Path(name) / "rerun"
        for _ in range(rounds):
            start = time.perf_counter()
            trainer = build(rerun, iterations)
            trainer.handlers[1].detach()
            trainer.train(resume=str(checkpoint))
            trained.append(time.perf_counter() - start)
            shutil.rmtree(rerun)
            start = time.perf_counter()
            if not verify(run, lambda: build(rerun, iterations), from_iteration=BEGIN + 1):
                raise SystemExit("the run was not reproduced: nothing was measured")
            verified.append(time.perf_counter() - start)
            shutil.rmtree(rerun, ignore_errors=True)
    return [
        Row(name="training, s", measured=statistics.median(trained), kind="absolute"),
        Row(name="verify, s", measured=statistics.median(verified), kind="absolute"),
        Row(name="verify / training", kind="ratio", **ratios(verified, trained), bound=BOUND, goal=GOAL),
    ]


def main() -> int:
    """Measure and print; the exit status is 1 if the bound is missed."""
    parser = make_parser("verify", __doc__)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    title = f"{options.iterations} iterations"
    return report(options, title, lambda: (measure(options.iterations, options.rounds), []))


if __name__ == "__main__":
    raise SystemExit(main())
