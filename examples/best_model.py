"""Validation lowers the learning rate, ends the run, and selects the weights that the model keeps.

python examples/best_model.py        (the data comes with scikit-learn: pip install scikit-learn)
"""

import torch
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.handlers import BestModel, EarlyStopping, ReduceLROnPlateau


def main(seed: int = 0) -> dict[str, list[float]]:
    torch.manual_seed(seed)  # the model and the split are created before the trainer seeds its run
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    training, validation = random_split(digits, [0.5, 0.5])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loaders = DataLoader(training, batch_size=16, shuffle=True), DataLoader(validation, batch_size=512)
    best = BestModel("val/loss")
    policies = [ReduceLROnPlateau("val/loss", factor=0.3, patience=1), EarlyStopping("val/loss", patience=6), best]
    config = TrainingConfig(max_epochs=100, optimizer="adam", learning_rate=0.02, seed=seed)
    trainer = Trainer(model, *loaders, metrics={"accuracy": Accuracy()}, config=config, handlers=policies)
    history = trainer.train()

    for epoch, (rate, loss) in enumerate(zip(history["learning_rate"], history["val/loss"], strict=True), start=1):
        print(f"epoch {epoch}: rate {rate:.5f}, validation loss {loss:.4f}{' *' if loss == best.best_value else ''}")
    print(trainer.state.stop_reason)
    kept = trainer.validate()  # what the model holds now
    print(f"kept: iteration {best.best_iteration}, validation loss {kept['val/loss']:.4f}")
    return history


if __name__ == "__main__":
    main()
