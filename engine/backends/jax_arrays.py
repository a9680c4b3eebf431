"""Jax arrays on one device or several: to torch tensors and back, and pytrees of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.backends.jax_mesh import OneDevice, leaf_paths
from pulsetrain.engine.backends.trees import Trees
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import Tree

__all__ = ["JaxArrays", "find_jax_device", "find_mesh_devices"]

_WIDE = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}
_IN_NUMPY = {
    **_WIDE,
    **{each: each for each in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)},
    **{each: each for each in (torch.float16, torch.float32, torch.complex64)},
}  # and the dtype that jax computes in, unless it is set to keep 64 bits


class JaxArrays(Trees):
    """Trees are jax's pytrees, of jax arrays on one device or on a mesh."""

    _jax: ModuleType
    placement: OneDevice
    jax_device: Any  # the first of several
    device: torch.device

    def _use(self, placement: OneDevice) -> None:
        self.placement = placement
        self.jax_device = device = placement.first
        on_gpu = device.platform == "gpu" and torch.cuda.is_available()
        self.device = torch.device("cuda", device.local_hardware_id) if on_gpu else torch.device("cpu")

    def copy_of(self, leaf: Array) -> Array:
        # with an explicit dtype: a weak one (jax's of 0.5) would make jax compile again
        copy = self._jax.numpy.array(leaf, dtype=self._jax.numpy.asarray(leaf).dtype)
        return self.placement.put_like(copy, leaf) if self.owns(leaf) else copy

    def owns(self, leaf: Array) -> bool:
        return isinstance(leaf, self._jax.Array) and leaf.devices() == self.placement.devices

    def memory(self) -> int | None:
        """Bytes that the device holds, the first of a mesh; None if it does not report them."""
        found = self.jax_device.memory_stats()
        return None if found is None else int(found["bytes_in_use"])

    def to_host(self, batch: Tree) -> Tree:
        """The batch in torch tensors on the host."""
        return self.map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, self.to_torch(batch))

    def tensor_of(self, leaf: Array) -> Tree:
        """One array as a torch tensor, by DLPack if both are on one device; one that is split is gathered."""
        if isinstance(leaf, self._jax.Array):
            if self._jax.numpy.issubdtype(leaf.dtype, self._jax.dtypes.prng_key):
                leaf = self._jax.random.key_data(leaf)
            leaf = self.placement.on_one_device(leaf)
            if self.device.type == "cpu" and self.jax_device.platform != "cpu":
                leaf = self._jax.device_put(leaf, self._jax.devices("cpu")[0])
            return torch.utils.dlpack.from_dlpack(leaf)
        return super().tensor_of(leaf)

    def from_torch(self, tensor: Tensor) -> Array:
        """One torch tensor as an array on the device, or on each of them."""
        # a copy: the program reads it after the call has returned, when a loader may have put the next batch there
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        array = self._jax.numpy.from_dlpack(copy)
        return array if array.devices() == self.placement.devices else self.placement.put(array)

    def to_arguments(self, value: Tree) -> Tree:
        """Tensors as numpy arrays: a compiled program converts them in a tenth of the time that a jax array takes."""
        return self.map(lambda leaf: self._argument(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def _argument(self, tensor: Tensor) -> Array:
        if tensor.device.type != "cpu" or tensor.dtype not in _IN_NUMPY:
            return self.from_torch(tensor)
        dtype = tensor.dtype if self._jax.config.jax_enable_x64 else _IN_NUMPY[tensor.dtype]
        # a copy, as in from_torch
        return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format).numpy()

    def leaf_from(self, saved: Array, like: Tree) -> Array:
        jax = self._jax
        if jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key):
            data = self._array_of(saved)
            return self.placement.put_like(jax.random.wrap_key_data(data, impl=jax.random.key_impl(like)), like)
        return self.placement.put_like(jax.numpy.array(self._array_of(saved), dtype=like.dtype), like)  # a copy

    def _array_of(self, saved: Array) -> Array:
        return self._jax.numpy.from_dlpack(torch.as_tensor(saved).detach().cpu().contiguous())

    def tensors(self, tree: Tree) -> list[Tensor]:
        return [self.tensor_of(leaf) for leaf in self._jax.tree.leaves(tree)]

    def map(self, function: Callable[..., Tree], *trees: Tree) -> Tree:
        return self._jax.tree.map(function, *trees)

    def paths(self, tree: Tree) -> dict[str, Array]:
        return leaf_paths(self._jax, tree)

    def rebuilt(self, like: Tree, leaves: list[Array]) -> Tree:
        return self._jax.tree.unflatten(self._jax.tree.structure(like), leaves)


def find_jax_device(jax: ModuleType, name: str) -> Any:
    """The jax device of that name.

    Raises:
        ConfigurationError: there is none; the message lists those that there are.
    """
    kind, colon, number = str(name).partition(":")
    wanted = {"cuda": "gpu", "mps": "metal"}.get(kind, kind)
    try:
        devices = jax.devices() if kind == "auto" else jax.devices(wanted)
        if colon and not number.isdecimal():
            raise ValueError(number)
        return devices[int(number or 0)]
    except (RuntimeError, IndexError, ValueError):
        present = ", ".join(f"{each.platform}:{each.id}" for each in jax.devices())
        raise ConfigurationError(f"jax finds no such device here; it has {present}; or 'auto'", device=name) from None


def find_mesh_devices(jax: ModuleType, name: str, axes: Mapping[str, int]) -> list[Any]:
    """As many devices of that kind as the mesh has.

    Raises:
        ConfigurationError: there are fewer; the message says how a CPU counts as several.
    """
    devices: list[Any] = jax.devices(find_jax_device(jax, name).platform)
    count = math.prod(axes.values())
    if ":" in name:
        raise ConfigurationError("a mesh uses the first devices of a kind; leave the number out", device=name)
    if len(devices) < count:
        kind = devices[0].platform
        remedy = (
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={count} in the environment, or call "
            f"jax.config.update('jax_num_cpu_devices', {count}) before jax is first used"
            if kind == "cpu"
            else "choose smaller sizes"
        )
        raise ConfigurationError(
            f"needs {count} devices, and jax finds {len(devices)} of kind {kind!r}; {remedy}",
            "JaxBackend",
            mesh=dict(axes),
        )
    return devices[:count]
