"""How a run is stopped from inside: the flags that end or pause it, and the safe points where the loop reads them."""

from __future__ import annotations

from pulsetrain.engine.events.engine_events import EngineEvents
from pulsetrain.engine.events.names import Events, EventType
from pulsetrain.engine.events.payloads import ExceptionRaised

__all__ = ["RunControl", "StepStopped", "StopEpoch", "StopRun"]


class StopRun(Exception):  # noqa: N818  # a signal to the loop, not an error
    """terminate() was called."""


class StopEpoch(Exception):  # noqa: N818
    """terminate_epoch() was called."""


class StepStopped(Exception):  # noqa: N818
    """A step or handler raised StopIteration, which no generator lets through."""

    def __init__(self, cause: StopIteration) -> None:
        super().__init__(str(cause))
        self.cause = cause


class RunControl(EngineEvents):
    """The part of an engine that ends, pauses and fails a run."""

    _terminate: bool | str = False
    _terminate_epoch: bool | str = False
    _interrupt = False
    _termination_reason = ""
    _termination_observed = False

    # The loop looks at these three at the next safe point; ignite's handlers set them, too.

    @property
    def should_terminate(self) -> bool | str:
        """False, True, or "skip_completed"."""
        return self._terminate

    @should_terminate.setter
    def should_terminate(self, value: bool | str) -> None:
        self._terminate = value
        self._attention = self._attention or bool(value)

    @property
    def should_terminate_single_epoch(self) -> bool | str:
        """False, True, or "skip_epoch_completed"."""
        return self._terminate_epoch

    @should_terminate_single_epoch.setter
    def should_terminate_single_epoch(self, value: bool | str) -> None:
        self._terminate_epoch = value
        self._attention = self._attention or bool(value)

    @property
    def should_interrupt(self) -> bool:
        """Whether the run pauses at the next safe point."""
        return self._interrupt

    @should_interrupt.setter
    def should_interrupt(self, value: bool) -> None:
        self._interrupt = value
        self._attention = self._attention or value

    def terminate(
        self,
        skip_completed: bool = False,
        *,
        reason: str = "terminate() was called",
        observed: bool = False,
        alike: bool = False,
    ) -> None:
        """End the run at the next safe point: TERMINATE is fired, then COMPLETED.

        Args:
            skip_completed: leave out COMPLETED.
            reason: what `state.stop_reason` and TERMINATE's payload say afterwards.
            observed: the moment depends on the clock, another thread or the machine, so that the run is not expected to
                end there when it is repeated.
            alike: of several processes that train together, each calls this in the same iteration. Otherwise they
                agree first, and the run ends at a later iteration.
        """
        if not isinstance(skip_completed, bool):
            raise TypeError(
                f"terminate({skip_completed!r}): skip_completed is True or False; say reason={skip_completed!r}"
            )
        self._termination_reason, self._termination_observed = reason, observed
        self.should_terminate = "skip_completed" if skip_completed else True

    def terminate_epoch(self, skip_epoch_completed: bool = False) -> None:
        """End the epoch at the next safe point and continue with the next one."""
        self.should_terminate_single_epoch = "skip_epoch_completed" if skip_epoch_completed else True

    def _signal(self, event: EventType, payload: object = None) -> None:
        """Fire one of the rarer events of the loop: `last_event_name` follows these even if nobody subscribed."""
        self.last_event_name = event
        self.fire(event, payload)

    def _attend(self) -> bool:
        """A safe point: deliver what was posted, then obey; returns whether the run pauses here."""
        self._attention = False  # before looking: what arrives meanwhile raises it again
        self._deliver_posts()
        if self._terminate:
            raise StopRun
        if self._terminate_epoch:
            raise StopEpoch
        if self._interrupt:
            self._signal(Events.INTERRUPT)
            self._interrupt = False
            return True
        return False

    def _after_failure(self, error: BaseException) -> BaseException | None:
        """Fire EXCEPTION_RAISED; returns what the caller of run() gets, or None if a handler has handled it.

        Only a handler registered with `engine.on` handles an exception; bus subscribers observe it. KeyboardInterrupt
        and SystemExit are handled only by a handler that calls terminate().
        """
        self._terminate = False
        signal = self.bus.signal(Events.EXCEPTION_RAISED)
        handled = not signal.is_muted and any(s.by_engine for s in signal.subscriptions(id(self), exclusive=True))
        self.state.stop_reason = f"{type(error).__name__}: {error}"
        outcome: BaseException | None = error
        try:
            self._signal(Events.EXCEPTION_RAISED, ExceptionRaised(error=error))
            if handled and (self._terminate or not isinstance(error, (KeyboardInterrupt, SystemExit))):
                outcome = None
        except BaseException as raised:
            outcome = raised
        self._terminate = True  # the next run continues as after terminate()
        return outcome
