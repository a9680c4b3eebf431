"""Compares the environments of two runs: what results depend on besides the program and its data."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["environment_differences"]

_ABSENT = {"processes": 1}  # what a missing entry means


def environment_differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """The entries that differ between two environments.

    >>> environment_differences({"device": "cpu", "threads": 2}, {"device": "cpu", "threads": 1})
    ['threads: 2 -> 1']
    >>> environment_differences({"device": "cpu", "processes": 2}, {"device": "cpu"})
    ['processes: 2 -> 1']
    """
    names = [*saved, *(name for name in now if name not in saved)]
    before, after = ({**dict.fromkeys(names), **_ABSENT, **each} for each in (saved, now))
    return [f"{name}: {before[name]} -> {after[name]}" for name in names if before[name] != after[name]]
