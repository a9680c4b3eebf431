"""Writes a schedule's rate into an optimizer's groups, which keep their ratios to each other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

from torch import Tensor
from torch.optim import Optimizer

from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["GroupRates", "default_rate", "group_ratios", "update_optimizer", "write_rates"]


def update_optimizer(optimizer: Optimizer, learning_rate: float) -> None:
    """Sets the default learning rate; groups with a different rate keep their ratio to it.

    The ratio is that of the group's first rate, which is stored in the group as `initial_lr` and so in the optimizer's
    state. Rates that are tensors are filled in place.

    >>> import torch
    >>> weight, bias = torch.nn.Linear(2, 2).parameters()
    >>> optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.2}], lr=0.1)
    >>> update_optimizer(optimizer, 0.05)
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.05, 0.1]

    Raises:
        TypeError: the optimizer is not a torch optimizer.
        ConfigurationError: the rate is not a finite number of at least 0, or a ratio is undefined (see `group_ratios`).
    """
    GroupRates(optimizer).write(learning_rate)


class GroupRates:
    """`update_optimizer` for repeated use: it recomputes the ratios only if a first rate has changed.

    That happens when a group is added or a state is loaded into the optimizer. It takes less than half the time of
    `update_optimizer`.

    >>> import torch
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    >>> rates = GroupRates(optimizer)
    >>> rates.write(0.05)
    >>> optimizer.param_groups[0]["lr"]
    0.05

    Args:
        place: the start of error messages.

    Raises:
        TypeError: the optimizer is not a torch optimizer.
        ConfigurationError: a ratio is undefined (see `group_ratios`).
    """

    def __init__(self, optimizer: Optimizer, place: str = "update_optimizer") -> None:
        self.optimizer = optimizer
        self._place = place
        self._read()

    def write(self, learning_rate: float) -> None:
        """Sets each group's rate for this default rate.

        Raises:
            ConfigurationError: the rate is not a finite number of at least 0, or a ratio has become undefined.
        """
        # the check for Real takes as long as everything else for one group
        number = type(learning_rate) is float or isinstance(learning_rate, Real)
        if not number or not 0 <= learning_rate < math.inf:
            remedy = "; bound a schedule that grows forever, such as one with a gamma above 1"
            raise ConfigurationError(
                f"needs a finite number that is not negative{remedy if learning_rate == math.inf else ''}",
                self._place,
                learning_rate=learning_rate,
            )
        optimizer = self.optimizer
        if (
            optimizer.defaults["lr"] is not self._default
            or [group.get("initial_lr") for group in optimizer.param_groups] != self._first
        ):
            self._read()
        groups = optimizer.param_groups
        if len(groups) == 1 and type(groups[0]["lr"]) is float:  # the usual case, without a call
            groups[0]["lr"] = learning_rate * self._ratios[0]
        else:
            write_rates(optimizer, [learning_rate * ratio for ratio in self._ratios])

    def _read(self) -> None:
        self._ratios = group_ratios(self.optimizer, self._place)
        self._first = [group["initial_lr"] for group in self.optimizer.param_groups]
        self._default = self.optimizer.defaults["lr"]


def group_ratios(optimizer: Optimizer, place: str = "update_optimizer") -> list[float]:
    """Each group's first rate divided by the optimizer's default rate; stores the first rates as `initial_lr`.

    >>> import torch
    >>> weight, bias = torch.nn.Linear(2, 2).parameters()
    >>> group_ratios(torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.5}], lr=0.25))
    [1.0, 2.0]

    Args:
        place: the start of error messages.

    Raises:
        TypeError: the optimizer is not a torch optimizer.
        ConfigurationError: the default rate is 0 and a group's is not, so the ratio would be infinite.
    """
    default = default_rate(optimizer, place)
    # torch's own schedulers keep a group's first rate under this name too
    own = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if default == 0.0 and any(own):
        raise ConfigurationError(
            "its default learning rate is 0, so the groups' "
            f"ratios to it are undefined: {own}; give the optimizer the rate of an ordinary group",
            place,
            optimizer=type(optimizer),
        )
    for group, rate in zip(optimizer.param_groups, own, strict=True):
        group["initial_lr"] = rate
    return [rate / default if default else 1.0 for rate in own]


def default_rate(optimizer: Optimizer, place: str = "default_rate") -> float:
    """The learning rate that the optimizer was constructed with.

    >>> import torch
    >>> default_rate(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
    0.1

    Args:
        place: the start of error messages.

    Raises:
        TypeError: it is not a torch optimizer.
    """
    check_type(place, "optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    default = optimizer.defaults["lr"]
    if isinstance(default, Tensor) and any(group["lr"] is default for group in optimizer.param_groups):
        # The groups share this tensor and it is about to be filled, so store a copy of the first rate. The copy is on
        # the host: reading it from the device at each update would wait for all of the device's pending work.
        default = optimizer.defaults["lr"] = default.detach().to("cpu", copy=True)
    return float(default)


def write_rates(optimizer: Optimizer, rates: Iterable[float | Tensor]) -> None:
    """Sets each group's rate, in the order of the groups."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        held = group["lr"]
        if type(held) is float or not isinstance(held, Tensor):  # the first test alone takes a third of the time
            group["lr"] = rate
        else:
            held.fill_(rate)  # captured CUDA graphs read this tensor
