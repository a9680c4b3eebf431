"""Going back to a checkpoint in the midst of a run, and past the batches that have spoilt it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pulsetrain.engine.checkpoint import Location
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger
from pulsetrain.training.run_start import checkpointer_of

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = ["Rewind", "go_back", "plan_rewind"]


class Rewind(NamedTuple):
    """Where a run goes back to, and which batches it then leaves out."""

    checkpoint: Location
    left_out: tuple[int, int]  # the first and the last, as `skip_batches` numbers them


def plan_rewind(trainer: Trainer, first: int, last: int) -> Rewind:
    """The newest undamaged checkpoint before iteration `first`; the batches `first` to `last` are to be left out.

    Args:
        trainer: its run is under way.
        first: iteration of the first batch.
        last: iteration of the last one.

    Raises:
        ConfigurationError: the trainer has no Checkpointer, or several.
        CheckpointError: there is no such checkpoint.
    """
    saver = checkpointer_of(trainer, "rewind()")
    saver.wait()  # for one that is being written: it deletes others when it is done
    found = saver.manager.valid()
    before = [place for place in found if step_of(place) < first]
    if not before:
        late = f"the oldest of those that are kept was made behind iteration {step_of(found[0])}" if found else ""
        raise CheckpointError(
            f"Trainer.rewind(first={first}): there is no checkpoint before that iteration"
            + (f", {late}; look more often, or raise keep_last" if late else "; save more often")
            + ", as Checkpointer(every=Every(updates=100), keep_last=3)"
        )
    number = trainer.position.number
    newest = max(reversed(before), key=step_of)  # of several of one step the last written
    return Rewind(newest, (number(first), number(last)))


def go_back(trainer: Trainer, rewind: Rewind) -> None:
    """Take over the checkpoint; what is trained next are the batches behind it without those left out.

    The checkpoints behind it are deleted, and it is saved anew with what is left out: should the process end before the
    next save, the run goes on from there.
    """
    position = trainer.position
    rewinds, left_out = position.rewinds + 1, [*position.left_out_since, rewind.left_out]
    trainer.load_checkpoint(rewind.checkpoint)
    position.rewinds = rewinds
    for first, last in left_out:  # the checkpoint knows of none that were found since
        position.leave_out(first, last)
    get_logger("pulsetrain").warning(
        "the run goes back to a checkpoint",
        checkpoint=rewind.checkpoint.name,
        left_out="batches {} to {}".format(*rewind.left_out),
    )
    saver = checkpointer_of(trainer, "rewind()")
    try:
        saver.manager.delete_after(step_of(rewind.checkpoint))
        saver.save(trainer)
    except OSError as error:
        get_logger("pulsetrain").warning(
            "that the run has gone back is not saved: cut off before its next checkpoint, it would not know of it",
            reason=str(error),
        )
