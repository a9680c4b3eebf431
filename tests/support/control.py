"""Environments of each kind that gymnasium has, small policies for them, and runs in them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from pulsetrain.engine import PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts
from pulsetrain.engine.strategies import EpisodicLSTM, GaussianHead
from tests.support.runs_strategies import Task

WIDTH = 8


class Target(gymnasium.Env[Any, Any]):
    """Noise to watch and an action to guess; an episode is truncated after some steps.

    Args:
        actions: the space of actions.
        named: whether the observation is a Dict of two arrays.
        length: of an episode.
    """

    def __init__(self, actions: Any, named: bool = False, length: int = 5) -> None:
        self.action_space, self._named, self._length = actions, named, length
        box = gymnasium.spaces.Box(-10.0, 10.0, (3,), np.float64)
        image = gymnasium.spaces.Box(0, 255, (2, 2), np.uint8)
        self.observation_space = gymnasium.spaces.Dict({"image": image, "place": box}) if named else box
        self.taken: list[Any] = []

    def _seen(self) -> Any:
        place = self.np_random.normal(2.0, 3.0, 3)
        return {"image": self.np_random.integers(0, 255, (2, 2), np.uint8), "place": place} if self._named else place

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self._steps += 1
        self.taken.append(np.array(action))
        reward = 3.0 * float(np.sum(action)) + self.np_random.normal()
        return self._seen(), float(reward), self._steps == 3 and reward > 4, self._steps == self._length, {}


BOX = gymnasium.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
SEVERAL = gymnasium.spaces.MultiDiscrete([2, 3])
SWITCHES = gymnasium.spaces.MultiBinary((2, 2))


class Policy(nn.Module):
    """A policy of observations of three numbers, or of a Dict.

    Args:
        numbers: that it returns for each action; None: those of a Gaussian of that size.
    """

    def __init__(self, numbers: int | None = None, observed: int = 3, named: bool = False, size: int = 2) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.named = named
        self.hidden, self.critic = nn.Linear(observed + (4 if named else 0), WIDTH), nn.Linear(WIDTH, 1)
        self.actor = GaussianHead(WIDTH, size, -0.5) if numbers is None else nn.Linear(WIDTH, numbers)

    def forward(self, observations: Any = None, image: Any = None, place: Any = None) -> tuple[Tensor, Tensor]:
        if self.named:
            observations = torch.cat([image.flatten(1) / 255, place], -1)
        hidden = torch.tanh(self.hidden(observations.flatten(1)))
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


class Recurrent(nn.Module):
    """A policy with a memory."""

    def __init__(self, numbers: int = 2, observed: int = 4) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.memory = EpisodicLSTM(observed, WIDTH)
        self.actor, self.critic = nn.Linear(WIDTH, numbers), nn.Linear(WIDTH, 1)

    def initial_state(self, count: int) -> tuple[Tensor, Tensor]:
        return self.memory.initial_state(count)

    def forward(self, observations: Tensor, state: Any, starts: Tensor) -> tuple[Tensor, Tensor, Any]:
        hidden, state = self.memory(observations, state, starts)
        return self.actor(hidden), self.critic(hidden).squeeze(-1), state


def target(actions: Any, named: bool = False, count: int = 2, **options: Any) -> EnvironmentRollouts:
    """Rollouts of 16 steps in such environments."""
    return EnvironmentRollouts(lambda: Target(actions, named), count, 16, **options)


def task(name: str, data: Any, model: Any, cuts: tuple[int, ...] = (5, 8), **options: Any) -> Task:
    """A run of three rollouts of 32 rows: 2 batches, twice."""
    options = {"minibatch_size": 16, "minibatch_epochs": 2, "entropy_coef": 0.01, **options}
    return Task(name, lambda: PPOStrategy(**options), data, model, lambda: None, cuts, {"max_epochs": 3},
                metric="rollout/reward")  # fmt: skip
