"""Ends a short run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pulsetrain.engine import Engine, Events, Phase
from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.handlers.attachment.attachment import Handler

__all__ = ["ENDED", "EndAt"]

ENDED = "the short run ends"


class EndAt(Handler):
    """Terminates the run at the first validation after a number of iterations.

    `pulsetrain bisect` adds it to the configuration of its runs. Schedules, which depend on the run's length, stay.

    Args:
        iteration: counted from the beginning of the run's lineage.

    Raises:
        ConfigurationError: not a positive whole number.
    """

    def __init__(self, iteration: int) -> None:
        check_whole_number("EndAt", "iteration", iteration)
        self.iteration = iteration
        self.has_ended: bool = False

    def attach(self, engine: Engine) -> Self:
        """Watch the validations of the engine, in phase ACT."""
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            subscribe(Events.VALIDATION_COMPLETED | Events.ROLLOUT_COMPLETED, self._on_validation, phase=Phase.ACT)
            subscribe(Events.STARTED, self._on_started, phase=Phase.ACT)
        return self

    def state_dict(self) -> dict[str, object]:
        return {"has_ended": self.has_ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.has_ended = bool(state["has_ended"])

    def _on_started(self, engine: Engine) -> None:
        if engine.state.iteration > 0 and self.has_ended:  # resumed after its end, since the search did not see it
            self._end(engine)

    def _on_validation(self, engine: Engine) -> None:
        if engine.state.iteration >= self.iteration:
            self.has_ended = True
            self._end(engine)

    def _end(self, engine: Engine) -> None:
        engine.terminate(reason=f"{ENDED}: {self.iteration} iterations", alike=True)
