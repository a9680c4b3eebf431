"""Trains a classifier of handwritten digits to over 95% validation accuracy in a few seconds.

python examples/minimal.py        (the data comes with scikit-learn: pip install scikit-learn)
"""

import torch
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from pulsetrain import Trainer, TrainingConfig


def main() -> float:
    torch.manual_seed(0)  # the model and the split are created before the trainer seeds its run
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    training, validation = random_split(digits, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loaders = DataLoader(training, batch_size=32, shuffle=True), DataLoader(validation, batch_size=256)
    config = TrainingConfig(max_epochs=20, learning_rate=3e-3)
    trainer = Trainer(model, *loaders, metrics={"accuracy": Accuracy()}, config=config)
    accuracy = trainer.train()["val/accuracy"][-1]
    print(f"validation accuracy: {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main()
