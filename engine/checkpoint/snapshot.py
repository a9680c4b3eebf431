"""A copy of a checkpoint's state in host memory, so that training continues while the copy is written."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.checkpoint.pieces import Piece
from pulsetrain.engine.checkpoint.plain import Plain, as_saved
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.named_values import NamedValues

__all__ = ["Snapshot"]

_Storages = defaultdict[tuple[int, bool], list[torch.UntypedStorage]]  # by size in bytes, and whether pinned


class Snapshot:
    """Copies states, one after the other, into host memory that it reuses: a copy is valid until the next one.

    New memory is allocated only for storages that were absent, or of another size, last time. 100 MB take 5 to 7 ms
    into memory that has been written before, and 30 to 160 ms into new memory: a page fault for each 4 KB.

    >>> weights = torch.ones(2)
    >>> copy = Snapshot().copy({"weights": weights})
    >>> weights += 1
    >>> copy
    {'weights': tensor([1., 1.])}
    """

    def __init__(self) -> None:
        self._kept: _Storages = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        return sum(size * len(storages) for (size, _), storages in self._kept.items())

    def prepare(self, state: Mapping[str, Plain]) -> Callable[[], None]:
        """A function that allocates memory for the first copy of such a state, in any thread, before `copy`."""
        sizes: dict[tuple[torch.device, int], tuple[int, bool]] = {}  # by storage

        def measure(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                sizes[tensor.device, storage.data_ptr()] = storage.nbytes(), tensor.device.type == "cuda"
            return tensor

        _Copying(self._kept, measure).copied(dict(state))

        def make() -> None:
            for size, pinned in sizes.values():
                room = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                room.zero_()  # the first write is slow
                self._kept[size, pinned].append(room.untyped_storage())

        return make

    def copy(self, state: Mapping[str, Plain]) -> dict[str, Plain]:
        """Copy the state; later changes of the state, also in place, do not change the copy.

        Tensors are copied to the CPU with their dtype, strides and attributes; tensors that share a storage still do.
        Other values are not copied: those that a checkpoint can hold are immutable.

        Raises:
            CheckpointError: the state holds itself.
        """
        copying = _Copying(self._kept)
        try:
            copy = {key: copying.copied(value) for key, value in state.items()}
        except RecursionError:
            raise CheckpointError("checkpoint: holds a container that is too deep, or that holds itself") from None
        copying.finish()
        self._kept = copying.used  # frees the memory that is no longer needed
        return copy


class _Copying:
    """The progress of one copy: which storage has been copied where. `tensor` may do something else with tensors."""

    def __init__(self, spare: _Storages, tensor: Callable[[Tensor], Tensor] | None = None) -> None:
        self._of_tensor = tensor or self._tensor
        self.used: _Storages = defaultdict(list)
        self._spare = spare
        self._copies: dict[tuple[torch.device, int, int], torch.UntypedStorage] = {}
        self._streams: set[torch.cuda.Stream] = set()

    def copied(self, value: Plain) -> Plain:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            if value.is_meta:  # it stays without values
                return value
            return self._of_tensor(value)
        if kind is Piece:
            return replace(value, data=self._of_tensor(value.data))
        if hasattr(value, "to_local"):  # a shard, which stays in this process
            return value.detach().clone()
        if kind is dict or kind is NamedValues:
            return {key: self.copied(item) for key, item in value.items()}
        if kind is list or kind is tuple:
            # floats are skipped without a call: a history has a million of them
            return kind([item if type(item) is float else self.copied(item) for item in value])
        if kind is OrderedDict:  # a module's state_dict() keeps its versions in an attribute
            ordered = OrderedDict((key, self.copied(item)) for key, item in value.items())
            vars(ordered).update(self.copied(vars(value)))
            return ordered
        return np.array(value) if kind in (np.ndarray, np.memmap) else value

    def finish(self) -> None:
        """Wait for the copies from devices."""
        for stream in self._streams:
            stream.synchronize()

    def _tensor(self, tensor: Tensor) -> Tensor:
        data = tensor.detach()
        copy: Tensor
        if data.layout is torch.strided and not (data.is_quantized or data.is_conj() or data.is_neg()):
            copy = torch.empty(0, dtype=data.dtype)
            copy.set_(self._storage(data), data.storage_offset(), data.size(), data.stride())
        else:
            copy = data.to("cpu", copy=True)
        return as_saved(copy, type(tensor) is torch.nn.Parameter, tensor.requires_grad, self.copied(vars(tensor)))

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """The copy of the whole storage that the tensor is a view of: torch.save writes it whole as well."""
        storage = tensor.untyped_storage()
        source = (tensor.device, storage.data_ptr(), storage.nbytes())
        copy = self._copies.get(source)
        if copy is None:
            on_cuda = tensor.device.type == "cuda"
            copy = self._copies[source] = self._room(storage.nbytes(), pinned=on_cuda)
            if on_cuda:  # the copies run concurrently, and `finish` waits for all
                self._streams.add(torch.cuda.current_stream(tensor.device))
            copy.copy_(storage, non_blocking=on_cuda)
        return copy

    def _room(self, size: int, *, pinned: bool) -> torch.UntypedStorage:
        spare = self._spare[size, pinned]
        room = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        self.used[size, pinned].append(room)
        return room
