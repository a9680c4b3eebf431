"""The time to verify part of a run, compared with training it.

    python benchmarks/verify.py          # prints a table and a JSON line, exits with 1 if the bound is missed

Both continue from the same checkpoint with the same handlers to the same iteration, and take turns: a Trainer that
resumes and records, and `verify`, which also compares every event. The medians count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig, verify
from pulsetrain.engine import Every, SupervisedStrategy
from pulsetrain.handlers import Checkpointer, EventRecorder

BOUND = {"verify / training, %": 3.0}  # more
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


def measure(iterations: int, rounds: int) -> dict[str, float]:
    """Seconds of both, and the time that verifying takes in addition, in percent."""
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
    ratio = statistics.median(v / t for v, t in zip(verified, trained, strict=True))
    return {
        "training, s": statistics.median(trained),
        "verify, s": statistics.median(verified),
        "verify / training, %": 100 * (ratio - 1),
    }


def main() -> int:
    """Measure and print; the exit status is 1 if the bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    results = measure(arguments.iterations, arguments.rounds)
    print(f"{f'{arguments.iterations} iterations':<28}{'measured':>10}{'bound':>10}")
    for name, figure in results.items():
        print(f"{name:<28}{figure:>10.2f}" + (f"{f'<= {BOUND[name]:g}':>10}" if name in BOUND else ""))
    print(json.dumps({"iterations": arguments.iterations, **results, "bounds": BOUND}))
    return int(any(results[name] > bound for name, bound in BOUND.items()))


if __name__ == "__main__":
    raise SystemExit(main())
