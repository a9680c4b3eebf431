"""The autoencoder with Lightning."""

from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.ported.data import images
from examples.ported.models import Autoencoder


class LitAutoencoder(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = F.mse_loss(self.model(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", F.mse_loss(self.model(inputs), targets), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


def train(model, loaders, folder, epochs=10):
    lightning.seed_everything(0)
    checkpoint = ModelCheckpoint(Path(folder, "checkpoints"), filename="best", monitor="val_loss", save_last=True)
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[checkpoint], default_root_dir=folder)
    last = Path(folder, "checkpoints", "last.ckpt")
    trainer.fit(LitAutoencoder(model), *loaders, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Autoencoder(), images(), "runs/lightning_autoencoder")
