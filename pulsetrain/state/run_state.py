"""The state of a run: a mapping of the parts that own it, and the parts that have no other home."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from pulsetrain.config import BOUNDS, TrainingConfig
from pulsetrain.engine import LAST, Backend, CheckpointError, Engine, Events, Phase, State, is_training_run
from pulsetrain.engine.backends.model_store import optimizer_type
from pulsetrain.engine.checkpoint.snapshot import Snapshot
from pulsetrain.engine.checkpoint.weights import compare_weights, take_dtypes
from pulsetrain.engine.distributed.ranks import is_sharded, ranks
from pulsetrain.engine.distributed.saved_shards import sharded_like
from pulsetrain.engine.environment import describe_environment
from pulsetrain.engine.events.names import EventLike
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording.diff.environments import environment_differences
from pulsetrain.handlers import EventRecorder
from pulsetrain.state.data_change import describe_data
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.state.handler_registry import plain_arguments, state_of
from pulsetrain.state.local_state import RANK, RANKS
from pulsetrain.state.part import CheckedPart, OwnedPart, Part, PartOf, StateDict, keeps_state, require

__all__ = [
    "FORMAT", "IN_PIECES", "MAY_CHANGE", "BackendPart", "Counters", "MadeWith", "ModelPart", "RunState", "StrategyPart",
]  # fmt: skip

FORMAT = 5
_FIRST_COUNTERS = (  # which every checkpoint of this format has
    "iteration", "epoch", "epoch_length", "update", "validation_round", "rollout_round", "save", "tokens", "samples",
)  # fmt: skip
# settings that may differ between two parts of one run: its length, what it reports, where it writes, and its seed, of
# which the DataCursor says that the checkpoint's is used
_LOG_POINTS = ("log_every_n_steps", "log_strategy_metrics")
MAY_CHANGE = (*BOUNDS, *_LOG_POINTS, "run_dir", "seed")
IN_PIECES = ("model", "optimizer", "stepper", "handlers")  # parts that read what this process needs of a tensor
_MAY_REFUSE = ("backend", "strategy", "handlers")  # parts that run code which cannot be checked beforehand
# what every checkpoint of this format holds; a part that was added later starts from its beginning without an entry
_REQUIRED = (
    "made_with", "backend", "strategy", "handlers", "model", "optimizer", "counters", "stepper", "data", "validation",
    "reporter", "rng",
)  # fmt: skip


class RunState:
    """The parts of a run's state, by the names of their entries in a checkpoint.

    Args:
        parts: in the order in which they are reset.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = parts
        self.others: Sequence[Mapping[str, Any]] | None = None  # what other processes know, while all save together

    def reset(self) -> None:
        """Return every part to the state before the first iteration."""
        for part in self.parts.values():
            part.reset()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next iteration depends on, as tensors and plain containers."""
        here = ranks()
        of_rank = {} if here.world_size == 1 else {RANK: here.rank}
        of_others = {} if self.others is None else {RANKS: list(self.others)}
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {"format": FORMAT, **parts, **of_rank, **of_others}

    def check_state_dict(self, state: StateDict) -> None:
        """Refuse a state that lacks a part which every checkpoint has, or does not fit one.

        Raises:
            CheckpointError: it does not.
        """
        require("", state, _REQUIRED)
        for name, part in self.parts.items():
            if isinstance(part, CheckedPart) and name in state:
                part.check_state_dict(state[name])

    def load_state_dict(self, state: StateDict) -> None:
        """Load a state that was checked. A part without an entry is reset, with a warning.

        Parts that may still refuse it are loaded first, and put back if one raises. The others have refused in
        `check_state_dict` what they could not load.
        """
        unchecked = [
            name for name, part in self.parts.items() if name in _MAY_REFUSE or not isinstance(part, CheckedPart)
        ]
        before = Snapshot().copy({name: self.parts[name].state_dict() for name in unchecked})
        try:
            for name in unchecked:
                self._load(name, state)
        except Exception as refused:
            for name in unchecked:
                try:
                    self.parts[name].load_state_dict(before[name])
                except Exception as error:  # the first error is the one to mend
                    refused.add_note(f"{name!r} could not be put back either: {type(error).__name__}: {error}")
            raise
        for name in self.parts:
            if name not in unchecked:
                self._load(name, state)

    def _load(self, name: str, state: StateDict) -> None:
        if name not in state:
            get_logger("pulsetrain").warning(
                "the checkpoint has no state for a part of the run, which starts from its beginning", part=name
            )
            self.parts[name].reset()
            return
        try:
            self.parts[name].load_state_dict(state[name])
        except KeyError as error:
            raise CheckpointError(
                f"the checkpoint's state of {name!r} lacks {error}; load another checkpoint, or let load_state_dict() "
                "use a default where the entry is missing"
            ) from error


_WITHOUT_EFFECT = {"rollouts.background", "rollouts.log_completions"}  # on what is learnt


class _Described(Protocol):
    backend: Backend
    config: TrainingConfig
    optimizer: torch.optim.Optimizer
    strategy: object
    train_loader: Iterable[Any]


class _Counting(Protocol):
    state: State
    data: DataCursor

    @property
    def registered_events(self) -> tuple[EventLike, ...]: ...
    def counter_of(self, event: EventLike, /) -> str | None: ...
    def set_counters(self, counters: Mapping[str, int | None], /) -> None: ...


class MadeWith(PartOf[_Described]):
    """What a checkpoint was made with. Loading it reports what has changed since; the optimizer must not.

    Args:
        owner: the training run.
    """

    _log_points_differ = False  # from those of the checkpoint's run, or what they report

    def attach(self, engine: Engine) -> None:
        engine.bus.subscribe(
            Events.CHECKPOINT_LOADED, self._leave_out_log_points, sender=engine, phase=Phase.PERSIST, order=LAST
        )

    def state_dict(self) -> StateDict:
        backend = self._owner.backend
        return {
            "environment": describe_environment(backend.device, backend.environment()),
            "settings": _changed_settings(self._owner.config),
            "optimizer": optimizer_type(self._owner.optimizer),
            "data": describe_data(self._owner.train_loader),
            "arguments": self._arguments(),
        }

    def _arguments(self) -> dict[str, str]:
        """The plain arguments of the strategy, and of rollouts, as text: what decides about the next step as well."""
        parts: dict[str, object] = {"strategy": self._owner.strategy}
        if getattr(self._owner.train_loader, "fires_rollouts", False):
            parts["rollouts"] = self._owner.train_loader
        found = {f"{name}.{key}": text for name, part in parts.items() for key, text in plain_arguments(part).items()}
        return {name: text for name, text in found.items() if name not in _WITHOUT_EFFECT}

    def check_state_dict(self, state: StateDict) -> None:
        require("made_with", state, ("environment", "settings", "optimizer", "data"))
        kind, mine = state["optimizer"], optimizer_type(self._owner.optimizer)
        if mine != kind:
            raise CheckpointError(
                f"the checkpoint was made with {kind}, this trainer has {mine}; use the same optimizer"
            )

    def load_state_dict(self, state: StateDict) -> None:
        current = self.state_dict()
        for name, message in (
            ("environment", "the environment differs from the checkpoint's: results may differ in their last bits"),
            ("settings", "the run resumes with other settings than before"),
            ("arguments", "the run resumes with other arguments than before"),
        ):
            saved = state.get(name, current[name])  # earlier checkpoints have no arguments
            before, now = (
                {key: value for key, value in made.items() if key not in MAY_CHANGE} for made in (saved, current[name])
            )
            differences = environment_differences(before, now)
            if differences:
                get_logger("pulsetrain").warning(message, differences=differences)
        theirs, mine = state["settings"], current["settings"]
        self._log_points_differ = any(theirs.get(each) != mine.get(each) for each in _LOG_POINTS)

    def _leave_out_log_points(self, engine: Engine) -> None:
        """After the recorders have begun their comparison: METRICS_LOGGED differs from that of the run before."""
        if not self._log_points_differ or not is_training_run(engine):
            return
        for handler in engine.handlers:
            if isinstance(handler, EventRecorder) and handler.resume_check is not None:
                handler.resume_check.leave_out(Events.METRICS_LOGGED.value)


class BackendPart(OwnedPart[Backend]):
    """What the next step depends on besides the model's state, such as the gradient scale of fp16."""

    def reset(self) -> None:
        """Start counting updates at 0; the gradient scale stays."""
        self._owner.begin_run()


