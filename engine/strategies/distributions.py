"""Distributions of actions: what the numbers that a policy returns mean for each kind of action space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array, at_least_float32, log_sigmoid, misshapen, namespace
from pulsetrain.engine.losses import entropy, token_log_probs

__all__ = ["ActionDistribution", "Categorical", "Gaussian", "MultiCategorical", "SquashedGaussian"]

_LOG_2PI = math.log(2 * math.pi)
_NODES, _WEIGHTS = (each.tolist() for each in np.polynomial.hermite.hermgauss(32))  # for the weight exp(-x ** 2)


class ActionDistribution(Protocol):
    """What a policy's numbers mean: the distribution of an action, given parameters of shape (..., width).

    Log-probabilities and entropies are computed in float32 at least, by torch and JAX alike.
    """

    @property
    def width(self) -> int | None:
        """The parameters of an action; None if any number fits."""

    @property
    def action_dims(self) -> int:
        """The dimensions of one action: 0 for a number, 1 for a vector."""

    @property
    def is_continuous(self) -> bool:
        """Whether actions are floating point numbers."""

    def log_probs(self, parameters: Array, actions: Array) -> Array:
        """The log-probability or log-density of each action in nats, shape (...)."""

    def entropy(self, parameters: Array) -> Array:
        """The entropy in nats, shape (...)."""

    def sample(self, parameters: Tensor) -> Tensor:
        """An action for each row, drawn by torch's generator; parameters of shape (rows, width)."""

    def mode(self, parameters: Tensor) -> Tensor:
        """The most likely action."""


@dataclass(frozen=True)
class Categorical:
    """One of several actions; the parameters are logits.

    >>> Categorical(4).log_probs(torch.zeros(1, 4), torch.tensor([3]))
    tensor([-1.3863])

    Args:
        count: the number of actions; None if any number fits.
    """

    count: int | None = None
    action_dims = 0
    is_continuous = False

    @property
    def width(self) -> int | None:
        return self.count

    def log_probs(self, parameters: Array, actions: Array) -> Array:
        return token_log_probs(parameters, actions)

    def entropy(self, parameters: Array) -> Array:
        return entropy(parameters)

    def sample(self, parameters: Tensor) -> Tensor:
        return torch.multinomial(at_least_float32(parameters).softmax(-1), 1).squeeze(-1)

    def mode(self, parameters: Tensor) -> Tensor:
        return parameters.argmax(-1)


@dataclass(frozen=True)
class MultiCategorical:
    """Several independent choices at a time; the parameters are the logits of the first, then of the second, and so on.

    >>> several = MultiCategorical((2, 3))
    >>> several.width, several.mode(torch.tensor([[0.0, 1.0, 5.0, 0.0, 0.0]]))
    (5, tensor([[1, 0]]))

    Args:
        counts: the number of actions of each choice.
    """

    counts: tuple[int, ...]
    action_dims = 1
    is_continuous = False

    @property
    def width(self) -> int:
        return sum(self.counts)

    def log_probs(self, parameters: Array, actions: Array) -> Array:
        parts = self._split(parameters)
        if tuple(actions.shape) != (*parameters.shape[:-1], len(parts)):
            needs = f"needs {len(parts)} actions for each row of parameters"
            raise misshapen("MultiCategorical.log_probs", needs, parameters=parameters, actions=actions)
        return sum(token_log_probs(each, actions[..., index]) for index, each in enumerate(parts))

    def entropy(self, parameters: Array) -> Array:
        return sum(entropy(each) for each in self._split(parameters))

    def sample(self, parameters: Tensor) -> Tensor:
        return torch.stack([Categorical().sample(each) for each in self._split(parameters)], -1)

    def mode(self, parameters: Tensor) -> Tensor:
        return torch.stack([each.argmax(-1) for each in self._split(parameters)], -1)

    def _split(self, parameters: Array) -> list[Array]:
        _check_width("MultiCategorical", parameters, self.width, f"logits of choices among {self.counts}")
        ends = np.cumsum((0, *self.counts)).tolist()
        return [parameters[..., first:end] for first, end in pairwise(ends)]


