"""Half precision and accumulated gradients: less memory per batch, the same training.

python examples/mixed_precision_accumulation.py        (the data comes with scikit-learn: pip install scikit-learn)

The same 120 updates of 64 digits each, in four ways. fp16 scales gradients: if they overflow, the update is
skipped, the scale is lowered, and ANOMALY_DETECTED is fired.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from pulsetrain import Accuracy, Trainer, TrainingConfig
from pulsetrain.engine import Accumulate, Engine, Event, Events, TorchBackend

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32, 64 digits a batch": (64, {}),
    "fp32, 4 batches of 16": (16, {"accumulate": 4}),
    "bf16, 2 batches of 32": (32, {"accumulate": 2, "precision": "bf16"}),
    # small updates first, large ones from the 60th on: 1 batch of 16, then 7
    "fp16, a growing number of batches": (
        16,
        {"accumulate": Accumulate(schedule={0: 1, 60: 7}), "precision": "fp16", "activation_checkpointing": "0"},
    ),
}


def train(batch_size: int, settings: dict[str, Any]) -> Trainer:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(labels)[order])
    trainer = Trainer(
        nn.Sequential(nn.Sequential(nn.Linear(64, 128), nn.ReLU()), nn.Linear(128, 10)),
        DataLoader(Subset(digits, range(1536)), batch_size=batch_size, shuffle=True),
        DataLoader(Subset(digits, range(1536, 1797)), batch_size=261),
        backend=TorchBackend(gradient_scale=2.0**30),  # far too high, so that fp16 overflows and recovers
        metrics={"accuracy": Accuracy()},
        config=TrainingConfig(max_updates=120, learning_rate=5e-3, clip_grad_norm=1.0, validate_every=None, **settings),
    )

    @trainer.on(Events.ANOMALY_DETECTED)
    def report(engine: Engine, event: Event) -> None:
        print(f"  by iteration {event.iteration}: {event.payload.value:.0f} updates skipped ({event.payload.kind})")

    trainer.train()
    return trainer


def main() -> None:
    for name, (batch_size, settings) in RUNS.items():
        trainer = train(batch_size, settings)
        print(
            f"{name:<34} {trainer.state.iteration:>4} batches, {trainer.state.update} updates, "
            f"{trainer.backend.skipped_updates()} skipped, loss {trainer.history['train/loss'][-1]:.3f}, "
            f"accuracy {trainer.history['val/accuracy'][-1]:.3f}"
        )


if __name__ == "__main__":
    main()
