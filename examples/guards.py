"""A row with a NaN and a batch with absurd targets: the guards report both, and the run still learns.

NaNGuard skips the update on the device; LossSpikeGuard returns to the last checkpoint and skips the batch.

    python examples/guards.py [FOLDER]
"""

import sys
import tempfile
from typing import Any

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Engine, Event, Events, Every, SupervisedStrategy
from pulsetrain.handlers import Checkpointer, LossSpikeGuard, NaNGuard


def rows() -> TensorDataset:
    """442 patients: 10 measurements each and the progression of a disease, both standardised."""
    inputs, targets = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    inputs, targets = inputs / inputs.std(0), (targets - targets.mean()) / targets.std()
    inputs[100, 3] = float("nan")  # a missing measurement
    targets[300] = 1e4  # a wrong unit
    return TensorDataset(inputs, targets.unsqueeze(1))


def train(handlers: list[Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    trainer = Trainer(
        model,
        DataLoader(rows(), batch_size=16, shuffle=True),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_iterations=27, optimizer="adamw", learning_rate=1e-2, seed=0, log_every_n_steps=9),
        handlers=handlers,
    )

    @trainer.on(Events.ANOMALY_DETECTED)
    def report(engine: Engine, event: Event) -> None:
        anomaly = event.payload
        print(
            f"  {anomaly.kind} at iteration {anomaly.at_iteration}: {anomaly.value:.4g}, rows {anomaly.batch_indices}"
        )

    trainer.train()
    good, targets = rows().tensors
    kept = good.isfinite().all(1) & (targets[:, 0] < 100)
    with torch.no_grad():
        error = (model(good[kept]) - targets[kept]).square().mean().item()
    print(f"  went back {trainer.rewinds} time(s); mean squared error on the good rows: {error:.3f}")


def main(folder: str | None = None) -> None:
    folder = folder or tempfile.mkdtemp()
    print("without guards")
    train([])
    print("with guards")
    every = Every(iterations=3)
    train(
        [
            NaNGuard(every=every),
            LossSpikeGuard(window=8, policy="rewind", every=every),
            Checkpointer(folder, every=every, keep_last=8),
        ]
    )


if __name__ == "__main__":
    main(*sys.argv[1:2])
