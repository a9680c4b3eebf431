"""Shards as a checkpoint has them: what each process writes of a tensor, and what it reads of one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pulsetrain.engine.checkpoint.pieces import Piece, StoredTensor, converted, whole
from pulsetrain.engine.distributed.shards import is_shard, local
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


def sharded_like(value: Any, like: Any) -> Any:
    """What this rank has of a tensor, as it has another one; nothing is communicated.

    Args:
        value: a whole tensor, or one that is stored in pieces; anything else, as a shard, is returned as it is.
        like: a shard of a tensor of the same shape, or a tensor without values, which is returned; for any other, the
            whole tensor is returned.
    """
    if isinstance(like, Tensor) and like.is_meta:
        return like
    if not is_shard(like) or not isinstance(value, (Tensor, StoredTensor)) or value.shape != like.shape:
        return whole(value)
    if is_shard(value):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    if isinstance(value, Tensor):
        return distribute_tensor(value.to(like.device), mesh, placements, src_data_rank=None)
    shape, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    block = value.block(offset, shape).to(like.device)
    return DTensor.from_local(block, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _piece(shard: Any) -> Piece:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    others = [each for each in shard.placements if type(each) not in (Shard, Replicate)]
    if others:
        raise CheckpointError(f"a tensor of shape {tuple(shard.shape)} is split up as {others[0]}, which is not saved")
    data, shape = shard.detach().to_local(), tuple(shard.shape)
    coordinates = shard.device_mesh.get_coordinate() or ()
    copies = [at for at, each in zip(coordinates, shard.placements, strict=True) if type(each) is Replicate]
    if any(copies):
        return Piece(data.new_empty((0,) * len(shape)), shape, (0,) * len(shape))
    offset = compute_local_shape_and_global_offset(shape, shard.device_mesh, shard.placements)[1]
    return Piece(data, shape, tuple(offset))
