"""Writes the state of a run: one process for all, or each process its part of a model that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from pulsetrain.engine import CheckpointSaved, State
from pulsetrain.engine.checkpoint import CheckpointManager, Form, Location
from pulsetrain.engine.checkpoint.disk import sync
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.joining import busy
from pulsetrain.engine.distributed.ranks import is_pipelined
from pulsetrain.engine.distributed.saved_shards import in_pieces
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.events.names import EventType
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.training_run import is_training_run
from pulsetrain.handlers.checkpointing.saved_layers import of_all_layers
from pulsetrain.handlers.checkpointing.shared_save import SharedSave

__all__ = ["Save", "SavedEngine", "StateWriter", "Write", "trained_iteration"]

Write = Callable[[Mapping[str, Any], Callable[[CheckpointSaved], None]], Location]

_saves = count()  # of this process; each process counts the same ones


class SavedEngine(Protocol):
    """An engine with a state to save."""

    state: State

    def fire(self, event: EventType, payload: object = None) -> None:
        """Fire the event."""

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on."""


def trained_iteration(engine: SavedEngine) -> int:
    """The iteration after which a state of the engine is saved: the last one whose step was made.

    The state's own counter is one ahead between ITERATION_STARTED and the step.
    """
    return engine.data.trained if is_training_run(engine) else int(engine.state.iteration)


@dataclass(frozen=True)
class Save:
    """One save."""

    target: Location  # the checkpoint's folder
    label: str  # in the folder's name
    form: Form  # of the file
    is_best: bool = False  # what the event says
    marked: bool = False  # whether the manager marks it as the best
    background: bool = False  # whether another thread writes it, so that older ones are not deleted then


class StateWriter:
    """Writes states with a manager.

    Args:
        manager: of the folder.
        control: of processes of which each has a part of the model; None where one process saves for all.
    """

    control: ControlGroup | None

    def __init__(self, manager: CheckpointManager, control: ControlGroup | None = None) -> None:
        self.control, self._manager = control, manager

    @property
    def is_main(self) -> bool:
        """Whether this process leads the saves."""
        return self.control is None or self.control.ranks.is_main

    def target(self, label: str, iteration: int) -> Location:
        """The folder of the next checkpoint, the same in all processes, which all call this."""
        if self.control is None:
            return self._manager.target(label, iteration)
        self.control.sum([], "a save of a sharded model, which all processes have to make together")
        return self.control.main_decides(lambda: self._manager.target(label, iteration))

    def state_of(self, engine: SavedEngine) -> Mapping[str, Any]:
        """The state as this process saves it; where several save together, all call this."""
        with engine.sharing() if self.control is not None and is_training_run(engine) else nullcontext():
            state = self.own_state_of(engine)
        if self.control is None or not is_pipelined(getattr(engine, "model", None)):
            return state
        return of_all_layers(self.control, state)

    def own_state_of(self, engine: SavedEngine) -> Mapping[str, Any]:
        """The state without what the other processes alone know."""
        with self._ends_all():
            state = engine.checkpoint_state()
        return state if self.control is None else in_pieces(state)

    @contextmanager
    def _ends_all(self) -> Iterator[None]:
        """Around code that only this process runs: after an OSError, it alone would continue without the checkpoint."""
        try:
            yield
        except OSError as error:
            if self.control is None:
                raise
            raise CheckpointError(f"the state could not be collected: {error}") from error

    def writer(
        self,
        engine: SavedEngine,
        save: Save,
        kept: Callable[[], Collection[Location]] = tuple,
        when_durable: Callable[[Location], object] = lambda path: None,
    ) -> Write:
        """A function that writes a state of this iteration, and calls another one once it is durable.

        Args:
            engine: whose state it is.
            save: where and how.
            kept: those that are not deleted.
            when_durable: called in the main process, with the folder.
        """
        if is_training_run(engine) and engine.is_stepping:
            raise RuntimeError(
                "Checkpointer.save(): called in the middle of a step, from which no run could resume exactly; "
                "save on ITERATION_COMPLETED"
            )
        iteration, start, manager = trained_iteration(engine), time.perf_counter(), self._manager
        with self._ends_all():
            files = engine.files_to_sync() if is_training_run(engine) else []
        control = self.control
        shared = None if control is None else SharedSave(control, f"save-{next(_saves)}")

        def saved(size: int) -> CheckpointSaved:
            seconds = time.perf_counter() - start
            return CheckpointSaved(
                path=save.target,
                iteration=iteration,
                bytes=size,
                seconds=seconds,
                is_best=save.is_best,
                background=save.background,
            )

        def write(state: Mapping[str, Any], announce: Callable[[CheckpointSaved], None]) -> Location:
            def durable(path: Location) -> None:
                when_durable(path)
                if shared is not None:
                    shared.durable()  # before what the event's receivers do
                announce(saved(manager.size(path)))

            _sync(files)
            with nullcontext() if save.background else busy():
                return manager.save(
                    state, save.label, save.marked, step=iteration, keep=kept(), announce=durable, form=save.form,
                    prune=not save.background, unsaved=state.get("unsaved"), others=shared, target=save.target,
                )  # fmt: skip

        def lead(state: Mapping[str, Any], announce: Callable[[CheckpointSaved], None]) -> Location:
            assert shared is not None
            return shared.lead(lambda: write(state, announce))

        def follow(state: Mapping[str, Any], announce: Callable[[CheckpointSaved], None]) -> Location:
            assert shared is not None
            assert control is not None
            files = shared.follow(lambda: manager.write_pieces(state, save.target, control.ranks.rank))
            announce(saved(sum(each["bytes"] for each in files.values())))
            return save.target

        if shared is None:
            return write
        return lead if self.is_main else follow


def _sync(files: Iterable[Path]) -> None:
    """Make files durable that the checkpoint counts on; an error there does not prevent the save."""
    for file in files:
        try:
            sync(file)
        except OSError as error:
            get_logger("handlers").warning(
                "a file could not be made durable: after a power cut it may be older than the checkpoint",
                file=str(file),
                error=str(error),
            )
