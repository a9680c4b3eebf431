"""Processes that compute one copy of the model together have to get the same batches."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["check_batches"]


def check_batches(batch: object, group: ProcessGroup, argument: str, place: str = "Topology") -> None:
    """Refuse different batches in the processes of one copy of the model; they all call this. It waits for the device.

    Args:
        batch: a tree, whose tensors are compared bit for bit.
        group: the processes.
        argument: by which the user has asked for as many of them, for the message.
        place: the class that has this argument.

    Raises:
        ConfigurationError: a process has another batch than the first one; the message names its rank.
    """
    mine = [_digest(each) for each in tree_leaves(batch) if isinstance(each, Tensor)]
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, mine, group=group)
    different = [at for at, each in enumerate(everyone) if each != everyone[0]]
    if different:
        rank, first = (torch.distributed.get_global_rank(group, at) for at in (different[0], 0))
        raise ConfigurationError(
            "the processes of one copy of the model need the same batches, and got different ones: that of rank "
            f"{rank} is not that of rank {first}; leave the sampler of the DataLoader out, or make it "
            "DistributedSampler(dataset, copies, copy), by the number of the copies of the model and that of the "
            "process's own; a loader of your own has to give them the same",
            place,
            **{argument: group.size()},
        )


def _digest(tensor: Tensor) -> tuple[object, ...]:
    values: Any = tensor.detach()  # not all layouts are in torch's stubs
    if values.layout is torch.jagged:
        return "jagged", _digest(values.values()), _digest(values.offsets())
    if values.layout is not torch.strided:
        sparse = values.to_sparse_coo().coalesce()
        return tuple(values.shape), _digest(sparse.indices()), _digest(sparse.values())
    data = values.cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return tuple(values.shape), str(values.dtype), zlib.crc32(data)
