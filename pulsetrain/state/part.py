"""What a part of a run's state is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

from pulsetrain.engine.errors import CheckpointError

__all__ = [
    "AttachedPart", "CheckedPart", "OwnedPart", "Part", "PartOf", "StateDict", "Stateful", "keeps_state", "require",
]  # fmt: skip

# The entry of a part in a checkpoint: tensors and plain containers, in a form that the part chooses. `check_state_dict`
# refuses what the part could not load, so its fields are read without a check of their types.
StateDict: TypeAlias = Mapping[str, Any]


class Stateful(Protocol):
    """An object that saves its progress and restores it."""

    def state_dict(self) -> Any:
        """The progress, as tensors and plain containers."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Restore what `state_dict` gave."""
        ...


Owner = TypeVar("Owner")
StatefulOwner = TypeVar("StatefulOwner", bound=Stateful)


class Part(Stateful, Protocol):
    """An object that owns some of a run's state; a checkpoint holds one entry for each."""

    def reset(self) -> None:
        """Return to the state before the first iteration."""
        ...


@runtime_checkable
class CheckedPart(Part, Protocol):
    """A part that can check whether a state fits it."""

    def check_state_dict(self, state: Any, /) -> None:
        """Raise CheckpointError if `load_state_dict` would fail; nothing changes."""
        ...


@runtime_checkable
class AttachedPart(Part, Protocol):
    """A part that subscribes to events."""

    def attach(self, engine: Any, /) -> object:
        """Subscribe; called once, before the handlers are attached."""
        ...


class PartOf(Generic[Owner]):
    """A part that is the state of another object, and that a new run keeps."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def reset(self) -> None: ...


class OwnedPart(PartOf[StatefulOwner]):
    """A part that is what another object's `state_dict` gives; a new run keeps it."""

    def state_dict(self) -> Any:
        return self._owner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._owner.load_state_dict(state)


def keeps_state(value: object) -> TypeGuard[Stateful]:
    """Whether an object has `state_dict` and `load_state_dict`.

    >>> keeps_state([])
    False
    """
    try:
        return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    except Exception:  # code of the user's answers
        return False


def require(part: str, state: Collection[str], names: Iterable[str]) -> None:
    """Refuse a state that lacks some of its fields.

    >>> require("counters", {"epoch": 1}, ["epoch", "iteration"])
    Traceback (most recent call last):
        ...
    pulsetrain.engine.errors.CheckpointError: the checkpoint's state lacks counters.iteration; load another checkpoint

    Raises:
        CheckpointError: it does; the message lists them.
    """
    lacking = [f"{part}.{name}" if part else name for name in names if name not in state]
    if lacking:
        raise CheckpointError(f"the checkpoint's state lacks {', '.join(lacking)}; load another checkpoint")
