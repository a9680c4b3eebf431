"""Digests of a run's state, so that comparing two logs finds the first update at which they differ."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine import ConfigurationError, Engine, EventEnum, Events, Every, Phase
from pulsetrain.engine.arrays import is_array
from pulsetrain.engine.backends.module_view import reading_once
from pulsetrain.engine.data import rng
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.distributed.shards import local
from pulsetrain.engine.training_run import model_of, optimizer_of
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.cadence import check_every

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = ["BatchFingerprint", "FingerprintEvents", "Fingerprints", "StateFingerprint", "digest_of", "fingerprint_of"]

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value
_CHUNK = 1 << 22  # words of 8 bytes: a digest needs that much memory at a time
_SHOWN = (int, float, complex, str, range, PurePath, type(None))  # repr shows the whole value
MAX_DEPTH = 100  # of nesting in a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFingerprint:
    """STATE_FINGERPRINTED: int64 tensors of shape (), left on the device, so that nothing waits; `rng` is a CRC-32."""

    weights: Tensor
    buffers: Tensor
    optimizer: Tensor
    rng: int  # of Python's, numpy's and torch's generators on every device
    sharded: bool = False  # whether the digests of weights and optimizer are of this process's part of them


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFingerprint:
    """BATCH_FINGERPRINTED: CRC-32 of everything in the batch, as the loader gave it."""

    batch: int


class FingerprintEvents(EventEnum):
    """What `Fingerprints` fires, for the event recorder."""

    STATE_FINGERPRINTED = "state_fingerprinted", StateFingerprint
    BATCH_FINGERPRINTED = "batch_fingerprinted", BatchFingerprint


class Fingerprints(Handler):
    """Fires STATE_FINGERPRINTED at a cadence, and BATCH_FINGERPRINTED for each batch.

    A wrong buffer or optimizer moment may not show in the loss for a long time; it shows in the digests at once. Those
    of weights, buffers and the optimizer's tensors combine the XOR (torch.hash_tensor) and the sums of their bits, for
    up to 32 MiB of one tensor at a time. They miss a change that leaves all of these equal, such as an exchange of
    certain values within one tensor. They read everything three times, on its device. The digests of a batch and of the
    random number generators are CRC-32, which also depends on the order.

    A batch's digest covers tensors, numpy arrays, numbers, text, bytes, containers, dataclasses and objects with a
    `__dict__`; for any other object, it covers only the name of its type. It ignores values nested more than 100 deep.

    Args:
        every: when to digest the state; by default at every 100th update.
        batches: digest each batch as well; the host reads it where the loader has put it.
        model: by default the engine's.
        optimizer: by default the engine's.

    >>> engine, found = Engine(lambda engine, batch: None), []
    >>> _ = Fingerprints(Every(iterations=1), batches=True, model=torch.nn.Linear(2, 1)).attach(engine)
    >>> @engine.on(FingerprintEvents.BATCH_FINGERPRINTED)
    ... def note(engine, event):
    ...     found.append(event.payload.batch)
    >>> _ = engine.run([[1, 2], [3, 4], [1, 2]])
    >>> found[0] == found[2], found[0] == found[1]
    (True, False)
    """

    batches: bool
    model: Module | None
    optimizer: Optimizer | None

    def __init__(
        self,
        every: Every | None = None,
        *,
        batches: bool = False,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if every is not None:
            check_every("Fingerprints", every, "Every(updates=100)")
        self.every: Every = Every(updates=100) if every is None else every
        self.batches, self.model, self.optimizer = batches, model, optimizer

    def attach(self, engine: Engine) -> Self:
        """Attach before the run starts: the recorder then records these events from the first on.

        Raises:
            ConfigurationError: the engine has no model, and none was given.
        """
        if self.model is None and model_of(engine) is None:
            raise ConfigurationError(f"{engine.name!r} has no torch model; pass model=", "Fingerprints", model=None)
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            engine.register_events(*FingerprintEvents)
            subscribe(self.every.events(), self._digest_state, phase=Phase.OBSERVE)
            if self.batches:
                subscribe(Events.GET_BATCH_COMPLETED, self._digest_batch, phase=Phase.OBSERVE)
        return self

    def _digest_state(self, engine: Engine) -> None:
        model = self.model if self.model is not None else model_of(engine)
        assert model is not None, "attach() has checked it"
        optimizer = self.optimizer if self.optimizer is not None else optimizer_of(engine)
        engine.fire(FingerprintEvents.STATE_FINGERPRINTED, fingerprint_of(model, optimizer))

    def _digest_batch(self, engine: Engine) -> None:
        engine.fire(FingerprintEvents.BATCH_FINGERPRINTED, BatchFingerprint(batch=_crc_of(engine.state.batch)))


def fingerprint_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> StateFingerprint:
    """The digests of the weights, the buffers, the optimizer's state and the process's random number generators."""
    state = optimizer.state_dict()["state"] if optimizer is not None else {}
    with reading_once(model):
        weights, buffers = digest_of(model.parameters()), digest_of(model.buffers())
    return StateFingerprint(
        weights=weights,
        buffers=buffers,
        optimizer=digest_of(_tensors(state)),
        rng=_crc_of(rng.capture()),
        sharded=is_sharded(model),
    )


def _crc_of(value: object) -> int:
    crc = 0
    for piece in _pieces(value):
        crc = zlib.crc32(piece, crc)
    return crc


def digest_of(tensors: Iterable[Tensor]) -> Tensor:
    """One number for all, shape (), int64; a tensor's part is weighted by its position, so exchanging two shows."""
    found: dict[torch.device, list[Tensor]] = {}
    for words in (words for tensor in tensors for bits in _bits(tensor) for words in _words(bits)):
        if words.numel():  # hash_tensor rejects empty tensors
            # the sum loses upper bits, in which many equal values may be all the difference
            parts = [torch.hash_tensor(words).view(torch.int64), words.sum(), (words >> 32).sum()]
            found.setdefault(words.device, []).extend(parts)
    totals = [(torch.stack(parts) * _weights(len(parts), device)).sum() for device, parts in found.items()]
    total = torch.zeros((), dtype=torch.int64) if not totals else totals[0]
    for other in totals[1:]:
        total = total + other.to(total.device)
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    """Unrelated odd numbers (the mixing function of SplitMix64), shape (count,), int64."""
    mixed = torch.arange(1, count + 1, device=device) * (0x9E3779B97F4A7C15 - 2**64)
    mixed = (mixed ^ (mixed >> 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    mixed = (mixed ^ (mixed >> 27)) * (0x94D049BB133111EB - 2**64)
    return (mixed ^ (mixed >> 31)) | 1


def _words(bits: Tensor) -> Iterator[Tensor]:
    """The same bits as int64, 8 bytes to a number: adding them needs no copy of wider numbers."""
    flat = bits.contiguous().view(-1)
    each = 8 // flat.itemsize
    if flat.storage_offset() % each:
        flat = flat.clone()
    whole = flat.numel() // each * each
    yield from flat[:whole].view(torch.int64).split(_CHUNK)
    yield flat[whole:].to(torch.int64)


def _bits(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor's values as integers with the same bits; of a sparse tensor, its indices and its values."""
    tensor = local(tensor.detach())
    if tensor.is_meta:  # another process has its values
        return
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        parts = [tensor.indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = list(tensor.unbind()) if tensor.is_nested else [tensor]
    for part in parts:
        plain = part.resolve_conj().resolve_neg()
        if plain.dtype == torch.complex128:
            plain = torch.view_as_real(plain)
        yield plain.view(_WHOLE[plain.itemsize])


def _tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in nested containers, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _pieces(value: object, around: tuple[int, ...] = ()) -> Iterator[bytes]:
    """The bytes of everything in nested containers and objects, in their order.

    Args:
        around: ids of the objects that contain this one, so that an object that contains itself ends there.
    """
    if isinstance(value, Tensor):
        for bits in _bits(value):
            yield bits.cpu().contiguous().numpy().tobytes()
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        yield value.tobytes()
    elif is_array(value) and not isinstance(value, np.ndarray):  # jax's
        yield np.asarray(value).tobytes()
    elif isinstance(value, _SHOWN):
        yield repr(value).encode(errors="backslashreplace")
    elif isinstance(value, (bytes, bytearray, memoryview)):
        yield bytes(value)
    elif isinstance(value, (type, ModuleType)):
        yield value.__name__.encode()
    elif id(value) not in around and len(around) < MAX_DEPTH:
        for item in _items(value):
            yield from _pieces(item, (*around, id(value)))


def _items(value: object) -> Iterable[object]:
    """The contents of a container, or the name of an object's type and its attributes."""
    if isinstance(value, Mapping):
        return (part for item in value.items() for part in item)
    if isinstance(value, np.ndarray):  # of objects
        return value.ravel().tolist()
    if isinstance(value, Sequence):
        return value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    names: Iterable[str] = getattr(value, "__dataclass_fields__", getattr(value, "__dict__", ()))
    return [type(value).__qualname__, *(part for name in names for part in (name, getattr(value, name, None)))]
