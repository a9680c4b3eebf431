"""What modules hold besides their weights and buffers: flags, dropout rates, and buffers that are not persistent."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.checkpoint.frozen import FrozenWeights, check_left_out
from pulsetrain.engine.checkpoint.weights import compare_weights, take_dtypes
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.step.averaging import passing_buffers
from pulsetrain.state.digests import digest
from pulsetrain.state.object_graph import attributes_of
from pulsetrain.state.part import StateDict, keeps_state, require

__all__ = ["DROPOUTS", "ModulesPart", "modules_in"]

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_FIELDS = ("frozen", "eval", "dropout", "buffers")


class ModulesPart:
    """The flags of the model and of the modules in the strategy, and the state of those in the strategy.

    Of each module: which parameters are frozen, which submodules are in evaluation mode, the rates of dropout, and the
    buffers that are not persistent. A module that the strategy holds, such as a loss, is saved as a whole, except for
    one whose parameters are all frozen and were never written to, such as a teacher. Frozen weights that the model
    leaves out of its state are named by a digest.

    Args:
        model: whose weights another part saves.
        strategy: likewise its state, if it keeps one.
    """

    def __init__(self, model: nn.Module, strategy: object) -> None:
        self._model, self._strategy = model, strategy
        self._frozen = FrozenWeights(model)
        self._first = {name: _weights_of(module) for name, module in self._modules().items() if name != "model"}
        self._flags: Mapping[str, StateDict] = {}  # of the checkpoint that was loaded

    def reset(self) -> None:
        """A new run keeps the modules as they are."""
        self._flags = {}

    def state_dict(self) -> dict[str, Any]:
        return {name: self._state_of(name, module) for name, module in self._modules().items()}

    def check_state_dict(self, state: Mapping[str, StateDict]) -> None:
        """Refuse a state that lacks a field, or is of other modules, or of a model with other frozen weights.

        Raises:
            CheckpointError: it does.
        """
        for name, module in self._modules().items():
            if name not in state:
                continue
            require(f"modules.{name}", state[name], _FIELDS)
            if "left_out" in state[name]:
                check_left_out("", state[name]["left_out"], module)
            rates = {path for path, _, _ in _dropouts(module)}
            if state[name]["dropout"].keys() != rates:
                differing = ", ".join(sorted(state[name]["dropout"].keys() ^ rates))
                raise CheckpointError(
                    f"the checkpoint has other dropout modules than {name}: {differing}; build the modules as they "
                    "were when it was made"
                )
            problems = (
                compare_weights(module.state_dict(), state[name]["weights"]) if "weights" in state[name] else None
            )
            if problems:
                raise CheckpointError(f"the checkpoint's weights do not fit {name}: {problems}")

    def load_state_dict(self, state: Mapping[str, StateDict]) -> None:
        """Restore the modules; the flags once more at the start of the run, when handlers may have set others."""
        modules = self._modules()
        if state.keys() != modules.keys():
            get_logger("pulsetrain").warning(
                "the checkpoint was made with other modules in the strategy: those without a saved state start from "
                "their beginning",
                modules=sorted(state.keys() ^ modules.keys()),
            )
        for name in state.keys() & modules.keys():
            if "weights" in state[name]:
                take_dtypes(modules[name], state[name]["weights"])
                modules[name].load_state_dict(copy.copy(state[name]["weights"]))  # with its attributes: the versions
            _load_buffers(modules[name], state[name]["buffers"])
        self._flags = state
        self.load_flags()

    def load_flags(self) -> None:
        """Set the flags and dropout rates of the checkpoint that was loaded last, if there is one."""
        for name, module in self._modules().items():
            if name in self._flags:
                _load_flags(module, self._flags[name])

    def _modules(self) -> dict[str, nn.Module]:
        """The model, and the modules of the strategy that are not parts of it, by name."""
        own = set(map(id, self._model.modules()))
        held = {name: module for name, module in modules_in(self._strategy) if id(module) not in own}
        return {"model": self._model, **held}

    def _state_of(self, name: str, module: nn.Module) -> dict[str, Any]:
        state = {
            "frozen": [path for path, each in module.named_parameters() if not each.requires_grad],
            "eval": [path for path, each in module.named_modules() if not each.training],
            "dropout": {path: rate for path, _, rate in _dropouts(module)},
            "buffers": dict(passing_buffers(module)),
        }
        if name != "model" and not keeps_state(self._strategy) and self._changes(name, module):
            state["weights"] = module.state_dict()
        left_out = self._frozen.left_out() if name == "model" else None
        if left_out is not None:
            state["left_out"] = left_out
        return state

    def _changes(self, name: str, module: nn.Module) -> bool:
        parameters = list(module.parameters())
        frozen = bool(parameters) and not any(each.requires_grad for each in parameters)
        return not frozen or self._first.get(name) != _weights_of(module)


def _dropouts(module: nn.Module) -> Iterator[tuple[str, nn.Module, float]]:
    """The dropout modules by their paths, those with a number as their rate, and the rate."""
    for path, each in module.named_modules():
        if isinstance(each, DROPOUTS) and isinstance(each.p, Real):
            yield path, each, float(each.p)


def modules_in(holder: object) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a strategy is or holds, in its attributes or in containers there, by their paths."""
    if isinstance(holder, nn.Module):
        yield "strategy", holder
        return
    for name, value in attributes_of(holder).items():
        path = f"strategy.{name}"
        with suppress(Exception):  # raised by code of the user's: a mapping that cannot be iterated
            if isinstance(value, nn.Module):
                yield path, value
            elif isinstance(value, Mapping):
                yield from ((f"{path}.{key}", each) for key, each in value.items() if isinstance(each, nn.Module))
            elif isinstance(value, (list, tuple)):
                yield from ((f"{path}.{at}", each) for at, each in enumerate(value) if isinstance(each, nn.Module))


def _weights_of(module: nn.Module) -> tuple[object, ...]:
    return tuple([digest(each) for each in (*module.parameters(), *module.buffers())])


def _load_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    mine, modules = dict(passing_buffers(module)), dict(module.named_modules())
    lacking = sorted(mine.keys() - saved.keys())
    if lacking:
        get_logger("pulsetrain").warning(
            "the checkpoint has no value for buffers that are not persistent, which start from their beginning",
            buffers=lacking,
        )
    for path, tensor in saved.items():
        if path in mine and mine[path].shape == tensor.shape and mine[path].dtype == tensor.dtype:
            with torch.no_grad():
                mine[path].copy_(tensor)
            continue
        place, _, name = path.rpartition(".")
        if place in modules and (path in mine or not hasattr(modules[place], name)):  # made, or resized, in the run
            near = mine.get(path, next(module.parameters(), tensor))
            modules[place].register_buffer(name, tensor.to(near.device, copy=True), persistent=False)


def _load_flags(module: nn.Module, state: StateDict) -> None:
    frozen, evaluating = set(state["frozen"]), set(state["eval"])
    for path, parameter in module.named_parameters():
        if parameter.requires_grad == (path in frozen):
            parameter.requires_grad_(path not in frozen)
    for path, each in module.named_modules():
        each.training = path not in evaluating
    for path, dropout, _ in _dropouts(module):
        dropout.p = state["dropout"][path]
