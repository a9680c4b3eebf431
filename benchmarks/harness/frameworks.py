"""The frameworks that are compared in `trainers`, each as a function that trains one small model, and that model.

They are imported when they are called: none of them need be installed (pip install -e '.[bench]').
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

__all__ = [
    "Batch", "Contestant", "Nothing", "Timed", "accelerate", "bare", "fabric", "hugging_face", "ignite", "lightning",
    "some_batches", "torchtnt",
]  # fmt: skip

FIRST = 300  # iterations before the measurement

Batch = tuple[Tensor, Tensor]
Contestant = Callable[["Timed", DataLoader[Batch], Path], object]


class Timed(nn.Module):
    """A linear model that notes when the measured iterations began and ended.

    Args:
        measured: iterations to measure.
        slices: parts of equal length whose beginnings and ends are noted.
    """

    strategy_loss: Any = "mse"  # the loss, as a user would name it to our Trainer

    def __init__(self, measured: int, slices: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 4)
        self.calls, self.noted = 0, list[float]()
        self.marks = frozenset(range(FIRST, FIRST + measured + 1, measured // slices))
        self.last = FIRST + measured + 1  # iterations of the run

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs, shape (batch, 4)."""
        if self.training:
            self.calls += 1
            if self.calls in self.marks:
                self.noted.append(time.perf_counter())
        return self.compute(inputs)

    def compute(self, inputs: Tensor) -> Tensor:
        """The outputs, shape (batch, 4)."""
        outputs: Tensor = self.linear(inputs)
        return outputs

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a hand-written loop, shape ()."""
        return nn.functional.mse_loss(outputs, targets)

    def optimizer(self) -> torch.optim.Optimizer:
        """The same for every contestant."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Nothing(Timed):
    """Its output is a parameter, its loss is its output, and its optimizer changes nothing.

    What a trainer adds to its step is the trainer's own Python code, with warm caches.
    """

    strategy_loss = staticmethod(lambda outputs, targets: outputs)

    def __init__(self, measured: int, slices: int = 1) -> None:
        super().__init__(measured, slices)
        del self.linear
        self.constant = nn.Parameter(torch.zeros(()))

    def compute(self, inputs: Tensor) -> Tensor:
        """A constant, shape ()."""
        return self.constant

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The output."""
        return outputs

    def optimizer(self) -> torch.optim.Optimizer:
        """An optimizer without a step."""
        return _Still([self.constant], {"lr": 0.01})


class _Still(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> Any:
        """Nothing."""


class _Batches(Dataset[Batch]):
    def __init__(self, count: int, draws_nothing: bool = True) -> None:
        self.draws_nothing = draws_nothing
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def some_batches(count: int, *, draws_nothing: bool = True) -> DataLoader[Batch]:
    """The batches of an epoch, which every contestant gets in the same way.

    Args:
        count: of the batches.
        draws_nothing: what the dataset declares; if it does not, our Trainer seeds the generators for each batch.
    """
    return DataLoader(_Batches(count, draws_nothing), batch_size=None)


def bare(model: Timed, batches: DataLoader[Batch], folder: Path) -> None:
    """The loop that a user would write."""
    optimizer, done = model.optimizer(), 0
    while done < model.last:
        for inputs, targets in batches:
            loss = model.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def ignite(model: Timed, batches: DataLoader[Batch], folder: Path) -> None:
    """Pytorch-ignite's supervised trainer."""
    from ignite.engine import create_supervised_trainer

    engine = create_supervised_trainer(model, model.optimizer(), nn.functional.mse_loss)
    engine.run(batches, max_iters=model.last)


def fabric(model: Timed, batches: DataLoader[Batch], folder: Path) -> None:
    """A loop on Lightning Fabric."""
    from lightning.fabric import Fabric

    helper = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = helper.setup(model, model.optimizer())
    data, done = helper.setup_dataloaders(batches), 0
    while done < model.last:
        for inputs, targets in data:
            loss = nn.functional.mse_loss(wrapped(inputs), targets)
            helper.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def lightning(model: Timed, batches: DataLoader[Batch], folder: Path) -> None:
    """Lightning's Trainer, without logger, checkpoints and progress bar."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return model.optimizer()

    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    LightningTrainer(accelerator="cpu", devices=1, max_steps=model.last, **options).fit(Module(), batches)


def accelerate(model: Timed, batches: DataLoader[Batch], folder: Path) -> None:
    """A loop on Hugging Face's accelerate."""
    from accelerate import Accelerator

    helper = Accelerator(cpu=True)
    wrapped, optimizer, data = helper.prepare(model, model.optimizer(), batches)
    done = 0
    while done < model.last:
        for inputs, targets in data:
            loss = nn.functional.mse_loss(wrapped(inputs), targets)
            helper.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def hugging_face(model: Timed, batches: DataLoader[Batch], folder: Path) -> None:
    """The Trainer of transformers, without reports and checkpoints."""
    from transformers import Trainer as HFTrainer
    from transformers import TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = self.model(inputs)
            return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}

    class OnBatches(HFTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return named

    named = DataLoader(_Named(len(batches)), batch_size=None)
    arguments = TrainingArguments(
        str(folder), max_steps=model.last, report_to=[], save_strategy="no", logging_strategy="no", use_cpu=True,
        disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    module = WithLoss()
    OnBatches(module, arguments, train_dataset=named.dataset, optimizers=(model.optimizer(), None)).train()


class _Named(_Batches):
    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.batches[index]
        return {"inputs": inputs, "labels": targets}


def torchtnt(model: Timed, batches: DataLoader[Batch], folder: Path) -> None:
    """An AutoUnit of torchtnt, without callbacks."""
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.train import train

    class Unit(AutoUnit):  # type: ignore[misc]
        def compute_loss(self, state: Any, data: Batch) -> tuple[Tensor, Tensor]:
            outputs = self.module(data[0])
            return nn.functional.mse_loss(outputs, data[1]), outputs

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
            return model.optimizer(), None

    train(Unit(module=model, device=torch.device("cpu")), batches, max_steps=model.last)
