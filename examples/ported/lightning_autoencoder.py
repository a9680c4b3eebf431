"""An autoencoder of handwritten digits, as it is often written with Lightning.

python -m examples.ported.lightning_autoencoder        (from the folder that contains examples/)
"""

import torch
from torch import nn

from examples.ported.data import Loaders, images
from examples.ported.models import Autoencoder
from pulsetrain import Checkpointer, SupervisedStrategy, Trainer, TrainingConfig


def train(model: nn.Module, loaders: Loaders, folder: str, epochs: int = 10) -> None:
    config = TrainingConfig(max_epochs=epochs, optimizer="adam", learning_rate=1e-3, seed=0)
    handlers, strategy = [Checkpointer(folder, metric="val/loss")], SupervisedStrategy("mse")
    Trainer(model, *loaders, strategy=strategy, config=config, handlers=handlers).train(resume="latest")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Autoencoder(), images(), "runs/lightning_autoencoder")
