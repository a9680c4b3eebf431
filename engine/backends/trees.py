"""Pytrees of a backend's arrays: to torch tensors and back, to leaves by their paths and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.step.protocols import Tree

__all__ = ["LaterMetrics", "Trees", "check_paths"]


class LaterMetrics(Mapping[str, Tensor]):
    """The metrics of a step that is still being computed, as torch tensors: reading one waits for the step.

    Args:
        to_torch: converts one.
        arrays: the metrics as arrays of the backend.

    >>> metrics = LaterMetrics(torch.from_numpy, {"loss": np.ones(1)})
    >>> metrics["loss"], metrics["loss"] is metrics["loss"]
    (tensor([1.], dtype=torch.float64), True)
    """

    def __init__(self, to_torch: Callable[[Array], Tensor], arrays: Mapping[str, Array]) -> None:
        self._to_torch, self._arrays = to_torch, arrays
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = self._to_torch(self._arrays[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class Trees:
    """Trees are torch's pytrees, dicts, lists, tuples and named tuples, of torch tensors or numpy arrays.

    >>> trees = Trees()
    >>> tree = {"blocks": [torch.zeros(2)], "rate": 0.1}
    >>> trees.flat(tree)
    {'blocks/0': tensor([0., 0.]), 'rate': 0.1}
    >>> trees.unflat(tree, {"blocks/0": torch.ones(2), "rate": 0.2}, "example")
    {'blocks': [tensor([1., 1.])], 'rate': 0.2}
    """

    device: torch.device = torch.device("cpu")

    def owns(self, leaf: object) -> bool:
        """Whether the leaf is an array that this backend computes with."""
        return isinstance(leaf, Tensor) and leaf.device.type == self.device.type

    def from_torch(self, tensor: Tensor) -> Array:
        """One torch tensor as an array of this backend."""
        return tensor

    def tensor_of(self, leaf: Array) -> Array:
        """One array as a torch tensor, without a copy where possible; other leaves unchanged."""
        if isinstance(leaf, Tensor) or not hasattr(leaf, "__array__"):
            return leaf
        return torch.as_tensor(leaf.copy() if _is_awkward(leaf) else leaf)

    def to_torch(self, value: Tree) -> Tree:
        """The value with every array as a torch tensor, without a copy where possible."""
        return self.map(self.tensor_of, value)

    def map(self, function: Callable[..., object], *trees: Tree) -> Tree:
        """Apply a function to the leaves of trees of one structure."""
        return pytree.tree_map(function, *trees)

    def to_native(self, value: Tree) -> Tree:
        """The value with every torch tensor as an array of this backend."""
        return self.map(lambda leaf: self.from_torch(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def copy_of(self, leaf: Array) -> Array:
        """An array in memory of its own; a number unchanged."""
        return leaf.clone() if isinstance(leaf, Tensor) else copy(leaf)

    def flat(self, tree: Tree) -> dict[str, Array]:
        """The leaves by their paths, "blocks/0/weight", arrays as torch tensors; for files, which hold no trees."""
        return {path: self.tensor_of(leaf) for path, leaf in self.paths(tree).items()}

    def tensors(self, tree: Tree) -> list[Array]:
        """The values of `flat`, without the paths, which take longer than the leaves."""
        return [self.tensor_of(leaf) for leaf in pytree.tree_leaves(tree)]

    def paths(self, tree: Tree) -> dict[str, Array]:
        """The leaves by their paths."""
        pairs = pytree.tree_flatten_with_path(tree)[0]
        return {"/".join(_key(key) for key in path): leaf for path, leaf in pairs}

    def unflat(self, like: Tree, saved: Mapping[str, object], place: str) -> Tree:
        """A tree like the given one from leaves by their paths.

        Raises:
            CheckpointError: a path or a shape differs; the message names the first.
        """
        check_paths(self.flat(like), saved, place)
        leaves = [self.leaf_from(saved[path], leaf) for path, leaf in self.paths(like).items()]
        return self.rebuilt(like, leaves)

    def leaf_from(self, saved: Array, like: Array) -> Array:
        """A saved leaf as one of this backend, of the type of `like`."""
        return self.from_torch(saved.to(self.device, copy=True)) if isinstance(saved, Tensor) else type(like)(saved)

    def rebuilt(self, like: Tree, leaves: list[Array]) -> Tree:
        """A tree like the given one with other leaves."""
        return pytree.tree_unflatten(leaves, pytree.tree_structure(like))


def check_paths(mine: Mapping[str, object], saved: Mapping[str, object], place: str) -> None:
    """Raise if the saved leaves have other paths or shapes.

    Raises:
        CheckpointError: the message names the first.
    """
    for path in (*mine, *(path for path in saved if path not in mine)):
        if path not in saved or path not in mine:
            where = "in the checkpoint" if path in mine else "here"
            raise CheckpointError(f"{place}: {path} is not {where}; use the model and optimizer that it was made with")
        shapes = [tuple(getattr(each[path], "shape", ())) for each in (saved, mine)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(f"{place}: {path} is {shapes[0]} in the checkpoint, {shapes[1]} here")


def _is_awkward(array: object) -> bool:
    """Whether torch refuses a numpy array or warns of it: reversed strides, or not writeable."""
    return isinstance(array, np.ndarray) and (not array.flags.writeable or any(step < 0 for step in array.strides))


def _key(key: object) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
