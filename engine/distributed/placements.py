"""What this process holds of a tensor that is split over a mesh of processes, and how it is cut out of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pulsetrain.engine.blocks import Held, held_blocks
from pulsetrain.engine.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["Stored", "held_here", "shard_of"]


class Stored(Protocol):
    """A tensor in files, such as a `StoredTensor`, of which only what is asked for is read."""

    shape: torch.Size
    dtype: torch.dtype

    def block(self, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The items from an index on, on the CPU."""


def held_here(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Any]) -> Held:
    """The parts of a tensor of this shape that this process holds.

    Raises:
        CheckpointError: the tensor is split up in a way that is not along its dimensions.
    """
    try:
        return held_blocks(shape, mesh.shape, mesh.get_coordinate() or (), placements)
    except ValueError as error:
        raise CheckpointError(f"a tensor of shape {tuple(shape)} is not saved: {error}") from None


def shard_of(
    whole: Tensor | Stored,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    stride: tuple[int, ...],
    device: torch.device,
) -> DTensor:
    """This process's shard of a whole tensor, in memory of its own; nothing is communicated.

    Args:
        whole: a tensor, or one in files, of which only what the process holds is read.
        mesh: over which it is split.
        placements: one for each dimension of the mesh, see `held_blocks`.
        stride: of the whole tensor, in items.
        device: where to make the shard.

    Raises:
        CheckpointError: a placement is not along a dimension of the tensor.
    """
    from torch.distributed.tensor import DTensor

    mine = held_here(whole.shape, mesh, placements)

    def block(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if not isinstance(whole, Tensor):
            return whole.block(offset, shape).to(device)
        part = whole[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
        return part.to(device, copy=True, memory_format=torch.contiguous_format)

    if len(mine.blocks) == 1:
        made = block(mine.blocks[0].offset, mine.shape)
    else:
        made = torch.empty(mine.shape, dtype=whole.dtype, device=device)
        for offset, start, shape in mine.blocks:
            made[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))] = block(offset, shape)
    return DTensor.from_local(made, mesh, placements, run_check=False, shape=whole.shape, stride=stride)