@dataclass(frozen=True)
class Gaussian:
    """Independent normal distributions; the parameters are the means, then the logarithms of standard deviations.

    >>> normal = Gaussian(1)
    >>> parameters = torch.tensor([[2.0, 0.0]])  # mean 2, standard deviation 1
    >>> normal.log_probs(parameters, torch.tensor([[2.0]])), normal.entropy(parameters)
    (tensor([-0.9189]), tensor([1.4189]))

    Args:
        size: the numbers of an action.
    """

    size: int
    action_dims = 1
    is_continuous = True

    @property
    def width(self) -> int:
        return 2 * self.size

    def log_probs(self, parameters: Array, actions: Array) -> Array:
        mean, log_std = self._split(parameters)
        if tuple(actions.shape) != tuple(mean.shape):
            needs = f"needs {self.size} numbers for each row of parameters"
            raise misshapen(f"{type(self).__name__}.log_probs", needs, parameters=parameters, actions=actions)
        apart = (at_least_float32(actions) - mean) / namespace(mean, actions).exp(log_std)
        return -0.5 * (apart * apart + 2 * log_std).sum(-1) - 0.5 * _LOG_2PI * self.size

    def entropy(self, parameters: Array) -> Array:
        _, log_std = self._split(parameters)
        return log_std.sum(-1) + 0.5 * (1 + _LOG_2PI) * self.size

    def sample(self, parameters: Tensor) -> Tensor:
        mean, log_std = self._split(parameters)
        drawn: Tensor = mean + log_std.exp() * torch.randn_like(mean)
        return drawn

    def mode(self, parameters: Tensor) -> Tensor:
        mean: Tensor = self._split(parameters)[0]
        return mean

    def _split(self, parameters: Array) -> tuple[Array, Array]:
        needs = f"the means of {self.size} numbers and the logarithms of their standard deviations"
        _check_width(type(self).__name__, parameters, self.width, needs)
        wide = at_least_float32(parameters)
        if isinstance(wide, Tensor):  # the gradient of one split, and not of two slices
            mean, log_std = wide.chunk(2, -1)
            return mean, log_std
        return wide[..., : self.size], wide[..., self.size :]


@dataclass(frozen=True)
class SquashedGaussian(Gaussian):
    """The hyperbolic tangent of normal distributions, for bounded actions; the parameters are those of `Gaussian`.

    An action is kept as it was before the tangent, which has no exact inverse in floating point. Densities are those of
    the tangent, from -1 to 1, before it is scaled to the bounds of an environment. The entropy has no closed form; it
    is that of the normal distribution plus the mean of `log(1 - tanh(x) ** 2)` by Gauss-Hermite quadrature with 32
    nodes, within 1e-7 nats for standard deviations up to 1, and 2e-4 up to 2. Source: Haarnoja et al. 2018, appendix C.

    >>> SquashedGaussian(1).log_probs(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0]]))  # of tanh(1) = 0.7616
    tensor([-0.5514])
    """

    def log_probs(self, parameters: Array, actions: Array) -> Array:
        normal = super().log_probs(parameters, actions)
        return normal - _log_slope(at_least_float32(actions)).sum(-1)

    def entropy(self, parameters: Array) -> Array:
        mean, log_std = self._split(parameters)
        places = mean[..., None] + math.sqrt(2) * namespace(mean).exp(log_std)[..., None] * _constant(_NODES, mean)
        slopes = (_log_slope(places) * _constant(_WEIGHTS, mean)).sum(-1) / math.sqrt(math.pi)
        return super().entropy(parameters) + slopes.sum(-1)


def _log_slope(places: Array) -> Array:
    """`log(1 - tanh(x) ** 2)`, stable for large x of either sign."""
    return 2 * (math.log(2) - places + log_sigmoid(2 * places))


def _constant(values: Sequence[float], like: Array) -> Array:
    if isinstance(like, Tensor):
        return like.new_tensor(values)
    return namespace(like).asarray(values, dtype=like.dtype)


def _check_width(kind: str, parameters: Array, width: int, needs: str) -> None:
    if not parameters.ndim or parameters.shape[-1] != width:
        raise misshapen(kind, f"needs {width} numbers for each action: {needs}", parameters=parameters)
