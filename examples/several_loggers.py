"""One run, written to several places at once: the terminal, a table, JSON lines, TensorBoard, and MLflow.

python examples/several_loggers.py        (the data comes with scikit-learn: pip install scikit-learn)
"""

import importlib.util
import sys
from pathlib import Path

import torch
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.handlers import ConsoleLogger, CSVLogger, JSONLinesLogger, MLflowLogger, TensorBoardLogger

RUN = Path("runs/digits")


def main(seed: int = 0) -> None:
    torch.manual_seed(seed)  # the model and the split are created before the trainer seeds its run
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    training, validation = random_split(digits, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    loaders = DataLoader(training, batch_size=32, shuffle=True), DataLoader(validation, batch_size=512)

    # All loggers receive the same events. None makes the training wait, and one that fails stops neither the run nor
    # the others. A thread sends MLflow's data to a server with tracking_uri="http://...", or writes into the folder.
    loggers = [ConsoleLogger(stream=sys.stdout), CSVLogger(RUN), JSONLinesLogger(RUN)]
    outputs: dict[str, object] = {"table": RUN / "metrics.csv", "JSON lines": RUN / "metrics.jsonl"}
    if importlib.util.find_spec("tensorboard"):
        loggers.append(TensorBoardLogger(RUN))
        outputs["TensorBoard"] = f"tensorboard --logdir {RUN}"
    if importlib.util.find_spec("mlflow"):
        loggers.append(MLflowLogger(folder=RUN, hyperparameters={"hidden": 64}, flush_seconds=120))
        outputs["MLflow"] = f"mlflow server --backend-store-uri sqlite:///{RUN}/mlflow.db"

    config = TrainingConfig(max_epochs=3, learning_rate=0.003, log_every_n_steps=20, seed=seed)
    trainer = Trainer(model, *loaders, metrics={"accuracy": Accuracy()}, config=config, handlers=loggers)
    trainer.train()
    for name, output in outputs.items():
        print(f"{name}: {output}")


if __name__ == "__main__":
    main()
