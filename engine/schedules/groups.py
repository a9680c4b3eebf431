"""The learning rates of an optimizer's groups."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["GroupRates", "default_rate", "group_ratios", "update_optimizer", "write_rates"]


def update_optimizer(optimizer: Optimizer, learning_rate: float) -> None:
    """Write the rate of a group that has the optimizer's default rate; the other groups keep their ratio to it.

    A ratio is that of a group's first rate, which is kept in the group as `initial_lr` and so in the optimizer's state.
    Rates that are tensors are filled in place.

    Raises:
        TypeError: the optimizer is none of torch's.
        ConfigurationError: the rate is no finite number from 0 on, or the ratios are not known (see `group_ratios`).
    """
    GroupRates(optimizer).write(learning_rate)


class GroupRates:
    """What `update_optimizer` does, again and again: the ratios are computed anew only when a first rate is another.

    That is so for a group that was added, and after a state was loaded into the optimizer. It takes less than half the
    time of `update_optimizer`.

    Args:
        place: who asks, for the message.

    Raises:
        TypeError: the optimizer is none of torch's.
        ConfigurationError: the ratios are not known (see `group_ratios`).
    """

    def __init__(self, optimizer: Optimizer, place: str = "update_optimizer") -> None:
        self.optimizer = optimizer
        self._place = place
        self._read()

    def write(self, learning_rate: float) -> None:
        """Write the rates that go with this default rate.

        Raises:
            ConfigurationError: the rate is no finite number from 0 on, or the ratios are no longer known.
        """
        # asking for Real takes as long as all the rest for one group
        number = type(learning_rate) is float or isinstance(learning_rate, Real)
        if not number or not 0 <= learning_rate < math.inf:
            remedy = "; end a schedule that grows without end, as one with a gamma above 1"
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
        write_rates(optimizer, [learning_rate * ratio for ratio in self._ratios])

    def _read(self) -> None:
        self._ratios = group_ratios(self.optimizer, self._place)
        self._first = [group["initial_lr"] for group in self.optimizer.param_groups]
        self._default = self.optimizer.defaults["lr"]


def group_ratios(optimizer: Optimizer, place: str = "update_optimizer") -> list[float]:
    """Each group's first rate over the optimizer's default rate; a group seen for the first time gets its `initial_lr`.

    Args:
        place: who asks, for the message.

    Raises:
        TypeError: the optimizer is none of torch's.
        ConfigurationError: the default rate is 0 and a group's is not, so the ratio would be infinite.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{place}(optimizer={optimizer!r}): needs a torch.optim.Optimizer")
    # torch's own schedulers keep a group's first rate under this name too
    own = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    default = default_rate(optimizer)
    if default == 0.0 and any(own):
        raise ConfigurationError(
            "its default learning rate is 0, so the groups' "
            f"ratios to it are not known: {own}; give the optimizer the rate of an ordinary group",
            place,
            optimizer=type(optimizer),
        )
    for group, rate in zip(optimizer.param_groups, own, strict=True):
        group["initial_lr"] = rate
    return [rate / default if default else 1.0 for rate in own]


def default_rate(optimizer: Optimizer) -> float:
    """The rate that the optimizer was made with."""
    default = optimizer.defaults["lr"]
    if isinstance(default, Tensor) and any(group["lr"] is default for group in optimizer.param_groups):
        # The groups hold this very tensor and it is about to be filled: keep the first rate in one of its own. On the
        # host, since reading it from a device at each update would wait for all that the device still has to do.
        default = optimizer.defaults["lr"] = default.detach().to("cpu", copy=True)
    return float(default)


def write_rates(optimizer: Optimizer, rates: Iterable[Any]) -> None:
    """Set each group's rate, in its order."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        held = group["lr"]
        if type(held) is float or not isinstance(held, Tensor):  # with a float alone, in a third of the time
            group["lr"] = rate
        else:
            held.fill_(rate)  # captured graphs read this very tensor
