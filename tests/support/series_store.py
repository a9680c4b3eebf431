"""A server's store in tests."""

from __future__ import annotations

import time
from collections.abc import Iterable

from pulsetrain.serve.store import Series, Store

__all__ = ["all_read"]


def all_read(store: Store, names: Iterable[str]) -> dict[str, Series | str | None]:
    """The curves of runs, once they are read."""
    end = time.monotonic() + 120
    while None in (found := {name: store.series(name) for name in names}).values():
        assert time.monotonic() < end, "the runs are not read"
        time.sleep(0.05)
    return found
