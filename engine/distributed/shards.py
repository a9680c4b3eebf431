"""Models that are split over the processes (FSDP2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["holders_of", "is_shard", "local", "norms_of_wholes", "point_at", "resharded", "shard_module"]


def shard_module(module: nn.Module, topology: Topology, device: torch.device) -> None:
    """Split a module's weights over the processes, in place; all of them call this.

    All begin with the values of rank 0. Each child of a ModuleList or Sequential that has parameters is gathered by
    itself when it computes, and what remains of the module together; all of it together if two of them share a weight.

    Args:
        module: on its device, the same on all ranks but for its values.
        topology: how many parts, and in which types they compute.
        device: of the module.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            torch.distributed.broadcast(tensor.detach(), src=0)
    options: dict[str, Any] = {
        "mesh": topology.mesh(device),
        "reshard_after_forward": True,  # else weights of the root stay whole after a pass without gradients
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_dtype(topology.param_dtype), reduce_dtype=_dtype(topology.reduce_dtype)
        ),
    }
    if topology.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for block in [] if _ties_blocks(module) else _blocks(module):
        fully_shard(block, **options)
    fully_shard(module, **options)


def point_at(optimizer: torch.optim.Optimizer, parameters: Mapping[Tensor, Tensor]) -> None:
    """Let an optimizer that was made over whole parameters update their shards.

    Args:
        optimizer: without any state yet.
        parameters: whole -> sharded.

    Raises:
        ConfigurationError: it has made updates already, or updates other parameters.
    """
    rule = ""
    if optimizer.state:
        rule = "it has made updates, whose state belongs to the whole parameters; pass a new one, or its name"
    elif any(each not in parameters for group in optimizer.param_groups for each in group["params"]):
        rule = (
            "it updates a parameter that is not the model's, so it cannot be split up with it; make it over "
            "model.parameters()"
        )
    if rule:
        raise ConfigurationError(rule, "Trainer", optimizer=type(optimizer))
    for group in optimizer.param_groups:
        group["params"] = [parameters[each] for each in group["params"]]


@contextmanager
def resharded(module: nn.Module) -> Iterator[None]:
    """After the block, each process holds its parts alone: a pass without gradients may leave weights whole."""
    try:
        yield
    finally:
        if is_sharded(module):
            from torch.distributed.fsdp import FSDPModule

            for each in module.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: its shard, or the tensor itself.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def holders_of(tensor: Tensor) -> ProcessGroup | None:
    """The processes that hold the parts of a tensor; None if this one has all of it.

    >>> holders_of(torch.ones(2)) is None
    True
    """
    if not is_shard(tensor):
        return None
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    (dimension,) = (at for at, each in enumerate(placements) if not each.is_replicate())
    group: ProcessGroup = tensor.device_mesh.get_group(dimension)  # type: ignore[attr-defined]
    return group


def norms_of_wholes(norms: Tensor, order: float, group: ProcessGroup) -> Tensor:
    """The norms of whole tensors from those of each process's parts, which all call this.

    Args:
        norms: shape (tensors,).
        order: 1, 2, ... or inf.
        group: of the processes.
    """
    if math.isinf(order):
        found = norms.double()
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=group)
        return found
    found = norms.double() ** order
    torch.distributed.all_reduce(found, group=group)
    return found ** (1 / order)


def _ties_blocks(module: nn.Module) -> bool:
    """Whether two blocks, or a block and the rest, share a parameter, which has to be gathered in one place."""
    owners: dict[int, set[str]] = {}  # the names of each parameter
    inside: set[str] = set()
    names = {id(each): name for name, each in module.named_modules()}
    for block in _blocks(module):
        inside |= {f"{names[id(block)]}.{name}" for name, _ in block.named_parameters(remove_duplicate=False)}
        for name, each in block.named_parameters(remove_duplicate=False):
            owners.setdefault(id(each), set()).add(f"{names[id(block)]}.{name}")
    rest = {id(each) for name, each in module.named_parameters(remove_duplicate=False) if name not in inside}
    return bool(rest & owners.keys()) or any(len(each) > 1 for each in owners.values())


def is_shard(value: object) -> TypeGuard[Tensor]:
    """Whether the value is a tensor of which each process holds a part.

    >>> is_shard(torch.ones(2))
    False
    """
    return isinstance(value, Tensor) and hasattr(value, "to_local")


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The children of lists and sequences; of nested ones, the inner ones first."""
    found: list[nn.Module] = []
    for each in module.modules():
        if isinstance(each, (nn.ModuleList, nn.Sequential)):
            found += [child for child in each if not isinstance(child, nn.ModuleList)]
    blocks = [each for each in dict.fromkeys(found) if each is not module and any(True for _ in each.parameters())]
    return blocks[::-1]
