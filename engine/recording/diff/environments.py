"""Compares the environments of two runs: what results depend on besides the program and its data."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["environment_differences"]


def environment_differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """The entries that differ between two environments.

    >>> environment_differences({"device": "cpu", "threads": 2}, {"device": "cpu", "threads": 1})
    ['threads: 2 -> 1']
    """
    names = [*saved, *(name for name in now if name not in saved)]
    return [f"{name}: {saved.get(name)} -> {now.get(name)}" for name in names if saved.get(name) != now.get(name)]
