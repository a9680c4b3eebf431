"""The states of validation sets: what their samplers and datasets save themselves, and their loaders' generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch.utils.data import DataLoader

from pulsetrain.engine.data.loaders import can_be_keyed
from pulsetrain.engine.logs import get_logger
from pulsetrain.state.handler_registry import state_of
from pulsetrain.state.loader_parts import parts_of_loader, stateful_parts
from pulsetrain.state.part import StateDict, Stateful

__all__ = ["load_states_of_sets", "states_of_sets"]

Loaders = Mapping[str, Iterable[object]]


def states_of_sets(loaders: Loaders, train_loader: object) -> dict[str, StateDict]:
    """The states of those sets that have some, between two validations.

    What a set shares with the training data is left out, because the position in that data says what it is. A shared
    generator is not: the order of data that can be keyed does not draw from it.

    >>> loader = DataLoader(range(4), shuffle=True, generator=torch.Generator())
    >>> [(name, list(state["generators"])) for name, state in states_of_sets({"val": loader}, []).items()]
    [('val', ['sampler.generator'])]
    """
    states: dict[str, StateDict] = {}
    for name, loader in loaders.items():
        parts, generators = _found_in(loader, train_loader)
        state = {
            "parts": {path: deepcopy(state_of(f"{name} set: {path}", part)) for path, part in parts.items()},
            "generators": {path: each.get_state() for path, each in generators.items()},
        }
        if any(state.values()):
            states[name] = state
    return states


def load_states_of_sets(loaders: Loaders, train_loader: object, saved: Mapping[str, StateDict]) -> None:
    """Restore what `states_of_sets` gave; a warning names what has no saved state."""
    lacking: list[str] = []
    for name, loader in loaders.items():
        parts, generators = _found_in(loader, train_loader)
        state: Mapping[str, Any] = saved.get(name, {"parts": {}, "generators": {}})
        for path, part in parts.items():
            if path not in state["parts"]:
                lacking.append(f"{name}: {path}")
                continue
            try:
                part.load_state_dict(deepcopy(state["parts"][path]))
            except (
                Exception
            ) as error:  # of another sampler than the one that was saved: the weights do not depend on it
                lacking.append(f"{name}: {path} ({type(error).__name__}: {error})")
        for path, generator in generators.items():
            if path in state["generators"]:
                generator.set_state(state["generators"][path])
        lacking += [f"{name}: {path}" for path in generators.keys() - state["generators"].keys()]
    if lacking:
        get_logger("pulsetrain").warning(
            "the checkpoint has no state that fits parts of validation sets, which start from their beginning",
            parts=sorted(lacking),
        )


def _found_in(loader: object, train_loader: object) -> tuple[dict[str, Stateful], dict[str, torch.Generator]]:
    """The parts of a set that keep state, and its loader's generators, by their paths."""
    shared = {id(part) for _, part in parts_of_loader(train_loader)}
    if not can_be_keyed(train_loader):
        shared |= {id(each) for _, each in _generators_of(train_loader)}
    parts = {path: part for path, part in stateful_parts(loader).items() if id(part) not in shared}
    generators: dict[str, torch.Generator] = {}
    for path, generator in _generators_of(loader):
        if id(generator) not in shared:
            shared.add(id(generator))
            generators[path] = generator
    return parts, generators


def _generators_of(loader: object) -> Iterator[tuple[str, torch.Generator]]:
    """Those that its order and the seeds of its workers are drawn from."""
    if not isinstance(loader, DataLoader):
        return
    samplers = [(path, part) for path, part in parts_of_loader(loader) if path.endswith("sampler")]
    for path, holder in (*samplers, ("loader", loader)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            yield f"{path}.generator", generator
