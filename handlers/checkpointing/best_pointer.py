"""Lets the manager's pointer to the best checkpoint follow the ranking."""

from __future__ import annotations

from pulsetrain.engine.checkpoint import CheckpointManager, find_checkpoints
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.checkpointing.ranking import Ranking

__all__ = ["BestPointer"]


class BestPointer:
    """The pointer of one folder.

    Args:
        manager: of the folder.
        ranking: which checkpoints are the best; it has no metric if none is.
    """

    def __init__(self, manager: CheckpointManager, ranking: Ranking) -> None:
        self._manager, self._ranking = manager, ranking

    def update(self, *new: str) -> None:
        """Point at the best checkpoint that is there; a disk that is full then costs no checkpoint.

        Args:
            new: a checkpoint's folder that was saved just now.
        """
        present = {*new, *(each.name for each in find_checkpoints(self._manager.checkpoint_dir))}
        best = next((name for _, name in self._ranking.best if name in present), None)
        if not self._ranking.metric or best is None:
            return
        try:
            if self._pointed_at() != best:
                self._manager.set_best(best)
        except OSError as error:
            get_logger("handlers").warning(
                "the pointer to the best checkpoint could not be written, and is written again with the next save",
                best=best,
                error=str(error),
            )

    def _pointed_at(self) -> str | None:
        try:
            best = self._manager.get_best()
        except CheckpointError:  # damaged: it is written again
            return None
        return best.name if best is not None else None
