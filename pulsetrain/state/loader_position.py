"""Where a loader that keeps its own state is in its pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

from pulsetrain.engine.data import rng
from pulsetrain.engine.data.loaders import draws_from_a_buffer, draws_in_workers

__all__ = ["LoaderPosition", "LoaderState"]


class LoaderState(NamedTuple):
    """A state of a loader that keeps its own, and how many batches of the pass it had given then."""

    state: object
    given: int


class LoaderPosition:
    """Begins passes over loaders with `state_dict` and `load_state_dict`, and returns into one."""

    anchor: LoaderState

    def __init__(self) -> None:
        self.given: int = 0  # batches of the pass
        self.anchor = LoaderState(None, 0)  # to return to

    def begin(self, loader: Any, seed: int, number: int, saved: LoaderState | None = None) -> Iterator[object]:
        """The batches of a pass from its first on, or from a saved state on.

        Args:
            loader: of the pass.
            seed: of its order.
            number: of the pass.
            saved: a state of the loader in this pass, from which it continues.
        """
        with rng.seeded(rng.derive(seed, number)):
            if saved is not None:
                loader.load_state_dict(saved.state)
            batches = iter(loader)
            self.anchor = saved or LoaderState(deepcopy(loader.state_dict()), 0)
        self.given = self.anchor.given
        return self._give(loader, batches, seed, number)

    def _give(self, loader: object, batches: Iterator[object], seed: int, number: int) -> Iterator[object]:
        """Makes each batch under a seed of its own: a resume need not know what those before it have drawn."""
        while True:
            # inside a rollout nothing is drawn, and seeding takes longer than making the batch
            draws = getattr(loader, "acts_next", True)
            with rng.seeded(rng.derive(seed, number, self.given)) if draws else nullcontext():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            self.given += 1
            yield batch

    def state(self, loader: Any, trained: int, *, reads_ahead: bool) -> LoaderState:
        """A state of the loader after the batches that were trained on, or from further back.

        Args:
            loader: of the pass.
            trained: how many of its batches were trained on. Of those given, the last may not have been, if the run was
                stopped in between: it has to be given again.
            reads_ahead: whether this rank may have read ahead, or have ended before the others.
        """
        if reads_ahead or draws_from_a_buffer(loader):  # which would be empty, and its examples lost
            return self.anchor
        if draws_in_workers(loader):  # from generators that are in no state
            return self.anchor
        ahead = self.given - trained
        if not ahead:
            return LoaderState(loader.state_dict(), self.given)
        before = getattr(loader, "state_before", None)  # of one whose batches cannot be made a second time
        return self.anchor if before is None else LoaderState(before(ahead), self.given - ahead)
