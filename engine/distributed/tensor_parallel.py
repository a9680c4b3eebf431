"""Layers that several processes compute together: each has a part of the weights (Shoeybi et al. 2019).

A column-parallel layer has a part of the outputs on each process, a row-parallel one a part of the inputs, whose
products are added up. Between the two, such as in attention and feed-forward networks, nothing is communicated. With
sequence parallelism, what lies outside of them is split along the sequence (Korthikanti et al. 2022).
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.distributed.placements import shard_of
from pulsetrain.engine.distributed.topology import TENSOR
from pulsetrain.engine.errors import ConfigurationError

__all__ = [
    "Colwise",
    "Rowwise",
    "SequencePlain",
    "SequenceSplit",
    "check_gradients",
    "explain_whole_use",
    "group_of",
    "parallelize",
]

_Sequence = Shard(1)  # of activations of shape (batch, length, features)


@dataclass
class Colwise(ParallelStyle):
    """Split a linear layer by its outputs.

    Args:
        parts: projections of equal size that are one after the other in the weight, such as queries, keys and values.
        units: what must not be split up within a part, such as the heads of attention; their number.
        gather: give all outputs to all processes.
        sequence: the inputs are split along the sequence, and gathered first.
    """

    parts: int = 1
    units: int | None = None
    gather: bool = False
    sequence: bool = False

    def __post_init__(self) -> None:
        check_whole_number("tensor_plan", "parts", self.parts)
        check_whole_number("tensor_plan", "units", self.units, or_none=True)

    def check(self, name: str, layer: nn.Module, count: int) -> None:
        """Refuse a layer that so many processes cannot split."""
        features = _features(layer)[1]
        for what, number in (("outputs", features // self.parts), ("heads or other units", self.units or count)):
            if number % count or features % self.parts:
                raise _uneven(name, f"{number} {what}{' in each part' if self.parts > 1 else ''}", count)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        count = device_mesh.size()
        out = 1 if _is_transposed(module) else 0
        split = partial(_StridedShard, split_factor=self.parts) if self.parts > 1 else Shard
        _place(module, device_mesh, {"weight": split(out), "bias": split(0)})
        if isinstance(outputs := getattr(module, "nf", None), int):  # the layer of transformers' GPT-2 reads it
            module.nf = outputs // count  # type: ignore[assignment]  # torch has no type for an attribute

        def enter(x: Tensor) -> Tensor:
            return _converted(x, device_mesh, _Sequence if self.sequence else Replicate(), Replicate(), Partial())

        def leave(y: Tensor) -> Tensor:
            return _converted(y, device_mesh, Shard(-1), Replicate(), Replicate()) if self.gather else y

        return _on_parts(module, enter, leave, device_mesh)


@dataclass
class Rowwise(ParallelStyle):
    """Split a linear layer by its inputs, which a column-parallel layer has made.

    Args:
        sequence: split the outputs along the sequence.
    """

    sequence: bool = False

    def check(self, name: str, layer: nn.Module, count: int) -> None:
        """Refuse a layer that so many processes cannot split."""
        features = _features(layer)[0]
        if features % count:
            raise _uneven(name, f"{features} inputs", count)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _place(module, device_mesh, {"weight": Shard(0 if _is_transposed(module) else 1), "bias": Replicate()})
        out = _Sequence if self.sequence else Replicate()
        # the bias is added once: by the first process
        first = 1.0 if device_mesh.get_local_rank() == 0 else 0.0
        return _on_parts(
            module, lambda x: x, lambda y: _converted(y, device_mesh, Partial(), out, out), device_mesh, {"bias": first}
        )


@dataclass
class SequencePlain(ParallelStyle):
    """A module, such as a normalisation, that computes each position by itself, on its process's part of a sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        _place(module, device_mesh, dict.fromkeys(names, Replicate()))
        return _on_parts(module, lambda x: x, lambda y: y, device_mesh, dict.fromkeys(names, 1.0))


