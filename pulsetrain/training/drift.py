"""Finds ranks whose copies of the model are no longer the same: at each pulse, without a collective of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from pulsetrain.engine import Engine, Event, Events, Phase
from pulsetrain.engine.backends.module_view import version_of
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.distributed.replicas import Difference, differ, difference, digest
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.payloads import RanksDiverged
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents, digest_of, fingerprint_of
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.training.stepper import Stepper

__all__ = ["DriftCheck"]


class DriftCheck:
    """Compares what is replicated: counters, rates and the gradient's norm at each pulse, and the state at times.

    Weights and the optimizer's state are compared at the end of each epoch, and wherever `Fingerprints` digests them.
    A buffer that has other bits there although nothing was written into it is found, too; what is written into
    buffers, such as a running mean or a count, is each rank's own.

    Args:
        control: joins the ranks.
    """

    def __init__(self, control: ControlGroup) -> None:
        self._control = control
        self._sent: dict[str, object] = {}  # to the pulse that is being waited for
        self._state: dict[str, object] = {}  # digests since the last pulse
        self._digested_at = 0  # iteration
        self._reported: set[str] = set()
        self._buffers: dict[str, tuple[object, int]] = {}  # which tensor, how often written, and its digest

    def attach(self, engine: Engine, stepper: Stepper, data: DataCursor) -> None:
        """Compare the engine's runs; before the pulses at the same events."""
        self._engine, self._stepper, self._data = engine, stepper, data
        engine.register_events(*FingerprintEvents)
        engine.add_event_handler(Events.STARTED, self._on_started, phase=Phase.OBSERVE)
        engine.add_event_handler(FingerprintEvents.STATE_FINGERPRINTED, self._on_fingerprint)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._digest_state, phase=Phase.OBSERVE)

    def numbers(self) -> list[float]:
        """What this rank adds to the sums of a pulse."""
        self._sent = self._facts()
        return digest(self._sent)

    def judge(self, sums: Sequence[float]) -> None:
        """Fire RANKS_DIVERGED, in every process, if these sums say that the ranks differ.

        Raises:
            ConfigurationError: they are in different passes over their data, which no later iteration could put right.
        """
        facts, self._state = self._sent, {}
        if not differ(sums, self._control.ranks.world_size):
            return
        found = difference(self._control, facts)
        if found is None:  # of two digests that are made from the same values
            return
        if found.field == _PASS:
            raise ConfigurationError(
                "the loader of a rank gave more or fewer batches than its len(), so that the ranks are in different "
                "passes, as (number, iteration before it): "
                f"{'; '.join(f'rank {rank} {each}' for rank, each in enumerate(found.values))}; let len() be the "
                "number of batches that a pass gives, or leave it out"
            )
        iteration = self._digested_at if found.field in _STATE else self._engine.state.iteration
        if found.field in _PARTS:
            found = difference(self._control, dict(self._parts(found.field))) or found
        if found.field not in self._reported:
            self._reported.add(found.field)
            self._report(found, iteration)

    def _report(self, found: Difference, iteration: int) -> None:
        if self._control.ranks.is_main:
            get_logger("pulsetrain").error(
                "the processes have diverged: what has to be the same in all of them is not. A handler or the model's "
                "code acts in some of them alone, or a machine computes wrongly; resume from a checkpoint before this "
                "iteration",
                field=found.field,
                ranks=list(found.ranks),
                iteration=iteration,
                values=list(found.values),
            )
        payload = RanksDiverged(field=found.field, ranks=found.ranks, values=found.values, at_iteration=iteration)
        self._engine.fire(Events.RANKS_DIVERGED, payload, observed=True)

    def _facts(self) -> dict[str, object]:
        stepper, state = self._stepper, self._engine.state
        norms = {"": stepper.grad_norm, **stepper.grad_norms}
        return {
            _PASS: (self._data.passes, self._data.pass_start),
            "epoch": state.epoch,
            "update": state.update,
            "samples": state.samples,
            "tokens": state.tokens,
            "learning_rates": [float(rate) for rate in stepper.learning_rates],
            "grad_norm": {name: float(norm) for name, norm in norms.items() if norm is not None},
            **{name: int(each) if isinstance(each, Tensor) else each for name, each in self._state.items()},
        }

    def _on_started(self) -> None:
        self._reported.clear()
        self._state = {}
        self._buffers = self._buffers_now()

    def _digest_state(self) -> None:
        if not is_sharded(self._stepper.store.module):
            found = fingerprint_of(self._stepper.store.module, self._stepper.store.optimizer)
            self._note(found.weights, found.optimizer)

    def _on_fingerprint(self, engine: Engine, event: Event) -> None:
        if not is_sharded(self._stepper.store.module):
            self._note(event.payload.weights, event.payload.optimizer)

    def _note(self, weights: Tensor, optimizer: Tensor) -> None:
        before, self._buffers = self._buffers, self._buffers_now()
        spoilt = [
            name
            for name, (written, digest) in self._buffers.items()
            if name in before and before[name][0] == written and before[name][1] != digest
        ]
        self._state = {"weights": weights, "optimizer": optimizer, "buffers": spoilt}
        self._digested_at = self._engine.state.iteration

    def _buffers_now(self) -> dict[str, tuple[object, int]]:
        named = list(self._stepper.store.module.named_buffers())
        digests = dict(_digests(named))
        return {name: ((id(each), version_of(each)), digests[name]) for name, each in named}

    def _parts(self, field: str) -> Iterable[tuple[str, int]]:
        """The digest of each tensor."""
        if field == "weights":
            return _digests(self._stepper.store.module.named_parameters())
        state = self._stepper.store.optimizer.state_dict()["state"]
        return _digests(
            (f"optimizer, parameter {index}, {name}", value)
            for index, values in state.items()
            for name, value in values.items()
            if isinstance(value, Tensor)
        )


_PASS = "pass over the data"
_PARTS = ("weights", "optimizer")
_STATE = (*_PARTS, "buffers")


def _digests(tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, int]]:
    return ((name, int(digest_of([tensor]))) for name, tensor in tensors)
