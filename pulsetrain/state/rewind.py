"""Returning to an earlier checkpoint in the middle of a run, and leaving out the batches that spoilt it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from pulsetrain.engine import CheckpointLoaded, Events
from pulsetrain.engine.checkpoint import Location, load_checkpoint
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers import Checkpointer
from pulsetrain.handlers.checkpointing.state_writer import SavedEngine
from pulsetrain.state.data_cursor import DataCursor

__all__ = ["Rewind", "go_back", "plan_rewind"]


class _Run(SavedEngine, Protocol):
    def load_checkpoint_state(self, state: Mapping[str, object], /) -> None: ...


class Rewind(NamedTuple):
    """Which checkpoint a run returns to, and which batches it then leaves out."""

    checkpoint: Location
    left_out: tuple[int, int]  # the first and the last, as `skip_batches` numbers them


def plan_rewind(checkpointer: Checkpointer, data: DataCursor, first: int, last: int) -> Rewind:
    """Find the newest undamaged checkpoint before iteration `first`; the batches `first` to `last` are to be left out.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    checkpointer.wait()  # for one that is being written: it deletes others when it is done
    found = checkpointer.manager.valid()
    before = [location for location in found if step_of(location) < first]
    if not before:
        late = f"the oldest of those that are kept was made after iteration {step_of(found[0])}" if found else ""
        raise CheckpointError(
            "there is no checkpoint before that iteration"
            + (f", {late}; look more often, or raise keep_last" if late else "; save more often")
            + ", as Checkpointer(every=Every(updates=100), keep_last=3)",
            "Trainer.rewind",
            first=first,
        )
    newest = max(reversed(before), key=step_of)  # of several of one step, the one written last
    return Rewind(newest, (data.number(first), data.number(last)))


def go_back(rewind: Rewind, run: _Run, checkpointer: Checkpointer, data: DataCursor) -> None:
    """Load the checkpoint; the run continues with the batches after it, except for those left out.

    Later checkpoints are deleted before handlers remove what they wrote after this one: a process that is killed in
    between resumes from here. The state is saved again with what is left out.
    """
    rewinds, left_out = data.rewinds + 1, [*data.left_out_since, rewind.left_out]
    failure: OSError | None = None
    run.load_checkpoint_state(load_checkpoint(rewind.checkpoint))
    try:
        checkpointer.manager.delete_after(step_of(rewind.checkpoint))
    except OSError as error:
        failure = error
    run.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=rewind.checkpoint, iteration=run.state.iteration))
    data.keep_rewinds(rewinds, left_out)  # the checkpoint lacks those that came after it
    get_logger("pulsetrain").warning(
        "the run returns to a checkpoint",
        checkpoint=rewind.checkpoint.name,
        left_out="batches {} to {}".format(*rewind.left_out),
    )
    try:
        checkpointer.save(run)
    except OSError as error:
        failure = error
    if failure is not None:
        get_logger("pulsetrain").warning(
            "the rewind is not saved: if the run is killed before its next checkpoint, it resumes without the rewind",
            reason=str(failure),
        )
