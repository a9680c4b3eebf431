"""Observations and rewards scaled by running statistics, which are part of the rollouts' state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pulsetrain.engine.errors import CheckpointError

__all__ = ["Normalization", "RunningMoments"]

_MOST = 10.0  # normalised values are clipped to it
_EPSILON = 1e-8


class RunningMoments:
    """The mean and the variance of all values so far, float64, by the parallel algorithm of Chan et al. 1979.

    >>> moments = RunningMoments((1,))
    >>> moments.update(np.array([[1.0], [3.0]]))
    >>> moments.update(np.array([[5.0]]))
    >>> moments.mean.round(3), moments.variance.round(2)  # of 1, 3, 5
    (array([3.]), array([2.67]))

    Args:
        shape: of one value.
    """

    mean: np.ndarray
    variance: np.ndarray
    count: float

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean, self.variance = np.zeros(shape), np.ones(shape)
        self.count = 1e-4  # of values with mean 0 and variance 1, so that a first value does not divide by 0

    def update(self, values: np.ndarray) -> None:
        """Adds values, shape (count, ...)."""
        wide = values.astype(np.float64)
        count, mean, variance = len(wide), wide.mean(0), wide.var(0)
        total, apart = self.count + count, mean - self.mean
        squares = self.variance * self.count + variance * count + apart**2 * self.count * count / total
        self.mean, self.variance, self.count = self.mean + apart * count / total, squares / total, total

    def state_dict(self) -> dict[str, Any]:
        """The statistics, as tensors."""
        return {"mean": torch.tensor(self.mean), "variance": torch.tensor(self.variance), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the statistics."""
        self.mean, self.variance = state["mean"].numpy().copy(), state["variance"].numpy().copy()
        self.count = state["count"]


class Normalization:
    """What the policy sees of observations and learns of rewards, each limited to -10 .. 10.

    An observation is shifted and scaled to mean 0 and variance 1 over all steps so far, each entry separately. A reward
    is divided by the standard deviation of the discounted sum of the rewards before it, which leaves its sign.

    Args:
        shapes: of the observations to normalise, by their flat names.
        environments: that step together; None leaves rewards as they are.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], environments: int | None) -> None:
        self._shapes, self._environments = dict(shapes), environments
        self.restart()

    def restart(self) -> None:
        """Returns to the state before the first step."""
        self._observed = {name: RunningMoments(shape) for name, shape in self._shapes.items()}
        self._returned = None if self._environments is None else RunningMoments()
        self._sums = np.zeros(self._environments or 0)  # of discounted rewards, in each environment

    def observations(self, arrays: Mapping[str, np.ndarray], *, update: bool = False) -> dict[str, np.ndarray]:
        """Observations as the model receives them, float32.

        Args:
            arrays: by flat names, shape (environments, ...).
            update: count them, too.
        """
        found = dict(arrays)
        for name, moments in self._observed.items():
            if update:
                moments.update(arrays[name])
            scaled = (arrays[name] - moments.mean) / np.sqrt(moments.variance + _EPSILON)
            found[name] = np.clip(scaled, -_MOST, _MOST).astype(np.float32)
        return found

    def rewards(self, rewards: np.ndarray, dones: np.ndarray, gamma: float) -> np.ndarray:
        """The rewards of a step as the policy learns from them; they are counted."""
        if self._returned is None:
            return rewards
        self._sums = self._sums * gamma + rewards
        self._returned.update(self._sums)
        self._sums[dones] = 0.0
        return np.clip(rewards / np.sqrt(self._returned.variance + _EPSILON), -_MOST, _MOST)

    def state_dict(self) -> dict[str, Any]:
        """The statistics; empty if nothing is normalised."""
        found: dict[str, Any] = {name: moments.state_dict() for name, moments in self._observed.items()}
        if self._returned is not None:
            found |= {"returns": self._returned.state_dict(), "sums": torch.tensor(self._sums)}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the statistics.

        Raises:
            CheckpointError: the run normalised other things.
        """
        mine, theirs = self.state_dict().keys(), state.keys()
        if mine != theirs:
            raise CheckpointError(
                f"EnvironmentRollouts: the checkpoint has statistics of {', '.join(sorted(theirs)) or 'nothing'}, and "
                f"these rollouts need those of {', '.join(sorted(mine)) or 'nothing'}; resume with the "
                "normalize_observations and normalize_rewards that the run started with"
            )
        for name, moments in self._observed.items():
            moments.load_state_dict(state[name])
        if self._returned is not None:
            self._returned.load_state_dict(state["returns"])
            self._sums = state["sums"].numpy().copy()
