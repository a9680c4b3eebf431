"""One callback on Keras's own `fit` and on our Trainer: the same calls, with the same losses."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
from pulsetrain.handlers import KerasCallbacks

pytestmark = pytest.mark.slow
os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

EPOCHS, ROWS, SIZE, RATE = 3, 24, 8, 0.05
HOOKS = (
    "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end",
    "on_test_begin", "on_test_end",
)  # fmt: skip


def noting() -> tuple[Any, list[tuple[Any, ...]]]:
    """A callback that notes each call, with its number and the losses that it was given."""
    calls: list[tuple[Any, ...]] = []

    def hook(name: str) -> Any:
        if name.endswith(("train_begin", "train_end", "test_begin", "test_end")):
            return lambda self, logs=None: calls.append((name, dict(logs or {})))
        return lambda self, number, logs=None: calls.append((name, number, dict(logs or {})))

    return type("Noting", (keras.callbacks.Callback,), {name: hook(name) for name in HOOKS})(), calls


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 3, generator=generator)
    return inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(ROWS, 1, generator=generator)


def on_keras(*callbacks: Any) -> None:
    inputs, targets = (each.numpy() for each in data())
    dense = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((3,)), dense])
    model.compile(optimizer=keras.optimizers.SGD(RATE), loss="mse")
    held = (inputs[:SIZE], targets[:SIZE])
    model.fit(
        inputs, targets, batch_size=SIZE, epochs=EPOCHS, shuffle=False, verbose=0, validation_data=held,
        callbacks=list(callbacks),
    )  # fmt: skip


def on_ours(*callbacks: Any) -> None:
    inputs, targets = data()
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    Trainer(
        model,
        DataLoader(TensorDataset(inputs, targets), batch_size=SIZE),
        DataLoader(TensorDataset(inputs[:SIZE], targets[:SIZE]), batch_size=SIZE),
        strategy=SupervisedStrategy("mse"),
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        config=TrainingConfig(max_epochs=EPOCHS, device="cpu", progress=False),
        handlers=[KerasCallbacks(callbacks)],
    ).train()


def test_the_calls_come_in_the_same_order_with_the_same_numbers():
    (theirs, expected), (ours, found) = noting(), noting()
    on_keras(theirs)
    on_ours(ours)
    assert [call[:-1] for call in found] == [call[:-1] for call in expected]
    assert len(found) == 2 + EPOCHS * (2 + 2 + 2 * ROWS // SIZE)


def test_the_losses_of_epochs_and_validations_are_the_same():
    (theirs, expected), (ours, found) = noting(), noting()
    on_keras(theirs)
    on_ours(ours)
    for hook, names in (("on_epoch_end", {"loss", "val_loss"}), ("on_test_end", {"loss"})):
        mine, peer = ([call[-1] for call in calls if call[0] == hook] for calls in (found, expected))
        assert len(mine) == len(peer) == EPOCHS
        for one, other in zip(mine, peer, strict=True):
            assert other.keys() == names <= one.keys()
            assert [one[name] for name in names] == pytest.approx([float(other[name]) for name in names], rel=1e-5)


def test_keras_early_stopping_ends_both_after_the_same_epoch():
    def epochs(train: Any) -> int:
        callback, calls = noting()
        stopping = keras.callbacks.EarlyStopping("val_loss", min_delta=100.0, patience=1)
        train(callback, stopping)
        return sum(call[0] == "on_epoch_end" for call in calls)

    assert epochs(on_ours) == epochs(on_keras) == 2
