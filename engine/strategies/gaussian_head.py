"""The last layer of a policy with continuous actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pulsetrain.engine.argument_checks import check_whole_number

if TYPE_CHECKING:
    from torch.nn import Linear

__all__ = ["GaussianHead"]


class GaussianHead(nn.Module):
    """Means by a linear layer, beside logarithms of standard deviations that do not depend on the observation.

    These are the parameters of `Gaussian` and `SquashedGaussian`. Schulman et al. 2017 use it for continuous actions.

    >>> head = GaussianHead(64, 2, log_std=-0.5)
    >>> parameters = head(torch.zeros(8, 64))
    >>> parameters.shape, parameters[0, 2:]
    (torch.Size([8, 4]), tensor([-0.5000, -0.5000], grad_fn=<SliceBackward0>))

    Args:
        inputs: the width of the layer before it.
        actions: the numbers of an action.
        log_std: the initial logarithm of each standard deviation.

    Raises:
        ConfigurationError: a width is not a whole number of at least 1.
    """

    def __init__(self, inputs: int, actions: int, log_std: float = 0.0) -> None:
        super().__init__()
        check_whole_number("GaussianHead", "inputs", inputs)
        check_whole_number("GaussianHead", "actions", actions)
        self.mean: Linear = nn.Linear(inputs, actions)
        self.log_std: nn.Parameter = nn.Parameter(torch.full((actions,), float(log_std)))

    def forward(self, hidden: Tensor) -> Tensor:
        """Means and logarithms of standard deviations (..., 2 * actions) of hidden values (..., inputs)."""
        mean = self.mean(hidden)
        return torch.cat([mean, self.log_std.expand_as(mean)], -1)
