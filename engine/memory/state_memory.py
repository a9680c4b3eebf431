"""Memory outside the device, for the state of an optimizer: in a file that is mapped, or on the host."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.file_system import file_system_of
from pulsetrain.engine.logs import get_logger

__all__ = ["HostState", "MappedState", "Slots", "StateMemory"]

Slots = Mapping[str, Tensor]  # the state of one parameter, by name

_ALIGNED = 64  # bytes, as torch aligns its own tensors
# A page that is read brings in its neighbours, up to 64 KiB (fault-around), so some lie before what was used.
_AROUND = 1 << 20


class StateMemory(Protocol):
    """Makes tensors for the optimizer state of parameters, in the order in which an update uses them."""

    def reserve(self, wanted: Sequence[Mapping[str, Tensor]]) -> list[Slots]:
        """Tensors for parameters: for each, like those given, on the CPU.

        Raises:
            ConfigurationError: there is no room.
        """

    def release(self, slots: Sequence[Slots] | None = None) -> None:
        """These slots, or all, are not in use: they may leave the process's memory."""


class HostState:
    """The host's memory.

    Args:
        pinned: whether the parameters are on a GPU, to which pinned memory is copied faster.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned

    def reserve(self, wanted: Sequence[Mapping[str, Tensor]]) -> list[Slots]:
        return [
            {name: torch.empty_like(each, device="cpu", pin_memory=self.pinned) for name, each in values.items()}
            for values in wanted
        ]

    def release(self, slots: Sequence[Slots] | None = None) -> None:
        return


class MappedState:
    """Files without a name in a folder, mapped into memory. They vanish with the process, however it ends.

    Their room is reserved beforehand: writing to a mapped file on a full disk would end the process by SIGBUS.

    Args:
        folder: where to make them; it is created if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: list[tuple[mmap.mmap, int]] = []  # with their addresses
        self._reported = False

    def reserve(self, wanted: Sequence[Mapping[str, Tensor]]) -> list[Slots]:
        places: list[dict[str, int]] = []
        end = 0
        for values in wanted:
            end = _rounded_up(end, mmap.PAGESIZE)  # a page is of one parameter, so that each can be released
            places.append({})
            for name, each in values.items():
                places[-1][name] = end = _rounded_up(end, _ALIGNED)
                end += each.nbytes
        if not end:
            return [{} for _ in wanted]
        mapped = self._mapped(end)
        made: list[Slots] = [
            {
                # a storage of its own: who copies a tensor's storage would copy the whole file
                name: torch.frombuffer(mapped, dtype=each.dtype, count=each.numel(), offset=offsets[name]).as_strided(
                    each.shape, each.stride()
                )
                for name, each in values.items()
            }
            for values, offsets in zip(wanted, places, strict=True)
        ]
        self._maps.append((mapped, torch.frombuffer(mapped, dtype=torch.uint8, count=1).data_ptr()))
        return made

    def release(self, slots: Sequence[Slots] | None = None) -> None:
        if slots is None:
            for mapped, _ in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)  # of a shared mapping: what was written is in the file
            return
        tensors = [each for values in slots for each in values.values()]
        for mapped, address in self._maps:
            offsets = [each.data_ptr() - address for each in tensors]
            inside = [
                (at, at + each.nbytes) for at, each in zip(offsets, tensors, strict=True) if 0 <= at < len(mapped)
            ]
            if inside:
                begin = max(min(inside)[0] - _AROUND, 0) // mmap.PAGESIZE * mmap.PAGESIZE
                end = min(_rounded_up(max(inside)[1], mmap.PAGESIZE), len(mapped))
                mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _mapped(self, size: int) -> mmap.mmap:
        if not hasattr(os, "posix_fallocate") or not hasattr(mmap, "MADV_DONTNEED"):
            raise ConfigurationError("needs Linux; choose 'host'", "OptimizerOffload", to="disk")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise ConfigurationError(
                f"no room there for {math.ceil(size / 2**20)} MiB of optimizer state: {error.strerror or error}; make "
                "room, or choose another folder",
                "OptimizerOffload",
                folder=str(self.folder),
            ) from error
        if file_system_of(self.folder).type in ("tmpfs", "ramfs") and not self._reported:
            self._reported = True
            get_logger("engine").warning(
                "the folder for the optimizer's state is in memory (tmpfs), so nothing is saved; choose one on a disk",
                folder=str(self.folder),
            )
        return mapped


def _rounded_up(size: int, to: int) -> int:
    return -(-size // to) * to
