"""A small GPT over bytes, with warm-up and cosine, clipping, and batches that are accumulated.

python -m examples.ported.gpt        (from the folder that contains examples/)
"""

import torch
from torch import nn

from examples.byte_lm.model import ByteGPT
from examples.ported.data import Loaders, text
from pulsetrain import Checkpointer, Every, PretrainStrategy, Trainer, TrainingConfig


def train(model: nn.Module, loaders: Loaders, folder: str, updates: int = 200, evaluate_every: int = 20) -> None:
    config = TrainingConfig(
        max_updates=updates, accumulate=2, learning_rate=3e-3, weight_decay=0.1, no_decay="auto",
        optimizer_options={"betas": (0.9, 0.95)}, schedule="cosine", warmup_steps=20, clip_grad_norm=1.0,
        validate_every=Every(updates=evaluate_every), seed=0,
    )  # fmt: skip
    handlers = [Checkpointer(folder, every=Every(updates=evaluate_every), metric="val/loss")]
    Trainer(model, *loaders, strategy=PretrainStrategy(), config=config, handlers=handlers).train(resume="latest")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(ByteGPT(layers=2, width=64, context=64), text(), "runs/gpt")
