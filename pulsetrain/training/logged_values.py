"""Values that a step, a handler or any other code has logged by name, until they are reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.state.part import StateDict
from pulsetrain.training.agreement import Agreement
from pulsetrain.training.running_stats import Losses

__all__ = ["LoggedValues"]

_WHAT = "values that were logged by name"


class LoggedValues:
    """The means of logged values, for the same readers as a run's losses: "log" and "epoch".

    Args:
        agreement: of several processes, whose means are over the values of all of them.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._values: dict[str, Losses] = {}

    def add(self, name: str, value: Any) -> Tensor:
        """Add one value; returns it as a tensor of shape (), on its device and without its graph.

        Raises:
            ArgumentTypeError, ConfigurationError: it is not one number, or the name is not text.
        """
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError("needs a name, as trainer.log('accuracy', 0.9)", "Trainer.log", name=name)
        tensor = _scalar(name, value)
        self._values.setdefault(name, Losses()).add(tensor, 1)
        return tensor

    def count(self, reader: str, wanted: Callable[[str], bool]) -> int:
        """How many of these names have values in this process that the reader has not consumed."""
        return len(self._of(reader, wanted))

    def means(
        self, reader: str, wanted: Callable[[str], bool], *, keep: bool = False, anywhere: float | None = None
    ) -> dict[str, Any]:
        """The means of what the reader has not consumed, by name; of several processes, over all of them.

        Args:
            reader: "log" or "epoch".
            wanted: which names; the others stay.
            keep: the reader's next means have these values, too.
            anywhere: of several processes, the sum of their counts, where that is known.
        """
        here = self._of(reader, wanted)
        control = self._agreement.control
        if not control.is_shared:
            found = {name: losses.peek(reader) for name, losses in here.items()}
        else:
            if anywhere is None:
                (anywhere,) = control.sum([float(len(here))], _WHAT)
            found = self._of_all(reader, here) if anywhere else {}
        for losses in here.values() if not keep else ():
            losses.forget(reader)
        return found

    def _of(self, reader: str, wanted: Callable[[str], bool]) -> dict[str, Losses]:
        return {name: losses for name, losses in self._values.items() if losses.count(reader) and wanted(name)}

    def _of_all(self, reader: str, here: Mapping[str, Losses]) -> dict[str, Any]:
        sums = {name: losses.sums(reader) for name, losses in here.items()}
        found = self._agreement.control.sum_by_name(sums, _WHAT)
        return {
            name: torch.tensor(total / weight, dtype=torch.float64) for name, (total, weight) in found.items() if weight
        }

    def forget(self, reader: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Start the reader's next means of these names here; by default of all."""
        for losses in self._of(reader, wanted).values():
            losses.forget(reader)

    def reset(self) -> None:
        """Forget every value and every name."""
        self._values.clear()

    def state_dict(self) -> StateDict:
        return {name: losses.state_dict() for name, losses in self._values.items()}

    def load_state_dict(self, state: StateDict, device: torch.device | str) -> None:
        self.reset()
        for name, saved in state.items():
            self._values[name] = losses = Losses()
            losses.load_state_dict(saved, device)

    def absorb(self, state: StateDict) -> None:
        """Add what another process has saved."""
        for name, saved in state.items():
            self._values.setdefault(name, Losses()).absorb(saved)


def _scalar(name: str, given: Any) -> Tensor:
    if isinstance(given, Tensor):
        value = given
    else:
        try:
            value = torch.tensor(float(given), dtype=torch.float64)
        except (TypeError, ValueError) as error:
            rule = f"{name!r} needs one number, not {type(given).__name__}"
            raise ArgumentTypeError(
                f"{rule}; log each part under a name of its own", "Trainer.log", value=given
            ) from error
    if value.numel() != 1:
        rule = f"{name!r} has the shape {tuple(value.shape)}; needs one number, such as its mean()"
        raise ConfigurationError(rule, "Trainer.log", value=...)
    return value.detach().reshape(())
