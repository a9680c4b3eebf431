"""Resuming a run from a checkpoint: checks it, restores the parts, and knows what is still pending."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pulsetrain.engine import LAST, Engine, Event, Events, Phase
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.workers import workers_outlive_signals
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger
from pulsetrain.state.data_change import adapt_to_data
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.state.handler_registry import HandlerRegistry
from pulsetrain.state.local_state import local_entries, state_of_rank
from pulsetrain.state.module_state import ModulesPart
from pulsetrain.state.older_formats import upgrade
from pulsetrain.state.part import AttachedPart, Part, PartOf, StateDict
from pulsetrain.state.run_state import RunState

__all__ = ["Resume", "Resumer"]


@dataclass(frozen=True)
class Resume:
    """What a loaded checkpoint leaves to be done when the run continues."""

    handlers: Mapping[str, Mapping[str, Any]]
    """Their states, which some reset at STARTED and EPOCH_STARTED."""
    rng: Mapping[str, Any] | None
    """States of the generators, for making the iterator over the data draws numbers; None if the run seeds them."""
    inside_epoch: bool
    """Whether the checkpoint was made inside an epoch."""
    done: int
    """How many batches of that epoch were trained."""


class Resumer:
    """Loads the state of a run, and completes what can only be restored once the run continues.

    It is the data source of the run loop: a resumed run gets the batches from the cursor's position on, and the
    generators as they were.

    Args:
        parts: of the run's state; the Resumer adds "rng".
        data: the position in the data.
        registry: the handlers.
        modules: whose flags handlers may set when the run starts, as at the start of the interrupted one.
    """

    data: DataCursor

    def __init__(
        self, parts: Mapping[str, Part], data: DataCursor, registry: HandlerRegistry, modules: ModulesPart
    ) -> None:
        self.pending: Resume | None = None
        self._engine: Engine | None = None
        self.state: RunState = RunState({**parts, "rng": _Generators(self)})
        self.data, self._registry, self._modules = data, registry, modules
        registry.leave_out(parts.values())

    def attach(self, engine: Engine) -> None:
        for part in self.state.parts.values():
            if isinstance(part, AttachedPart):
                part.attach(engine)
        self._engine, self.data.asked_to_end = engine, lambda: engine.should_terminate_single_epoch
        for event in (Events.STARTED, Events.EPOCH_STARTED):
            engine.bus.subscribe(event, self._restore_handlers, sender=engine, phase=Phase.PERSIST, order=LAST)

    @property
    def is_resuming(self) -> bool:
        """Whether a checkpoint was loaded from which the run has not continued yet."""
        return self.pending is not None and self.pending.rng is not None

    def load(self, saved: StateDict, loader: Iterable[object]) -> None:
        """Restore a checkpoint's state; the next run continues from there.

        Args:
            saved: what a checkpoint holds, in any format that this version reads.
            loader: the training data, to which the position is adapted if it has changed.

        Raises:
            CheckpointError: it does not fit this run, which then is as it was; the message lists what is missing,
                unexpected or misshapen.
        """
        saved = upgrade(saved)
        self.state.check_state_dict(saved)
        saved = adapt_to_data(state_of_rank(saved, ranks()), loader)
        self.state.load_state_dict(saved)
        self._registry.report_pairs(saved["handlers"])
        data = self.data
        self.pending = Resume(
            handlers=saved["handlers"],
            rng=saved["rng"] if data.passes else None,  # a run that had no batch yet starts from its seed
            inside_epoch=not data.epoch_done,
            done=0 if data.epoch_done else data.trained - data.epoch_start,
        )

    @contextmanager
    def sharing(self, control: ControlGroup) -> Iterator[None]:
        """A block that all processes enter together: the state inside holds what each of them alone knows."""
        if not control.is_shared:
            yield
            return
        before = self.state.others
        self.state.others = self._of_others(control)
        try:
            yield
        finally:
            self.state.others = before

    def _of_others(self, control: ControlGroup) -> list[Any]:
        """What the other processes know, in the main one.

        Raises:
            CheckpointError: one could not give it, in all of them.
        """
        own: Mapping[str, Any] | None = None
        failure = ""
        try:
            own = None if control.ranks.is_main else local_entries(self.state.parts)
        except Exception as error:  # of the user's loader
            failure = f"{type(error).__name__}: {error}"
        if control.sum([bool(failure)], "a save")[0]:
            failures = control.gather(failure)
            rank = next(rank for rank, each in enumerate(failures) if each)
            raise CheckpointError(
                f"rank {rank} could not give its part of a checkpoint, such as its loader's state: {failures[rank]}"
            )
        return control.collect(own)[1:]

    def reset(self, seed: int) -> None:
        """Seed the generators, on each rank its own way, and return every part to the state before iteration 1."""
        rank = self.data.rank.rank
        rng.seed_everything(rng.derive(seed, rank) if rank else seed)
        self.data.seed = seed
        self.state.reset()

    def begin(self, data: Iterable[object], iteration: int) -> Iterator[object]:
        return self.data.begin(data, iteration)

    def resume(self, data: Iterable[object], iteration: int, epoch_length: int | None) -> tuple[Iterator[object], int]:
        pending = self.pending
        if pending is None or pending.rng is None:
            self.pending = None
            return self.begin(data, iteration), iteration % epoch_length if epoch_length else iteration
        with workers_outlive_signals(data):
            batches = self.data.resume(data, iteration)
        self._restore_generators(pending.rng)  # last: making the iterator draws from the generators
        self.pending = None
        if self.data.ends_epoch and self._engine is not None:
            self._engine.should_terminate_single_epoch, self.data.ends_epoch = self.data.ends_epoch, False
        return batches, pending.done

    def finishes_epoch(self, epoch_length: int | None) -> bool:
        """Whether the checkpoint was made after the last batch of an epoch, and before its EPOCH_COMPLETED."""
        pending = self.pending
        if pending is None or not self.is_resuming or not pending.inside_epoch:
            return False
        return pending.done == epoch_length or bool(self.data.ends_epoch)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Around the end of a run whose checkpoint was made after its last batch: restores the generators for it."""
        if self.pending is not None and self.pending.rng is not None:
            self._restore_generators(self.pending.rng)
            self.pending = replace(self.pending, rng=None)
        try:
            yield
        finally:
            self.pending = None

    def _restore_generators(self, states: Mapping[str, Any]) -> None:
        rng.restore(states)
        if rank := self.data.rank.rank:  # the states in the checkpoint are the main process's; steps key their own
            rng.seed_everything(rng.derive(self.data.seed, rank, self.data.trained))

    def _restore_handlers(self, engine: Engine, event: Event) -> None:
        pending = self.pending
        if pending is not None and (event.type == Events.STARTED.value or pending.inside_epoch):
            self._registry.load_state_dict(pending.handlers)
            self._modules.load_flags()


class _Generators(PartOf["Resumer"]):
    """The process's random generators, as a part: what is loaded waits in `Resumer.pending`."""

    def state_dict(self) -> StateDict:
        pending = self._owner.pending
        return rng.capture() if pending is None or pending.rng is None else pending.rng

    def check_state_dict(self, state: StateDict) -> None:
        rng.missing_devices(state)

    def load_state_dict(self, state: StateDict) -> None:
        fewer = rng.missing_devices(state)
        if fewer:
            get_logger("pulsetrain").warning(
                "fewer devices than the checkpoint has RNG states for: random numbers on the missing ones will differ "
                "from here",
                devices=fewer,
            )
