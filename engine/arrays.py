"""Torch, jax and numpy arrays through the array API standard, with a few functions that the standard lacks.

Code written with `namespace` runs on all three libraries, also inside `jax.jit` and `jax.grad`. This module never
imports jax: if there is a jax array, jax has been imported already.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType, NoneType
from typing import Any, TypeAlias

import array_api_compat.torch as torch_namespace
import numpy as np
import torch
import torch.nn.functional as F
from array_api_compat import array_namespace
from torch import Tensor

__all__ = [
    "Array",
    "all_finite",
    "at_least_float32",
    "describe_array",
    "has_values",
    "is_array",
    "is_floating",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "masked_mean",
    "misshapen",
    "namespace",
    "on_host",
    "require_tensor",
    "stop_gradient",
    "take_last",
]

Array: TypeAlias = Any
"""A torch tensor, a jax array (or a tracer inside `jax.jit` and `jax.grad`) or a numpy array.

It is `Any` because no static type covers the three: jax is optional and untyped here, and a protocol would hide from
callers that the loss of two tensors is a tensor with a `backward`.
"""

_TORCH, _JAX, _NUMPY = "torch.Tensor", "jax.Array", "numpy.ndarray"

# ---------------------------------------------------------------------------------------------- properties


def namespace(*arrays: Array | float | None, place: str = "namespace") -> ModuleType:
    """The module with the functions (`where`, `exp`, `sum(x, axis=...)` ...) for these arrays.

    Numbers and None are skipped. A mix of numpy and jax arrays gives `jax.numpy`, which accepts both.

    >>> xp = namespace(torch.ones(2, 3))
    >>> xp.sum(torch.ones(2, 3), axis=-1)
    tensor([3., 3.])
    >>> float(namespace(np.ones(2)).sum(np.ones(2)))
    2.0

    Args:
        place: the start of an error message.

    Raises:
        TypeError: torch tensors are mixed with arrays of another library, or there is no array.
    """
    for each in arrays:
        if not isinstance(each, Tensor):
            break
    else:
        if arrays:
            return torch_namespace  # the usual case, before any slower check
    kinds = [None if isinstance(each, np.generic) else _kind(each) for each in arrays]
    if _TORCH in kinds:
        for other in (_JAX, _NUMPY):
            if other in kinds:
                tensor, array = arrays[kinds.index(_TORCH)], arrays[kinds.index(other)]
                remedy = "torch.from_numpy(array)" if other == _NUMPY else "torch.from_dlpack(array)"
                raise TypeError(
                    f"{place}({describe_array(tensor)}, {describe_array(array)}): needs arrays of one library; "
                    f"pass {remedy}, or jax.numpy.from_dlpack(tensor)"
                )
    given = [each for each in arrays if not isinstance(each, (int, float, complex, NoneType, np.generic))]
    leading = [each for each in given if not isinstance(each, np.ndarray)]
    module: ModuleType = array_namespace(*(leading or given or arrays))
    return module


def is_array(value: object) -> bool:
    """Whether the value is an array of torch, jax or numpy; numpy's scalars are arrays of shape ().

    >>> is_array(torch.ones(2)), is_array(np.float32(1)), is_array([1.0])
    (True, True, False)
    """
    return _kind(value) is not None


def has_values(array: Array) -> bool:
    """Whether the array has values that can be read: tracers in `jax.jit` and torch's meta tensors have none.

    >>> has_values(torch.ones(2)), has_values(torch.ones(2, device="meta"))
    (True, False)
    """
    if isinstance(array, Tensor):
        return array.device.type != "meta"
    jax = sys.modules.get("jax")
    return jax is None or not isinstance(array, jax.core.Tracer)


def all_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; waits for the device. Half the time of `isfinite().all()` for small tensors.

    >>> all_finite(torch.ones(3)), all_finite(torch.tensor([1.0, float("nan")])), all_finite(torch.full((2,), 3e38))
    (True, False, True)
    """
    # the sum of finite numbers may be infinite
    return math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


def on_host(array: Array) -> bool:
    """Whether the values can be read without waiting for an accelerator.

    >>> on_host(torch.ones(2)), on_host(np.ones(2)), on_host(torch.ones(2, device="meta"))
    (True, True, False)
    """
    if isinstance(array, Tensor):
        return array.device.type == "cpu"
    if _kind(array) == _JAX:
        return has_values(array) and all(device.platform == "cpu" for device in array.devices())
    return True


def is_floating(array: Array) -> bool:
    """Whether the dtype is a real floating point type.

    >>> is_floating(torch.ones(2)), is_floating(np.arange(2))
    (True, False)
    """
    if isinstance(array, Tensor):
        return array.is_floating_point()
    return bool(namespace(array).isdtype(array.dtype, "real floating"))


def describe_array(array: Array) -> str:
    """Library, dtype and shape, for messages.

    >>> describe_array(torch.zeros(8, 4))
    'torch.Tensor float32 (8, 4)'
    """
    return f"{_kind(array)} {str(array.dtype).removeprefix('torch.')} {tuple(array.shape)}"


