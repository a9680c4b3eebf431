"""Two models that learn against each other, a generator and a discriminator, each with its own optimizer.

The strategy yields losses with the name of their optimizer; the trainer makes each update before it asks for the next.

    python -m examples.ported.gan        (from the folder that contains examples/)
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from examples.ported.data import Batches, real_images
from examples.ported.models import NOISE, discriminator, discriminator_loss, generator, generator_loss, save_samples
from pulsetrain import Checkpointer, Trainer, TrainingConfig
from pulsetrain.engine import TrainingBatch


class GANStrategy:
    """Each batch trains the discriminator, then the generator."""

    def prepare_batch(self, batch: list[Tensor]) -> TrainingBatch:
        return TrainingBatch(batch[0], None, samples=len(batch[0]))

    def compute_losses(self, model: nn.ModuleDict, batch: TrainingBatch) -> Iterator[tuple[str, Tensor]]:
        real = batch.inputs
        fake = model["generator"](torch.randn(len(real), NOISE, device=real.device))
        yield "discriminator", discriminator_loss(model["discriminator"](fake.detach()), model["discriminator"](real))
        yield "generator", generator_loss(model["discriminator"](fake))  # with the updated discriminator


def train(models: dict[str, nn.Module], loader: Batches, folder: str, epochs: int = 80) -> None:
    config = TrainingConfig(max_epochs=epochs, optimizer="adam", optimizer_options={"betas": (0.5, 0.999)}, seed=0)
    trainer = Trainer(models, loader, strategy=GANStrategy(), config=config, handlers=[Checkpointer(folder)])
    trainer.train(resume="latest")
    save_samples(models["generator"], folder)


if __name__ == "__main__":
    torch.manual_seed(0)
    train({"generator": generator(), "discriminator": discriminator()}, real_images(), "runs/gan")
