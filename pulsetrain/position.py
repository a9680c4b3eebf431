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
        self.passes = 0  # begun
        self.pass_start = 0  # iteration before this pass's first batch
        self.epoch_start = 0  # iteration before this epoch's first batch
        self.epoch_done = True  # between two epochs
        self.trained = 0  # the last iteration whose step was made: state.iteration grows before its step
        self._generators: dict[str, Any] | None = None  # as they were when the pass began
        self._resuming = False

    def begin_epoch(self, iteration: int) -> None:
        """An epoch starts, or goes on behind a checkpoint that was made inside it."""
        if not (self.resuming and not self.epoch_done):
            self.epoch_start = iteration
        self.epoch_done = False

    def begin_pass(self, loader: Any, iteration: int) -> Iterator[Any]:
        """An iterator over a new pass."""
        self.passes += 1
        self.pass_start = iteration
        self._generators = rng.capture()
        return self._iterate(loader)

    def find_back(self, loader: Any, iteration: int) -> Iterator[Any]:
        """An iterator over the pass that a checkpoint was made in, at its position; reads what it skips."""
        self._resuming = False
        if self._generators is not None:
            rng.restore(self._generators)  # for loaders that draw from the global generators
        batches = self._iterate(loader)
        skip(batches, iteration - self.pass_start, loader)
        return batches

    @property
    def resuming(self) -> bool:
        """Whether a checkpoint was loaded whose pass has not been found back to."""
        return self._resuming and self.passes > 0

    def _iterate(self, loader: Any) -> Iterator[Any]:
        key_order(loader, rng.derive(self.seed, self.passes))
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {
            "seed": self.seed,
            "passes": self.passes,
            "pass_start": self.pass_start,
            "epoch_start": self.epoch_start,
            "epoch_done": self.epoch_done,
            "trained": self.trained,
            "generators": self._generators,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where a checkpoint was made; the seed of the data order is the checkpoint's."""
        self.seed, self.passes = state["seed"], state["passes"]
        self.pass_start, self.epoch_start = state["pass_start"], state["epoch_start"]
        self.epoch_done, self.trained = state["epoch_done"], state["trained"]
        self._generators = state["generators"]
        self._resuming = True
