"""Where a run stands in its data: which pass over the loader, and how many of its batches are behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import rng
from engine.batches import key_order, skip

__all__ = ["DataPosition"]


class DataPosition:
    """Begins passes over the loader in an order keyed by (seed, pass), and finds back into one."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.restart()

    def restart(self) -> None:
        """Stand at the very beginning."""
        self.passes = 0  # begun
        self.pass_start = 0  # iteration before this pass's first batch
        self.epoch = 0  # the one last begun
        self.epoch_start = 0  # iteration before its first batch
        self.epoch_done = True  # between two epochs
        self.trained = 0  # the last iteration whose step was made: state.iteration grows before its step
        self.resuming = False  # a checkpoint was loaded whose pass has not been found back to
        self._inside = False  # it was made inside an epoch, which has not gone on yet
        self._generators: dict[str, Any] | None = None  # as they were when the pass began

    def begin_epoch(self, epoch: int, iteration: int) -> bool:
        """An epoch's batches begin; false where they go on behind a checkpoint that was made inside the epoch."""
        inside, self._inside = self._inside, False
        if not inside:
            self.epoch_start = iteration
        self.epoch, self.epoch_done = epoch, False
        return not inside

    def begin_pass(self, loader: Any, iteration: int) -> Iterator[Any]:
        """An iterator over a new pass."""
        self.passes += 1
        self.pass_start = iteration
        self.resuming = False
        self._generators = rng.capture()
        return self._iterate(loader)

    def find_back(self, loader: Any, iteration: int) -> Iterator[Any]:
        """An iterator over the pass that a checkpoint was made in, at its position; reads what it skips."""
        self.resuming = False
        if self._generators is not None:
            rng.restore(self._generators)  # for loaders that draw from the global generators
        batches = self._iterate(loader)
        skip(batches, iteration - self.pass_start, loader)
        return batches

    def _iterate(self, loader: Any) -> Iterator[Any]:
        key_order(loader, rng.derive(self.seed, self.passes))
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        names = ("seed", "passes", "pass_start", "epoch", "epoch_start", "epoch_done", "trained")
        return {**{name: getattr(self, name) for name in names}, "generators": self._generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where a checkpoint was made; the seed of the data order is the checkpoint's."""
        for name, value in state.items():
            setattr(self, "_generators" if name == "generators" else name, value)
        self.resuming = self.passes > 0
        self._inside = not self.epoch_done
