"""The state of a run: a mapping of the parts that own it, and the parts that have no other home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pulsetrain.config import TrainingConfig
from pulsetrain.engine.backends.model_store import check_optimizer_state, optimizer_type
from pulsetrain.engine.checkpoint.snapshot import Snapshot
from pulsetrain.engine.checkpoint.weights import compare_weights
from pulsetrain.engine.environment import describe_environment, environment_differences
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.events.state import State
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.step.backend import Backend
from pulsetrain.state.data_change import describe_data
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.state.handler_registry import state_of
from pulsetrain.state.part import CheckedPart, Part, keeps_state, require

__all__ = [
    "FORMAT", "BackendPart", "Counters", "MadeWith", "ModelPart", "OptimizerPart", "RunState", "StepperPart",
    "StrategyPart",
]  # fmt: skip

FORMAT = 5
_COUNTERS = (
    "iteration", "epoch", "epoch_length", "update", "validation_round", "rollout_round", "save", "tokens", "samples",
)  # fmt: skip
# settings that may differ between two parts of one run: its length, what it reports, where it writes
_MAY_CHANGE = ("max_epochs", "max_iterations", "max_updates", "max_tokens", "log_every_n_steps", "run_dir")
_MAY_REFUSE = ("backend", "strategy", "handlers")  # parts that run code which cannot be checked beforehand


class RunState:
    """The parts of a run's state, by the names of their entries in a checkpoint.

    Args:
        parts: in the order in which they are reset and loaded.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = parts

    def reset(self) -> None:
        """Return every part to the state before the first iteration."""
        for part in self.parts.values():
            part.reset()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next iteration depends on, as tensors and plain containers."""
        return {"format": FORMAT, **{name: part.state_dict() for name, part in self.parts.items()}}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that lacks a part, or does not fit one.

        Raises:
            CheckpointError: it does not.
        """
        require("", state, self.parts)
        for name, part in self.parts.items():
            if isinstance(part, CheckedPart):
                part.check_state_dict(state[name])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that was checked: every part, or none if a handler, the strategy or the backend raises."""
        unchecked = {name: self.parts[name] for name in _MAY_REFUSE}
        before = Snapshot().copy({name: part.state_dict() for name, part in unchecked.items()})
        try:
            for name, part in unchecked.items():
                part.load_state_dict(state[name])
        except Exception:
            for name, part in unchecked.items():
                part.load_state_dict(before[name])
            raise
        for name, part in self.parts.items():
            if name not in unchecked:
                part.load_state_dict(state[name])


class MadeWith:
    """What a checkpoint was made with. Loading it reports what has changed since; the optimizer must not.

    Args:
        config: the run's settings.
        backend: describes what its results depend on.
        optimizer: whose kind is compared.
        loader: gives the current training data.
    """

    def __init__(
        self,
        config: TrainingConfig,
        backend: Backend,
        optimizer: torch.optim.Optimizer,
        loader: Callable[[], Iterable[object]],
    ) -> None:
        self._config, self._backend, self._optimizer, self._loader = config, backend, optimizer, loader
        self.environment_changes: list[str] = []  # as "threads: 2 -> 1", since the loaded checkpoint was made

    def reset(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {
            "environment": self._environment(),
            "settings": _changed_settings(self._config),
            "optimizer": optimizer_type(self._optimizer),
            "data": describe_data(self._loader()),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        require("made_with", state, ("environment", "settings", "optimizer", "data"))
        check_optimizer_kind(self._optimizer, state["optimizer"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        log = get_logger("pulsetrain")
        self.environment_changes = environment_differences(state["environment"], self._environment())
        if self.environment_changes:
            log.warning(
                "the environment differs from the checkpoint's: results may differ in their last bits",
                differences=self.environment_changes,
            )
        before, now = (
            {name: text for name, text in settings.items() if name not in _MAY_CHANGE}
            for settings in (state["settings"], _changed_settings(self._config))
        )
        changed = environment_differences(before, now)
        if changed:
            log.warning("the run resumes with other settings than before", differences=changed)

    def _environment(self) -> dict[str, Any]:
        return describe_environment(self._backend.device, self._backend.environment())


class BackendPart:
    """What the next step depends on besides the model's state, such as the gradient scale of fp16."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def reset(self) -> None:
        """Start counting updates at 0; the gradient scale stays."""
        self._backend.begin_run()

    def state_dict(self) -> dict[str, Any]:
        return self._backend.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._backend.load_state_dict(state)


