"""Encodes a plain state as named arrays and a JSON text, and decodes it from both, equal in values and types.

In the text, lists, strings, integers, finite floats, true, false and null represent themselves. An object with one of
the names below represents a value that JSON cannot hold.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pulsetrain.engine.checkpoint.pieces import Piece, StoredPiece, StoredTensor
from pulsetrain.engine.checkpoint.plain import Plain, Step, as_saved, shown_path
from pulsetrain.engine.checkpoint.safetensors_file import CODES
from pulsetrain.engine.errors import CheckpointError

__all__ = ["Encoded", "decode_tree", "encode_tree"]

_Path = tuple[Step, ...]

_MANY = 64  # a list of at least so many floats becomes an array: a history has a million of them
_DEPTH = 100  # levels of containers: each uses some of Python's stack when it is decoded


class Encoded(NamedTuple):
    """A state as a text and arrays."""

    text: str
    arrays: dict[str, Tensor]
    pieces: dict[str, Piece]  # those of the arrays that are pieces


def encode_tree(state: dict[str, Plain]) -> Encoded:
    """The text, the arrays and the pieces of a state that `plain` has accepted.

    The arrays are the state's own tensors, not copies. Tensors with the same memory are one array. An array's name is
    its path, joined by "/", with a number appended if two paths are equal.

    >>> encode_tree({"w": torch.ones(2), "step": 3})[:2]
    ('{"dict":{"w":{"tensor":"w"},"step":3}}', {'w': tensor([1., 1.])})

    Raises:
        CheckpointError: a tensor is sparse, quantized or without values, or a container too deep; it says where.
    """
    encoder = _Encoder()
    text = json.dumps(encoder.value(state, ()), separators=(",", ":"))
    return Encoded(text, encoder.arrays, encoder.pieces)


def decode_tree(
    text: str, arrays: dict[str, Tensor], pieces: Mapping[str, Sequence[StoredPiece]] | None = None
) -> Plain:
    """The state that was encoded; tensors that shared memory share it again, and those in pieces are stored tensors.

    >>> decode_tree('{"dict":{"w":{"tensor":"w"},"step":3}}', {"w": torch.ones(2)})
    {'w': tensor([1., 1.]), 'step': 3}

    Args:
        text: that of `encode_tree`.
        arrays: its arrays; entries are removed as they are used, so that no array is held twice.
        pieces: those of all processes, by the name of their tensor.

    Raises:
        ValueError: the text is not such an encoding, or an array is missing.
    """
    return _Decoder(arrays, pieces or {}).value(json.loads(text))


class _Encoder:
    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}
        self.pieces: dict[str, Piece] = {}
        self._names: dict[tuple[object, ...], str] = {}  # of the encoded tensors, by their memory

    def value(self, value: Plain, path: _Path) -> Plain:
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
        if kind is Piece:
            return self._piece(value, path)
        return self._tensor(value, path)

    def _items(self, items: Sequence[Plain], path: _Path) -> Plain:
        if len(items) >= _MANY and all(type(item) is float for item in items):
            name = self._new_name(path)
            self.arrays[name] = torch.tensor(items, dtype=torch.float64)
            return {"floats": name}
        return [self.value(item, (*path, index)) for index, item in enumerate(items)]

    def _mapping(self, mapping: Mapping[Plain, Plain], path: _Path) -> dict[str, Plain]:
        if all(type(key) is str for key in mapping):
            return {"dict": {key: self.value(item, (*path, key)) for key, item in mapping.items()}}
        pairs = [[self.value(key, (*path, key)), self.value(item, (*path, key))] for key, item in mapping.items()]
        return {"pairs": pairs}

    def _tensor(self, tensor: Tensor, path: _Path) -> dict[str, Plain]:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            what = "without values" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(
                f"{shown_path(path)}: a tensor that is {what}, which safetensors cannot hold; save with form='torch'"
            )
        found: dict[str, Plain] = {"tensor": self._name(tensor, path)}
        if tensor.dtype not in CODES:
            found["of"] = _name_of(tensor.dtype)
        dense = torch.empty_like(tensor, device="meta").stride()  # such as channels_last
        if not tensor.is_contiguous() and dense != torch.empty(tensor.shape, device="meta").stride():
            found["stride"] = list(dense)
        if type(tensor) is nn.Parameter:
            found["parameter"] = tensor.requires_grad
        elif tensor.requires_grad:
            found["requires_grad"] = True
        if attributes := vars(tensor):
            found["attributes"] = self._mapping(attributes, (*path, "__dict__"))
        return found

    def _piece(self, piece: Piece, path: _Path) -> dict[str, Plain]:
        if piece.data.dtype not in CODES:
            raise CheckpointError(f"{shown_path(path)}: {piece.data.dtype} cannot be saved in pieces")
        name = self._name(piece.data, path, "piece")
        self.pieces[name] = piece
        return {"pieces": name, "shape": list(piece.shape), "of": _name_of(piece.data.dtype)}

    def _name(self, tensor: Tensor, path: _Path, kind: str = "") -> str:
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        memory = (kind, *where, tensor.is_conj(), tensor.is_neg())  # a reader takes a piece for the whole tensor's
        name = self._names.get(memory) if tensor.nbytes else None  # all empty tensors have address 0
        if name is None:
            name = self._names[memory] = self._new_name(path)
            self.arrays[name] = tensor if tensor.dtype in CODES else _raw(tensor)
        return name

    def _new_name(self, path: _Path) -> str:
        # other tools cannot read a lone surrogate
        plain = "/".join(map(str, path)).encode("utf-8", "backslashreplace").decode()
        name, number = plain, 1
        while name in self.arrays or name == "__metadata__":  # reserved by the format
            number += 1
            name = f"{plain}~{number}"
        return name


class _Decoder:
    def __init__(self, arrays: dict[str, Tensor], pieces: Mapping[str, Sequence[StoredPiece]]) -> None:
        self._arrays, self._pieces = arrays, pieces
        self._made: dict[str, Tensor] = {}  # decoded tensors by the name of their array

    def value(self, value: Plain) -> Plain:
        if type(value) is list:
            return [self.value(item) for item in value]
        if type(value) is not dict:
            return value
        match value:
            case {"tensor": _}:
                return self._tensor(value)
            case {"pieces": name, "shape": shape, "of": dtype}:
                return StoredTensor(name, shape, _dtype_of(dtype), self._pieces.get(name, ()))
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
        raise ValueError(f"it holds values of an unknown kind: {', '.join(value)}")

    def _tensor(self, found: dict[str, Plain]) -> Tensor:
        tensor = self._memory(found).detach()  # a separate object with the same memory
        requires_grad = found.get("parameter", "requires_grad" in found)
        attributes = self.value(found["attributes"]) if "attributes" in found else {}
        return as_saved(tensor, "parameter" in found, requires_grad, attributes)

    def _memory(self, found: dict[str, Plain]) -> Tensor:
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
    """The bytes of each item, for a dtype that safetensors does not support, such as complex128."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return data.unsqueeze(-1).view(torch.uint8)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it names a dtype that torch does not have: {name!r}")
    return dtype
