"""Going back to a checkpoint in the midst of a run, and past the batches that have spoilt it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.checkpoint import Place
from engine.checkpoint.reading import step_of
from engine.errors import CheckpointError
from engine.logs import get_logger
from pulsetrain.beginning import checkpointer_of

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = ["Rewind", "go_back", "plan_rewind"]


class Rewind(NamedTuple):
    """Where a run goes back to, and which batches it then leaves out."""

    checkpoint: Place
    left_out: tuple[int, int]  # the first and the last, as `skip_batches` numbers them


def plan_rewind(trainer: Trainer, first: int, last: int) -> Rewind:
    """The newest undamaged checkpoint before iteration `first`; the batches `first` to `last` are to be left out.

    Args:
        trainer: its run is under way.
        first: iteration of the first batch; those of the run under way, counted as they were trained.
        last: iteration of the last one.

    Raises:
        ConfigurationError: the trainer has no Checkpointer, or several.
        CheckpointError: there is no such checkpoint.
    """
    found = [place for place in checkpointer_of(trainer, "rewind()").manager.valid() if step_of(place) < first]
    if not found:
        raise CheckpointError(
            f"Trainer.rewind(first={first}): there is no checkpoint before that iteration; save more often, as "
            "Checkpointer(every=Every(updates=100), keep_last=3)"
        )
    skipped = trainer.position.skipped
    return Rewind(max(found, key=step_of), (first + skipped, last + skipped))


def go_back(trainer: Trainer, rewind: Rewind) -> None:
    """Take over the checkpoint; what is trained next are the batches behind it without those left out."""
    left_out = [*trainer.position.left_out_since, rewind.left_out]  # those of earlier rewinds come after it as well
    trainer.load_checkpoint(rewind.checkpoint)
    for first, last in left_out:
        trainer.position.leave_out(first, last)
    get_logger("pulsetrain").warning(
        "the run goes back to a checkpoint",
        checkpoint=rewind.checkpoint.name,
        left_out="batches {} to {}".format(*rewind.left_out),
    )
