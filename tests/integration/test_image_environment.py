"""A policy learns from images in uint8 what it cannot learn without looking; it is recorded, replayed, verified."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not there: pip install 'pulsetrain[gymnasium]'")

from pulsetrain import EarlyStopping, EventRecorder, PPOStrategy, Trainer, TrainingConfig, verify
from pulsetrain.engine.recording import Replay
from tests.support.catch import catch, seeing


def run_of(*handlers: object, iterations: int = 16, frames: int = 1) -> Trainer:
    config = TrainingConfig(
        max_iterations=iterations, optimizer="adam", learning_rate=2e-3, clip_grad_norm=0.5, seed=1, device="cpu"
    )
    strategy = PPOStrategy(gamma=0.95, lam=0.9, minibatch_epochs=4, minibatch_size=64, entropy_coef=0.01)
    return Trainer(seeing(frames), catch(frames=frames), strategy=strategy, config=config, handlers=handlers)


@pytest.mark.slow
@pytest.mark.parametrize("frames", [1, 2])
def test_the_ball_is_caught_where_it_is_seen(frames: int) -> None:
    trained, untrained = run_of(iterations=1600, frames=frames), run_of(frames=frames)
    trained.train()
    assert statistics.mean(trained.train_loader.evaluate(50)) > 0.5
    assert statistics.mean(untrained.train_loader.evaluate(50)) < 0.0


def test_a_run_is_recorded_replayed_and_verified(tmp_path: Path) -> None:
    run = run_of(EventRecorder(tmp_path), stopping := EarlyStopping("rollout/reward", patience=50, mode="max"))
    run.train()
    again = EarlyStopping("rollout/reward", patience=50, mode="max")
    replay = Replay(tmp_path)
    again.attach(replay)
    replay.run()
    assert again.state_dict() == stopping.state_dict()
    assert again.best_value is not None
    assert verify(tmp_path, lambda: run_of(EventRecorder(tmp_path)))
