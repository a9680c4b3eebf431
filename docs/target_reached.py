"""An event of a user's own, for the pictures of the documentation: the validation accuracy has reached a target."""

from dataclasses import dataclass
from typing import Self

from pulsetrain import EventEnum, Events, Trainer
from pulsetrain.engine import Event, ValidationCompleted

TARGETS = (0.8, 0.9, 0.95, 0.97, 0.98)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReached:
    """TARGET_REACHED: the accuracy is at least the target for the first time."""

    target: float


class TargetEvents(EventEnum):
    """The event and the type of its payload."""

    TARGET_REACHED = "target_reached", TargetReached


class AccuracyTargets:
    """Fires TARGET_REACHED for each of TARGETS."""

    def __init__(self) -> None:
        self.reached = 0

    def attach(self, trainer: Trainer) -> Self:
        """Look at each validation."""
        trainer.register_events(*TargetEvents)
        trainer.add_event_handler(Events.VALIDATION_COMPLETED, self._compare)
        return self

    def _compare(self, trainer: Trainer, event: Event[ValidationCompleted]) -> None:
        while self.reached < len(TARGETS) and event.payload.metrics["val/accuracy"] >= TARGETS[self.reached]:
            trainer.fire(TargetEvents.TARGET_REACHED, TargetReached(target=TARGETS[self.reached]))
            self.reached += 1

    def state_dict(self) -> dict[str, int]:
        """How many targets were reached."""
        return {"reached": self.reached}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore it."""
        self.reached = state["reached"]
