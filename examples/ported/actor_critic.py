"""An actor and its critic balance a pole: advantages by GAE, and one update for each rollout.

python -m examples.ported.actor_critic        (from the folder that contains examples/)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from examples.ported.models import ActorCritic
from pulsetrain import Checkpointer, PPOStrategy, Trainer, TrainingConfig
from pulsetrain.engine.rollouts import EnvironmentRollouts


def train(model: nn.Module, environment: str | Callable[[], Any], folder: str, rollouts: int = 300) -> None:
    config = TrainingConfig(max_epochs=rollouts, optimizer="adam", learning_rate=3e-3, clip_grad_norm=0.5, seed=0)
    strategy = PPOStrategy(minibatch_epochs=1, normalize_advantages=False, entropy_coef=0.01)
    data, handlers = EnvironmentRollouts(environment, 8, steps=32), [Checkpointer(folder, metric="rollout/return")]
    Trainer(model, data, strategy=strategy, config=config, handlers=handlers).train(resume="latest")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(ActorCritic(), "CartPole-v1", "runs/actor_critic")
