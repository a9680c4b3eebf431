"""Digests of arrays and random generators: equal as long as these hold the same bits."""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pulsetrain.engine.arrays import is_array, on_host
from pulsetrain.engine.backends.module_view import version_of

__all__ = [
    "WHOLE", "bits_of", "bytes_of", "counted_writes", "digest", "digest_of_jax", "has_memory", "is_of_jax",
    "state_of_generator",
]  # fmt: skip

WHOLE, _SAMPLED = 1 << 20, 1 << 16  # elements of an array that is read whole, and read of a larger one


def digest(value: Tensor | np.ndarray) -> Hashable:
    """A value that depends on the bits of an array; of a large one, on a sample of them and on its version counter.

    >>> digest(torch.zeros(3)) == digest(torch.zeros(3)), digest(torch.zeros(3)) == digest(torch.ones(3))
    (True, False)
    """
    if isinstance(value, np.ndarray):
        if value.size > WHOLE and not value.flags.writeable and not _is_view_of_array(value):
            return str(value.dtype), value.shape, id(value)  # perhaps of a file, which is slow to sample
        return _bits_of_numpys(value)
    kind: Hashable = str(value.dtype), tuple(value.shape)
    if not has_memory(value):
        return kind, counted_writes(value)
    tensor = value.detach()
    if tensor.numel() <= WHOLE:
        return kind, bits_of(tensor.reshape(-1))
    if not tensor.is_contiguous():
        return kind, value.data_ptr(), counted_writes(value)
    return kind, counted_writes(value), bits_of(tensor.view(-1)[:: tensor.numel() // _SAMPLED])


def is_of_jax(value: object) -> bool:
    """Whether it is an array of jax."""
    return is_array(value) and not isinstance(value, (Tensor, np.ndarray, np.generic))


def digest_of_jax(value: Any) -> Hashable:
    """Of an array of jax. Nothing writes to it, so which object it is says enough where reading it takes long."""
    jax = sys.modules["jax"]
    kind = str(value.dtype), value.shape
    if value.size > WHOLE and not on_host(value):
        return kind, id(value)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return kind, _bits_of_numpys(np.asarray(value))


def has_memory(tensor: Tensor) -> bool:
    """Whether its elements can be read: not those of sparse, quantized and fake ones, nor of subclasses."""
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def bits_of(flat: Tensor) -> int:
    """A hash of the bits of a tensor with one axis."""
    return hash(flat.cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes())


def bytes_of(value: Any) -> int:
    """A hash of what a bytearray, or another object with a buffer, holds; of a large one, of a sample of it."""
    view = memoryview(value)
    if view.nbytes <= WHOLE or not view.contiguous:
        return hash(bytes(view))
    return hash(bytes(view.cast("B")[:: view.nbytes // _SAMPLED]))


def counted_writes(tensor: Tensor) -> int:
    """The count of writes to a tensor; 0 in inference mode, where none are counted."""
    return 0 if tensor.is_inference() else version_of(tensor)


def state_of_generator(generator: object) -> Hashable:
    """The state of a generator of torch, python or numpy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return str(generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state())  # type: ignore[attr-defined]


def _bits_of_numpys(value: np.ndarray) -> Hashable:
    few = value if value.size <= WHOLE else value.flat[:: value.size // _SAMPLED]  # reshape() may copy all of it
    return str(value.dtype), value.shape, hash(few.tobytes())


def _is_view_of_array(value: np.ndarray) -> bool:
    """Whether the memory is that of an array of numpy's, and not of a file or another library."""
    base: object = value
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return False
        base = base.base
    return base is None