class StrategyPart:
    """The strategy's state, None if it keeps none."""

    def __init__(self, strategy: object) -> None:
        self._strategy = strategy

    def reset(self) -> None: ...

    def state_dict(self) -> Any:
        return state_of("strategy", self._strategy) if keeps_state(self._strategy) else None

    def check_state_dict(self, state: object) -> None:
        """Refuse a state for a strategy that keeps none.

        Raises:
            CheckpointError: it is one.
        """
        if state is not None and not keeps_state(self._strategy):
            raise CheckpointError(
                f"the checkpoint holds the state of a strategy, and {type(self._strategy).__name__} has no "
                "state_dict() and load_state_dict(); resume with the strategy that the run began with"
            )

    def load_state_dict(self, state: object) -> None:
        if not keeps_state(self._strategy):
            return
        if state is not None:
            self._strategy.load_state_dict(state)
        else:
            get_logger("pulsetrain").warning(
                "the checkpoint has no state for the strategy, which starts from its beginning",
                strategy=type(self._strategy).__name__,
            )


class ModelPart:
    """The model's weights and buffers; a new run keeps them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def reset(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return self._model.state_dict()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse weights of other names or shapes.

        Raises:
            CheckpointError: they are; the message lists what is missing, unexpected or misshapen.
        """
        problems = compare_weights(self._model.state_dict(), state)
        if problems:
            raise CheckpointError(f"the checkpoint's weights do not fit the model: {problems}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(state)


class OptimizerPart:
    """The optimizer's state; a new run keeps it.

    Args:
        optimizer: whose state.
        follows_schedule: whether something sets its learning rates; if not, rates that loading changes are reported.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, follows_schedule: Callable[[], bool]) -> None:
        self._optimizer, self._follows_schedule = optimizer, follows_schedule

    def reset(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        check_optimizer_state(self._optimizer, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        configured = self._rates()
        self._optimizer.load_state_dict(dict(state))
        loaded = self._rates()
        if loaded != configured and not self._follows_schedule():
            get_logger("pulsetrain").warning(
                "the run resumes with the learning rates of its checkpoint; update_optimizer() sets others",
                checkpoint=loaded,
                configured=configured,
            )

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]


class _Counting(Protocol):
    state: State

    def set_counters(self, counters: Mapping[str, int | None], /) -> None: ...


class Gradients(Protocol):
    """What holds the gradients that wait for an update."""

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by their names."""
        ...

    def load_gradients(self, saved: Mapping[str, Tensor], batches: int, /) -> Callable[[], None]:
        """Check gradients of so many batches; returns what puts them in place."""
        ...


class StepperPart:
    """What the next step needs of the last ones, with the gradients that wait for an update.

    Args:
        stepper: makes the steps.
        store: has the gradients.
        waiting: whether any of them wait.
    """

    def __init__(self, stepper: Part, store: Gradients, waiting: Callable[[], object]) -> None:
        self._stepper, self._store, self._waiting = stepper, store, waiting

    def reset(self) -> None:
        self._stepper.reset()

    def state_dict(self) -> dict[str, Any]:
        gradients = self._store.gradients() if self._waiting() else {}  # their sum since the last update
        return {**self._stepper.state_dict(), "gradients": gradients}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        require("stepper", state, ("accumulation", "gradients", "learning_rates", "grad_norm", "grad_norms"))
        self._load_gradients(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        put_in_place = self._load_gradients(state)
        self._stepper.load_state_dict(state)
        put_in_place()

    def _load_gradients(self, state: Mapping[str, Any]) -> Callable[[], None]:
        return self._store.load_gradients(state["gradients"], state["accumulation"]["batches"])


class Counters:
    """The run's counters: iterations, epochs, updates, and the rest that filters read.

    A checkpoint counts what was trained: an iteration whose step was not made yet is not in it.
    """

    def __init__(self, engine: _Counting, data: DataCursor) -> None:
        self._engine, self._data = engine, data

    def reset(self) -> None:
        self._engine.set_counters(dict.fromkeys(_COUNTERS, 0) | {"epoch_length": None})

    def state_dict(self) -> dict[str, int | None]:
        counters = {name: getattr(self._engine.state, name) for name in _COUNTERS}
        return {
            **counters, "iteration": self._data.trained, "epoch": self._data.epoch - (not self._data.epoch_done)
        }  # fmt: skip

    def check_state_dict(self, state: Mapping[str, int | None]) -> None:
        require("counters", state, _COUNTERS)

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        # the checkpoint's own save is counted after it is durable, so it is not in there
        self._engine.set_counters({**state, "save": (state["save"] or 0) + 1})


def check_optimizer_kind(optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Refuse the state of an optimizer of another kind.

    Raises:
        CheckpointError: it is one.
    """
    mine = optimizer_type(optimizer)
    if mine != kind:
        raise CheckpointError(f"the checkpoint was made with {kind}, this trainer has {mine}; use the same optimizer")


def _changed_settings(config: TrainingConfig) -> dict[str, str]:
    """The settings as text, without those that have their default."""
    return {
        each.name: repr(value) for each in fields(config) if (value := getattr(config, each.name)) != _default(each)
    }


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()
