"""Returning to an earlier checkpoint in the middle of a run, and leaving out the batches that spoilt it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pulsetrain.engine.checkpoint import Location
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers import Checkpointer
from pulsetrain.handlers.checkpointing.background_save import SavedEngine
from pulsetrain.state.data_cursor import DataCursor

__all__ = ["Rewind", "go_back", "plan_rewind"]


class _Run(SavedEngine, Protocol):
    def load_checkpoint(self, path: Location, /) -> None: ...


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

    Later checkpoints are deleted, and the state is saved again with what is left out: if the process ends before the
    next save, the run resumes from there.
    """
    rewinds, left_out = data.rewinds + 1, [*data.left_out_since, rewind.left_out]
    run.load_checkpoint(rewind.checkpoint)
    data.keep_rewinds(rewinds, left_out)  # the checkpoint lacks those that came after it
    get_logger("pulsetrain").warning(
        "the run returns to a checkpoint",
        checkpoint=rewind.checkpoint.name,
        left_out="batches {} to {}".format(*rewind.left_out),
    )
    try:
        checkpointer.manager.delete_after(step_of(rewind.checkpoint))
        checkpointer.save(run)
    except OSError as error:
        get_logger("pulsetrain").warning(
            "the rewind is not saved: if the run is killed before its next checkpoint, it resumes without the rewind",
            reason=str(error),
        )
