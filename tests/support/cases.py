"""Cases of a test that are runs: each is a function that makes the arguments of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
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
