"""A fingerprint differs as soon as a value does, and is the same for as long as the value is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partialmethod, singledispatchmethod
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch

from pulsetrain.state.fingerprint import Fingerprint
from tests.support.runs_backends import needs_jax

T = TypeVar("T")


def changed(before: Any, after: Any) -> list[str]:
    first, second = Fingerprint(), Fingerprint()
    first.add("value", before)
    second.add("value", after)
    return second.changed_since(first)


def of_jax(value: Any) -> Callable[[], Any]:
    def make() -> Any:
        import jax

        return jax.numpy.asarray(value)

    return pytest.param(make, marks=needs_jax, id=f"jax {value}")


def key_of_jax(seed: int) -> Callable[[], Any]:
    def make() -> Any:
        import jax

        return jax.random.key(seed)

    return pytest.param(make, marks=needs_jax, id=f"key {seed}")


def read_only(value: float, size: int = 3) -> Callable[[], Any]:
    def make() -> Any:
        view = np.full(size, value).view()
        view.flags.writeable = False
        return view

    return make


VALUES = [
    lambda: -1, lambda: -2, lambda: 0, lambda: (1 << 61) - 1, lambda: 0.0, lambda: -1.0, lambda: -2.0, lambda: True,
    lambda: "-1", lambda: b"-1", lambda: None, lambda: [-1], lambda: [-2], lambda: (-1,), lambda: {"a": -1},
    lambda: {"a": -2}, lambda: {-1}, lambda: {-2}, lambda: frozenset([-1]), lambda: float("nan"), lambda: [-1, -2],
    lambda: [-2, -1], lambda: range(3), lambda: torch.zeros(3), lambda: torch.ones(3), lambda: np.zeros(3),
    lambda: np.float32(1), lambda: np.float64(1), lambda: np.float64(2), read_only(1), read_only(2),
    lambda: "a" * 99 + "b", lambda: "a" * 100, lambda: b"a" * 100, lambda: ["a" * 100], lambda: ["a" * 99 + "b"],
    lambda: [torch.zeros(3)], lambda: [torch.ones(3)], lambda: [torch.ones(3, dtype=torch.int32)],
    of_jax(1.0), of_jax([1.0, 2.0]), of_jax([1.0, 3.0]), of_jax([-1]), of_jax([-2]), key_of_jax(0), key_of_jax(1),
]  # fmt: skip


@pytest.mark.parametrize("make", VALUES)
def test_a_value_that_stays_has_the_same_fingerprint(make: Callable[[], Any]):
    value, held = make(), [make()]
    assert changed(value, value) == []
    assert changed(held, held) == []


def test_different_values_have_different_fingerprints():
    makes = [each.values[0] if hasattr(each, "values") else each for each in VALUES]
    if needs_jax.args[0]:
        makes = [each for each in makes if "_jax" not in each.__qualname__]
    for held in (lambda value: value, lambda value: [value]):
        values = [held(make()) for make in makes]
        same = [
            (first, second)
            for number, first in enumerate(values)
            for second in values[:number]
            if changed(first, second) == []
        ]
        assert same == []


def test_equal_sets_have_the_same_fingerprint_in_whatever_order_they_were_filled():
    rows = [1 << shift for shift in range(40)]
    assert changed({(each, "a") for each in rows}, {(each, "a") for each in rows[::-1]}) == []


def test_a_read_only_view_is_read():
    base = np.ones(3)
    view = base.view()
    view.flags.writeable = False
    before = Fingerprint()
    before.add("value", view)
    base[0] = 2
    after = Fingerprint()
    after.add("value", view)
    assert after.changed_since(before) == ["value"]


def test_a_large_array_that_is_replaced_has_another_fingerprint():
    large = (1 << 20) + 1
    kept = read_only(1, large)()
    assert changed(kept, kept) == []
    assert changed(kept, read_only(2, large)()) == ["value"]


class Slotted:
    __slots__ = ("__count", "level")

    def __init__(self, count: int) -> None:
        self.__count, self.level = count, 0


def test_slots_are_read_even_private_ones():
    assert changed(Slotted(1), Slotted(1)) == []
    assert changed(Slotted(1), Slotted(2)) == ["value"]


class Methodical(Generic[T]):
    """Has a method of each kind, and a cached property."""

    @classmethod
    def of_class(cls) -> None: ...

    @staticmethod
    def static() -> None: ...

    def plain(self, number: int = 0) -> None: ...

    of_one = partialmethod(plain, 1)

    @singledispatchmethod
    def of_type(self, value: object) -> None: ...

    @property
    def read(self) -> int:
        return 1

    @cached_property
    def computed(self) -> int:
        return 1

    def __init_subclass__(cls, **options: Any) -> None: ...

    def __class_getitem__(cls, kind: Any) -> Any:
        return cls


@pytest.mark.parametrize("holder", [Methodical(), type("Derived", (Methodical,), {})()], ids=["own", "inherited"])
def test_methods_are_not_listed_as_unseen_values(holder: Any):
    found = Fingerprint()
    found.add_attributes("holder", holder)
    assert found.unseen == {"holder.computed"}


def test_an_attribute_with_the_name_of_a_class_method_is_compared():
    holder, before, after = Methodical[Any](), Fingerprint(), Fingerprint()
    holder.of_class = 1  # type: ignore[method-assign, assignment]
    before.add_attributes("holder", holder)
    holder.of_class = 2  # type: ignore[method-assign, assignment]
    after.add_attributes("holder", holder)
    assert after.changed_since(before) == ["holder.of_class"]
