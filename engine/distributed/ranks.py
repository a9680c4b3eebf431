"""How many processes train together, which one this is, and whether they train one model, each on its own data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from pulsetrain.engine.distributed.launcher import started
from pulsetrain.engine.errors import ConfigurationError

__all__ = [
    "PIPELINE",
    "DataRank",
    "Ranks",
    "VirtualRanks",
    "agreed",
    "check_shared",
    "check_virtual",
    "gives_all_ranks_the_same",
    "is_fully_sharded",
    "is_pipelined",
    "is_sharded",
    "is_shared",
    "ranks",
]

PIPELINE = "_pipeline"  # the attribute of a model of which several processes have some layers each
_SAMPLERS = (SequentialSampler, RandomSampler, WeightedRandomSampler)  # whose order is a function of the seed


class Ranks(NamedTuple):
    """This process among those that train together."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that saves, logs and draws for all."""
        return self.rank == 0


@dataclass(frozen=True)
class DataRank:
    """This process among those that train on different samples: several may compute the same ones together."""

    rank: int = 0
    count: int = 1
    leads: bool = True  # whether it counts for those that compute the same samples


class VirtualRanks(NamedTuple):
    """The virtual ranks whose shares of each global batch this process computes."""

    here: range
    total: int  # in all processes


def ranks() -> Ranks:
    """Those of torch's default process group, or of the environment where torchrun or srun has started this process.

    >>> ranks()
    Ranks(rank=0, world_size=1)

    Raises:
        ConfigurationError: the environment contradicts itself.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    found = started()
    return Ranks(found.rank, found.world_size)


def check_shared(
    place: str, model: object, loader: object = None, *, wraps: bool = False, shares: int | None = None
) -> None:
    """Refuse a model of which each process would train or save its own copy or part, and data that cannot be shared.

    Args:
        place: the class that was given the model, for the message.
        model: a module, or several by name.
        loader: of the training data, whose batches the processes share out.
        wraps: whether the caller wraps a single module itself.
        shares: of a batch; by default, each process gets one.

    Raises:
        ConfigurationError: several processes train together, and a module is sharded, or learns and is not wrapped, or
            a batch cannot be shared out.
    """
    found = ranks()
    if found.world_size == 1:
        return
    parts = list(model.values()) if isinstance(model, Mapping) else [model]
    for part in parts:
        if is_sharded(part) and not (wraps and part is model and is_fully_sharded(part)):
            rule = (
                "one that is sharded, other than as a whole by fully_shard, is not supported: rank 0 of {world_size} "
                "would save its own shard alone; pass the plain model with TorchBackend(topology=Topology(...)), or "
                "wrap it in torch.nn.parallel.DistributedDataParallel"
            )
        elif not isinstance(part, nn.Module):
            rule = (
                "each of {world_size} processes would train a copy of its own, since their gradients are averaged for "
                "torch modules only; start one process"
            )
        elif not is_shared(part) and not (wraps and isinstance(model, nn.Module)):
            rule = (
                "each of {world_size} processes would train a model of its own; wrap the model in "
                "torch.nn.parallel.DistributedDataParallel, or start one process"
            )
        else:
            continue
        raise ConfigurationError(rule, place, model=type(part), world_size=found.world_size)
    if getattr(loader, "fires_rollouts", False) and not getattr(loader, "shares_ranks", False):
        raise ConfigurationError(
            "each of {world_size} processes would act in the same environments; start one process",
            place,
            train_loader=type(loader),
            world_size=found.world_size,
        )
    shares = shares or found.world_size
    sampler = _sampler_of(loader)
    if type(sampler) is DistributedSampler and sampler.num_replicas != shares != found.world_size:
        raise ConfigurationError(
            f"shares the data out to each process, and there are {shares} copies of the model, whose processes need "
            "the same batches; leave the sampler out, or make it DistributedSampler(dataset, copies, copy)",
            "DistributedSampler",
            num_replicas=sampler.num_replicas,
        )
    if shares > 1 and gives_all_ranks_the_same(loader, shares):
        _check_divisible(loader, shares)


def check_virtual(loader: object, virtual: int) -> None:
    """Refuse training data whose batches cannot be shared out to so many virtual ranks.

    Raises:
        ConfigurationError: the loader's order is not known, or its batch size is not a multiple.
    """
    if (
        type(loader) is not DataLoader
        or isinstance(loader.dataset, IterableDataset)
        or type(_sampler_of(loader)) not in _SAMPLERS
    ):
        raise ConfigurationError(
            "the batches of this loader cannot be shared out to {virtual} virtual ranks: that needs a torch DataLoader "
            "over a dataset with a length, in torch's own order (shuffle=False or True); give such a loader, or leave "
            "virtual and reduction='tree' out",
            "Trainer",
            train_loader=type(loader),
            virtual=virtual,
        )
    size = getattr(loader.batch_sampler, "batch_size", None)
    if size is None or size % virtual:
        raise ConfigurationError(
            "is the global batch, which {virtual} virtual ranks share; choose a multiple of their number",
            "DataLoader",
            batch_size=size,
            virtual=virtual,
        )


def _check_divisible(loader: object, world_size: int) -> None:
    """A loader's batch is the global one: what one process would train."""
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if size is None:
        raise ConfigurationError(
            "the dataset makes the batches itself, so {world_size} processes cannot share them out; give the "
            "DataLoader sampler=torch.utils.data.DistributedSampler(dataset, world_size, rank), by which each process "
            "gets its own",
            "DataLoader",
            batch_size=None,
            world_size=world_size,
        )
    if size % world_size:
        raise ConfigurationError(
            "is the global batch, which {world_size} processes share; choose a multiple of their number, or give each "
            "process its own batches by sampler=torch.utils.data.DistributedSampler(dataset, world_size, rank)",
            "DataLoader",
            batch_size=size,
            world_size=world_size,
        )


