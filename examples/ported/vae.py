"""A variational autoencoder of handwritten digits.

python -m examples.ported.vae        (from the folder that contains examples/)
"""

import torch
from torch import nn

from examples.ported.data import Loaders, images
from examples.ported.models import VariationalAutoencoder, evidence_bound
from pulsetrain import Checkpointer, SupervisedStrategy, Trainer, TrainingConfig


def train(model: nn.Module, loaders: Loaders, folder: str, epochs: int = 20) -> None:
    config = TrainingConfig(max_epochs=epochs, optimizer="adam", learning_rate=2e-3, seed=0)
    handlers = [Checkpointer(folder, metric="val/loss")]
    strategy = SupervisedStrategy(evidence_bound)
    Trainer(model, *loaders, strategy=strategy, config=config, handlers=handlers).train(resume="latest")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(VariationalAutoencoder(), images(), "runs/vae")
