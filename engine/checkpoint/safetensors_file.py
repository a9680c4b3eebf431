"""The file format of safetensors: arrays by name, which other tools read, and which no code is run to read.

Eight bytes with the length of the header, the header as JSON, then the bytes of the arrays, one behind the other and
little-endian. It is written and read here array by array, so that no second copy of all of them is ever in memory,
from URLs too; the package safetensors is not needed for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch import Tensor

from pulsetrain.engine.checkpoint.digesting import Write
from pulsetrain.engine.errors import CheckpointError

__all__ = ["CODES", "file_writer", "read_file"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in _DTYPES.items()}  # what the format calls each dtype that it has

_METADATA = "__metadata__"  # the header's one entry that is no array
_HEADER_LIMIT = 100_000_000  # bytes: the package reads no longer one


def file_writer(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Write:
    """What writes such a file; it copies at most one array at a time.

    Args:
        arrays: strided, on any device, of the dtypes in `CODES`; by names without lone surrogates.
        metadata: texts that the header holds beside them.

    Raises:
        CheckpointError: the header would be too long.
    """
    # the largest items first: each array then begins at a multiple of its item's size, and readers can map the file
    ordered = sorted(arrays.items(), key=lambda entry: -entry[1].itemsize)
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise CheckpointError(
            f"checkpoint: what it holds beside its arrays takes {len(text)} bytes, a file of safetensors has room for "
            f"{_HEADER_LIMIT}; keep long lists of numbers as tensors, or save with form='torch'"
        )

    def write(file: IO[bytes]) -> None:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, array in ordered:
            file.write(_bytes_of(array.detach().resolve_conj().resolve_neg().cpu().contiguous()))

    return write


def read_file(file: IO[bytes]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The arrays and the metadata of such a file, each array in memory of its own.

    Raises:
        ValueError: it is none.
    """
    header = json.loads(_filled(file, bytearray(_header_length(file))))
    metadata = header.pop(_METADATA, {})
    arrays: dict[str, Tensor] = {}
    position = 0
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} is of dtype {entry['dtype']}, which is not known")
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        begin, end = entry["data_offsets"]
        if (begin, end) != (position, position + math.prod(shape) * dtype.itemsize):
            raise ValueError(f"{name} does not lie where it has to")
        array = torch.empty(shape, dtype=dtype)
        _filled(file, _bytes_of(array))
        arrays[name], position = array, end
    if file.read(1):
        raise ValueError("something follows its last array")
    return arrays, metadata


def _header_length(file: IO[bytes]) -> int:
    length = int.from_bytes(_filled(file, bytearray(8)), "little")
    if length > _HEADER_LIMIT:
        raise ValueError(f"its header would have {length} bytes")
    return length


def _bytes_of(array: Tensor) -> memoryview:
    """The memory of a contiguous array on the CPU."""
    # torch would refuse to view a row of one item, or of none, whose stride is not 1
    return array.unsqueeze(-1).view(torch.uint8).numpy().reshape(-1).data


def _filled(file: IO[bytes], room: Any) -> Any:
    """The room, with the next bytes of the file in it."""
    left = memoryview(room)
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]  # each of ours can be read into
        if not count:
            raise ValueError("it ends too early")
        left = left[count:]
    return room
