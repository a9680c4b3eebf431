"""Torch modules that show weights which are values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["Mirror", "ModuleMirror", "Shown"]


class Shown(Protocol):
    """How a module shows weights that are values."""

    module: nn.Module

    def show(self, weights: Any) -> None:
        """There are new weights."""
        ...

    def seen(self, weights: Any) -> Any:
        """The weights, as they are now that somebody may have written into the module."""
        ...


class ModuleMirror:
    """A torch module whose tensors are those of the newest weights: nothing is copied.

    Args:
        module: made the weights.
        weights_of: reads them.
    """

    def __init__(self, module: nn.Module, weights_of: Callable[[nn.Module], dict[str, dict[str, Tensor]]]) -> None:
        self.module, self._weights_of = module, weights_of

    def show(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Let the module's tensors, which stay the objects that they are, have the new ones' memory."""
        new = {**weights["buffers"], **weights["parameters"]}
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            tensor.data = new[name]

    def seen(self, weights: Any) -> Any:
        """What the module holds, whoever wrote it."""
        return self._weights_of(self.module)


class Mirror(nn.Module):
    """Weights that are no torch tensors, as a module of torch tensors by their paths, "blocks/0/kernel", dots as "/".

    The tensors are copies, made when somebody asks for the state after it has changed; once parameters or buffers were
    asked for, at each change, since whoever has them may look again. What is written into them is taken over before the
    next step.

    Args:
        backend: has `flat` and `unflat`.
        weights: the first ones.
    """

    def __init__(self, backend: Any, weights: Mapping[str, Any]) -> None:
        super().__init__()
        self._backend, self._weights = backend, weights
        self._paths: dict[str, str] = {}  # by the names under which the module has them
        for path, tensor in backend.flat(weights["parameters"]).items():
            learns = tensor.is_floating_point() or tensor.is_complex()
            self._parameters[self._name(path)] = nn.Parameter(tensor.clone(), requires_grad=learns)
        for path, tensor in backend.flat(weights["buffers"]).items():
            self._buffers[self._name(path)] = torch.as_tensor(tensor).clone()
        self._stale = self._followed = False
        self._versions = self._versions_now()

    def _name(self, path: str) -> str:
        """For the weight at a path: to torch a dot means a module inside, and weights that are one array have none."""
        name = path.replace(".", "/") or "weights"
        if name in self._paths:
            raise ConfigurationError(
                f"{type(self._backend).__name__}: the weights {self._paths[name]!r} and {path!r} would have one name, "
                f"{name!r}; rename one of them"
            )
        self._paths[name] = path
        return name

    @property
    def module(self) -> nn.Module:
        """Itself."""
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's outputs for torch tensors, in order or by name, as in evaluation."""
        return self._backend.outputs(self.seen(self._weights), named or inputs)

    def show(self, weights: Mapping[str, Any]) -> None:
        """There are new weights."""
        self._weights, self._stale = weights, True
        if self._followed:
            self.refresh()

    def seen(self, weights: Any) -> Any:
        """The weights given, or those that the module holds where they were written into."""
        if self._versions_now() == self._versions:
            return self._weights  # read already, perhaps: by a call of the model
        if self._stale:
            raise RuntimeError(
                "the model was written into through a tensor that is no longer up to date; take it from "
                "trainer.model.parameters() or buffers(), whose tensors are from then on"
            )
        read = {
            kind: self._backend.unflat(
                weights[kind],
                {self._paths[name]: each.detach() for name, each in tensors.items() if each is not None},
                kind,
            )
            for kind, tensors in (("parameters", self._parameters), ("buffers", self._buffers))
        }
        self._weights, self._versions = read, self._versions_now()
        return read

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the newest weights into the tensors, where they are not yet."""
        if not self._stale:
            return
        self._stale = False
        new = {**self._backend.flat(self._weights["buffers"]), **self._backend.flat(self._weights["parameters"])}
        for name, tensor in {**self._parameters, **self._buffers}.items():
            assert tensor is not None
            tensor.copy_(torch.as_tensor(new[self._paths[name]]))
        self._versions = self._versions_now()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """As every module's, and up to date from now on."""
        self._followed = True
        self.refresh()
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """As every module's, and up to date from now on."""
        self._followed = True
        self.refresh()
        return super().named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, Tensor):
            self._followed = True
            self.refresh()
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Mirror:
        """A module of its own with the same weights; it computes with the same backend."""
        self.refresh()
        # arrays of its own: a step may reuse the memory of those that it is given
        weights = self._backend.map(self._backend.copy_of, self._weights)
        copied = Mirror(self._backend, weights)
        copied.training = self.training
        memo[id(self)] = copied
        return copied

    def __getstate__(self) -> Any:
        raise TypeError(
            f"the model of a {type(self._backend).__name__} is no torch module that could be pickled; save its "
            "state_dict()"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As every module's, up to date."""
        self.refresh()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As every module's."""
        self.refresh()
        return super().load_state_dict(*args, **kwargs)

    def _versions_now(self) -> list[tuple[int, int]]:
        # writing through `.data`, or through numpy, leaves no trace; other data in a tensor's place does
        held = (*self._parameters.values(), *self._buffers.values())
        return [(each._version, each.data_ptr()) for each in held if each is not None]
