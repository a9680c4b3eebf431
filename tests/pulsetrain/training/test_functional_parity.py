"""Torch by value gives the losses of torch in place, for every model and setting."""

import math

import pytest
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy, TorchBackend
from pulsetrain.handlers import NaNGuard

STEPS = 200


class Tied(nn.Module):
    """The output layer uses the weight of the input layer."""

    def __init__(self):
        super().__init__()
        self.into, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.back = nn.Linear(6, 6)
        self.back.weight = self.into.weight

    def forward(self, inputs):
        return self.back(self.norm(torch.tanh(self.into(inputs))))


class Counting(nn.Module):
    """Buffers of every kind: a sum that a pass changes, one that is not saved, a count of whole numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
            self.passes += 1
        return self.layer((inputs - self.mean) * self.scale) / (1 + self.passes / 100)


def mlp(dropout=0.0):
    # no bias before the norm: its gradient is only rounding error, which Adam would follow
    return nn.Sequential(
        nn.Linear(6, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 6),
    )


def frozen():
    model = mlp()
    for parameter in model[4].parameters():
        parameter.requires_grad_(False)
    return model


MODELS = {"mlp": mlp, "dropout": lambda: mlp(0.3), "frozen": frozen, "tied": Tied, "buffers": Counting}


def batches(count=10):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 6, generator=generator)
    found = [torch.randn(32 if index < count - 1 else 21, 6, generator=generator) for index in range(count)]
    return [(inputs, torch.tanh(inputs @ weight)) for inputs in found]


def run(functional, model="mlp", **settings):
    """Losses, history and last weights of 200 batches."""
    torch.manual_seed(0)
    config = TrainingConfig(
        **{"max_iterations": STEPS, "optimizer": "sgd", "learning_rate": 0.02, "device": "cpu", "seed": 5, **settings}
    )
    backend = TorchBackend(functional=functional)
    trainer = Trainer(
        MODELS[model](), batches(), batches(2), strategy=SupervisedStrategy("mse"), backend=backend, config=config
    )
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output["loss"]))
    history = trainer.train()
    return [loss.item() for loss in losses], history, trainer.model.state_dict()


def are_one(model="mlp", **settings):
    (mine, history, weights), (torchs, torchs_history, torchs_weights) = (
        run(functional, model, **settings) for functional in (True, False)
    )
    assert len(mine) == STEPS
    assert torchs[-1] < 0.95 * torchs[0], "it learns, so that equal losses say something about the updates"
    assert max(abs(one - other) for one, other in zip(mine, torchs, strict=True)) <= 1e-6
    assert history.keys() == torchs_history.keys()
    for name, values in history.items():
        assert values == pytest.approx(torchs_history[name], abs=1e-6), name
    assert weights.keys() == torchs_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, torchs_weights[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 0.02), ("adamw", 2e-3)])
def test_every_model_trains_as_in_place(model, optimizer, rate):
    are_one(model, optimizer=optimizer, learning_rate=rate)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 3},
        {"clip_grad_norm": 0.2},
        {"clip_grad_value": 0.01},
        {"clip_grad_norm": 0.2, "clip_grad_value": 0.01, "accumulate": 2},
        {"schedule": "cosine", "warmup_steps": 20},
        {"weight_decay": 0.1, "no_decay": "auto"},
        {"weight_decay": 0.1},
        {"optimizer": "adamw", "learning_rate": 2e-3, "weight_decay": 0.1, "no_decay": "auto", "schedule": "linear"},
        {"optimizer": "adam", "learning_rate": 2e-3, "weight_decay": 0.01, "clip_grad_norm": 0.2},
        {"optimizer": "rmsprop", "learning_rate": 2e-3, "optimizer_options": {"momentum": 0.5}},
        {"optimizer_options": {"momentum": 0.8, "nesterov": True}, "accumulate": 2},
    ],
    ids=str,
)
def test_every_setting_trains_as_in_place(settings):
    are_one(**settings)


@pytest.mark.slow
def test_no_decay_spares_the_same_parameters_as_in_place():
    """A decay so large that decayed weights vanish and the others do not."""
    left = [
        run(functional, optimizer="adamw", learning_rate=0.01, weight_decay=50.0, no_decay="auto")[2]
        for functional in (True, False)
    ]
    assert left[0]["0.weight"].norm() < 0.1 < left[0]["1.weight"].norm()
    for name, tensor in left[0].items():
        torch.testing.assert_close(tensor, left[1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop"])
def test_skipped_updates_count_in_neither(optimizer):
    """Each third batch is nan: NaNGuard leaves its update out, and the optimizer's own count of steps stays, too."""
    data = [
        (inputs * math.nan if index % 3 == 1 else inputs, targets)
        for index, (inputs, targets) in enumerate(batches(30))
    ]
    found = []
    for functional in (True, False):
        torch.manual_seed(0)
        config = TrainingConfig(max_epochs=1, optimizer=optimizer, learning_rate=0.01, device="cpu")
        model = nn.Linear(6, 6)
        trainer = Trainer(
            model,
            data,
            strategy=Lenient("mse"),
            backend=TorchBackend(functional=functional),
            config=config,
            handlers=[NaNGuard()],
        )
        trainer.train()
        found.append(trainer.model.state_dict())
    for name, tensor in found[0].items():
        assert tensor.isfinite().all()
        torch.testing.assert_close(tensor, found[1][name], rtol=0, atol=1e-6)


class Lenient(SupervisedStrategy):
    """Does not check its first batch."""

    def compute_loss(self, outputs, batch):
        return super().compute_loss(outputs, batch)
