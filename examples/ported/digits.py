"""A classifier of handwritten digits.

python -m examples.ported.digits        (from the folder that contains examples/)
"""

import torch
from ignite.metrics import Accuracy
from torch import nn

from examples.ported.data import Loaders, digits
from examples.ported.models import Classifier
from pulsetrain import Checkpointer, Trainer, TrainingConfig


def train(model: nn.Module, loaders: Loaders, folder: str, epochs: int = 10) -> None:
    config = TrainingConfig(max_epochs=epochs, learning_rate=3e-3, seed=0)
    metrics, handlers = {"accuracy": Accuracy()}, [Checkpointer(folder, metric="val/loss")]
    Trainer(model, *loaders, config=config, metrics=metrics, handlers=handlers).train(resume="latest")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Classifier(), digits(), "runs/digits")
