"""Pytrees of a backend's arrays: to torch tensors and back, taken apart by their paths, made anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pulsetrain.engine.errors import CheckpointError

__all__ = ["Trees", "check_paths"]


class Trees:
    """Trees are torch's pytrees, dicts, lists, tuples and named tuples, of torch tensors or numpy arrays."""

    device: Any = torch.device("cpu")

    def owns(self, leaf: Any) -> bool:
        """Whether it is an array that this backend computes with."""
        return isinstance(leaf, Tensor) and leaf.device.type == self.device.type

    def from_torch(self, tensor: Tensor) -> Any:
        """One torch tensor as an array of this backend."""
        return tensor

    def tensor_of(self, leaf: Any) -> Any:
        """One array as a torch tensor, without a copy where that is possible; what is no array as it is."""
        if isinstance(leaf, Tensor) or not hasattr(leaf, "__array__"):
            return leaf
        return torch.as_tensor(leaf.copy() if _is_awkward(leaf) else leaf)

    def to_torch(self, value: Any) -> Any:
        """Every array in it as a torch tensor, without a copy where that is possible."""
        return self.map(self.tensor_of, value)

    def map(self, function: Callable[..., Any], *trees: Any) -> Any:
        """`function` of the leaves of trees of one structure."""
        return pytree.tree_map(function, *trees)

    def to_native(self, value: Any) -> Any:
        """Every torch tensor in it as an array of this backend."""
        return pytree.tree_map_only(Tensor, self.from_torch, value)

    def copy_of(self, leaf: Any) -> Any:
        """An array in memory of its own; a number as it is."""
        return leaf.clone() if isinstance(leaf, Tensor) else copy(leaf)

    def flat(self, tree: Any) -> dict[str, Any]:
        """The leaves by their paths, "blocks/0/weight", arrays as torch tensors; for files, which know no trees."""
        return {path: self.tensor_of(leaf) for path, leaf in self.paths(tree).items()}

    def paths(self, tree: Any) -> dict[str, Any]:
        """The leaves by their paths."""
        pairs = pytree.tree_flatten_with_path(tree)[0]
        return {"/".join(_key(key) for key in path): leaf for path, leaf in pairs}

    def unflat(self, like: Any, saved: Mapping[str, Any], place: str) -> Any:
        """A tree like the given one of leaves by their paths.

        Raises:
            CheckpointError: a path or a shape is another; the message names the first.
        """
        check_paths(self.flat(like), saved, place)
        leaves = [self.leaf_from(saved[path], leaf) for path, leaf in self.paths(like).items()]
        return self.rebuilt(like, leaves)

    def leaf_from(self, saved: Any, like: Any) -> Any:
        """A saved leaf as one of this backend, of the kind that stands in its place now."""
        return self.from_torch(saved.to(self.device, copy=True)) if isinstance(saved, Tensor) else type(like)(saved)

    def rebuilt(self, like: Any, leaves: list[Any]) -> Any:
        """A tree like the given one with other leaves."""
        return pytree.tree_unflatten(leaves, pytree.tree_structure(like))


def check_paths(mine: Mapping[str, Any], saved: Mapping[str, Any], place: str) -> None:
    """Refuse leaves of other paths or shapes.

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


def _is_awkward(array: Any) -> bool:
    """Whether torch takes an array of numpy not at all, or with a warning: read backwards, or from a mapped file."""
    return isinstance(array, np.ndarray) and (not array.flags.writeable or any(step < 0 for step in array.strides))


def _key(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