@dataclass
class SequenceSplit(ParallelStyle):
    """A module, such as an embedding, whose outputs are split along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        count = device_mesh.size()

        def leave(_module: nn.Module, _inputs: object, y: Tensor) -> Tensor:
            if y.shape[1] % count:
                raise ConfigurationError(
                    f"a sequence of {y.shape[1]} positions cannot be split evenly over {count} processes; choose "
                    "another length, or leave sequence_parallel out",
                    "Topology",
                    tensor=count,
                )
            return _converted(y, device_mesh, Replicate(), _Sequence, _Sequence)

        module.register_forward_hook(leave)
        return module


def parallelize(module: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """Split the layers of a module over the processes of a mesh, in place; all of them call this.

    Args:
        module: the same on all processes.
        mesh: of one dimension.
        styles: by the names of modules, in which `*` is anything between two dots.
    """
    parallelize_module(module, mesh, dict(styles))
    for name, each in module.named_modules():  # attention of transformers' GPT-2 cuts its outputs by this number
        if f"{name}.c_attn" in styles and isinstance(size := getattr(each, "split_size", None), int):
            each.split_size = size // mesh.size()


def group_of(module: nn.Module) -> ProcessGroup | None:
    """The processes that compute the layers of a module together; None if none of them is split."""
    split = (each.device_mesh for each in module.parameters() if isinstance(each, DTensor) and _is_split(each))
    mesh = next(split, None)
    return None if mesh is None else mesh.get_group(TENSOR)


def check_gradients(module: nn.Module, group: ProcessGroup) -> None:
    """Refuse a parameter that is not split, and has other gradients in each process; they all call this.

    Raises:
        ConfigurationError: there is one; the message names it.
    """
    whole = {name: each.grad for name, each in module.named_parameters() if each.requires_grad and not _is_split(each)}
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in whole.values()]
    numbers = [
        [0.0, 0.0] if each is None else [float(each.double().norm()), float(each.double().sum())] for each in parts
    ]
    for name, alike in zip(whole, _alike(numbers, group), strict=True):
        if not alike:
            raise ConfigurationError(
                f"{name} is not split, and its gradients differ between the processes that compute each layer "
                "together: each uses it on its own part of the features or of the sequence; name its module in the "
                'plan as "replicated", which adds the gradients up, or as "sequence" for sequence parallelism',
                "Topology",
                tensor=group.size(),
            )


def explain_whole_use(error: Exception, module: nn.Module) -> None:
    """Add a note to torch's error about a model that computes with the weight of a split layer itself.

    Args:
        error: raised while the model computed.
        module: the model.
    """
    if "mixed torch.Tensor and DTensor" not in str(error):
        return
    split = [name.rpartition(".")[0] for name, each in module.named_parameters() if _is_split(each)]
    names = {id(each): name for name, each in module.named_modules()}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        owner = frame.f_locals.get("self")
        place = names.get(id(owner))
        if place is None or not isinstance(owner, nn.Module):
            continue
        children = {f"{place}.{name}" if place else name: name for name, _ in owner.named_children()}
        code = linecache.getline(frame.f_code.co_filename, line)
        used = [name for name in dict.fromkeys(split) if f".{children.get(name)}." in code]
        if found := used or [name for name in dict.fromkeys(split) if name in children]:
            called = children.get(found[0], found[0])
            error.add_note(
                f"{', '.join(found)}: several processes have a part of its weight each, with which only the layer "
                f"itself computes; call the layer, as self.{called}(x) in place of F.linear(x, self.{called}.weight), "
                "or leave it out of the plan (TorchBackend(tensor_plan=...))"
            )
            return


def _is_split(parameter: Tensor) -> bool:
    """Whether tensor parallelism has split it."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return TENSOR in names and not parameter.placements[names.index(TENSOR)].is_replicate()


