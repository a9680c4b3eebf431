"""A batch in parts of equal size, which are in a pipeline one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import TrainingBatch, Tree

__all__ = ["MicroBatches", "cut", "filled", "joined", "rows_of", "split", "tensors_in"]


class MicroBatches(TrainingBatch):
    """The batch that several smaller ones are together.

    >>> batches = [TrainingBatch(torch.ones(n, 4), torch.zeros(n), samples=n, weight=2 * n) for n in (2, 1)]
    >>> whole = MicroBatches(batches)
    >>> whole.samples, whole.size, whole.inputs.shape
    (3, 6, torch.Size([3, 4]))

    Args:
        batches: each prepared from some of the rows.
    """

    def __init__(self, batches: Sequence[TrainingBatch]) -> None:
        self.__dict__["batches"] = batches
        self.__dict__["samples"] = sum(each.samples for each in batches)
        self.__dict__["tokens"] = sum(each.tokens for each in batches)
        weighed = any(each.weight is not None for each in batches)
        self.__dict__["weight"] = sum(each.size for each in batches) if weighed else None

    batches: Sequence[TrainingBatch]

    @cached_property
    def inputs(self) -> Tree:  # made when they are read: a step does not need them
        return joined([each.inputs for each in self.batches])

    @cached_property
    def targets(self) -> Tree:
        return joined([each.targets for each in self.batches])


def split(value: Tree, parts: int) -> list[Tree]:
    """The rows of all tensors in equal parts; if they do not divide, the last part has fewer, or parts are left out.

    >>> [each.tolist() for each in split(torch.arange(5), 4)]
    [[0, 1], [2, 3], [4]]

    Args:
        value: a batch, whose tensors have as many rows as the first one, or are the same for all rows.
        parts: at most.

    Raises:
        ConfigurationError: it has no tensor with rows.
    """
    rows = rows_of(value)
    if rows is None:
        raise ConfigurationError(
            f"a batch of {type(value).__name__} cannot be split into rows for the pipeline; let the loader give "
            "tensors, in tuples, lists and dicts",
            "Topology",
            microbatches=parts,
        )
    size = -(-rows // parts) if rows else 1
    starts = range(0, rows, size) if rows else [0]
    return [_of_rows(value, rows, itemgetter(slice(at, at + size))) for at in starts]


def filled(value: Tree, rows: int, size: int) -> Tree:
    """The value with its last row repeated, so that each of its tensors that has so many rows has as many as `size`.

    >>> filled((torch.tensor([1, 2]), torch.tensor(5)), rows=2, size=3)
    (tensor([1, 2, 2]), tensor(5))
    """
    if rows == size:
        return value
    return _of_rows(value, rows, lambda each: torch.cat([each, each[-1:].expand(size - rows, *each.shape[1:])]))


def cut(value: Tree, size: int, rows: int) -> Tree:
    """The first rows of each tensor that has as many as `size`."""
    return value if rows == size else _of_rows(value, size, lambda each: each[:rows])


def joined(values: Sequence[Tree]) -> Tree:
    """The inverse of `split`.

    >>> joined([(torch.ones(2), 5), (torch.zeros(1), 5)])
    (tensor([1., 1., 0.]), 5)
    """
    found, rows = [tensors_in(each) for each in values], [rows_of(each) for each in values]
    whole = iter(
        torch.cat(each) if all(_has(one, number) for one, number in zip(each, rows, strict=True)) else each[0]
        for each in zip(*found, strict=True)
    )
    return tree_map_only(Tensor, lambda tensor: next(whole), values[0])


def rows_of(value: Tree) -> int | None:
    """The rows of the first tensor in the value that has any.

    >>> rows_of({"ids": torch.zeros(3, 2), "scale": torch.tensor(1.0)})
    3
    """
    return next((each.shape[0] for each in tensors_in(value) if each.ndim), None)


def tensors_in(value: Tree) -> list[Tensor]:
    """The tensors in a tree, in their order."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _of_rows(value: Tree, rows: int, convert: Callable[[Tensor], Tensor]) -> Tree:
    return tree_map_only(Tensor, lambda each: convert(each) if _has(each, rows) else each, value)


def _has(tensor: Tensor, rows: int | None) -> bool:
    return bool(tensor.ndim) and tensor.shape[0] == rows
