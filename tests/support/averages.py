"""What the tests of averaged weights share: an engine that sets a weight, a run, and comparisons of weights."""

import torch
from torch import nn

from pulsetrain.engine import Engine, Events, OptimizerStepCompleted
from tests.support.models import loader, regression_model, trainer

TRAINING = {"optimizer": "adamw", "learning_rate": 0.05, "max_epochs": 3, "seed": 7}


class Setting(Engine):
    """Makes one weight each batch's value, and that an update."""

    def __init__(self):
        super().__init__(self._step, name="trainer")
        self.model = nn.Linear(1, 1, bias=False)

    def _step(self, engine, batch):
        nn.init.constant_(self.model.weight, batch)
        self.state.update += 1
        self.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=(1.0,)))


class PlugPulled(Exception):  # noqa: N818
    """Raised to interrupt a run."""


def pull_the_plug():
    raise PlugPulled


def averaged_weight(handler, engine):
    with handler.applied():
        return engine.model.weight.item()


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def averaged(handler, model):
    with handler.applied():
        return snapshot(model)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_of(*handlers, train_loader=None, validated=True, **config):
    return trainer(
        {**TRAINING, **config},
        model=regression_model(dropout=0.3),
        train_loader=train_loader,
        val_loader=loader(12, shuffle=False) if validated else None,
        handlers=list(handlers),
    )
