"""Several optimizers, each over the parameters of its own, as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from engine.errors import CheckpointError, ConfigurationError

__all__ = ["NamedOptimizers", "parts_of"]

_MARK = "optimizer"  # in each group: the name of the optimizer whose it is; in saved states too


class NamedOptimizers(Optimizer):
    """What holds optimizers by name, such as a generator's and a discriminator's: `optimizers["generator"]`.

    Groups and state are those of its parts, so that one checkpoint, one fingerprint and one list of rates hold them
    all. A group that is added later names its optimizer: `{"params": ..., "optimizer": "generator"}`.

    Args:
        optimizers: name -> optimizer; no parameter is in two of them.

    Raises:
        ConfigurationError: no optimizer, or one parameter in two.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        if not optimizers:
            raise ConfigurationError("NamedOptimizers(optimizers={}): needs one optimizer at least")
        owners: dict[int, str] = {}
        for name, part in optimizers.items():
            for parameter in (each for group in part.param_groups for each in group["params"]):
                other = owners.setdefault(id(parameter), name)
                if other != name:
                    raise ConfigurationError(
                        f"NamedOptimizers: {other!r} and {name!r} share a parameter of shape {tuple(parameter.shape)}; "
                        "give it to one of them"
                    )
        self.parts = dict(optimizers)
        groups = []
        for name, part in self.parts.items():
            for group in part.param_groups:
                group[_MARK] = name
                groups.append(group)
        super().__init__(groups, {})
        for part in self.parts.values():
            self.state.update(part.state)
        self._link()

    def __getitem__(self, name: str) -> Optimizer:
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def name_of(self, optimizer: Optimizer) -> str | None:
        """Under which name it is one of the parts."""
        return next((name for name, part in self.parts.items() if part is optimizer), None)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each; the closure is evaluated once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        name = param_group.get(_MARK)
        if name not in self.parts:
            raise ConfigurationError(
                f"NamedOptimizers.add_param_group(optimizer={name!r}): names none of {', '.join(self.parts)}"
            )
        for option, value in self.parts[name].defaults.items():
            param_group.setdefault(option, value)
        super().add_param_group(param_group)
        self._link()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit, and change nothing.

        Raises:
            CheckpointError: it is of other optimizers.
        """
        mine = [group[_MARK] for group in self.param_groups]
        saved = [group.get(_MARK) for group in state_dict["param_groups"]]
        if mine != saved:
            raise CheckpointError(
                f"NamedOptimizers.load_state_dict: the saved groups are of the optimizers {saved}, these of {mine}; "
                "make them in the order in which the saved ones were made"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()

    def _link(self) -> None:
        """The parts work on the groups and the state of the whole: these very objects, not copies."""
        for name, part in self.parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group[_MARK] == name]
            relink = getattr(part, "_link", None)  # of one that is several itself
            if relink is not None:
                relink()


def parts_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers by their names; a single one's name is ""."""
    return dict(optimizer.parts) if isinstance(optimizer, NamedOptimizers) else {"": optimizer}
