"""A causal language model of transformers, made from a small configuration: nothing is downloaded.

python -m examples.ported.hugging_face_lm        (from the folder that contains examples/)
"""

import torch
from torch import nn

from examples.ported.data import Loaders, text
from examples.ported.models import llama
from pulsetrain import Checkpointer, HuggingFaceExporter, PretrainStrategy, Trainer, TrainingConfig


def train(model: nn.Module, loaders: Loaders, folder: str, epochs: int = 5) -> None:
    config = TrainingConfig(max_epochs=epochs, learning_rate=3e-3, schedule="linear", warmup_steps=10, seed=0)
    handlers = [Checkpointer(folder), HuggingFaceExporter(folder, metric="val/loss")]
    Trainer(model, *loaders, strategy=PretrainStrategy(), config=config, handlers=handlers).train(resume="latest")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(llama(), text(), "runs/hugging_face_lm")
