"""Shards as a checkpoint has them: what each process writes of a tensor, and what it reads of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.checkpoint.pieces import Piece, StoredTensor, converted, whole
from pulsetrain.engine.distributed.placements import held_here, shard_of
from pulsetrain.engine.distributed.shards import is_shard, local
from pulsetrain.engine.distributed.topology import TENSOR

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
    """This process's part of a tensor that is split as another one is; nothing is communicated.

    Args:
        value: a whole tensor, or one that is stored in pieces; anything else, such as a shard, is returned as it is.
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
    split: Any = like
    return shard_of(value, split.device_mesh, split.placements, split.stride(), device or split.device)


def _piece(shard: Any) -> Piece:
    from torch.distributed.tensor import Replicate

    mesh, data, shape = shard.device_mesh, shard.detach().to_local(), tuple(shard.shape)
    mine = held_here(shape, mesh, shard.placements)
    copies = [at for at, each in zip(mesh.get_coordinate(), shard.placements, strict=True) if type(each) is Replicate]
    every = mesh._get_root_mesh()  # noqa: SLF001  # has no public name
    if mesh != every and TENSOR not in mesh.mesh_dim_names:  # not of a layer that several processes compute together
        copies.append(every.get_local_rank(TENSOR) if TENSOR in every.mesh_dim_names else 0)
    if any(copies):
        return Piece(data.new_empty((0,) * len(shape)), shape, (0,) * len(shape))
    if len(mine.blocks) == 1:
        return Piece(data, shape, mine.blocks[0].offset)
    return Piece(data, shape, (0,) * len(shape), mine.blocks)
