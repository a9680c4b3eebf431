"""Digests of what a run computes with, so that a comparison of two logs finds the very update at which they part."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from engine import rng
from engine.cadence import Every
from engine.errors import ConfigurationError
from engine.events import EventEnum, Events
from engine.loop import Engine
from engine.subscription import Phase
from handlers.attachment import Attachment

__all__ = ["BatchFingerprint", "FingerprintEvents", "Fingerprints", "StateFingerprint", "fingerprint_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFingerprint:
    """STATE_FINGERPRINTED: tensors of shape (), int64, on the device: nothing waits for it. `rng` is a CRC-32."""

    weights: Tensor
    buffers: Tensor
    optimizer: Tensor
    rng: int  # of python's, numpy's and torch's generators on every device


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFingerprint:
    """BATCH_FINGERPRINTED: CRC-32 of the bytes of every tensor in the batch, as the loader gave it."""

    batch: int


class FingerprintEvents(EventEnum):
    """What `Fingerprints` fires, for whoever records."""

    STATE_FINGERPRINTED = "state_fingerprinted", StateFingerprint
    BATCH_FINGERPRINTED = "batch_fingerprinted", BatchFingerprint


class Fingerprints:
    """Fires STATE_FINGERPRINTED at a cadence, and BATCH_FINGERPRINTED for each batch.

    A wrong buffer, or a wrong moment of the optimizer, shows in no loss for a long time; here it shows at once. A
    state's digest is the XOR of its values' bits, tensor by tensor (torch.hash_tensor): any change of a value shows, an
    exchange of two within one tensor does not. It reads all weights once, on their device. Those of a batch and of the
    random number generators are exact.

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
        with self._attachment.to(engine, whole_bus=False) as hear:
            engine.register_events(*FingerprintEvents)
            hear(self.every.events(), self._digest_state, phase=Phase.OBSERVE)
            if self.batches:
                hear(Events.GET_BATCH_COMPLETED, self._digest_batch, phase=Phase.OBSERVE)
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
        rng=_digest_generators(),
    )


def _digest_generators() -> int:
    state = rng.capture()
    python, numpy = state["python"], state["numpy"]
    rest = python["gauss"], numpy["position"], numpy["has_gauss"], numpy["gauss"]
    return zlib.crc32(repr(rest).encode(), _crc_of(state))


def _crc_of(value: Any) -> int:
    """CRC-32 of the bytes of every tensor in nested containers."""
    crc = 0
    for tensor in _tensors(value):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(data.tobytes(), crc)
    return crc


def _digest(tensors: Iterable[Tensor]) -> Tensor:
    """One number for all, shape (), int64: each tensor's hash weighs by its place, so that two cannot be exchanged."""
    total: Tensor | None = None
    for place, tensor in enumerate(tensors):
        part = torch.hash_tensor(tensor.detach()).view(torch.int64) * (2 * place + 1)
        total = part if total is None else total + part.to(total.device)
    return torch.zeros((), dtype=torch.int64) if total is None else total


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
