"""Whatever objects the data, the strategy and the handlers hold, a run with a Checkpointer starts, saves and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from pulsetrain.engine import Events, SupervisedStrategy
from pulsetrain.state import unsaved
from tests.support.models import pairs
from tests.support.runs import saving_run, warnings_of
from tests.support.runs_backends import needs_jax

ROWS = 16


class RefusingHandler:
    """Has no attributes that can be listed, and is called all the same."""

    def __call__(self) -> None: ...

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError


class Refusing:
    """Raises whatever it is asked."""

    __slots__ = ("__weakref__", "unset")

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class RaisingMapping(Mapping[str, int]):
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError

    def __getitem__(self, key: str) -> int:
        raise KeyError(key)


class RaisingText:
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


class RaisingState:
    def state_dict(self) -> Any:
        raise RuntimeError

    def load_state_dict(self, state: Any) -> None: ...


class RaisingLength(list[int]):
    def __len__(self) -> int:
        raise RuntimeError


def array_of_jax() -> Any:
    import jax

    return jax.numpy.ones(3)


def deleted_array_of_jax() -> Any:
    array = array_of_jax()
    array.delete()
    return array


def key_of_jax() -> Any:
    import jax

    return jax.random.key(0)


OBJECTS = [
    Refusing, RaisingMapping, lambda: {RaisingText(): 1}, RaisingState, RaisingLength, lambda: 10**5000,
    *(pytest.param(make, marks=needs_jax) for make in (array_of_jax, deleted_array_of_jax, key_of_jax)),
]  # fmt: skip


class Holding(Dataset[Any]):
    def __init__(self, held: Any) -> None:
        self.held, self.several, self.pairs = held, [held], pairs(ROWS)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return self.pairs[row]


class HoldingStrategy(SupervisedStrategy):
    def __init__(self, held: Any) -> None:
        super().__init__("mse")
        self.held, self.several = held, [held]


class Handler:
    def __init__(self, held: Any) -> None:
        self.held, self.several = held, [held]

    def __call__(self) -> None: ...


@pytest.mark.parametrize("make", OBJECTS)
def test_a_run_starts_and_saves_whatever_its_parts_hold(make: Callable[[], Any], tmp_path: Path):
    held = make()
    run = saving_run(tmp_path, train_loader=DataLoader(Holding(held), 4), strategy=HoldingStrategy(held))
    run.add_event_handler(Events.ITERATION_COMPLETED, Handler(held))
    run.train()
    assert list(tmp_path.glob("checkpoints/*-checkpoint"))


def test_a_run_starts_and_saves_if_a_handlers_attributes_cannot_be_listed(tmp_path: Path):
    run = saving_run(tmp_path)
    run.add_event_handler(Events.ITERATION_COMPLETED, RefusingHandler())
    run.train()
    assert list(tmp_path.glob("checkpoints/*-checkpoint"))


def test_a_fingerprint_that_fails_is_reported_and_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise ValueError("unexpected")

    monkeypatch.setattr(unsaved, "fingerprint_of_run", fail)
    found = [each["error"] for each in warnings_of(saving_run(tmp_path)) if "cannot be compared" in each["event"]]
    assert found == ["ValueError: unexpected"]
    assert list(tmp_path.glob("checkpoints/*-checkpoint"))
