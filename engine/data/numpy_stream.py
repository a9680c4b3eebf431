"""Numpy's global generator, exchanged for another one and back: 2 us, where copying its numbers out and in takes 90.

`set_bit_generator` forgets the normal number that numpy may keep beside the generator, since it makes two at a time.
Only `get_state` and `set_state` read and write that number; here they see an empty generator, which costs nothing.
"""

# ruff: noqa: SLF001 - numpy has no public name for its global RandomState and that one's generator

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.random import mtrand

__all__ = ["NumpyStream", "current", "use"]

Normal = tuple[int, float]
"""Whether there is a normal number that was drawn with another one and has not been given yet, and that number."""


class NumpyStream(NamedTuple):
    """A generator that can take the place of numpy's global one."""

    generator: np.random.BitGenerator
    normal: Normal = (0, 0.0)


class _Empty:
    """In the place of the generator while numpy gives or gets the number beside it."""

    @property
    def state(self) -> dict[str, Any]:
        return {"bit_generator": "MT19937", "state": {}}

    @state.setter
    def state(self, value: object) -> None:
        """Nothing is kept."""


_EMPTY: Any = _Empty()


def current() -> NumpyStream:
    """What `numpy.random` draws from now."""
    return NumpyStream(mtrand.get_bit_generator(), _normal())


def use(stream: NumpyStream) -> None:
    """Let `numpy.random` draw from this stream.

    >>> np.random.seed(3)
    >>> first = np.random.standard_normal()  # numpy makes two at a time
    >>> outer = current()
    >>> use(NumpyStream(np.random.MT19937(0)))
    >>> _ = np.random.rand(700)
    >>> use(outer)
    >>> both = first, np.random.standard_normal()
    >>> np.random.seed(3)
    >>> both == (np.random.standard_normal(), np.random.standard_normal())
    True
    """
    mtrand.set_bit_generator(stream.generator)
    if _normal() != stream.normal:
        _keep(stream.normal)


def _normal() -> Normal:
    shared = mtrand._rand
    generator, shared._bit_generator = shared._bit_generator, _EMPTY
    try:
        state: dict[str, Any] = shared.get_state(legacy=False)
    finally:
        shared._bit_generator = generator
    return state["has_gauss"], state["gauss"]


def _keep(normal: Normal) -> None:
    shared = mtrand._rand
    generator, shared._bit_generator = shared._bit_generator, _EMPTY
    try:
        shared.set_state({**_EMPTY.state, "has_gauss": normal[0], "gauss": normal[1]})
    finally:
        shared._bit_generator = generator
