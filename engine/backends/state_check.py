"""Whether states that are values are of the model, the optimizer and the device of their backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from torch import Tensor

from pulsetrain.engine.arrays import Array, is_array
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import ModelState, Optimizer, Tree

__all__ = ["StateCheck"]

_Shapes: TypeAlias = dict[str, tuple[int, ...]]


class _Backend(Protocol):
    optimizer: Optimizer

    def owns(self, leaf: object) -> bool: ...
    def paths(self, tree: Tree) -> dict[str, Array]: ...


class StateCheck:
    """Checks the states of a backend, whose model and optimizer are those of the last `init`.

    Args:
        backend: computes with them.
    """

    def __init__(self, backend: _Backend) -> None:
        self._backend, self._place = backend, type(backend).__name__
        self._paths: set[str] = set()  # of the model's weights
        self._expected: dict[tuple[tuple[str, tuple[int, ...]], ...], _Shapes] = {}  # by the shapes of the weights

    def begin(self, leaves: Mapping[str, Array]) -> None:
        """Take the weights of a model, by their paths, which the states have to have from now on.

        Raises:
            TypeError: the backend does not compute with one of them.
        """
        for path, leaf in leaves.items():
            if not self._backend.owns(leaf):
                raise TypeError(
                    f"{self._place}.split(): weights[{path!r}] is {_kind(leaf)}; return torch tensors on the backend's "
                    "device or numpy arrays, or write owns(leaf), from_torch(tensor) and tensor_of(array)"
                )
        self._paths = set(leaves)

    def check(self, state: ModelState) -> None:
        """Raise if a step could not be computed from the state.

        Raises:
            TypeError: an array is of another backend.
            ConfigurationError: the optimizer's state is not of these weights.
        """
        place, backend = self._place, self._backend
        if not isinstance(state, ModelState) or not isinstance(state.weights, Mapping):
            raise TypeError(f"{place}: {type(state).__name__} is not a ModelState of values; make one by init()")
        lacking = [name for name in ("parameters", "buffers") if name not in state.weights]
        if lacking:
            raise TypeError(f"{place}: the state's weights lack {' and '.join(lacking)}; see init()")
        if not hasattr(backend, "optimizer"):
            raise ConfigurationError(f"{place}: has neither model nor optimizer yet; call init() first")
        weights, optimizer = backend.paths(state.weights), backend.paths(state.optimizer)
        for path, leaf in weights.items():
            if not backend.owns(leaf):
                raise TypeError(
                    f"{place}: weights[{path!r}] is {_kind(leaf)}, of another backend or device; make "
                    "the state by this backend's init()"
                )
        if weights.keys() != self._paths:
            path = min(weights.keys() ^ self._paths)
            where = "not in the state" if path in self._paths else "not in the model"
            raise ConfigurationError(f"{place}: weights[{path!r}] is {where}; make the state by init() of this model")
        for path, leaf in optimizer.items():
            if is_array(leaf) and leaf.ndim and not backend.owns(leaf):
                raise TypeError(
                    f"{place}: the optimizer's {path!r} is {_kind(leaf)}, of another backend or device; "
                    "make it by optimizer.init(parameters)"
                )
        key = tuple(_shapes(weights).items())
        if key not in self._expected:
            self._expected[key] = _shapes(backend.paths(backend.optimizer.init(state.weights["parameters"])))
        expected, found = self._expected[key], _shapes(optimizer)
        if found != expected:
            path = next(path for path in (*expected, *found) if expected.get(path) != found.get(path))
            here, there = (f"of shape {each[path]}" if path in each else "missing" for each in (found, expected))
            raise ConfigurationError(
                f"{place}: the optimizer's state does not fit the weights: {path} is {here}, and for "
                f"these weights it is {there}; make a new one by optimizer.init(parameters)"
            )


def _shapes(leaves: Mapping[str, Array]) -> _Shapes:
    return {path: tuple(getattr(leaf, "shape", ())) for path, leaf in leaves.items()}


def _kind(leaf: object) -> str:
    module = type(leaf).__module__.split(".")[0]
    return f"{module}.{type(leaf).__name__}" + (f" on {leaf.device}" if isinstance(leaf, Tensor) else "")
