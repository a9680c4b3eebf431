"""Several optimizers, each over its own parameters, as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pulsetrain.engine.errors import CheckpointError, ConfigurationError

__all__ = ["NamedOptimizers", "parts_of"]

_MARK = "optimizer"  # in each group, also in saved states: the name of the optimizer it belongs to


class NamedOptimizers(Optimizer):
    """Optimizers by name, such as those of a generator and a discriminator.

    Groups and state are those of the parts, so one checkpoint, one fingerprint and one list of rates cover all of them;
    each part can also be saved and loaded separately. A group that is added later names its optimizer:
    `{"params": ..., "optimizer": "generator"}`.

    >>> generator, discriminator = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    >>> optimizers = NamedOptimizers({
    ...     "generator": torch.optim.SGD(generator.parameters(), lr=0.1),
    ...     "discriminator": torch.optim.SGD(discriminator.parameters(), lr=0.2),
    ... })
    >>> optimizers["discriminator"].param_groups[0]["lr"], len(optimizers.param_groups)
    (0.2, 2)

    Args:
        optimizers: name -> optimizer; no two may share a parameter.

    Raises:
        ConfigurationError: there is no optimizer, or two share a parameter.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        if not optimizers:
            raise ConfigurationError("needs at least 1 optimizer", "NamedOptimizers", optimizers=optimizers)
        owners: dict[int, str] = {}
        for name, part in optimizers.items():
            for parameter in (each for group in part.param_groups for each in group["params"]):
                other = owners.setdefault(id(parameter), name)
                if other != name:
                    raise ConfigurationError(
                        f"NamedOptimizers: {other!r} and {name!r} share a parameter of shape {tuple(parameter.shape)}; "
                        "give it to one of them"
                    )
        for name, part in optimizers.items():
            for group in part.param_groups:
                group[_MARK] = name
        self.parts: dict[str, Optimizer] = {}  # empty while torch's constructor sets groups and state
        super().__init__([group for part in optimizers.values() for group in part.param_groups], {})
        self.parts = dict(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts in order: the same objects, in a new list."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, object]]) -> None:
        for name, part in self.parts.items():
            part.param_groups = [group for group in groups if group[_MARK] == name]

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of all parts: the same objects, in a new dict."""
        merged: defaultdict[Tensor, object] = defaultdict(dict)
        for part in self.parts.values():
            merged.update(part.state)
        return merged

    @state.setter
    def state(self, state: Mapping[Tensor, object]) -> None:
        for part in self.parts.values():
            mine = [each for group in part.param_groups for each in group["params"]]
            part.state = defaultdict(dict, {each: state[each] for each in mine if each in state})

    def __getitem__(self, name: str) -> Optimizer:
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def name_of(self, optimizer: Optimizer) -> str | None:
        """The name of a part, or None if the optimizer is not a part."""
        return next((name for name, part in self.parts.items() if part is optimizer), None)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each part; the closure is evaluated once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self.parts:  # called by torch's constructor; the parts already have their groups
            return
        name = param_group.get(_MARK)
        if name not in self.parts:
            raise ConfigurationError(
                f"needs one of {', '.join(self.parts)}", "NamedOptimizers.add_param_group", optimizer=name
            )
        self.parts[name].add_param_group(param_group)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Rejects a state that does not fit, without changing anything.

        Raises:
            CheckpointError: the state belongs to other optimizers.
        """
        mine = [group[_MARK] for group in self.param_groups]
        saved = [group.get(_MARK) for group in state_dict["param_groups"]]
        if mine != saved:
            raise CheckpointError(
                f"NamedOptimizers.load_state_dict: the saved groups belong to the optimizers {saved}, these to {mine}; "
                "create them in the order of the saved ones"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, object]) -> None:
        of_parts = {name: state[name] for name in ("param_groups", "state") if name in state}
        super().__setstate__({name: value for name, value in state.items() if name not in of_parts})
        for name, value in of_parts.items():  # groups first: they assign each state to its part
            setattr(self, name, value)


def parts_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers by name; a single optimizer has the name "".

    >>> list(parts_of(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)))
    ['']
    """
    return dict(optimizer.parts) if isinstance(optimizer, NamedOptimizers) else {"": optimizer}
