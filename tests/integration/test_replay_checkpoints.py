"""A replay gives handlers the weights of the nearest checkpoint of a Trainer's run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Engine, Events, Every, SupervisedStrategy
from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording import Replay
from pulsetrain.handlers import EMA, Checkpointer, EventRecorder


def test_the_weights_of_the_nearest_checkpoint_are_there(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    trainer = Trainer(
        model,
        DataLoader(TensorDataset(torch.randn(24, 3), torch.randn(24, 1)), batch_size=4, shuffle=True),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=2, optimizer="sgd", learning_rate=0.1, schedule=None, seed=1),
        handlers=[EventRecorder(tmp_path), Checkpointer(tmp_path, every=Every(iterations=4), keep_last=10)],
    )
    live: dict[int, torch.Tensor] = {}
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine: live.update({engine.state.iteration: model.weight.detach().clone()}),
    )
    trainer.train()
    assert sorted(live) == list(range(1, 13))

    weights = nn.Linear(3, 1)
    replay = Replay(tmp_path, checkpoints=True, model=weights)
    replayed: dict[int, torch.Tensor] = {}

    @replay.on(Events.ITERATION_COMPLETED)
    def look(engine: Replay) -> None:
        assert engine.checkpoint_state()["model"]["weight"].equal(weights.weight)
        replayed[engine.state.iteration] = weights.weight.detach().clone()

    replay.run()
    nearest = {at: max([saved for saved in (4, 8, 12) if saved <= at], default=4) for at in live}
    assert {at: replayed[at].tolist() for at in replayed} == {at: live[near].tolist() for at, near in nearest.items()}


def test_an_average_of_weights_is_refused_where_there_are_none(tmp_path: Path):
    trainer = Engine(lambda engine, batch: 0.5, name="trainer")
    EventRecorder(tmp_path).attach(trainer)
    trainer.run(range(3))
    with pytest.raises(RecordingError, match="'trainer' has no 'model': an event log does not hold the weights"):
        EMA(0.9, model=nn.Linear(3, 1)).attach(Replay(tmp_path))
