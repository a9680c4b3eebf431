"""A plain state as arrays by name and a text of all the rest, and made anew from both, equal in values and types.

The text is JSON. In it, lists, strings, integers, finite floats, true, false and null stand for themselves; an object
with one of the names below for what JSON has no form of.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.checkpoint.plain import shown_path
from pulsetrain.engine.checkpoint.safetensors_file import CODES
from pulsetrain.engine.errors import CheckpointError

__all__ = ["put_together", "take_apart"]

_Path = tuple[Any, ...]

_MANY = 64  # as many floats in a list become an array: a history has a million of them
_DEPTH = 100  # levels of containers: each takes some of python's stack when it is read


def take_apart(state: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """The text and the arrays of a state that `plain` has let through.

    The arrays are the state's own tensors, no copies, each once: those that are one in memory have one name. It is
    the path, joined by "/", with a number behind it where two are the same.

    Raises:
        CheckpointError: a tensor is sparse, quantized or without values, or a container too deep; it says where.
    """
    taking = _TakingApart()
    return json.dumps(taking.value(state, ()), separators=(",", ":")), taking.arrays


def put_together(text: str, arrays: dict[str, Tensor]) -> Any:
    """The state that was taken apart; tensors that were one in memory share it again.

    Args:
        text: the first that `take_apart` gave.
        arrays: the second; taken out of the dict as they are needed, so that none is kept twice.

    Raises:
        ValueError: the text is of nothing that was taken apart, or an array is missing.
    """
    return _PuttingTogether(arrays).value(json.loads(text))


class _TakingApart:
    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # of the tensors that have been met, by what they are in memory

    def value(self, value: Any, path: _Path) -> Any:
        if len(path) > _DEPTH:
            raise CheckpointError(f"{shown_path(path[:3])}...: holds a container that is too deep")
        kind = type(value)
        if value is None or kind is str or kind is bool or kind is int:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return {"tuple": self._items(value, path)}
        if kind is dict:
            return self._mapping(value, path)
        if kind is OrderedDict:
            attributes = self._mapping(vars(value), (*path, "__dict__"))
            return {"ordered": self._mapping(value, path), "attributes": attributes}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is torch.dtype:
            return {"dtype": _name_of(value)}
        if kind is torch.device:
            return {"device": str(value)}
        return self._tensor(value, path)

    def _items(self, items: list[Any] | tuple[Any, ...], path: _Path) -> Any:
        if len(items) >= _MANY and all(type(item) is float for item in items):
            name = self._new_name(path)
            self.arrays[name] = torch.tensor(items, dtype=torch.float64)
            return {"floats": name}
        return [self.value(item, (*path, index)) for index, item in enumerate(items)]

    def _mapping(self, mapping: Mapping[Any, Any], path: _Path) -> Any:
        if all(type(key) is str for key in mapping):
            return {"dict": {key: self.value(item, (*path, key)) for key, item in mapping.items()}}
        pairs = [[self.value(key, (*path, key)), self.value(item, (*path, key))] for key, item in mapping.items()]
        return {"pairs": pairs}

    def _tensor(self, tensor: Tensor, path: _Path) -> dict[str, Any]:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            what = "without values" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(
                f"{shown_path(path)}: a tensor that is {what}: safetensors cannot hold it; save with form='torch'"
            )
        found: dict[str, Any] = {"tensor": self._name(tensor, path)}
        if tensor.dtype not in CODES:
            found["of"] = _name_of(tensor.dtype)
        dense = torch.empty_like(tensor, device="meta").stride()  # such as channels_last; else that of the file
        if not tensor.is_contiguous() and dense != torch.empty(tensor.shape, device="meta").stride():
            found["stride"] = list(dense)
        if type(tensor) is nn.Parameter:
            found["parameter"] = tensor.requires_grad
        elif tensor.requires_grad:
            found["requires_grad"] = True
        if attributes := vars(tensor):
            found["attributes"] = self._mapping(attributes, (*path, "__dict__"))
        return found

    def _name(self, tensor: Tensor, path: _Path) -> str:
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        memory = (*where, tensor.is_conj(), tensor.is_neg())
        name = self._names.get(memory) if tensor.nbytes else None  # without a byte all lie at address 0
        if name is None:
            name = self._names[memory] = self._new_name(path)
            self.arrays[name] = tensor if tensor.dtype in CODES else _raw(tensor)
        return name

    def _new_name(self, path: _Path) -> str:
        # a lone surrogate is no text for other tools
        plain = "/".join(map(str, path)).encode("utf-8", "backslashreplace").decode()
        name, again = plain, 1
        while name in self.arrays or name == "__metadata__":  # which the format has taken
            again += 1
            name = f"{plain}~{again}"
        return name


class _PuttingTogether:
    def __init__(self, arrays: dict[str, Tensor]) -> None:
        self._arrays = arrays
        self._made: dict[str, Tensor] = {}  # of the arrays, the tensors that have been met

    def value(self, value: Any) -> Any:
        if type(value) is list:
            return [self.value(item) for item in value]
        if type(value) is not dict:
            return value
        match value:
            case {"tensor": _}:
                return self._tensor(value)
            case {"dict": items}:
                return {key: self.value(item) for key, item in items.items()}
            case {"pairs": pairs}:
                return {self.value(key): self.value(item) for key, item in pairs}
            case {"ordered": items, "attributes": attributes}:
                ordered = OrderedDict(self.value(items))
                vars(ordered).update(self.value(attributes))
                return ordered
            case {"tuple": items}:
                return tuple(self.value(items))
            case {"floats": name}:
                return self._array(name).tolist()
            case {"float": digits}:
                return struct.unpack(">d", bytes.fromhex(digits))[0]
            case {"bytes": digits}:
                return bytes.fromhex(digits)
            case {"size": sizes}:
                return torch.Size(sizes)
            case {"dtype": name}:
                return _dtype_of(name)
            case {"device": name}:
                return torch.device(name)
        raise ValueError(f"it holds what this version does not know: {', '.join(value)}")

    def _tensor(self, found: dict[str, Any]) -> Tensor:
        tensor = self._memory(found).detach()  # an object of its own
        if "parameter" in found:
            tensor = nn.Parameter(tensor, found["parameter"])
        elif "requires_grad" in found:
            tensor.requires_grad_()
        if "attributes" in found:
            vars(tensor).update(self.value(found["attributes"]))
        return tensor

    def _memory(self, found: dict[str, Any]) -> Tensor:
        name = found["tensor"]
        if name not in self._made:
            tensor = self._array(name)
            if "of" in found:
                tensor = tensor.view(_dtype_of(found["of"])).squeeze(-1)
            if "stride" in found:
                tensor = torch.empty_strided(tensor.shape, found["stride"], dtype=tensor.dtype).copy_(tensor)
            self._made[name] = tensor
        return self._made[name]

    def _array(self, name: str) -> Tensor:
        if name not in self._arrays:
            raise ValueError(f"it lacks the array {name}")
        return self._arrays.pop(name)


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of each item of a dtype that safetensors has no code for, such as complex128."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return data.unsqueeze(-1).view(torch.uint8)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it names a dtype that torch does not know: {name!r}")
    return dtype
