"""How far a run is: computed in one place, so that every command and the page say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from pulsetrain.engine.recording.log.records import Json, LoggedEvent

__all__ = ["BEGINNINGS", "EPOCHS", "Progress", "bounds_of", "completed_epochs_of", "progress_of"]

BEGINNINGS = frozenset({"started", "epoch_started"})
"""The events whose payloads have the length of the run."""
EPOCHS = frozenset({"epoch_started", "epoch_completed"})
_OTHER_BOUNDS = ("max_iterations", "max_updates", "max_tokens", "max_environment_steps")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    >>> Progress(epoch=3, iteration=130, completed_epochs=2, total_epochs=20, total_iterations=1000).share
    0.13
    """

    epoch: int = 0
    iteration: int = 0
    completed_epochs: int = 0
    total_epochs: int | None = None  # None if it is not bounded by epochs
    total_iterations: int | None = None

    @property
    def share(self) -> float | None:
        """The share of its length that it has trained, from 0 to 1; None if its length is not known.

        In iterations if their total is known, else in completed epochs.
        """
        if self.total_iterations:
            return min(self.iteration / self.total_iterations, 1.0)
        return min(self.completed_epochs / self.total_epochs, 1.0) if self.total_epochs else None


def bounds_of(event: LoggedEvent) -> dict[str, int]:
    """The length of the run, as one of BEGINNINGS reports it; empty if it does not."""
    reported = event.payload or event.observed  # what was read after the event had begun
    found = reported.items() if event.event in BEGINNINGS and isinstance(reported, dict) else ()
    return {name: value for name, value in found if type(value) is int}


def completed_epochs_of(event: LoggedEvent) -> int | None:
    """How many epochs are complete at one of EPOCHS; None for any other event."""
    if event.event not in EPOCHS:
        return None
    return event.epoch if event.event == "epoch_completed" else max(event.epoch - 1, 0)


def progress_of(
    epoch: int, iteration: int, completed_epochs: int | None, bounds: Mapping[str, int], settings: Json
) -> Progress:
    """How far a run is.

    Args:
        epoch: of the training engine's newest event.
        iteration: of the same event.
        completed_epochs: by the newest of EPOCHS; None if there is none.
        bounds: by the newest of BEGINNINGS: see `bounds_of`.
        settings: those in run.json; a run that was not described has none.
    """
    given = settings if isinstance(settings, dict) else {}
    epochs = bounds.get("max_epochs", given.get("max_epochs"))
    if given.get("max_epochs") is None and any(given.get(name) is not None for name in _OTHER_BOUNDS):
        epochs = None  # the engine may count how many epochs its iterations are
    iterations = bounds.get("total_iterations", given.get("max_iterations"))
    return Progress(
        epoch,
        iteration,
        max(epoch - 1, 0) if completed_epochs is None else completed_epochs,
        epochs if _is_count(epochs) else None,
        iterations if _is_count(iterations) else None,
    )


def _is_count(value: Json) -> TypeGuard[int]:
    """Whether it is a number that can be remembered: a file may hold any."""
    return type(value) is int and value.bit_length() < 64
