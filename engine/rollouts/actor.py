"""The policy as it acts, step by step; a recurrent one keeps its state from one step to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.step.protocols import describe
from pulsetrain.engine.strategies.language import logits_of, values_of

__all__ = ["Actor", "is_recurrent"]


def is_recurrent(model: object) -> bool:
    """Whether a policy has a state: its model has a method `initial_state(count)`."""
    return callable(getattr(model, "initial_state", None))


class Actor:
    """Calls the policy for one step in each environment.

    A recurrent policy gets `observations` (count, 1, ...), its `state` and `starts` (count, 1), which is true at the
    first step of an episode, and returns parameters (count, 1, width), values (count, 1) and its next state.

    >>> actor = Actor(lambda observations: (observations, observations.sum(-1)), None, 2)
    >>> actor.step(torch.ones(2, 3), np.array([True, False]))[1]
    tensor([3., 3.])

    Args:
        act: calls the model.
        model: the policy's model.
        count: the number of environments.
        device: of the model.
    """

    def __init__(
        self, act: Callable[[object], object], model: Any, count: int, device: torch.device | str = "cpu"
    ) -> None:
        self._act, self._count, self._device = act, count, device
        self.is_recurrent: bool = is_recurrent(model)
        self.state = _several(model.initial_state(count)) if self.is_recurrent else ()

    def step(self, observations: Tensor | Mapping[str, Tensor], starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Parameters (count, width) and values (count,); the state is kept for the next step."""
        *found, self.state = self._call(observations, starts)
        return found[0], found[1]

    def values(self, observations: Tensor | Mapping[str, Tensor], starts: np.ndarray) -> Tensor:
        """The values, shape (count,); the state remains as it is."""
        return self._call(observations, starts)[1]

    def _call(
        self, observations: Tensor | Mapping[str, Tensor], starts: np.ndarray
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if not self.is_recurrent:
            outputs = self._act(observations)
            return logits_of(outputs), values_of(outputs, (self._count,)), ()
        one = (
            {name: each.unsqueeze(1) for name, each in observations.items()}
            if isinstance(observations, Mapping)
            else observations.unsqueeze(1)
        )
        state = self.state[0] if len(self.state) == 1 else self.state
        first = torch.from_numpy(starts).unsqueeze(1).to(self._device)
        outputs = self._act({"observations": one, "state": state, "starts": first})
        if not isinstance(outputs, (tuple, list)) or len(outputs) != 3:
            raise TypeError(
                f"EnvironmentRollouts: the recurrent policy returned {describe(outputs)}; needs three: parameters "
                "(environments, steps, width), values (environments, steps) and the next state"
            )
        following = _several(outputs[2])
        if [each.shape for each in following] != [each.shape for each in self.state]:
            raise ValueError(
                f"EnvironmentRollouts: the recurrent policy returned the state {describe(following)}; its "
                f"initial_state({self._count}) has {describe(self.state)}"
            )
        return logits_of(outputs)[:, 0], values_of(outputs, (self._count, 1))[:, 0], following


def _several(state: Any) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)
