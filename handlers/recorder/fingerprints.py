"""Digests of what a run computes with, so that a comparison of two logs finds the very update at which they part."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import ModuleType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.arrays import is_array
from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import EventEnum, Events
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.cadence import check_every

__all__ = ["BatchFingerprint", "FingerprintEvents", "Fingerprints", "StateFingerprint", "fingerprint_of"]

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value
_CHUNK = 1 << 22  # words of 8 bytes: what a digest needs of memory at a time is as large
_TOLD = (int, float, complex, str, range, PurePath, type(None))  # whose repr tells all
MAX_DEPTH = 100  # of nesting in a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFingerprint:
    """STATE_FINGERPRINTED: tensors of shape (), int64, on the device: nothing waits for it. `rng` is a CRC-32."""

    weights: Tensor
    buffers: Tensor
    optimizer: Tensor
    rng: int  # of python's, numpy's and torch's generators on every device


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFingerprint:
    """BATCH_FINGERPRINTED: CRC-32 of everything in the batch, as the loader gave it."""

    batch: int


class FingerprintEvents(EventEnum):
    """What `Fingerprints` fires, for whoever records."""

    STATE_FINGERPRINTED = "state_fingerprinted", StateFingerprint
    BATCH_FINGERPRINTED = "batch_fingerprinted", BatchFingerprint


class Fingerprints:
    """Fires STATE_FINGERPRINTED at a cadence, and BATCH_FINGERPRINTED for each batch.

    A wrong buffer, or a wrong moment of the optimizer, shows in no loss for a long time; here it shows at once. The
    digests of weights, buffers and the optimizer's tensors combine the XOR (torch.hash_tensor) and the sums of their
    bits, up to 32 MiB of one tensor at a time: a change shows unless it leaves all of these as they are, as some
    exchanges of values within one tensor do. They read everything three times, on its device. Those of a batch and of
    the random number generators are CRC-32, to which the order counts as well.

    In a batch tensors, numpy arrays, numbers, text, bytes, containers, dataclasses and objects with a `__dict__` count;
    of any other object the name of its type does. What is nested more than 100 deep is not looked at.

    Args:
        every: when to digest the state; by default at each 100th update.
        batches: digest each batch as well; it is read on the host, where the loader has put it.
        model: by default the engine's.
        optimizer: by default the engine's.
    """

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
        self.every = Every(updates=100) if every is None else every
        self.batches, self.model, self.optimizer = batches, model, optimizer
        self._attachment = Attachment("Fingerprints")

    def attach(self, engine: Engine) -> Self:
        """Attach before the recorder, or run: an event is recorded that was registered when the run starts.

        Raises:
            ConfigurationError: the engine has no model, and none was given.
        """
        if self.model is None and not isinstance(getattr(engine, "model", None), torch.nn.Module):
            raise ConfigurationError(f"Fingerprints(model=None): {engine.name!r} has no torch model; pass model=")
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            engine.register_events(*FingerprintEvents)
            subscribe(self.every.events(), self._digest_state, phase=Phase.OBSERVE)
            if self.batches:
                subscribe(Events.GET_BATCH_COMPLETED, self._digest_batch, phase=Phase.OBSERVE)
        return self

    def detach(self) -> None:
        self._attachment.cancel()

    def _digest_state(self, engine: Any) -> None:
        model = self.model if self.model is not None else engine.model
        optimizer = self.optimizer if self.optimizer is not None else getattr(engine, "optimizer", None)
        engine.fire(FingerprintEvents.STATE_FINGERPRINTED, fingerprint_of(model, optimizer))

    def _digest_batch(self, engine: Any) -> None:
        engine.fire(FingerprintEvents.BATCH_FINGERPRINTED, BatchFingerprint(batch=_crc_of(engine.state.batch)))


def fingerprint_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> StateFingerprint:
    """Of the weights, buffers, the optimizer's state and the process's random number generators, as they are now."""
    state = optimizer.state_dict()["state"] if optimizer is not None else {}
    return StateFingerprint(
        weights=_digest(model.parameters()),
        buffers=_digest(model.buffers()),
        optimizer=_digest(_tensors(state)),
        rng=_crc_of(rng.capture()),
    )


def _crc_of(value: Any) -> int:
    crc = 0
    for piece in _pieces(value):
        crc = zlib.crc32(piece, crc)
    return crc


def _digest(tensors: Iterable[Tensor]) -> Tensor:
    """One number for all, shape (), int64; what is of one tensor weighs by its place: exchanging two tensors shows."""
    found: dict[torch.device, list[Tensor]] = {}
    for words in (words for tensor in tensors for bits in _bits(tensor) for words in _words(bits)):
        if words.numel():  # hash_tensor takes no empty ones
            # the sum loses upper bits; those of many equal values would be all that there is
            parts = [torch.hash_tensor(words).view(torch.int64), words.sum(), (words >> 32).sum()]
            found.setdefault(words.device, []).extend(parts)
    totals = [(torch.stack(parts) * _weights(len(parts), device)).sum() for device, parts in found.items()]
    total = torch.zeros((), dtype=torch.int64) if not totals else totals[0]
    for other in totals[1:]:
        total = total + other.to(total.device)
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers that have nothing to do with each other (the mixing of SplitMix64), shape (count,), int64."""
    mixed = torch.arange(1, count + 1, device=device) * (0x9E3779B97F4A7C15 - 2**64)
    mixed = (mixed ^ (mixed >> 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    mixed = (mixed ^ (mixed >> 27)) * (0x94D049BB133111EB - 2**64)
    return (mixed ^ (mixed >> 31)) | 1


def _words(bits: Tensor) -> Iterator[Tensor]:
    """The same bits, 8 bytes to a number, int64: they are added without a copy of wider numbers."""
    flat = bits.contiguous().view(-1)
    each = 8 // flat.itemsize
    if flat.storage_offset() % each:
        flat = flat.clone()
    whole = flat.numel() // each * each
    yield from flat[:whole].view(torch.int64).split(_CHUNK)
    yield flat[whole:].to(torch.int64)


def _bits(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor's values as whole numbers of the same bits; of a sparse one, those of its indices and its values."""
    tensor = tensor.detach()
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


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _pieces(value: Any, around: tuple[int, ...] = ()) -> Iterator[bytes]:
    """The bytes of everything in nested containers and objects, in their order.

    Args:
        around: ids of what this lies in: what holds itself ends there.
    """
    if isinstance(value, Tensor):
        for bits in _bits(value):
            yield bits.cpu().contiguous().numpy().tobytes()
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        yield value.tobytes()
    elif is_array(value) and not isinstance(value, np.ndarray):  # jax's
        yield np.asarray(value).tobytes()
    elif isinstance(value, _TOLD):
        yield repr(value).encode(errors="backslashreplace")
    elif isinstance(value, (bytes, bytearray, memoryview)):
        yield bytes(value)
    elif isinstance(value, (type, ModuleType)):
        yield value.__name__.encode()
    elif id(value) not in around and len(around) < MAX_DEPTH:
        for item in _items(value):
            yield from _pieces(item, (*around, id(value)))


def _items(value: Any) -> Iterable[Any]:
    """What an object or a container holds; of an object the name of its type as well."""
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
