"""The spaces of an environment: what its observations are for the model, and the policy's actions for it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.strategies.distributions import (
    ActionDistribution,
    Categorical,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
)

__all__ = ["ActionSpace", "ObservationSpace", "distribution_of"]

_PLACE = "EnvironmentRollouts"


class ObservationSpace:
    """The arrays of an observation: one, or several by name (a Dict space), each float32.

    They are kept under flat names, as the rows of a rollout have them: "observations", or "observations/camera".

    >>> import torch
    >>> space = ObservationSpace(type("Box", (), {"shape": (2,), "dtype": "float32"})())
    >>> arrays = space.empty(3)
    >>> space.write(arrays, 0, [1.0, 2.0])
    >>> space.inputs({name: torch.from_numpy(each) for name, each in arrays.items()})[0]
    tensor([1., 2.])

    Args:
        space: of one environment, as gymnasium describes it.

    Raises:
        ConfigurationError: it is not a Box or a Dict of such.
    """

    def __init__(self, space: Any) -> None:
        parts = getattr(space, "spaces", None)
        self.is_named: bool = isinstance(parts, Mapping)
        named = dict(parts) if isinstance(parts, Mapping) else {"": space}
        wrong = next((name for name, each in named.items() if not _is_box(each)), None)
        if wrong is not None or not named:
            of = f" at {wrong!r}" if wrong else ""
            raise ConfigurationError(
                f"{_PLACE}: the environment's observations are {space}; needs arrays of numbers, or a Dict of "
                f"arrays{of} (use gymnasium.wrappers.FlattenObservation)"
            )
        self.keys: dict[str, str] = {
            name: f"observations/{name}" if self.is_named else "observations" for name in named
        }
        self._shapes = {name: tuple(each.shape) for name, each in named.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array, by flat names."""
        return {self.keys[name]: shape for name, shape in self._shapes.items()}

    def empty(self, count: int) -> dict[str, np.ndarray]:
        """Arrays for the observations of that many environments, by flat names."""
        return {name: np.zeros((count, *shape), np.float32) for name, shape in self.shapes.items()}

    def write(self, arrays: Mapping[str, np.ndarray], index: int | slice, observation: Any) -> None:
        """Copies the observation of one environment, or those of all: an environment may reuse its array.

        Raises:
            ValueError: it does not have the shape of the space.
        """
        for name, key in self.keys.items():
            target = arrays[key][index]
            try:
                found = np.asarray(observation[name] if self.is_named else observation, np.float32)
            except (ValueError, TypeError, KeyError, IndexError):
                found = None
            if found is None or found.shape != target.shape:
                raise ValueError(
                    f"{_PLACE}: the environment returned the observation {reprlib.repr(observation)}; its space has "
                    f"{'the arrays ' if self.is_named else ''}{self._described()}"
                )
            target[...] = found

    def inputs(self, fields: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """The model's input: a tensor, or tensors by the names of a Dict."""
        if not self.is_named:
            return fields["observations"]
        return {name: fields[key] for name, key in self.keys.items()}

    def check_finite(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Rejects observations that are not finite.

        Raises:
            ValueError: names the first environment that returned one.
        """
        for each in arrays.values():
            finite = np.isfinite(each)
            if not finite.all():
                index = int(np.argmin(finite.reshape(len(each), -1).all(1)))
                raise ValueError(
                    f"{_PLACE}: environment {index} returned an observation that is not finite: "
                    f"{reprlib.repr(each[index].tolist())}; fix the environment"
                )

    def _described(self) -> str:
        shapes = [f"{name + ' ' if name else 'shape '}{shape}" for name, shape in self._shapes.items()]
        return ", ".join(shapes)


@dataclass(frozen=True)
class ActionSpace:
    """How the policy's actions reach an environment.

    Args:
        distribution: what the policy draws from.
        low: the smallest values of continuous actions, float32.
        high: the largest.
        shape: of an action with several numbers.
        dtype: of the numbers.
    """

    distribution: ActionDistribution
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    shape: tuple[int, ...] = ()
    dtype: Any = np.int64

    @property
    def described(self) -> str:
        """What an action is, for messages."""
        found = self.distribution
        if isinstance(found, MultiCategorical):
            return f"choices among {found.counts}, the logits of one after the other"
        if isinstance(found, Gaussian):
            return f"actions of {found.size} numbers: their means, then the logarithms of their standard deviations"
        return f"{found.width} actions"

    def for_environment(self, actions: Tensor) -> list[int] | np.ndarray:
        """The actions as environments take them, one for each row: numbers, or an array (rows, ...).

        Normal actions are clipped to the bounds; squashed ones are scaled to them.

        >>> import torch
        >>> torques = ActionSpace(Gaussian(1), np.full(1, -2.0), np.full(1, 2.0), (1,), np.float32)
        >>> torques.for_environment(torch.tensor([[0.5], [3.0]]))
        array([[0.5],
               [2. ]], dtype=float32)
        """
        if not self.distribution.action_dims:
            numbers: list[int] = actions.tolist()
            return numbers
        array = actions.cpu().numpy()
        if self.low is not None and self.high is not None:
            if isinstance(self.distribution, SquashedGaussian):
                array = self.low + (np.tanh(array.astype(np.float64)) + 1) / 2 * (self.high - self.low)
            array = np.clip(array, self.low, self.high)
        return array.reshape(len(array), *self.shape).astype(self.dtype)


def distribution_of(space: Any, chosen: str | None = None) -> ActionSpace:
    """The actions of a space: categorical for Discrete, several for MultiDiscrete and MultiBinary, normal for a Box.

    >>> distribution_of(type("Discrete", (), {"n": 3})()).distribution
    Categorical(count=3)

    Args:
        space: of one environment, as gymnasium describes it.
        chosen: the name of a distribution for it; None chooses by the space.

    Raises:
        ConfigurationError: the space is not one of these, or the chosen distribution does not fit.
    """
    fitting = _fitting(space)
    if chosen is None:
        return next(iter(fitting.values()))
    if chosen not in fitting:
        rule = f"does not fit the environment's actions, {space}; choose {' or '.join(map(repr, fitting))}"
        raise ConfigurationError(rule, "PPOStrategy", distribution=chosen)
    found = fitting[chosen]
    bounds = () if found.low is None or found.high is None else (found.low, found.high)
    if chosen == "squashed_gaussian" and not all(np.isfinite(each).all() for each in bounds):
        rule = f"needs finite bounds, and the environment's actions are {space}; choose 'gaussian'"
        raise ConfigurationError(rule, "PPOStrategy", distribution=chosen)
    return found


def _fitting(space: Any) -> dict[str, ActionSpace]:
    """The distributions that fit a space, by name, the usual one first."""
    shape = tuple(getattr(space, "shape", None) or ())
    if hasattr(space, "nvec") and _counts_from_zero(space):
        counts = tuple(np.asarray(space.nvec).reshape(-1).tolist())
        return {"multi_categorical": ActionSpace(MultiCategorical(counts), shape=shape, dtype=space.dtype)}
    if hasattr(space, "n") and not shape and _counts_from_zero(space):
        return {"categorical": ActionSpace(Categorical(int(space.n)))}
    if hasattr(space, "n") and shape:  # MultiBinary
        size = int(np.prod(shape))
        kind = getattr(space, "dtype", None) or np.int8
        return {"multi_categorical": ActionSpace(MultiCategorical((2,) * size), shape=shape, dtype=kind)}
    if shape and hasattr(space, "low") and np.issubdtype(np.dtype(space.dtype), np.floating):
        size, low, high = int(np.prod(shape)), np.asarray(space.low).reshape(-1), np.asarray(space.high).reshape(-1)
        kinds: Sequence[tuple[str, ActionDistribution]] = (
            ("gaussian", Gaussian(size)),
            ("squashed_gaussian", SquashedGaussian(size)),
        )
        return {name: ActionSpace(each, low, high, shape, space.dtype) for name, each in kinds}
    raise ConfigurationError(
        f"{_PLACE}: the environment's actions are {space}; needs discrete actions numbered from 0 (Discrete, "
        "MultiDiscrete or MultiBinary), or a Box of floating point numbers; wrap it in a gymnasium.ActionWrapper that "
        "has such a space"
    )


def _counts_from_zero(space: Any) -> bool:
    return not np.any(np.asarray(getattr(space, "start", 0)))


def _is_box(space: Any) -> bool:
    return bool(getattr(space, "shape", None)) and getattr(space, "dtype", None) is not None
