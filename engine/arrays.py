"""Arrays of torch, jax and numpy under the names of the array API standard, and what the standard lacks.

Mathematics that is written on `namespace` runs on all three, inside `jax.jit` and `jax.grad` too. jax is never imported
here: where there is an array of it, it has been.
"""

from __future__ import annotations

import sys
from types import NoneType
from typing import Any

import array_api_compat.torch as torch_namespace
import numpy as np
import torch
import torch.nn.functional as F
from array_api_compat import array_namespace
from torch import Tensor

__all__ = [
    "Array",
    "at_least_float32",
    "describe_array",
    "has_values",
    "is_array",
    "is_floating",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "masked_mean",
    "namespace",
    "on_host",
    "require_tensor",
    "stop_gradient",
    "take_last",
]

Array = Any
"""A torch tensor, a jax array (or what stands for one inside `jax.jit` and `jax.grad`) or a numpy array."""

_TORCH, _JAX, _NUMPY = "torch.Tensor", "jax.Array", "numpy.ndarray"

# ---------------------------------------------------------------------------------------------- what it is


def namespace(*arrays: Any, place: str = "namespace") -> Any:
    """The module whose functions (`where`, `exp`, `sum(x, axis=...)` ...) these arrays are for.

    Numbers among them are passed over. Numpy arrays beside jax's are for `jax.numpy`, which takes them.

    Args:
        place: what an error begins with.

    Raises:
        TypeError: torch tensors beside arrays of another library, or no array at all.
    """
    for each in arrays:
        if not isinstance(each, Tensor):
            break
    else:
        if arrays:
            return torch_namespace
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
    return array_namespace(*(leading or given or arrays))


def is_array(value: object) -> bool:
    """Whether it is an array of torch, jax or numpy; numbers of numpy are arrays of shape ()."""
    return _kind(value) is not None


def has_values(array: Array) -> bool:
    """Whether there is anything to look at: neither inside `jax.jit` or `jax.vmap` nor on torch's meta device is."""
    if isinstance(array, Tensor):
        return array.device.type != "meta"
    jax = sys.modules.get("jax")
    return jax is None or not isinstance(array, jax.core.Tracer)


def on_host(array: Array) -> bool:
    """Whether its values can be looked at without waiting for an accelerator."""
    if isinstance(array, Tensor):
        return array.device.type == "cpu"
    if _kind(array) == _JAX:
        return has_values(array) and all(device.platform == "cpu" for device in array.devices())
    return True


def is_floating(array: Array) -> bool:
    """Whether its dtype is one of the real floating point types."""
    if isinstance(array, Tensor):
        return array.is_floating_point()
    return bool(namespace(array).isdtype(array.dtype, "real floating"))


def describe_array(array: Array) -> str:
    """Library, dtype and shape, for messages: `jax.Array float32 (8, 4)`."""
    return f"{_kind(array)} {str(array.dtype).removeprefix('torch.')} {tuple(array.shape)}"


def require_tensor(place: str, name: str, value: object) -> None:
    """Refuses an array of another library where a torch tensor is needed; lets everything else pass.

    Raises:
        TypeError: it names the value's type, and how to make a tensor of it.
    """
    kind = _kind(value)
    if kind in (_JAX, _NUMPY):
        remedy = "torch.from_dlpack" if kind == _JAX else "torch.from_numpy"
        raise TypeError(
            f"{place}({name}={describe_array(value)}): needs torch tensors; let the loader give {remedy}(...), or "
            "train with a JaxBackend, which takes both"
        )


def _kind(value: object) -> str | None:
    if isinstance(value, Tensor):
        return _TORCH
    if isinstance(value, (np.ndarray, np.generic)):
        return _NUMPY
    jax = sys.modules.get("jax")
    # its metaclass says yes for what stands for an array in jit and grad; () while jax itself is being imported
    return _JAX if isinstance(value, getattr(jax, "Array", ())) else None


# ------------------------------------------------------------------------------- what the standard lacks


def stop_gradient(array: Array) -> Array:
    """The array as a constant: no gradient goes through it."""
    if isinstance(array, Tensor):
        return array.detach()
    return sys.modules["jax"].lax.stop_gradient(array) if _kind(array) == _JAX else array


def at_least_float32(array: Array) -> Array:
    """The array in float32, or as it is where its dtype is wider; whole numbers in a floating point type."""
    if isinstance(array, Tensor):
        return array.to(torch.promote_types(array.dtype, torch.float32))
    xp = namespace(array)
    return xp.astype(array, xp.result_type(array.dtype, xp.float32), copy=False)


def log_softmax(array: Array) -> Array:
    """`log(exp(x) / sum(exp(x)))` over the last dimension, whatever the size of x."""
    if isinstance(array, Tensor):
        return array.log_softmax(-1)
    xp = namespace(array)
    # the largest becomes 0 before anything is rounded: beside logits of 1e4 a loss would else keep 3 digits
    shifted = array - stop_gradient(xp.max(array, axis=-1, keepdims=True))
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def logsumexp(array: Array) -> Array:
    """`log(sum(exp(x)))` over the last dimension, whatever the size of x."""
    if isinstance(array, Tensor):
        return array.logsumexp(-1)
    xp = namespace(array)
    largest = stop_gradient(xp.max(array, axis=-1, keepdims=True))
    largest = xp.where(xp.isfinite(largest), largest, 0.0)  # inf - inf is nan
    return xp.log(xp.sum(xp.exp(array - largest), axis=-1)) + largest[..., 0]


def log_sigmoid(array: Array) -> Array:
    """`log(1 / (1 + exp(-x)))`, whatever the size of x."""
    if isinstance(array, Tensor):
        return F.logsigmoid(array)
    xp = namespace(array)
    return -xp.logaddexp(xp.zeros_like(array), -array)


def take_last(array: Array, index: Array) -> Array:
    """`array[..., index]`, an index for each row of the last dimension.

    Args:
        array: shape (..., n).
        index: whole numbers from 0 to n - 1, shape (...); int64 for torch.
    """
    if isinstance(array, Tensor):
        return array.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return namespace(array, index).take_along_axis(array, index[..., None], axis=-1)[..., 0]


def masked_mean(values: Array, mask: Array) -> Array:
    """Mean of the values where the mask is true, shape (); nan where it is nowhere, with a gradient of 0.

    Values beside the mask may be anything: neither they nor their gradients come through.
    """
    if isinstance(values, Tensor):
        return torch.where(mask, values, 0.0).sum() / mask.sum()
    xp = namespace(values, mask)
    wide = at_least_float32(values)
    count = xp.astype(xp.sum(xp.astype(mask, xp.int32)), wide.dtype)
    # nan by choice, not by 0 / 0: numpy would warn of that
    mean = xp.sum(xp.where(mask, wide, 0.0)) / xp.where(count > 0, count, 1.0)
    return xp.astype(xp.where(count > 0, mean, xp.nan), values.dtype, copy=False)
