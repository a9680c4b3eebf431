"""Shards as a checkpoint has them: what each process writes of a tensor, and what it reads of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.blocks import Held, held_blocks
from pulsetrain.engine.checkpoint.pieces import Piece, StoredTensor, converted, whole
from pulsetrain.engine.distributed.shards import is_shard, local
from pulsetrain.engine.distributed.topology import TENSOR
from pulsetrain.engine.errors import CheckpointError

__all__ = ["held", "in_pieces", "sharded_like"]


def in_pieces(value: Any) -> Any:
    """The value with the piece of each shard that this process saves in its place; nothing is communicated.

    Of several copies of a shard, one process saves it; the others get a piece without items.

    Raises:
        CheckpointError: a tensor is split up in a way that is not along its dimensions.
    """
    return converted(value, lambda leaf: _piece(leaf) if is_shard(leaf) else leaf)


def held(value: Any) -> Any:
    """The value with what this process has of each shard in its place; nothing is communicated."""
    return converted(value, local)


def sharded_like(value: Any, like: Any, device: torch.device | None = None) -> Any:
    """What this rank has of a tensor, as it has another one; nothing is communicated.

    Args:
        value: a whole tensor, or one that is stored in pieces; anything else, as a shard, is returned as it is.
        like: a shard of a tensor of the same shape, or a tensor without values, which is returned unless a device is
            given; for any other, the whole tensor is returned.
        device: where to make the shard; by default, where the other one is.
    """
    if device is None and isinstance(like, Tensor) and like.is_meta:
        return like
    if not is_shard(like) or not isinstance(value, (Tensor, StoredTensor)) or value.shape != like.shape:
        return whole(value)
    if is_shard(value):
        return value
    from torch.distributed.tensor import DTensor

    mine, device = _held(like), device or like.device

    def block(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if isinstance(value, StoredTensor):
            return value.block(offset, shape).to(device)
        part = value[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
        return part.to(device, copy=True, memory_format=torch.contiguous_format)

    if len(mine.blocks) == 1:
        made = block(mine.blocks[0].offset, mine.shape)
    else:
        made = torch.empty(mine.shape, dtype=value.dtype, device=device)
        for offset, start, shape in mine.blocks:
            made[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))] = block(offset, shape)
    return DTensor.from_local(
        made,
        like.device_mesh,  # type: ignore[attr-defined]  # of a DTensor, as the next line
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _held(shard: Any) -> Held:
    mesh = shard.device_mesh
    try:
        return held_blocks(shard.shape, mesh.shape, mesh.get_coordinate() or (), shard.placements)
    except ValueError as error:
        raise CheckpointError(f"a tensor of shape {tuple(shard.shape)} is not saved: {error}") from None


def _piece(shard: Any) -> Piece:
    from torch.distributed.tensor import Replicate

    mine, data, shape = _held(shard), shard.detach().to_local(), tuple(shard.shape)
    mesh = shard.device_mesh
    copies = [at for at, each in zip(mesh.get_coordinate(), shard.placements, strict=True) if type(each) is Replicate]
    every = mesh._get_root_mesh()  # noqa: SLF001  # has no public name
    if mesh != every and TENSOR not in mesh.mesh_dim_names:  # not of a layer that several processes compute together
        copies.append(every.get_local_rank(TENSOR) if TENSOR in every.mesh_dim_names else 0)
    if any(copies):
        return Piece(data.new_empty((0,) * len(shape)), shape, (0,) * len(shape))
    if len(mine.blocks) == 1:
        return Piece(data, shape, mine.blocks[0].offset)
    return Piece(data, shape, (0,) * len(shape), mine.blocks)
