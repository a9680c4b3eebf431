"""Torch modules that show weights that are values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.backend import ValueBackend
from pulsetrain.engine.step.protocols import ModelState, Tree

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["ArraysView", "TensorsView", "reading_once", "version_of"]


class TensorsView:
    """The user's module, whose tensors share the memory of the newest weights: nothing is copied.

    Args:
        module: what the weights were taken from.
        weights_of: takes them.
    """

    module: Module

    def __init__(self, module: nn.Module, weights_of: Callable[[nn.Module], dict[str, dict[str, Tensor]]]) -> None:
        self.module, self._weights_of = module, weights_of

    def show(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Let the module's tensors, which stay the same objects, share the memory of the new ones."""
        new = {**weights["buffers"], **weights["parameters"]}
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            tensor.data = new[name]

    def seen(self, weights: Tree) -> Tree:
        """What the module holds."""
        return self._weights_of(self.module)


class ArraysView(nn.Module):
    """Arrays of another library as a module of torch tensors named by their paths, "blocks/0/kernel", dots as "/".

    The tensors are copies. They are made when the state is read after it has changed and, once the parameters or
    buffers have been read, at each change, since their reader may look again; not if they were read in `reading_once`.
    What is written into them takes effect in the next step.

    Args:
        backend: made the weights.
        weights: the first ones.
    """

    def __init__(self, backend: ValueBackend, weights: Tree) -> None:
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
        """The name of the weight at a path: torch reads a dot as a submodule, and a single array has no path."""
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

    def forward(self, *inputs: Tree, **named: Tree) -> Tree:
        """The model's outputs for torch tensors, in order or by name, as in evaluation."""
        return self._backend.outputs(self.seen(self._weights), named or inputs)

    def show(self, weights: Tree) -> None:
        """Show new weights."""
        self._weights, self._stale = weights, True
        if self._followed:
            self.refresh()

    def seen(self, weights: Tree) -> Tree:
        """The weights given, or those that the module holds if they were written into."""
        if self._versions_now() == self._versions:
            return self._weights  # which a call of the model may have read already
        if self._stale:
            raise RuntimeError(
                "the model was written into through a tensor that is no longer up to date; read it from "
                "trainer.model.parameters() or buffers(), whose tensors are kept up to date from then on"
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
        """Copy the newest weights into the tensors, unless they are there already."""
        if not self._stale:
            return
        self._stale = False
        new = {**self._backend.flat(self._weights["buffers"]), **self._backend.flat(self._weights["parameters"])}
        for name, tensor in {**self._parameters, **self._buffers}.items():
            assert tensor is not None
            tensor.copy_(torch.as_tensor(new[self._paths[name]]))
        self._versions = self._versions_now()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, and kept up to date from now on."""
        self._followed = True
        self.refresh()
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, and kept up to date from now on."""
        self._followed = True
        self.refresh()
        return super().named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, Tensor):
            self._followed = True
            self.refresh()
        return value

    def __deepcopy__(self, memo: dict[int, object]) -> ArraysView:
        """An independent module with the same weights, which computes with the same backend."""
        self.refresh()
        # a step may reuse the memory of the weights that it is given
        copied = ArraysView(self._backend, self._backend.copied(ModelState(self._weights, ())).weights)
        copied.training = self.training
        memo[id(self)] = copied
        return copied

    def __getstate__(self) -> Any:
        raise TypeError(
            f"the model of a {type(self._backend).__name__} cannot be pickled as a torch module; save its state_dict()"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, up to date."""
        self.refresh()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module."""
        self.refresh()
        return super().load_state_dict(*args, **kwargs)

    def _versions_now(self) -> list[int]:
        # writing through `.data` or numpy leaves no trace; putting another tensor there does
        held = [each for each in (*self._parameters.values(), *self._buffers.values()) if each is not None]
        return [*map(version_of, held), *map(Tensor.data_ptr, held)]


@contextmanager
def reading_once(module: nn.Module) -> Iterator[None]:
    """Within it, reading the tensors of a module does not ask for them to be kept up to date: they are not kept.

    An ArraysView would copy its weights after every step from then on; any other module is left alone.
    """
    followed = isinstance(module, ArraysView) and module._followed  # noqa: SLF001
    try:
        yield
    finally:
        if isinstance(module, ArraysView):
            module._followed = followed  # noqa: SLF001


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written into."""
    return tensor._version  # noqa: SLF001  # autograd's own counter; torch has no public way to read it
