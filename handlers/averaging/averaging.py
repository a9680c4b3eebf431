"""What EMA and SWA share: an average of a model's weights by a cadence, its state, and its place in validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.subscription import FIRST, Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.optimizers import is_schedule_free
from pulsetrain.engine.step.averaging import MultiAverage, WeightAverage
from pulsetrain.handlers.attachment.attachment import Attachment

__all__ = ["Averaging"]


class Averaging:
    """One average of one model, as EMA and SWA keep it.

    Args:
        place: the handler's class name, for messages.
        average: as WeightAverage takes it.
        model: by default the engine's.
        every: when to average the weights in.

    Raises:
        TypeError: the model is no nn.Module, or the cadence no Every.
    """

    def __init__(self, place: str, average: MultiAverage, model: nn.Module | None, every: Every) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"{place}(model={type(model).__name__}): needs a torch.nn.Module")
        if not isinstance(every, Every):
            raise TypeError(f"{place}(every={every!r}): needs an Every, such as Every(updates=10)")
        self._place, self._function, self._given, self._every = place, average, model, every
        self._weights = None if model is None else WeightAverage(model, average)
        self._awaiting: Mapping[str, Any] | None = None  # a state loaded before there was a model
        self._averaged_at: tuple[int, int] | None = None  # iteration and update
        self._contexts: list[Callable[[], AbstractContextManager[Any]]] | None = None  # where validation enters ours
        self._entered: Callable[[], AbstractContextManager[Any]] | None = None
        self._attachment = Attachment(place)

    def attach(
        self,
        engine: Engine,
        *,
        applied: Callable[[], AbstractContextManager[Any]] | None,
        check: Callable[[Engine, nn.Module], None] = lambda engine, model: None,
        begun: Callable[[Engine], bool] = lambda engine: True,
    ) -> None:
        """Average at the cadence, before a validation that is due at the same point.

        Args:
            engine: its model, where none was given; an average of another model than the last one's begins anew.
            applied: what its validations are to run in, if anything.
            check: raises where the handler cannot work on the model.
            begun: asked at each occasion whether to take it.

        Raises:
            RecordingError: the engine is a replay without weights.
            ConfigurationError: the engine has no model; another average is validated already; or validation runs on
                that of a schedule-free optimizer.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            held = getattr(engine, "model", None)  # a replay without weights raises, though a model was given here
            model = self._given if self._given is not None else held
            if not isinstance(model, nn.Module):
                raise ConfigurationError(f"{self._place}(model=None): {engine.name!r} has no torch model; pass model=")
            check(engine, model)

            def average(engine: Engine) -> None:
                now = engine.state.iteration, engine.state.update
                if now != self._averaged_at and begun(engine):  # two parts of the cadence met
                    self._averaged_at = now
                    self.weights("update").update()

            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE)
            subscribe(
                # FIRST: before the validation of the same phase
                self._every.events(),
                average,
                phase=Phase.COMPUTE,
                order=FIRST,
            )  # before the validation of the same phase
            subscribe(Events.COMPLETED, self._check_was_averaged, phase=Phase.ACT)
            self._take(model)
            if applied is not None:
                self._join_validation(engine, applied)

    def detach(self) -> None:
        """Average no more, and leave validation; the average stays."""
        self._attachment.cancel()
        if self._contexts is not None and self._entered in self._contexts:
            self._contexts.remove(self._entered)
        self._contexts = self._entered = None

    def weights(self, method: str) -> WeightAverage:
        """The average, for the handler's method of that name.

        Raises:
            RuntimeError: there is no model yet.
        """
        if self._weights is None:
            raise RuntimeError(f"{self._place}.{method}(): no model yet; pass model= or attach to an engine first")
        return self._weights

    def state_dict(self) -> dict[str, Any]:
        at = None if self._averaged_at is None else list(self._averaged_at)
        average = self._weights.state_dict() if self._weights is not None else self._awaiting
        return {"averaged_at": at, "average": average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another left off.

        Raises:
            CheckpointError: the average does not fit the model.
        """
        if self._weights is not None and state["average"] is not None:
            self._weights.load_state_dict(state["average"])
        elif self._weights is not None:  # of a handler that had no model
            self._weights = WeightAverage(self._weights.model, self._function)
        else:
            self._awaiting = state["average"]
        at = state["averaged_at"]
        self._averaged_at = None if at is None else (int(at[0]), int(at[1]))

    def _take(self, model: nn.Module) -> None:
        if self._weights is not None and self._weights.model is model:
            return
        weights = WeightAverage(model, self._function)
        if self._awaiting is not None:
            weights.load_state_dict(self._awaiting)
        else:
            self._averaged_at = None
        self._weights, self._awaiting = weights, None

    def _join_validation(self, engine: Any, applied: Callable[[], AbstractContextManager[Any]]) -> None:
        contexts = getattr(getattr(engine, "evaluator", None), "contexts", None)
        if contexts is None:
            return  # nothing validates here
        mine = set(self.weights("attach").model.parameters())
        optimizer: Any = getattr(engine, "optimizer", None)
        if is_schedule_free(optimizer) and any(
            parameter in mine for group in optimizer.param_groups for parameter in group["params"]
        ):
            raise ConfigurationError(
                f"{self._place}(validate=True): {type(optimizer).__name__} is schedule-free, and validation runs on "
                "the average that it keeps itself; pass validate=False, or train with another optimizer"
            )
        for context in contexts:
            other = getattr(getattr(context, "__self__", None), "_averaging", None)
            if isinstance(other, Averaging) and not mine.isdisjoint(other.weights("attach").model.parameters()):
                raise ConfigurationError(
                    f"{self._place}(validate=True): {other._place} validates its average of these weights already; "
                    "pass validate=False to one of the two"
                )
        contexts.append(applied)
        self._contexts, self._entered = contexts, applied

    def _on_started(self, engine: Engine) -> None:
        if engine.state.iteration == 0:  # else the run goes on, perhaps at the very point that was averaged last
            self._averaged_at = None

    def _check_was_averaged(self, engine: Engine) -> None:
        if self.weights("update").number_averaged == 0 and engine.state.iteration > 0:
            get_logger("handlers").warning(
                f"{self._place} has averaged nothing: none of its occasions came. For a cadence of updates, a custom "
                "step fires Events.OPTIMIZER_STEP_COMPLETED itself, or uses every=Every(iterations=1)",
                engine=engine.name,
                every=repr(self._every),
            )
