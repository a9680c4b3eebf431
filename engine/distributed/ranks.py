"""How many processes train together, which one this is, and whether they train one model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["Ranks", "agreed", "check_shared", "ranks"]


class Ranks(NamedTuple):
    """This process among those that train together."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that saves, logs and draws for all."""
        return self.rank == 0


def ranks() -> Ranks:
    """Those of torch's default process group, or of the environment where torchrun has started this process.

    >>> ranks()
    Ranks(rank=0, world_size=1)
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    try:
        return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except (KeyError, ValueError):  # started alone
        return Ranks()


def check_shared(place: str, model: object) -> None:
    """Refuse a model of which each process would train its own copy.

    Args:
        place: the class that was given the model, for the message.
        model: a module, or several by name.

    Raises:
        ConfigurationError: several processes train together, and a module that learns is not wrapped.
    """
    found = ranks()
    parts = list(model.values()) if isinstance(model, Mapping) else [model]
    if found.world_size > 1 and not all(map(_is_shared, parts)):
        raise ConfigurationError(
            "each of {world_size} processes would train a model of its own; wrap the model in "
            "torch.nn.parallel.DistributedDataParallel, or shard it by fully_shard, or start one process",
            place,
            model=type(model),
            world_size=found.world_size,
        )


def agreed(number: int) -> int:
    """The main process's number, in every process; they all have to call this."""
    if ranks().world_size == 1 or not torch.distributed.is_initialized():
        return number
    numbers = [number]
    torch.distributed.broadcast_object_list(numbers)
    return numbers[0]


def _is_shared(model: object) -> bool:
    """Whether gradients are averaged over the processes, or nothing learns."""
    if not isinstance(model, nn.Module):
        return False
    wrappers: tuple[type, ...] = (DistributedDataParallel,)
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # imports 60 modules

        wrappers = (*wrappers, FSDPModule, FullyShardedDataParallel)
    learns = any(parameter.requires_grad for parameter in model.parameters())
    return not learns or any(isinstance(module, wrappers) for module in model.modules())