class StrategyPart(PartOf[object]):
    """The strategy's state, None if it keeps none."""

    def state_dict(self) -> Any:
        return state_of("strategy", self._owner) if keeps_state(self._owner) else None

    def check_state_dict(self, state: object) -> None:
        """Refuse a state for a strategy that keeps none.

        Raises:
            CheckpointError: it is one.
        """
        if state is not None and not keeps_state(self._owner):
            raise CheckpointError(
                f"the checkpoint holds the state of a strategy, and {type(self._owner).__name__} has no "
                "state_dict() and load_state_dict(); resume with the strategy that the run began with"
            )

    def load_state_dict(self, state: object) -> None:
        if not keeps_state(self._owner):
            return
        if state is not None:
            self._owner.load_state_dict(state)
        else:
            get_logger("pulsetrain").warning(
                "the checkpoint has no state for the strategy, which starts from its beginning",
                strategy=type(self._owner).__name__,
            )


class ModelPart(OwnedPart[nn.Module]):
    """The model's weights and buffers."""

    def check_state_dict(self, state: StateDict) -> None:
        """Refuse weights of other names or shapes.

        Raises:
            CheckpointError: they are; the message lists what is missing, unexpected or misshapen.
        """
        mine = self._owner.state_dict()
        problems = compare_weights(mine, state)
        if problems.unexpected:  # perhaps of an earlier version, which did not leave out what is frozen
            problems = compare_weights({**dict(self._owner.named_parameters(remove_duplicate=False)), **mine}, state)
            problems = replace(
                problems, missing={name: each for name, each in problems.missing.items() if name in mine}
            )
        if problems:
            raise CheckpointError(
                f"the checkpoint's weights do not fit the model: {problems}; build the model as it was when the "
                "checkpoint was made, with the modules that handlers have added since the run began"
            )
        if is_sharded(self._owner):  # which keeps buffers of its own, in the dtype that it was split up with
            others = [name for name, each in state.items() if _dtype_of(each) != _dtype_of(mine.get(name))]
            if others:
                name = others[0]
                raise CheckpointError(
                    f"the checkpoint has {name} in {state[name].dtype}, and the sharded model in "
                    f"{_dtype_of(mine[name])}; make the model with the dtypes of the checkpoint"
                )

    def load_state_dict(self, state: StateDict) -> None:
        """Restore them in the dtypes that they had."""
        converted = take_dtypes(self._owner, state)
        if converted:
            get_logger("pulsetrain").warning(
                "tensors of the model have other dtypes in the checkpoint, to which they are converted: the run "
                "continues with those",
                tensors={name: f"{now} to {saved}".replace("torch.", "") for name, (now, saved) in converted.items()},
            )
        if is_sharded(self._owner):
            mine = self._owner.state_dict()
            state = {name: sharded_like(each, mine.get(name)) for name, each in state.items()}
        super().load_state_dict(state)


