"""Cases of tests: functions that make the arguments of a Trainer, and parameters of which only some are not slow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

Make = Callable[[], dict[str, Any]]


class Cases(list[Any]):
    """What `parametrize` is given: a function and further values; the function's name is the id."""

    def add(self, *marks: Any, values: tuple[Any, ...] = ()) -> Callable[[Make], Make]:
        def add(make: Make) -> Make:
            self.append(pytest.param(make, *values, id=make.__name__.replace("_", " "), marks=marks))
            return make

        return add


def slow_but(kept: Collection[object], values: Iterable[Any]) -> list[Any]:
    """Parameters, those that are not kept with the mark `slow`; a tuple holds one for each name."""
    return [
        value
        if value in kept
        else pytest.param(*value if isinstance(value, tuple) else [value], marks=pytest.mark.slow)
        for value in values
    ]
