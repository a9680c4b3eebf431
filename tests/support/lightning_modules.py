"""LightningModules as their users write them, and their data."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

BATCHES, ROWS = 6, 8


def loader(seed: int = 1, batches: int = BATCHES, missing: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(batches * ROWS - missing, 5, generator=generator)
    targets = (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=ROWS)


class Classifier(lightning.LightningModule):
    """A classifier; `form` is what configure_optimizers returns."""

    def __init__(self, form: str = "optimizer") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
        self.form = form
        self.losses: list[float] = []
        self.rates: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = functional.cross_entropy(self(inputs), targets)
        self.losses.append(loss.item())
        self.log("train_loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        self.log("batch", float(batch_idx))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self(inputs)
        self.log_dict(
            {
                "val_loss": functional.cross_entropy(outputs, targets),
                "val_acc": (outputs.argmax(1) == targets).float().mean(),
            },
            prog_bar=True,
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        schedulers = torch.optim.lr_scheduler
        if self.form == "optimizer":
            return optimizer
        if self.form == "lists":
            return [optimizer], [schedulers.StepLR(optimizer, 1, gamma=0.5)]
        if self.form == "by step":
            total = self.trainer.estimated_stepping_batches
            schedule = schedulers.OneCycleLR(optimizer, max_lr=0.3, total_steps=int(total))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.form == "every two epochs":
            schedule = schedulers.ExponentialLR(optimizer, 0.3)
            return [{"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "frequency": 2}}]
        plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        monitor = "val_loss" if self.form == "plateau" else "train_loss"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": monitor}}


class Adversarial(lightning.LightningModule):
    """A generator and a discriminator that the module trains itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(5, 5), nn.Linear(5, 1)
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.steps: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        first, second = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        compare = functional.binary_cross_entropy_with_logits
        self.toggle_optimizer(first)
        loss = compare(self.discriminator(self.generator(real.flip(0))), ones)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        with second.toggle_model():
            fake = self.generator(real.flip(0)).detach()
            judged = compare(self.discriminator(real), ones) + compare(self.discriminator(fake), zeros)
            self.manual_backward(judged)
            second.step()
            second.zero_grad()  # afterwards: what the generator's loss had added would still be there
        self.losses += [loss.item(), judged.item()]
        self.log_dict({"g_loss": loss, "d_loss": judged})
        self.steps.append(self.global_step)

    def on_train_epoch_end(self) -> None:
        for each in self.lr_schedulers():
            each.step()
        self.rates += [each.param_groups[0]["lr"] for each in self.optimizers()]

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.999))
        second = torch.optim.Adam(self.discriminator.parameters(), lr=0.01)
        step = torch.optim.lr_scheduler.StepLR
        return [first, second], [step(first, 1, gamma=0.5), step(second, 2, gamma=0.1)]
