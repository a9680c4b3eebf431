"""Sums over virtual ranks in one fixed binary tree: the same bits, however many processes compute the leaves.

A sum of floats depends on the order in which they are added. With four virtual ranks it is always (0 + 1) + (2 + 3):

    processes      each adds         then, in every process
    1              (0+1) + (2+3)
    2              0+1    2+3        (0+1) + (2+3)
    4              0  1  2  3        (0+1) + (2+3)

The numbers of virtual ranks and of processes are powers of two, so that what a process adds is a part of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor

from pulsetrain.engine.distributed.ranks import ranks

__all__ = ["TreeSum", "add_over_processes", "gathered"]

_BUCKET = 1 << 25  # bytes of a process that are exchanged at a time: each process holds as many of every other one


class TreeSum:
    """Adds lists of tensors as the leaves of a binary tree, from left to right; a power of two of them.

    It holds one partial sum for each level of the tree. The first tensors of each pair are added to in place.

    >>> tree = TreeSum()
    >>> for value in (1e8, 1.0, -1e8, 3.0):
    ...     tree.add([torch.tensor(value)])
    >>> tree.total()  # (1e8 + 1) + (-1e8 + 3) in float32; from left to right, it would be 3
    [tensor(0.)]
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor]]] = []  # with the level of each, which decreases

    def add(self, leaf: list[Tensor]) -> None:
        """Add the next leaf; all have tensors of the same shapes and types."""
        level = 0
        while self._sums and self._sums[-1][0] == level:
            left = self._sums.pop()[1]
            torch._foreach_add_(left, leaf)
            level, leaf = level + 1, left
        self._sums.append((level, leaf))

    def total(self) -> list[Tensor]:
        """The sum over all leaves."""
        ((_, found),) = self._sums
        return found


def gathered(values: Tensor) -> list[Tensor]:
    """The values of each process, in the order of their ranks; all of them call this with the same shape."""
    count = ranks().world_size
    if count == 1:
        return [values]
    found = [torch.empty_like(values) for _ in range(count)]
    torch.distributed.all_gather(found, values)
    return found


def add_over_processes(tensors: Sequence[Tensor]) -> None:
    """Add these tensors to those of the other processes, in place and by the tree; all of them call this.

    Args:
        tensors: a process's part of the sum, of the same shapes and types in each.
    """
    if ranks().world_size == 1:
        return
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:
        groups.setdefault((each.dtype, each.device), []).append(each)
    for group in groups.values():
        flat = torch.cat([each.reshape(-1) for each in group])
        for part in flat.split(max(_BUCKET // flat.itemsize, 1)):
            tree = TreeSum()
            for each in gathered(part):
                tree.add([each])
            part.copy_(tree.total()[0])
        for each, part in zip(group, flat.split([each.numel() for each in group]), strict=True):
            each.copy_(part.view_as(each))
