"""The safetensors file format: arrays by name, which other tools can read, and which runs no code when it is read.

A file has eight bytes with the length of the header, the header as JSON, then the bytes of the arrays, consecutive and
little-endian. This module writes and reads array by array, also at URLs, so that memory never holds a second copy of
all of them. It does not need the package safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from itertools import product
from typing import IO, NamedTuple, TypeVar

import torch
from torch import Tensor

from pulsetrain.engine.checkpoint.digests import Write
from pulsetrain.engine.errors import CheckpointError

__all__ = ["CODES", "Entry", "file_writer", "read_block", "read_file", "read_header"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in _DTYPES.items()}  # the format's name for each dtype that it supports

_METADATA = "__metadata__"  # the header's one entry that is not an array
_HEADER_LIMIT = 100_000_000  # bytes: the package does not read a longer one

_Buffer = TypeVar("_Buffer", bytearray, memoryview)


def file_writer(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Write:
    """A function that writes such a file; it copies at most one array at a time.

    >>> import io
    >>> file = io.BytesIO()
    >>> file_writer({"w": torch.ones(2)}, {"made_by": "me"})(file)
    >>> read_file(io.BytesIO(file.getvalue()))
    ({'w': tensor([1., 1.])}, {'made_by': 'me'})

    Args:
        arrays: strided, on any device, of the dtypes in `CODES`; names without lone surrogates.
        metadata: texts to store in the header.

    Raises:
        CheckpointError: the header would be too long.
    """
    # the largest items first: each array then begins at a multiple of its item's size, and readers can map the file
    ordered = sorted(arrays.items(), key=lambda entry: -entry[1].itemsize)
    header: dict[str, object] = {_METADATA: dict(metadata)}
    end = 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise CheckpointError(
            f"checkpoint: its values other than arrays take {len(text)} bytes, and a safetensors file has room for "
            f"{_HEADER_LIMIT}; keep long lists of numbers as tensors, or save with form='torch'"
        )

    def write(file: IO[bytes]) -> None:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, array in ordered:
            file.write(_bytes_of(array.detach().resolve_conj().resolve_neg().cpu().contiguous()))

    return write


class Entry(NamedTuple):
    """Where an array is in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int  # its first byte


def read_header(file: IO[bytes]) -> tuple[dict[str, Entry], dict[str, str]]:
    """Where the arrays are, in the order of the file, and the metadata; the file is then at the first array.

    Raises:
        ValueError: it is not such a file.
    """
    length = int.from_bytes(_filled(file, bytearray(8)), "little")
    if length > _HEADER_LIMIT:
        raise ValueError(f"its header would have {length} bytes, and {_HEADER_LIMIT} is the limit")
    header = json.loads(_filled(file, bytearray(length)))
    metadata = header.pop(_METADATA, {})
    entries: dict[str, Entry] = {}
    position = 0
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        begin, end = entry["data_offsets"]
        if (begin, end) != (position, position + math.prod(shape) * dtype.itemsize):
            raise ValueError(
                f"{name} has bytes {begin} to {end}, which do not fit its shape {shape} or the array before it"
            )
        entries[name], position = Entry(dtype, tuple(shape), 8 + length + begin), end
    return entries, metadata


def read_file(file: IO[bytes], without: Container[str] = ()) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The arrays, but for some, and the metadata of such a file; each array has its own memory.

    Raises:
        ValueError: it is not such a file.
    """
    entries, metadata = read_header(file)
    arrays: dict[str, Tensor] = {}
    for name, entry in entries.items():
        if name in without:
            file.seek(entry.at + math.prod(entry.shape) * entry.dtype.itemsize)
            continue
        array = torch.empty(entry.shape, dtype=entry.dtype)
        _filled(file, _bytes_of(array))
        arrays[name] = array
    if file.read(1):
        raise ValueError("bytes follow its last array")
    return arrays, metadata


def read_block(file: IO[bytes], entry: Entry, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The items of an array from an index on; where the block is narrower than the array, nothing beside it is read."""
    array = torch.empty(tuple(shape), dtype=entry.dtype)
    if not array.numel():
        return array
    whole = len(shape)  # from this dimension on, all of the array is in the block
    while whole and shape[whole - 1] == entry.shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)  # of the dimensions from this one on, the block has consecutive bytes
    strides = [math.prod(entry.shape[at + 1 :]) for at in range(len(shape))]
    length = math.prod(shape[outer:]) * entry.dtype.itemsize
    first = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    buffer, filled = _bytes_of(array), 0
    for index in product(*map(range, shape[:outer])):
        moved = sum(at * stride for at, stride in zip(index, strides, strict=False))
        file.seek(entry.at + (first + moved) * entry.dtype.itemsize)
        _filled(file, buffer[filled : filled + length])
        filled += length
    return array


def _bytes_of(array: Tensor) -> memoryview:
    """The memory of a contiguous array on the CPU."""
    # unsqueeze: torch does not view a row of one item, or of none, whose stride is not 1
    return array.unsqueeze(-1).view(torch.uint8).numpy().reshape(-1).data


def _filled(file: IO[bytes], buffer: _Buffer) -> _Buffer:
    """The buffer, filled with the next bytes of the file."""
    left = memoryview(buffer)
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]  # our files have it
        if not count:
            raise ValueError("it ends too early")
        left = left[count:]
    return buffer
