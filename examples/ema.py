"""Too high a learning rate leaves noise in the weights; their moving average is better than any of them.

python examples/ema.py        (the data comes with scikit-learn: pip install scikit-learn)
"""

import torch
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.handlers import EMA


def main(seed: int = 0) -> dict[str, dict[str, float]]:
    torch.manual_seed(seed)  # the model and the split are created before the trainer seeds its run
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    training, validation = random_split(digits, [0.5, 0.5])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    loaders = DataLoader(training, batch_size=8, shuffle=True), DataLoader(validation, batch_size=512)
    config = TrainingConfig(max_epochs=10, optimizer="adam", learning_rate=0.03, validate_every=None, seed=seed)
    ema = EMA(decay=0.995)  # after each update; averages about the last 200 of the 1,130
    trainer = Trainer(model, *loaders, metrics={"accuracy": Accuracy()}, config=config, handlers=[ema])
    trainer.train()

    results = {"averaged": trainer.validate()}  # validation uses the average while the handler is attached
    ema.detach()
    results["raw"] = trainer.validate()
    for weights in ("raw", "averaged"):
        loss, accuracy = results[weights]["val/loss"], results[weights]["val/accuracy"]
        print(f"{weights} weights: validation loss {loss:.4f}, accuracy {accuracy:.4f}")
    ema.copy_to(model)  # permanently: to save the averaged weights, or to train on from them
    return results


if __name__ == "__main__":
    main()
