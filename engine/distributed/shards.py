"""Models that are split over the processes: each weight (FSDP2), or each layer's work (tensor parallelism)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from pulsetrain.engine.distributed.parallelize import start_alike
from pulsetrain.engine.distributed.plans import TensorPlan, styles_of
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.distributed.topology import TENSOR, Topology
from pulsetrain.engine.errors import ConfigurationError

__all__ = [
    "holders_of",
    "is_shard",
    "local",
    "norms_of_wholes",
    "point_at",
    "resharded",
    "shard_module",
    "shard_weights",
]


def shard_module(module: nn.Module, topology: Topology, device: torch.device, plan: TensorPlan | None = None) -> None:
    """Split a module's weights over the processes, in place; all of them call this.

    All begin with the values of rank 0. Each child of a ModuleList or Sequential that has parameters is gathered by
    itself when it computes, and what remains of the module together; all of it together if two of them share a weight.

    Args:
        module: on its device, the same on all ranks but for its values.
        topology: how many parts, and in which types they compute.
        device: of the module.
        plan: which layers several processes compute together; by default the model's own.

    Raises:
        ConfigurationError: the plan is missing, or does not fit the model.
    """
    styles = {}
    if topology.tensor > 1:  # before anything is split
        styles = styles_of(module, plan, topology.tensor, sequence=topology.sequence_parallel)
    start_alike(module)  # what has no values yet gets them when it has been split up
    mesh = topology.mesh(device)
    if topology.tensor > 1:
        from pulsetrain.engine.distributed.tensor_parallel import parallelize  # imports torch's tensor parallelism

        parallelize(module, mesh[TENSOR], styles)
        # also where the weights are split over 1 process: an optimizer's kernel takes no plain parameters beside shards
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)]
    shard_weights(module, mesh, topology, device)


def shard_weights(module: nn.Module, mesh: DeviceMesh, topology: Topology, device: torch.device) -> None:
    """Split a module's weights over the processes of the mesh, which all have them; each block by itself."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": True,  # else weights of the root stay whole after a pass without gradients
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_dtype(topology.param_dtype), reduce_dtype=_dtype(topology.reduce_dtype)
        ),
    }
    if topology.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    if topology.tensor > 1 and topology.shard != 1:
        options["shard_placement_fn"] = partial(_dimension_of_shards, mesh["shard"].size())
    blocks = [] if _ties_blocks(module) else _blocks(module)
    apart = {*_of_other_types(module, blocks), *blocks, module}
    for each in reversed([*module.modules()]):  # inner ones first: a module takes what is left in it
        if each in apart:
            fully_shard(each, **options)


def _of_other_types(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules whose parameters have another type than most in their block, and those with parameters inside them.

    Each of them is gathered by itself, since what is gathered together has one type.

    Raises:
        ConfigurationError: a module has parameters of several types itself.
    """
    owners = [each for each in module.modules() if any(p.requires_grad for p in each.parameters(recurse=False))]
    types = {each: Counter[torch.dtype]() for each in owners}
    for each in owners:
        for parameter in each.parameters(recurse=False):
            if parameter.requires_grad:  # frozen ones may have any type
                types[each][parameter.dtype] += parameter.numel()
    if len({dtype for found in types.values() for dtype in found}) < 2:
        return []
    groups = {inside: block for block in (module, *reversed(blocks)) for inside in block.modules()}
    of_group: dict[nn.Module, Counter[torch.dtype]] = defaultdict(Counter)
    for each in owners:
        of_group[groups[each]].update(types[each])
    usual = {group: found.most_common(1)[0][0] for group, found in of_group.items()}
    others = [each for each in owners if set(types[each]) != {usual[groups[each]]}]
    for each in others:
        if len(types[each]) > 1 or each is groups[each]:
            raise ConfigurationError(
                f"{type(each).__name__} has parameters of several types, {' and '.join(map(str, types[each]))}, beside "
                f"others in {usual[groups[each]]}; give the model one type, or each process a copy of it",
                "Topology",
                shard=...,
            )
    inside = {(part, groups[each]) for each in others for part in each.modules()}
    return [each for each in owners if (each, groups[each]) in inside]


def _dimension_of_shards(count: int, parameter: nn.Parameter) -> Any:
    """Along which dimension to shard what tensor parallelism may have split.

    Of several projections in one weight, it has split each; torch could not put shards along the same dimension
    together again.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    packed = [each.dim for each in getattr(parameter, "placements", ()) if type(each) is _StridedShard]
    if count == 1 or packed != [0]:
        return Shard(0)
    if parameter.ndim == 1 or parameter.shape[1] % count:
        raise ConfigurationError(
            f"a parameter of shape {tuple(parameter.shape)} that several projections share cannot be sharded over "
            f"{count} processes as well; set shard=1, which makes copies instead",
            "Topology",
            shard=count,
        )
    return Shard(1)


def point_at(optimizer: torch.optim.Optimizer, parameters: Mapping[Tensor, Tensor]) -> None:
    """Make an optimizer that was created with whole parameters update their shards.

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


def holders_of(tensor: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups of processes that hold the parts of a tensor, one for each dimension of their mesh that splits it.

    >>> holders_of(torch.ones(2))
    ()
    """
    if not is_shard(tensor):
        return ()
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    split = [at for at, each in enumerate(placements) if not each.is_replicate()]
    return tuple(tensor.device_mesh.get_group(at) for at in split)  # type: ignore[attr-defined]


def norms_of_wholes(norms: Tensor, order: float, groups: Iterable[ProcessGroup]) -> Tensor:
    """The norms of whole tensors from those of each process's parts, which all call this.

    Args:
        norms: of one tensor or several, shape () or (tensors,).
        order: 1, 2, ... or inf.
        groups: of the processes, see `holders_of`.
    """
    largest = math.isinf(order)
    found = norms.double() if largest else norms.double() ** order
    for group in groups:
        torch.distributed.all_reduce(found, ReduceOp.MAX if largest else ReduceOp.SUM, group=group)
    return found if largest else found ** (1 / order)


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
