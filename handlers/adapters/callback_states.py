"""The states of callbacks that have `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["load_states", "states_of"]


def states_of(callbacks: Sequence[Any]) -> dict[str, object]:
    """The state of each callback, empty for one that has none."""
    return {"callbacks": [each.state_dict() if hasattr(each, "state_dict") else {} for each in callbacks]}


def load_states(callbacks: Sequence[Any], state: Mapping[str, Any]) -> None:
    """Restore what `states_of` returned for as many callbacks."""
    for each, saved in zip(callbacks, state["callbacks"], strict=True):
        if hasattr(each, "load_state_dict"):
            each.load_state_dict(saved)