def misshapen(place: str, needs: str, **arrays: Array) -> ValueError:
    """The error for arrays, by the names of their arguments, whose shapes do not fit.

    >>> print(misshapen("mse", "needs equal shapes", predictions=torch.ones(2), targets=torch.ones(3)))
    mse(predictions of shape (2,), targets of shape (3,)): needs equal shapes
    """
    shapes = ", ".join(f"{name} of shape {tuple(each.shape)}" for name, each in arrays.items())
    return ValueError(f"{place}({shapes}): {needs}")


def require_tensor(place: str, name: str, value: object) -> None:
    """Rejects jax and numpy arrays where a torch tensor is needed; accepts everything else.

    >>> require_tensor("SFTStrategy", "input_ids", np.zeros(3))
    Traceback (most recent call last):
        ...
    TypeError: SFTStrategy(input_ids=numpy.ndarray float64 (3,)): needs torch tensors; ...

    Raises:
        TypeError: names the array's type and how to convert it to a tensor.
    """
    kind = _kind(value)
    if kind in (_JAX, _NUMPY):
        remedy = "torch.from_dlpack" if kind == _JAX else "torch.from_numpy"
        raise TypeError(
            f"{place}({name}={describe_array(value)}): needs torch tensors; let the loader return {remedy}(...), or "
            "train with a JaxBackend, which accepts both"
        )


def _kind(value: object) -> str | None:
    if isinstance(value, Tensor):
        return _TORCH
    if isinstance(value, (np.ndarray, np.generic)):
        return _NUMPY
    jax = sys.modules.get("jax")
    # isinstance is also true for tracers in jit and grad; the default () is for the time while jax is being imported
    return _JAX if isinstance(value, getattr(jax, "Array", ())) else None


# ------------------------------------------------------------------------- functions missing from the standard


def stop_gradient(array: Array) -> Array:
    """The array as a constant, through which no gradient flows.

    >>> stop_gradient(torch.ones(2, requires_grad=True)).requires_grad
    False
    """
    if isinstance(array, Tensor):
        return array.detach()
    return sys.modules["jax"].lax.stop_gradient(array) if _kind(array) == _JAX else array


def at_least_float32(array: Array) -> Array:
    """The array in float32, or unchanged if its dtype is wider; integers become floating point.

    >>> at_least_float32(torch.ones(2, dtype=torch.bfloat16)).dtype, at_least_float32(np.ones(2)).dtype
    (torch.float32, dtype('float64'))
    """
    if isinstance(array, Tensor):
        return array.to(torch.promote_types(array.dtype, torch.float32))
    xp = namespace(array)
    return xp.astype(array, xp.result_type(array.dtype, xp.float32), copy=False)


def log_softmax(array: Array) -> Array:
    """`log(exp(x) / sum(exp(x)))` over the last dimension, stable for large x.

    >>> log_softmax(torch.tensor([1000.0, 1000.0]))
    tensor([-0.6931, -0.6931])
    """
    if isinstance(array, Tensor):
        return array.log_softmax(-1)
    xp = namespace(array)
    # subtract the largest before anything is rounded: with logits of 1e4 a loss would keep only 3 digits otherwise
    shifted = array - stop_gradient(xp.max(array, axis=-1, keepdims=True))
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def logsumexp(array: Array) -> Array:
    """`log(sum(exp(x)))` over the last dimension, stable for large x.

    >>> logsumexp(torch.tensor([100.0, 100.0]))
    tensor(100.6931)
    """
    if isinstance(array, Tensor):
        return array.logsumexp(-1)
    xp = namespace(array)
    largest = stop_gradient(xp.max(array, axis=-1, keepdims=True))
    largest = xp.where(xp.isfinite(largest), largest, 0.0)  # inf - inf is nan
    return xp.log(xp.sum(xp.exp(array - largest), axis=-1)) + largest[..., 0]


def log_sigmoid(array: Array) -> Array:
    """`log(1 / (1 + exp(-x)))`, stable for large x of either sign.

    >>> log_sigmoid(torch.tensor([0.0, -1000.0]))
    tensor([-6.9315e-01, -1.0000e+03])
    """
    if isinstance(array, Tensor):
        return F.logsigmoid(array)
    xp = namespace(array)
    return -xp.logaddexp(xp.zeros_like(array), -array)


def take_last(array: Array, index: Array) -> Array:
    """One element of the last dimension for each index.

    >>> take_last(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([0, 2]))
    tensor([1, 6])

    Args:
        array: shape (..., n).
        index: integers from 0 to n - 1, shape (...); int64 for torch.
    """
    if isinstance(array, Tensor):
        return array.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return namespace(array, index).take_along_axis(array, index[..., None], axis=-1)[..., 0]


def masked_mean(values: Array, mask: Array) -> Array:
    """The mean of the values where the mask is true, shape (); nan, with gradient 0, if the mask is nowhere true.

    Values outside the mask may be anything: neither they nor their gradients reach the result.

    >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    if isinstance(values, Tensor):
        return torch.where(mask, values, 0.0).sum() / mask.sum()
    xp = namespace(values, mask)
    wide = at_least_float32(values)
    count = xp.astype(xp.sum(xp.astype(mask, xp.int32)), wide.dtype)
    # nan is written explicitly: numpy would warn about 0 / 0
    mean = xp.sum(xp.where(mask, wide, 0.0)) / xp.where(count > 0, count, 1.0)
    return xp.astype(xp.where(count > 0, mean, xp.nan), values.dtype, copy=False)
