"""Finds a learning rate by a range test, and compares training with it and with the default.

python examples/lr_finder.py        (the data comes with scikit-learn: pip install scikit-learn)

The plot is runs/lr_finder/plots/lr_finder.png.
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.handlers import LRFinder


def make_trainer(learning_rate: float = 1e-3) -> Trainer:
    torch.manual_seed(0)  # the model and the split are created before the trainer seeds its run
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    training, validation = random_split(digits, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loaders = DataLoader(training, batch_size=32, shuffle=True), DataLoader(validation, batch_size=256)
    return Trainer(model, *loaders, config=TrainingConfig(max_epochs=3, learning_rate=learning_rate))


def main(folder: Path = Path("runs/lr_finder")) -> dict[float, float]:
    found = LRFinder(folder=folder).run(make_trainer())  # leaves the trainer unchanged
    if found.suggestion is None:
        raise SystemExit(f"no suggestion: {found.reason}")
    print(f"suggested learning rate: {found.suggestion:.2g}, after {len(found.rates)} updates")
    results = {}
    for rate in (1e-3, found.suggestion):
        results[rate] = make_trainer(rate).train()["val/loss"][-1]
        print(f"validation loss after 3 epochs at {rate:.2g}: {results[rate]:.4f}")
    return results


if __name__ == "__main__":
    main()
