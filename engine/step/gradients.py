"""The norm of gradients, and clipping; everything stays on the device, so nothing here waits for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from pulsetrain.engine.distributed.shards import holders_of, is_shard, local, norms_of_wholes
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["clip_grad_norm", "clip_grad_value", "grad_norm", "scale_grads"]


def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm over all gradients as if they were one vector, shape (); 0 if there are none.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> grad_norm([weight])
    tensor(5.)
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    try:
        norm = _total_norm(gradients)
    except NotImplementedError as error:
        if not any(gradient.is_sparse for gradient in gradients):
            raise
        raise ConfigurationError(
            "grad_norm(): torch has no norm of sparse gradients, which nn.Embedding(sparse=True) makes; make it dense, "
            "or leave the norm out (no clipping by norm, no receiver of GRADIENTS_READY)"
        ) from error
    return norm


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor | None = None) -> Tensor:
    """Scales all gradients by `min(1, max_norm / (norm + 1e-6))`, in place, and returns the norm before, shape ().

    A gradient that is not finite makes the norm and all scaled gradients not finite: check the norm before the update.

    Args:
        norm: the result of `grad_norm`, if it has been measured already.

    Raises:
        ConfigurationError: max_norm is not positive.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm([weight], max_norm=1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if not max_norm > 0:
        raise ConfigurationError("needs a positive number, or no clipping at all", "clip_grad_norm", max_norm=max_norm)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = grad_norm(parameters) if norm is None else norm
    clip_grads_with_norm_(_held(parameters), max_norm, norm)
    return norm


def clip_grad_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamps each element of each gradient to [-max_value, max_value], in place.

    Raises:
        ConfigurationError: max_value is not positive.
    """
    if not max_value > 0:
        raise ConfigurationError(
            "needs a positive number, or no clipping at all", "clip_grad_value", max_value=max_value
        )
    clip_grad_value_(_held(parameters), max_value)


def scale_grads(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiplies all gradients in place by the factor, a number or a tensor of shape ()."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if isinstance(factor, Tensor) and gradients:
        dtypes, factor = {each.dtype for each in gradients}, factor.to(gradients[0].device)
        if len(dtypes) == 1 and gradients[0].itemsize >= torch.float32.itemsize:
            factor = factor.to(dtypes.pop())  # else torch multiplies one by one; half precision would round the factor
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm over gradients, of which each rank may have a part; then this is a collective call."""
    if not any(is_shard(each) for each in gradients):
        return get_total_norm(gradients)
    alike: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}  # by the processes that hold parts of them
    for each in gradients:
        alike.setdefault(holders_of(each), []).append(local(each))
    norms = {groups: get_total_norm(parts) for groups, parts in alike.items()}
    wholes = [norms_of_wholes(norm, 2.0, groups) for groups, norm in norms.items()]
    return torch.stack(wholes).square().sum().sqrt().to(next(iter(norms.values())).dtype)


def _held(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters; in place of shards, tensors whose gradients are what this process holds of theirs."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not any(hasattr(each, "to_local") for each in parameters):
        return parameters
    held = []
    for parameter in parameters:
        if parameter.grad is not None:
            held.append(local(parameter).detach())
            held[-1].grad = local(parameter.grad)
    return held
