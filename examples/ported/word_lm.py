"""An LSTM over the words of Python's standard library, whose rate falls whenever validation does not improve.

python -m examples.ported.word_lm        (from the folder that contains examples/)
"""

import torch
from torch import nn

from examples.ported.data import WORDS, Loaders, words
from examples.ported.models import WordModel
from pulsetrain import Checkpointer, PretrainStrategy, ReduceLROnPlateau, Trainer, TrainingConfig


def train(model: nn.Module, loaders: Loaders, folder: str, epochs: int = 10) -> None:
    config = TrainingConfig(max_epochs=epochs, optimizer="sgd", learning_rate=2.0, clip_grad_norm=0.25, seed=0)
    handlers = [Checkpointer(folder, metric="val/loss"), ReduceLROnPlateau("val/loss", factor=0.25, patience=0)]
    Trainer(model, *loaders, strategy=PretrainStrategy(), config=config, handlers=handlers).train(resume="latest")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(WordModel(WORDS), words(), "runs/word_lm")