def agreed(number: int) -> int:
    """The main process's number, in every process; they all have to call this."""
    if ranks().world_size == 1 or not torch.distributed.is_initialized():
        return number
    numbers = [number]
    torch.distributed.broadcast_object_list(numbers)
    return numbers[0]


def is_shared(model: object) -> bool:
    """Whether gradients are averaged over the processes, or nothing learns."""
    if not isinstance(model, nn.Module):
        return False
    learns = any(parameter.requires_grad for parameter in model.parameters())
    wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    return not learns or wrapped or is_sharded(model)


def is_fully_sharded(model: object) -> bool:
    """Whether the whole module was split up by torch's `fully_shard`, and by nothing else.

    >>> is_fully_sharded(nn.Linear(2, 1))
    False
    """
    if not is_sharded(model):
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    assert isinstance(model, nn.Module)
    wrapped = (FullyShardedDataParallel, DistributedDataParallel)
    if not isinstance(model, FSDPModule) or any(isinstance(module, wrapped) for module in model.modules()):
        return False
    split = [[each for each in getattr(p, "placements", ()) if not each.is_replicate()] for p in model.parameters()]
    return all(len(each) <= 1 for each in split)  # else by tensor parallelism, too


def is_sharded(model: object) -> bool:
    """Whether this process holds a part of the weights alone."""
    if ranks().world_size == 1 or not isinstance(model, nn.Module):  # else a view of other arrays is not read
        return False
    if is_pipelined(model):
        return True
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # imports 60 modules
    from torch.distributed.tensor import DTensor

    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def is_pipelined(model: object) -> bool:
    """Whether this process has some of the model's layers, and the others are without values."""
    return getattr(model, PIPELINE, None) is not None


def gives_all_ranks_the_same(loader: object, world_size: int) -> bool:
    """Whether the loader is known to give every process the same batches; in doubt not.

    One of a subclass, over an IterableDataset, or with a sampler or batch sampler that is not torch's may share the
    samples out itself. So may a Subset of at most a process's share of the samples, and a generator of the user's that
    draws with replacement: both may differ by process.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    sampler = _sampler_of(loader)
    if type(sampler) not in _SAMPLERS:
        return False
    if getattr(sampler, "replacement", False) and getattr(sampler, "generator", None) is not None:
        return False
    dataset: object = loader.dataset
    while type(dataset) is Subset:
        if len(dataset.indices) <= -(-len(dataset.dataset) // world_size):  # type: ignore[arg-type]  # torch's has no __len__
            return False
        dataset = dataset.dataset
    return True


def _sampler_of(loader: object) -> object:
    """What draws the samples of a DataLoader; the user's own batch sampler if it has one."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        return getattr(loader, "sampler", None)
    return batches.sampler if type(batches) is BatchSampler else batches
