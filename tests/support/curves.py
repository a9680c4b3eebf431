"""Reads the answer of the page's server that holds the points of curves."""

from __future__ import annotations

import json

import numpy as np

__all__ = ["lines_of"]


def lines_of(answer: bytes) -> tuple[dict[str, dict[str, list[list[float]]]], list[str]]:
    """Places and values of the points, by curve and run; and the runs that have not counted tokens."""
    length = int.from_bytes(answer[:8], "little")
    head = json.loads(answer[8 : 8 + length])
    numbers = np.frombuffer(answer, "<f8", offset=8 + length)
    found: dict[str, dict[str, list[list[float]]]] = {}
    at = 0
    for name, lines in head["charts"].items():
        found[name] = {}
        for run, count in lines:
            found[name][run] = numbers[at : at + 2 * count].reshape(2, count).tolist()
            at += 2 * count
    assert at == len(numbers)
    return found, head["uncounted"]
