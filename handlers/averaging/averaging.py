"""What EMA and SWA share: the cadence, the state of the average, and its use in validation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

from torch import nn

from pulsetrain.engine import FIRST, ConfigurationError, Engine, Events, Every, Phase
from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.distributed.saved_shards import sharded_like
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.optimizers import is_schedule_free
from pulsetrain.engine.step.averaging import MultiAverage, WeightAverage
from pulsetrain.engine.training_run import model_of, optimizer_of, validation_contexts
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.cadence import check_every

__all__ = ["Averaging"]


class Averaging(Handler):
    """Averages the weights of one model; EMA and SWA say how.

    Args:
        average: as WeightAverage takes it.
        model: by default the engine's.
        every: when to average.
        validate: let the engine's evaluator, if it has one, run the model with the averaged weights.

    Raises:
        TypeError: the model is not an nn.Module, or the cadence not an Every.
    """

    reads_pieces = True  # of a state whose tensors several processes have saved, it reads this process's

    def __init__(self, average: MultiAverage, model: nn.Module | None, every: Every, validate: bool) -> None:
        self._place = type(self).__name__
        check_type(self._place, "model", model, nn.Module | None, "a torch.nn.Module")
        check_every(self._place, every, "Every(updates=10)")
        self.validate = validate
        self._function, self._given, self._every = average, model, every
        self._weights = None if model is None else WeightAverage(model, average)
        self._awaiting: Mapping[str, object] | None = None  # a state that was loaded before there was a model
        self._averaged_at: tuple[int, int] | None = None  # iteration and update
        self._contexts: list[Callable[[], AbstractContextManager[object]]] = []  # of the evaluator
        self._path: str | None = None  # of the averaged module in the engine's model, if it is there

    def attach(self, engine: Engine) -> Self:
        """Average at the cadence, in phase COMPUTE, before a validation that is due at the same point.

        If no model was given and this engine has a different model than the last one, the average starts again.

        Raises:
            RecordingError: the engine is a replay without weights.
            ConfigurationError: no model was given and the engine has none; SWA needs a bn_loader, or a separate one; or
                validation uses another average of these weights already, such as that of a schedule-free optimizer.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            own = model_of(engine)  # a replay without weights raises, though a model was given here
            model = self._given if self._given is not None else own
            if model is None:
                raise ConfigurationError(f"{engine.name!r} has no torch model; pass model=", self._place, model=None)
            self._check_model(engine, model)
            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE)
            # FIRST: before the validation of the same phase
            subscribe(self._every.events(), self._average, phase=Phase.COMPUTE, order=FIRST)
            subscribe(Events.COMPLETED, self._check_was_averaged, phase=Phase.ACT)
            self._adopt(model)
            modules = own.named_modules() if own is not None else ()
            self._path = next((path for path, module in modules if module is model), None)
            if self.validate:
                self._join_validation(engine)
        return self

    def detach(self) -> None:
        """Stop averaging and leave validation; the average stays."""
        self._attachment.cancel()
        if self.applied in self._contexts:
            self._contexts.remove(self.applied)
        self._contexts = []

    @property
    def number_averaged(self) -> int:
        """How often weights were averaged."""
        return self._average_for("number_averaged").number_averaged

    def applied(self) -> AbstractContextManager[None]:
        """In a `with` block, the model has the averaged weights; before the first average it keeps its own."""
        return self._average_for("applied").applied()

    def copy_to(self, model: nn.Module) -> None:
        """Copy the averaged weights and buffers into a model of the same kind.

        Raises:
            ConfigurationError: they do not fit it.
            RuntimeError: nothing has been averaged yet.
        """
        self._average_for("copy_to").copy_to(model)

    def averages(self, parameters: Collection[nn.Parameter]) -> bool:
        """Whether any of these parameters is averaged here."""
        return self._weights is not None and any(each in parameters for each in self._weights.model.parameters())

    def state_dict(self) -> dict[str, object]:
        """The average, and the iteration and update of its last change.

        For loading weights alone, it says of which module of the model validation uses the average (None: of none), and
        whether that could be done without measuring statistics first.
        """
        at = None if self._averaged_at is None else list(self._averaged_at)
        average = self._weights.state_dict() if self._weights is not None else self._awaiting
        validates = self._path if self.applied in self._contexts else None
        return {"averaged_at": at, "average": average, "validates": validates, "measured": not self._must_measure()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved average.

        Raises:
            CheckpointError: it does not fit the model.
        """
        if self._weights is not None and state["average"] is not None:
            self._weights.load_state_dict(_own_part(state["average"], self._weights.model))
        elif self._weights is not None:  # saved by a handler that had no model
            self._weights = WeightAverage(self._weights.model, self._function)
        else:
            self._awaiting = state["average"]
        at = state["averaged_at"]
        self._averaged_at = None if at is None else (int(at[0]), int(at[1]))

    def _has_begun(self, engine: Engine) -> bool:
        """Whether the weights are averaged at this point of the cadence."""
        return True

    def _must_measure(self) -> bool:
        """Whether the model's buffers have to be measured before it works with the average."""
        return False

    def _check_model(self, engine: Engine, model: nn.Module) -> None:
        """Raise where this kind of average cannot work on the model."""

    def _average_for(self, method: str) -> WeightAverage:
        """The average, for the public method of that name.

        Raises:
            RuntimeError: there is no model yet.
        """
        if self._weights is None:
            raise RuntimeError(f"{self._place}.{method}(): no model yet; pass model= or attach to an engine first")
        return self._weights

    def _average(self, engine: Engine) -> None:
        now = engine.state.iteration, engine.state.update
        if now != self._averaged_at and self._has_begun(engine):  # equal: two parts of the cadence met
            self._averaged_at = now
            self._average_for("update").update()

    def _adopt(self, model: nn.Module) -> None:
        if self._weights is not None and self._weights.model is model:
            return
        weights = WeightAverage(model, self._function)
        if self._awaiting is not None:
            weights.load_state_dict(_own_part(self._awaiting, model))
        else:
            self._averaged_at = None
        self._weights, self._awaiting = weights, None

    def _join_validation(self, engine: Engine) -> None:
        contexts = validation_contexts(engine)
        if contexts is None:
            return  # nothing validates here
        mine = set(self._average_for("attach").model.parameters())
        optimizer = optimizer_of(engine)
        groups = optimizer.param_groups if optimizer is not None and is_schedule_free(optimizer) else ()
        if any(parameter in mine for group in groups for parameter in group["params"]):
            rule = (
                f"{type(optimizer).__name__} is schedule-free, and validation uses the average that it keeps itself; "
                "pass validate=False, or train with another optimizer"
            )
            raise ConfigurationError(rule, self._place, validate=True)
        for context in contexts:
            other = getattr(context, "__self__", None)
            if isinstance(other, Averaging) and other.averages(mine):
                rule = (
                    f"{type(other).__name__} validates its average of these weights; "
                    "pass validate=False to one of the two"
                )
                raise ConfigurationError(rule, self._place, validate=True)
        self._contexts = contexts
        contexts.append(self.applied)

    def _on_started(self, engine: Engine) -> None:
        if engine.state.iteration == 0:  # else the run continues, perhaps at the very point of the last average
            self._averaged_at = None

    def _check_was_averaged(self, engine: Engine) -> None:
        if self.number_averaged == 0 and engine.state.iteration > 0:
            get_logger("handlers").warning(
                f"{self._place} has averaged nothing: its cadence never came due. For a cadence of updates, a custom "
                "step fires Events.OPTIMIZER_STEP_COMPLETED itself, or uses every=Every(iterations=1)",
                engine=engine.name,
                every=repr(self._every),
            )


def _own_part(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A saved average with what this process holds of each tensor."""
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {**state, "weights": {name: sharded_like(each, mine.get(name)) for name, each in state["weights"].items()}}
