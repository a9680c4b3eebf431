"""Activations that are kept elsewhere between the forward and the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from pulsetrain.engine.step.memory_settings import ActivationOffload, OffloadPolicy

__all__ = ["HostMemory", "offload_activations", "setting_of_estimate"]


class HostMemory:
    """Copies to the host's memory, pinned if the activations are on an accelerator: the default of ActivationOffload.

    >>> policy = HostMemory()
    >>> policy.unpack(policy.pack(torch.ones(2)))
    tensor([1., 1.])
    """

    def pack(self, tensor: Tensor) -> Tensor:
        is_remote = tensor.device.type != "cpu"
        copy = tensor.new_empty_strided(tensor.shape, tensor.stride(), device="cpu", pin_memory=is_remote)
        return copy.copy_(tensor, non_blocking=is_remote)

    def unpack(self, handle: Tensor) -> Tensor:
        return handle


class _NotCounted:
    """Where activations without values go: in an estimate, they need no memory there."""

    def pack(self, tensor: Tensor) -> _Moved:
        return _Moved(tensor.new_empty((), device="meta"), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def unpack(self, handle: _Moved) -> Tensor:
        like = cast(Tensor, handle.handle)  # of a tensor without values, so that the new one has none
        return like.new_empty_strided(handle.shape, handle.stride, device=handle.device)


def setting_of_estimate(setting: ActivationOffload, device: torch.device) -> ActivationOffload:
    """The setting with a policy that needs no values; what it moves counts only if it stays on the device."""
    is_host = setting.policy is None or type(setting.policy) is HostMemory
    return setting if is_host and device.type == "cpu" else replace(setting, policy=_NotCounted())


class _Kept(NamedTuple):
    """A tensor that stays where it is."""

    tensor: Tensor
    version: int


class _Moved(NamedTuple):
    """A tensor that is kept elsewhere, and what its copy has to be again."""

    handle: object
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def offload_activations(model: nn.Module, setting: ActivationOffload) -> AbstractContextManager[Any]:
    """A context for the forward pass and the loss, in which the activations of a model are kept elsewhere.

    >>> model, inputs = nn.Linear(2, 1), torch.ones(3, 2)
    >>> with offload_activations(model, ActivationOffload(min_bytes=0)):
    ...     loss = model(inputs).square().sum()
    >>> loss.backward()
    """
    policy = HostMemory() if setting.policy is None else cast(OffloadPolicy, setting.policy)
    smallest = setting.min_bytes
    weights = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers()) if _is_plain(each)}

    def pack(tensor: Tensor) -> _Kept | _Moved:
        version, is_plain = tensor._version, _is_plain(tensor)
        tensor = tensor.detach()  # an operator that keeps its own output would keep itself alive
        if tensor.nbytes < smallest or not is_plain:
            return _Kept(tensor, version)
        storage = tensor.untyped_storage()
        expanded = any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if storage._cdata in weights or storage.nbytes() < tensor.nbytes or expanded:
            return _Kept(tensor, version)
        return _Moved(policy.pack(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def unpack(packed: _Kept | _Moved) -> Tensor:
        if isinstance(packed, _Moved):
            return _restored(policy, packed)
        if packed.tensor._version != packed.version:  # which torch does not check where there are hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(packed.tensor.shape)} that the gradient needs was changed in place after "
                "the forward pass had read it; change a copy of it"
            )
        return packed.tensor

    return saved_tensors_hooks(pack, unpack)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor) and tensor.layout is torch.strided


def _restored(policy: OffloadPolicy, moved: _Moved) -> Tensor:
    """The tensor with its strides and on its device: kernels may round otherwise for other strides."""
    found = policy.unpack(moved.handle)
    if found.shape != moved.shape or found.dtype != moved.dtype:
        raise RuntimeError(
            f"{type(policy).__name__}.unpack() returned {found.dtype} {tuple(found.shape)} for a tensor that was "
            f"{moved.dtype} {tuple(moved.shape)}; return what pack() was given"
        )
    if found.device == moved.device and found.stride() == moved.stride:
        return found
    made = torch.empty_strided(moved.shape, moved.stride, dtype=moved.dtype, device=moved.device)
    return made.copy_(found, non_blocking=found.is_pinned())
