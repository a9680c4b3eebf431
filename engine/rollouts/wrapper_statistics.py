"""Statistics that the wrappers of an environment keep over its episodes, as a state that a checkpoint can hold."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pulsetrain.engine.errors import CheckpointError

__all__ = ["freeze_statistics", "has_statistics", "load_statistics", "statistics_of"]

# The attributes of gymnasium's wrappers, single or for vectors, whose values outlast an episode.
_KNOWN = {
    "NormalizeObservation": ("obs_rms",),
    "NormalizeReward": ("return_rms", "discounted_reward", "accumulated_reward", "_prev_dones"),
    "RecordEpisodeStatistics": (
        *("episode_count", "return_queue", "length_queue"),  # time_queue is of the clock
        *("episode_returns", "episode_lengths", "prev_dones"),
    ),
}
_MOMENTS = ("mean", "var", "count")

States = list[dict[str, Any]]


def has_statistics(environment: Any) -> bool:
    """Whether a wrapper of the environment, or the environment itself, keeps a state that outlasts an episode."""
    return any(True for _ in _stateful(environment))


def statistics_of(environment: Any) -> States:
    """The states of all such wrappers, from the outermost: copies, as tensors and plain containers.

    They are known of gymnasium's NormalizeObservation, NormalizeReward and RecordEpisodeStatistics, and of any wrapper
    or environment whose class has `state_dict()` and `load_state_dict(state)`.

    >>> class Counting:
    ...     episodes = 3
    ...     def state_dict(self):
    ...         return {"episodes": self.episodes}
    ...     def load_state_dict(self, state):
    ...         self.episodes = state["episodes"]
    >>> statistics_of(Counting())
    [{'kind': 'Counting', 'episodes': 3}]
    """
    return [
        {"kind": type(layer).__name__, **(_attributes(layer, names) if names else copy.deepcopy(layer.state_dict()))}
        for layer, names in _stateful(environment)
    ]


def load_statistics(environment: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Restores the result of `statistics_of`.

    Raises:
        CheckpointError: the environment has other wrappers.
    """
    layers = list(_stateful(environment))
    kinds, saved = [type(layer).__name__ for layer, _ in layers], [state["kind"] for state in states]
    if kinds != saved:
        raise CheckpointError(
            f"EnvironmentRollouts: the checkpoint has statistics of {', '.join(saved) or 'no wrapper'}, and this "
            f"environment has {', '.join(kinds) or 'no wrapper with statistics'}; resume with the wrappers that the "
            "run started with"
        )
    for (layer, names), state in zip(layers, states, strict=True):
        given = {name: value for name, value in state.items() if name != "kind"}
        if names:
            for name, value in given.items():
                setattr(layer, name, _decoded(getattr(layer, name), value))
        else:
            layer.load_state_dict(copy.deepcopy(given))


def freeze_statistics(environment: Any) -> None:
    """Keeps gymnasium's running means as they are, as in an evaluation."""
    for layer in _layers(environment):
        if hasattr(type(layer), "update_running_mean"):
            layer.update_running_mean = False


def _layers(environment: Any) -> Iterator[Any]:
    """The wrappers, from the outermost, and the environment."""
    seen: set[int] = set()
    while environment is not None and id(environment) not in seen:
        seen.add(id(environment))
        yield environment
        environment = getattr(environment, "env", None)


def _stateful(environment: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The layers with statistics, each with the attributes that hold them, or none where it has a state_dict."""
    for layer in _layers(environment):
        kind = type(layer)
        if callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None)):
            yield layer, ()
            continue
        for base in kind.__mro__:
            if base.__name__ in _KNOWN and base.__module__.startswith("gymnasium.wrappers"):
                yield layer, tuple(name for name in _KNOWN[base.__name__] if hasattr(layer, name))
                break


def _attributes(layer: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: _encoded(getattr(layer, name)) for name in names}


def _encoded(value: Any) -> Any:
    if isinstance(value, deque):
        return [_plain(each) for each in value]
    if all(hasattr(value, name) for name in _MOMENTS):
        return {name: _encoded(getattr(value, name)) for name in _MOMENTS}
    # numpy's scalars too: what a restored run computes with them has to have the same dtype
    return torch.from_numpy(np.array(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def _decoded(present: Any, value: Any) -> Any:
    if isinstance(present, deque):
        return deque(value, maxlen=present.maxlen)
    if isinstance(value, Mapping):
        for name, each in value.items():
            setattr(present, name, _decoded(None, each))
        return present
    return value.numpy().copy() if isinstance(value, torch.Tensor) else value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (np.generic, np.ndarray)) else value
