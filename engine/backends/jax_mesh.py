"""Where the arrays of a JaxBackend are: on one device, or on a mesh of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.backends.jax_sharding import ShardingRules, Spec
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import Tree

__all__ = ["DeviceMesh", "OneDevice", "leaf_paths"]


class OneDevice:
    """All arrays are on one device.

    Args:
        jax: the package.
        device: one of its devices.
    """

    first: Any
    devices: set[Any]

    def __init__(self, jax: ModuleType, device: Any) -> None:
        self._jax = jax
        self.first, self.devices = device, {device}
        self.default: Any = device  # a device or a sharding, for `jax.device_put`

    def put(self, tree: Tree) -> Tree:
        """The tree's arrays where arrays are that are not split."""
        return self._jax.device_put(tree, self.default)

    def put_weights(self, weights: Tree, annotated: Callable[[], Mapping[str, Sequence[object]]]) -> Tree:
        """A model's parameters and buffers, before everything else.

        Args:
            annotated: returns what the model's metadata says of its parameters, by their paths.
        """
        return self.put(weights)

    def put_optimizer(self, state: Tree) -> Tree:
        """The optimizer's state for these parameters."""
        return self.put(state)

    def put_batch(self, arrays: Tree, first: bool = False) -> Tree:
        """Inputs and targets; a program converts those of the host itself.

        Args:
            first: of a run, and so not the smaller batch at the end of a pass.
        """
        return arrays

    def put_like(self, array: Array, like: Array) -> Array:
        """An array where another one is."""
        return self._jax.device_put(array, self.default)

    def like_parameters(self, gradients: Tree) -> Tree:
        """Gradients, traced, split as the parameters are."""
        return gradients

    def on_one_device(self, array: Array) -> Array:
        """The array on one device, whole."""
        return array

    def pinned(self, kind: str) -> dict[str, Tree]:
        """Where the results of a program of this kind are, as options of `jax.jit`."""
        return {}

    def describe(self) -> dict[str, object]:
        """What results depend on, for `environment`."""
        return {}


class DeviceMesh(OneDevice):
    """Batches are split over the axis "data", parameters and what belongs to them by rules, the rest is replicated.

    The results of each program are pinned to where its arguments were: otherwise XLA would choose for them, and the
    next step would be compiled again for arguments that are somewhere else.

    Args:
        jax: the package.
        devices: as many as the mesh has.
        rules: its axes, and how parameters are split over them.
    """

    first: Any
    devices: set[Any]
    default: Any

    def __init__(self, jax: ModuleType, devices: Sequence[Any], rules: ShardingRules) -> None:
        super().__init__(jax, devices[0])
        axes = rules.axes
        automatic = (jax.sharding.AxisType.Auto,) * len(axes)  # XLA splits what is between parameters and batch
        self._mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), automatic, devices=devices)
        self._rules, self._data = rules, axes.get("data", 1)
        self.first, self.devices = self._mesh.devices.flat[0], set(self._mesh.devices.flat)
        self.default = self._split(())
        self._rows = self._split((("data",),)) if "data" in axes else self.default
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the parameters, by their paths
        self._shardings: dict[str, Any] = {}  # likewise
        self._parameters: Tree = None  # the same as a tree
        self._optimizer: Tree = None

    def _split(self, spec: Spec) -> Any:
        names = [each if len(each) > 1 else each[0] if each else None for each in spec]
        return self._jax.sharding.NamedSharding(self._mesh, self._jax.sharding.PartitionSpec(*names))

    def put_weights(self, weights: Tree, annotated: Callable[[], Mapping[str, Sequence[object]]]) -> Tree:
        parameters = weights["parameters"]
        self._shapes = {path: np.shape(leaf) for path, leaf in leaf_paths(self._jax, parameters).items()}
        specs = self._rules.specs(self._shapes, annotated())
        self._shardings = {path: self._split(spec) for path, spec in specs.items()}
        self._parameters = self._rebuilt(parameters, list(self._shardings.values()))
        return self._jax.device_put(weights, {"parameters": self._parameters, "buffers": self.default})

    def put_optimizer(self, state: Tree) -> Tree:
        found = [self._like_parameter(path, np.shape(leaf)) for path, leaf in leaf_paths(self._jax, state).items()]
        self._optimizer = self._rebuilt(state, found)
        return self._jax.device_put(state, self._optimizer)

    def _rebuilt(self, like: Tree, leaves: list[Any]) -> Tree:
        return self._jax.tree.unflatten(self._jax.tree.structure(like), leaves)

    def _like_parameter(self, path: str, shape: tuple[int, ...]) -> Any:
        """The sharding of the parameter to which a part of the optimizer's state belongs.

        Its path ends with the parameter's, as in "0/mu/blocks/0/kernel", and it has its shape. A part of another shape,
        such as a sum over rows, is replicated.
        """
        keys = path.split("/")
        for start in range(len(keys) + 1):
            parameter = "/".join(keys[start:])
            if self._shapes.get(parameter) == shape:
                return self._shardings[parameter]
        return self.default

    def put_batch(self, arrays: Tree, first: bool = False) -> Tree:
        lengths = [len(leaf) for leaf in self._jax.tree.leaves(arrays) if np.ndim(leaf)]
        rows = [each for each in lengths if each != 1] or lengths  # what has one row belongs to all of them
        unequal = [each for each in rows if each % self._data]
        if unequal and first:
            raise ConfigurationError(
                f"the first batch has {unequal[0]} rows, which do not divide by data={self._data}; choose a batch size "
                f"that is a multiple of {self._data}",
                "JaxBackend",
                mesh=self._rules.axes,
            )

        def put(leaf: Array) -> Array:
            if not np.ndim(leaf):
                return leaf
            return self._jax.device_put(leaf, self.default if unequal or len(leaf) % self._data else self._rows)

        return self._jax.tree.map(put, arrays)

    def put_like(self, array: Array, like: Array) -> Array:
        is_here = isinstance(like, self._jax.Array) and like.devices() == self.devices
        return self._jax.device_put(array, like.sharding if is_here else self.default)

    def like_parameters(self, gradients: Tree) -> Tree:
        return self._jax.lax.with_sharding_constraint(gradients, self._parameters)

    def on_one_device(self, array: Array) -> Array:
        return array.addressable_data(0) if array.is_fully_replicated else self._jax.device_put(array, self.first)

    def pinned(self, kind: str) -> dict[str, Tree]:
        one, parameters, optimizer = self.default, self._parameters, self._optimizer
        results = {
            "train": ({"parameters": parameters, "buffers": one}, optimizer, one, one, one),
            "gradients": (one, parameters, one, one),
            "finish": (parameters, one),
            "apply": (parameters, optimizer),
        }
        return {"out_shardings": results[kind]} if kind in results else {}  # nothing follows an evaluation

    def describe(self) -> dict[str, object]:
        axes = ", ".join(f"{axis}={size}" for axis, size in self._rules.axes.items())
        return {"jax_mesh": axes, "jax_sharding": str(self._rules.sharding)}


def leaf_paths(jax: ModuleType, tree: Tree, is_leaf: Callable[[object], bool] | None = None) -> dict[str, Array]:
    """The leaves of a tree by their paths, as "blocks/0/kernel"."""
    keystr = jax.tree_util.keystr
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
