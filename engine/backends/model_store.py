"""The newest state of a backend that computes with values, and torch objects that stand for it.

Handlers, checkpoints and whoever asks a trainer for its model and optimizer find an nn.Module and a torch optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.backends.functional import rate_of, with_buffers
from pulsetrain.engine.backends.module_view import Shown
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.optimizers import parts_of
from pulsetrain.engine.step.protocols import GradientInfo, ModelState

__all__ = ["Held", "HeldOptimizer", "LiveState", "kind_of", "shown_rate"]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer is called in a checkpoint: its class's name, and that of the backend where that makes it."""
    if not isinstance(optimizer, HeldOptimizer):
        return type(optimizer).__name__
    backend = optimizer.held.backend
    return f"{type(backend.optimizer).__name__} of {type(backend).__name__}"


class LiveState:
    """A state in place: the module and the optimizer themselves.

    Args:
        backend: computes with them.
        model: the module, on its device.
        optimizer: over its parameters.
    """

    in_place = True
    waiting: GradientInfo | None = None  # gradients wait in the parameters

    def __init__(self, backend: Any, model: nn.Module, optimizer: Any) -> None:
        self.backend, self.module, self.optimizer = backend, model, optimizer
        self.state: ModelState = backend.init(model, optimizer)
        # one for each of several optimizers
        self.parts = {name: backend.init(model, part) for name, part in parts_of(optimizer).items()}

    def take(self, state: ModelState) -> None:
        """Nothing to do: it is the same."""

    def publish(self) -> None:
        """Nothing to do: the module is the user's."""

    def wait(self, gradients: GradientInfo) -> None:
        """Nothing to do: they are in the parameters."""

    def showing(self, gradients: GradientInfo, tell: Callable[[], object]) -> GradientInfo:
        """Runs `tell`: each parameter holds its own gradient."""
        tell()
        return gradients

    def begin_anew(self) -> None:
        """Nothing to do: who draws has been seeded."""

    def discard(self) -> None:
        """Drop the gradients that wait for an update."""
        self.backend.discard_gradients(self.state)

    def gradients(self) -> dict[str, Tensor]:
        """Those that wait for an update, by the parameters' names."""
        return {name: each.grad for name, each in self.module.named_parameters() if each.grad is not None}

    def load_gradients(self, saved: Mapping[str, Tensor], batches: int) -> Callable[[], None]:
        """What goes on with gradients that `gradients` gave."""

        def go_on() -> None:
            for name, parameter in self.module.named_parameters():
                parameter.grad = saved[name].to(parameter.device) if name in saved else None

        return go_on


class Held:
    """A state from which a trainer goes on: what was written into its module and optimizer counts.

    Args:
        backend: made the state, and has `mirror`, `flat` and `unflat`.
        model: what the state was made of.
        state: the first one.
    """

    in_place = False

    def __init__(self, backend: Any, model: Any, state: ModelState) -> None:
        self.backend, self._state = backend, state
        self.waiting: GradientInfo | None = None  # gradients of the update under way
        self._shown: Shown = backend.mirror(model, state.weights)
        self.module = self._shown.module
        self.optimizer = HeldOptimizer(self)

    @property
    def state(self) -> ModelState:
        """The newest, with what was written into the module and with the rate that the optimizer's group has."""
        state, weights = self._state, self._shown.seen(self._state.weights)
        if state.metadata.get("schedule") is not None:  # of a state that came with one
            self.optimizer.param_groups[0]["lr"] = rate_of(state)
        metadata, rate = state.metadata, _known(self.optimizer.param_groups[0]["lr"])
        if weights is not state.weights or rate != metadata["learning_rate"]:
            self._state = state = replace(state, weights=weights, metadata={**metadata, "learning_rate": rate})
        return state

    def copy(self) -> ModelState:
        """The state in memory of its own, for somebody who may keep it."""
        return self.backend.copied(self.state)  # type: ignore[no-any-return]

    def take(self, state: ModelState) -> None:
        """Go on with this state, which nobody else has: the next may be made in its memory."""
        self._state = state
        self._shown.show(state.weights)

    def publish(self) -> None:
        """Training pauses: the user's own model, where it is another object, gets the weights."""
        self.backend.publish(self.state.weights)

    def wait(self, gradients: GradientInfo) -> None:
        """A batch has been added up for the update under way; its forward pass has changed the buffers."""
        self.waiting = gradients
        self.take(with_buffers(self._state, gradients))

    def showing(self, gradients: GradientInfo, tell: Callable[[], object]) -> GradientInfo:
        """Gives the module's parameters these gradients while `tell` runs; returns them as they are then."""
        parameters, flat = self.optimizer.learning, self.backend.flat(gradients.gradients)
        for parameter, gradient in zip(parameters, flat.values(), strict=True):
            parameter.grad = gradient
        before = [(id(each), each._version) for each in flat.values()]
        try:
            tell()
            after = [parameter.grad for parameter in parameters]
        finally:
            for parameter in parameters:
                parameter.grad = None
        if [(id(each), None if each is None else each._version) for each in after] == before:
            return gradients
        edited = {
            path: torch.zeros_like(old) if new is None else new
            for (path, old), new in zip(flat.items(), after, strict=True)
        }
        return replace(gradients, gradients=self.backend.unflat(gradients.gradients, edited, "edited gradients"))

    def begin_anew(self) -> None:
        """A run begins from its start: what is drawn in it goes by the number of the update."""
        self._state = replace(self._state, metadata={**self._state.metadata, "step": 0})

    def discard(self) -> None:
        """Drop the gradients that wait for an update."""
        self.waiting = None

    def gradients(self) -> dict[str, Tensor]:
        """Those that wait for an update, by their paths."""
        return {} if self.waiting is None else self.backend.flat(self.waiting.gradients)

    def load_gradients(self, saved: Mapping[str, Tensor], batches: int) -> Callable[[], None]:
        """What goes on with gradients that `gradients` gave, of so many batches.

        Raises:
            CheckpointError: they are not of these weights.
        """
        waiting: GradientInfo | None = None
        if saved:
            tree = self.backend.unflat(self.state.weights["parameters"], saved, "accumulated gradients")
            waiting = GradientInfo(None, tree, batches=batches)

        def go_on() -> None:
            self.waiting = waiting

        return go_on


