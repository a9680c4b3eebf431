"""An environment of images: a ball falls, and a paddle at the bottom has to be below it; and a policy that sees."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

SIZE = 8  # pixels of a side


class Catch(gymnasium.Env[np.ndarray, int]):
    """Observations are grey images, uint8 of shape (8, 8, 1); actions move the paddle left, not at all, or right.

    The ball starts in a random column and falls a row in each step. The reward at its end is 1 if it was caught, else
    -1: the mean return of a policy that does not look is below 0.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  # as gymnasium declares it

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 1), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.ball, self.paddle = [0, 0], SIZE // 2

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.ball, self.paddle = [0, int(self.np_random.integers(SIZE))], int(self.np_random.integers(SIZE))
        return self._image(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.paddle = min(max(self.paddle + int(action) - 1, 0), SIZE - 1)
        self.ball[0] += 1
        over = self.ball[0] == SIZE - 1
        reward = (1.0 if self.ball[1] == self.paddle else -1.0) if over else 0.0
        return self._image(), reward, over, False, {}

    def _image(self) -> np.ndarray:
        image = np.zeros((SIZE, SIZE, 1), np.uint8)
        image[self.ball[0], self.ball[1]] = 255
        image[SIZE - 1, self.paddle] = 128
        return image


class Seeing(nn.Module):
    """A small convolutional network with logits and a value."""

    def __init__(self, frames: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(frames, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(8 * SIZE * SIZE, 64), nn.ReLU(),
        )  # fmt: skip
        self.actor, self.critic = nn.Linear(64, 3), nn.Linear(64, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        images = observations.float() / 255
        if images.ndim == 5:  # stacked frames, shape (batch, frames, height, width, 1)
            images = images.squeeze(-1)
        else:
            images = images.permute(0, 3, 1, 2)
        hidden = self.layers(images)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def catch(number: int = 8, steps: int = 32, frames: int = 1, **options: Any) -> Any:
    """Rollouts in it."""
    from pulsetrain.engine.rollouts import EnvironmentRollouts

    def made() -> Any:
        return Catch() if frames == 1 else gymnasium.wrappers.FrameStackObservation(Catch(), frames)

    return EnvironmentRollouts(made, number, steps, **options)


def seeing(frames: int = 1) -> Seeing:
    torch.manual_seed(0)
    return Seeing(frames)
