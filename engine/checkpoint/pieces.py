"""Tensors of which each process holds a piece: what one process writes, and the whole or a part of it read again."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import add, gt, is_
from typing import IO, Any

import torch
from torch import Tensor

from pulsetrain.engine.blocks import Block
from pulsetrain.engine.checkpoint.safetensors_file import Entry, read_block
from pulsetrain.engine.errors import CheckpointError

__all__ = ["Piece", "StoredPiece", "StoredTensor", "check_cover", "converted", "whole"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one process writes of a tensor that several processes hold.

    Args:
        data: a part of the tensor; without items where other processes write all of it.
        shape: of the whole tensor.
        offset: the index of the first item, if the data is one block of the tensor.
        blocks: of the data, if it is made of several.
    """

    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A block of a tensor in a file.

    Args:
        open: opens the file.
        entry: the array there that has it.
        block: where it is, in the whole tensor and in the array; by default, it is all of the array.
    """

    open: Callable[[], IO[bytes]]
    entry: Entry
    block: Block

    @classmethod
    def of(cls, open: Callable[[], IO[bytes]], entry: Entry, offset: Sequence[int]) -> StoredPiece:
        """All of an array, which begins at an index of the whole tensor."""
        return cls(open, entry, Block(tuple(offset), (0,) * len(entry.shape), tuple(entry.shape)))


class StoredTensor:
    """A tensor whose pieces are in files; it is not read before it is asked for, and then not more of it than needed.

    Args:
        name: for errors.
        shape: of the whole tensor.
        dtype: of all pieces.
        pieces: in any order.

    Raises:
        CheckpointError: they do not cover it, or overlap.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype

    def __init__(self, name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[StoredPiece] = ()) -> None:
        self.name, self.shape, self.dtype, self._pieces = name, torch.Size(shape), dtype, pieces
        check_cover(name, self.shape, dtype, pieces)

    def whole(self) -> Tensor:
        """All of it, on the CPU."""
        return self.block((0,) * len(self.shape), self.shape)

    def block(self, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The items from an index on, on the CPU."""
        made = torch.empty(tuple(shape), dtype=self.dtype)
        for piece in self._pieces:
            its, start, extents = piece.block
            begins = list(map(max, offset, its))
            ends = [min(a + size, b + extent) for a, size, b, extent in zip(offset, shape, its, extents, strict=True)]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            moved = [
                at - first for at, first in zip(start, its, strict=True)
            ]  # from the tensor's indices to the array's
            sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
            inside = tuple(slice(b - at, e - at) for b, e, at in zip(begins, ends, offset, strict=True))
            with piece.open() as file:
                block = read_block(file, piece.entry, list(map(add, begins, moved)), sizes)
            if block.shape == made.shape:
                return block  # rather than a second copy
            made[inside] = block
        return made


def check_cover(name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[StoredPiece]) -> None:
    """Check that pieces are a tensor: each of its items is in one of them.

    Raises:
        CheckpointError: it is in none, or in two; or a piece is not of this tensor.
    """
    blocks = []
    for piece in pieces:
        each, extents = piece.block, piece.entry.shape
        if not math.prod(each.shape):
            continue
        ends = [at + extent for at, extent in zip(each.offset, each.shape, strict=False)]
        inside = len(each.start) == len(extents) and all(
            at >= 0 and at + extent <= size for at, extent, size in zip(each.start, each.shape, extents, strict=True)
        )
        fits = inside and len(extents) == len(each.offset) == len(shape) and piece.entry.dtype == dtype
        if not fits or min(each.offset, default=0) < 0 or any(map(gt, ends, shape)):
            raise CheckpointError(
                f"{name}: a piece of shape {each.shape} at {each.offset}, {piece.entry.dtype}, is not of this "
                f"tensor of shape {tuple(shape)}, {dtype}"
            )
        blocks.append(each)
    items = sum(math.prod(each.shape) for each in blocks)
    if items != math.prod(shape):
        raise CheckpointError(f"{name}: {items} of its {math.prod(shape)} items are in the files")
    blocks.sort()
    by_rows = all(each.shape[1:] == tuple(shape[1:]) for each in blocks)
    for one, other in pairwise(blocks) if by_rows else combinations(blocks, 2):
        both = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
        if all(max(a, b) < min(a + height, b + width) for a, height, b, width in both):
            raise CheckpointError(f"{name}: two pieces overlap, at {one.offset} and {other.offset}")


def whole(value: Any) -> Any:
    """The value with every stored tensor read, in dicts, lists and tuples."""
    return converted(value, lambda leaf: leaf.whole() if type(leaf) is StoredTensor else leaf)


def converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """The value with each leaf of its dicts, lists and tuples converted; the same objects where nothing changes.

    >>> converted({"rates": [1, 2]}, lambda leaf: -leaf)
    {'rates': [-1, -2]}
    """
    if isinstance(value, Mapping):
        items = {key: converted(each, convert) for key, each in value.items()}
        if all(items[key] is each for key, each in value.items()):
            return value
        if type(value) is not OrderedDict:
            return items
        ordered = OrderedDict(items)
        vars(ordered).update(vars(value))  # a module's state_dict() keeps its versions in an attribute
        return ordered
    if type(value) in (list, tuple):
        # floats are kept without a call: a history has a million of them
        parts = [each if type(each) is float else converted(each, convert) for each in value]
        return value if all(map(is_, parts, value)) else type(value)(parts)
    return convert(value)