class _UpToDate(list[nn.Parameter]):
    """A module's parameters, which are made up to date for whoever looks at them."""

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._module = module

    def __iter__(self) -> Iterator[nn.Parameter]:
        next(self._module.parameters(), None)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        next(self._module.parameters(), None)
        return super().__getitem__(index)


class HeldOptimizer(torch.optim.Optimizer):
    """Shows a functional optimizer's state as torch's optimizers do: one group, whose rate may be written.

    The rate is nan where the state holds none, as that of optax.adam(1e-3). Its steps are made by the backend.
    """

    def __init__(self, held: Held) -> None:
        rate = held._state.metadata["learning_rate"]
        # the group's parameters are the module's: whoever looks for them finds them there
        parameters = [each for module in held.module.modules() for each in module._parameters.values()]
        unique = {id(each): each for each in parameters if each is not None and each.requires_grad}
        self.learning = list(unique.values())
        super().__init__(self.learning, {"lr": shown_rate(rate)})
        self.param_groups[0]["params"] = _UpToDate(held.module, self.learning)
        self.held = held
        self._opt_called = True  # torch's schedules warn of an optimizer whose step() nobody has called

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused: see the class."""
        raise RuntimeError(f"{type(self.held.backend).__name__} makes the updates itself; call Trainer.train()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait for an update."""
        self.held.waiting = None

    def state_dict(self) -> dict[str, Any]:
        """The leaves of the optimizer's state by their paths, and the group's rate."""
        state = self.held.state
        group = {"lr": self.param_groups[0]["lr"], "params": list(range(len(self.param_groups[0]["params"])))}
        metadata = {"step": state.metadata["step"]}
        return {"state": self.held.backend.flat(state.optimizer), "param_groups": [group], **metadata}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit, and change nothing.

        Raises:
            CheckpointError: it is another optimizer's, or of other weights; the message names the first difference.
        """
        self._read(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        optimizer = self._read(state_dict)
        held, rate = self.held, _known(state_dict["param_groups"][0]["lr"])
        self.param_groups[0]["lr"] = shown_rate(rate)
        metadata = {**held.state.metadata, "step": state_dict["step"], "learning_rate": rate}
        held.take(replace(held.state, optimizer=optimizer, metadata=metadata))

    def _read(self, state_dict: Mapping[str, Any]) -> Any:
        if "step" not in state_dict:
            raise CheckpointError(
                f"the optimizer's state is one of torch.optim, and {type(self.held.backend).__name__} computes with "
                "values; go on with the backend that the checkpoint was made with"
            )
        return self.held.backend.unflat(self.held._state.optimizer, state_dict["state"], "the optimizer's state")


def shown_rate(rate: float | None) -> float:
    """A rate as an optimizer's group has it: nan where there is none."""
    return math.nan if rate is None else rate  # the one nan: it is equal to itself in a tuple of rates


def _known(rate: Any) -> float | None:
    """A group's rate as a number: a schedule of torch's may write tensors."""
    rate = float(rate)
    return None if math.isnan(rate) else rate