class Counters(PartOf[_Counting]):
    """The run's counters: iterations, epochs, updates, and the rest that filters read.

    A checkpoint counts what was trained: an iteration whose step was not made yet is not in it.
    """

    NAMES: ClassVar[tuple[str, ...]] = (*_FIRST_COUNTERS,)  # one that is added here is 0 in older checkpoints

    def __init__(self, owner: _Counting) -> None:
        super().__init__(owner)
        for name in self.NAMES:
            if not hasattr(owner.state, name):  # one that no event of the engine reads
                setattr(owner.state, name, 0)

    def reset(self) -> None:
        self._owner.set_counters(dict.fromkeys(self.NAMES, 0) | {"epoch_length": None})

    def state_dict(self) -> dict[str, int | None]:
        data = self._owner.data
        counters = {name: getattr(self._owner.state, name) for name in self.NAMES}
        counters["iteration"], counters["epoch"] = data.trained, data.epoch - (not data.epoch_done)
        for event in self._owner.registered_events:
            name = self._owner.counter_of(event)
            if name is not None and name not in counters:  # of a custom event
                counters[name] = getattr(self._owner.state, name)
        return counters

    def check_state_dict(self, state: Mapping[str, int | None]) -> None:
        require("counters", state, _FIRST_COUNTERS)

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        # the checkpoint's own save is counted after it is durable, so it is not in there
        self._owner.set_counters({**dict.fromkeys(self.NAMES, 0), **state, "save": (state["save"] or 0) + 1})


def _dtype_of(value: object) -> object:
    return getattr(value, "dtype", None)


def _changed_settings(config: TrainingConfig) -> dict[str, str]:
    """The settings as text, without those that have their default."""
    return {
        each.name: repr(value) for each in fields(config) if (value := getattr(config, each.name)) != _default(each)
    }


def _default(field: Field[object]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()
