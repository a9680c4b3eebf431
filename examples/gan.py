"""Two models that learn against each other, a generator and a discriminator, on the digits of scikit-learn.

The strategy yields losses with the name of their optimizer; the trainer makes each update before it asks for the next.

    python examples/gan.py [FOLDER]
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.image import imsave
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, TrainingBatch
from pulsetrain.handlers import ConsoleLogger

NOISE = 16
SETTINGS: dict[str, Any] = {
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "optimizer_options": {"betas": (0.5, 0.999)},
    "seed": 0,
}


class GANStrategy:
    """Goodfellow et al. 2014, with the non-saturating loss for the generator."""

    def prepare_batch(self, batch: list[Tensor]) -> TrainingBatch:
        return TrainingBatch(batch[0], None, samples=len(batch[0]))

    def compute_losses(self, model: nn.ModuleDict, batch: TrainingBatch) -> Iterator[tuple[str, Tensor]]:
        real = batch.inputs
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = model["generator"](torch.randn(len(real), NOISE))
        on_fake, on_real = model["discriminator"](fake.detach()), model["discriminator"](real)
        yield "discriminator", cross_entropy(on_real, ones) + cross_entropy(on_fake, zeros)
        yield "generator", cross_entropy(model["discriminator"](fake), ones)  # with the updated discriminator


def dense(a: int, b: int, end: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(a, 128), nn.LeakyReLU(), nn.Linear(128, 128), nn.LeakyReLU(), nn.Linear(128, b), end)


def main(folder: str = "runs/gan", max_epochs: int = 80) -> Trainer:
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1  # 8 x 8 pixels between -1 and 1
    generator = dense(NOISE, 64, nn.Tanh())
    trainer = Trainer(
        {"generator": generator, "discriminator": dense(64, 1, nn.Identity())},
        DataLoader(TensorDataset(images), batch_size=64, shuffle=True, drop_last=True),
        strategy=GANStrategy(),
        config=TrainingConfig(**SETTINGS, max_epochs=max_epochs),
        handlers=[ConsoleLogger(every=Every(epochs=10))],
    )
    updates: Counter[str] = Counter()
    counted = Events.OPTIMIZER_STEP_COMPLETED
    trainer.add_event_handler(counted, lambda engine, event: updates.update([event.payload.optimizer]))
    trainer.train()
    torch.manual_seed(1)
    with torch.no_grad():
        drawn = generator(torch.randn(40, NOISE)).view(4, 10, 8, 8)
    picture = nn.functional.pad(drawn, (1, 1, 1, 1), value=1.0).permute(0, 2, 1, 3).reshape(40, 100)
    Path(folder).mkdir(parents=True, exist_ok=True)
    imsave(Path(folder) / "samples.png", picture.repeat_interleave(8, 0).repeat_interleave(8, 1).numpy(), cmap="gray")
    print(f"updates: {dict(updates)}; samples: {Path(folder) / 'samples.png'}")
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "runs/gan")