def _alike(numbers: list[list[float]], group: ProcessGroup) -> list[bool]:
    """Of each row of numbers, whether it is the same in all processes, but for rounding."""
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, numbers, group=group)
    if any(list(map(len, each)) != list(map(len, numbers)) for each in everyone):
        return [False] * len(numbers)
    return [
        all(
            a == b or (a != a and b != b) or abs(a - b) <= 1e-3 * max(map(abs, (*mine, *theirs)))
            for theirs in rows
            for a, b in zip(mine, theirs, strict=True)
        )
        for mine, *rows in zip(numbers, *everyone, strict=True)
    ]


def _uneven(name: str, what: str, count: int) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} has {what}, which {count} processes cannot split evenly; choose another number of processes, or "
        "sizes of the model",
        "Topology",
        tensor=count,
    )


def _features(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    rows, columns = module.weight.shape  # type: ignore[misc]  # a tensor
    return (rows, columns) if _is_transposed(module) else (columns, rows)


def _is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as in the Conv1D of transformers' GPT-2."""
    return not isinstance(module, nn.Linear)


def _place(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Keep of each parameter what this process holds."""
    for name, whole in list(module.named_parameters(recurse=False)):
        made = shard_of(whole.detach(), mesh, [placements[name]], whole.stride(), whole.device)
        module.register_parameter(name, nn.Parameter(made, requires_grad=whole.requires_grad))


def _on_parts(
    module: nn.Module,
    enter: Callable[[Tensor], Tensor],
    leave: Callable[[Tensor], Tensor],
    mesh: DeviceMesh,
    replicated: Mapping[str, float] | None = None,
) -> nn.Module:
    """Let a module compute with what this process holds of its parameters.

    Args:
        enter: makes its input from that of the whole module.
        leave: makes the whole module's output from its own.
        mesh: of the processes.
        replicated: parameters whose gradients are added up over the processes, with what they are multiplied by here.
    """
    around = module.forward  # what computes it a second time in the backward pass has to find the parts again
    inside = around if hasattr(around, "forward") else module
    inside.forward = _PartForward(module, inside.forward, enter, leave, mesh, dict(replicated or {}))
    return module


class _PartForward:
    def __init__(
        self,
        module: nn.Module,
        forward: Callable[[Tensor], Tensor],
        enter: Callable[[Tensor], Tensor],
        leave: Callable[[Tensor], Tensor],
        mesh: DeviceMesh,
        replicated: Mapping[str, float],
    ) -> None:
        self._module, self._forward = module, forward
        self._enter, self._leave, self._mesh, self._replicated = enter, leave, mesh, replicated

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (given,) = (*args, *kwargs.values())  # these layers have one input
        x = self._enter(given)
        named = self._module._parameters  # noqa: SLF001  # functional_call would run the module's hooks a second time
        before = dict(named)
        try:
            for name, parameter in before.items():
                if parameter is not None:
                    named[name] = self._part(name, parameter)  # type: ignore[assignment]  # computed from it
            y = self._forward(x)
        finally:
            named.update(before)
        y = self._leave(y)
        is_view = y._is_view()  # noqa: SLF001  # has no public name
        made: Tensor = _NoView.apply(y) if is_view else y  # type: ignore[no-untyped-call]  # of torch
        return made

    def _part(self, name: str, parameter: Any) -> Tensor:
        part: Tensor = parameter.to_local()
        if name not in self._replicated:
            return part
        factor = self._replicated[name]
        shared = _converted(part, self._mesh, Replicate(), Replicate(), Partial())
        return shared if factor == 1.0 else shared * factor


class _NoView(torch.autograd.Function):
    """The same memory, not as a view: fully_shard warns of a module that returns one, and nothing else refers to it."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient


def _converted(x: Tensor, mesh: DeviceMesh, now: Placement, then: Placement, gradient: Placement) -> Tensor:
    """A process's part of a tensor under another placement; its gradient comes back under a placement of its own."""
    whole = DTensor.from_local(x, mesh, [now], run_check=False)
    return whole.redistribute(mesh, [then]).to_local(grad_placements=[gradient])
