"""The episodes of several environments that step together, restored by repeating their actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.rollouts.spaces import ObservationSpace
from pulsetrain.engine.rollouts.wrapper_statistics import (
    freeze_statistics,
    has_statistics,
    load_statistics,
    statistics_of,
)

__all__ = ["Episode", "Episodes", "SeparateEpisodes", "Step"]


@dataclass
class Episode:
    """An episode of one environment so far."""

    number: int
    actions: list[Any] = field(default_factory=list)  # as the environment took them
    gained: float = 0.0
    has_begun: bool = False
    statistics: list[dict[str, Any]] | None = None  # of wrappers, before it began; None if there are none


@dataclass(frozen=True)
class Step:
    """What a step returned, for each environment."""

    rewards: np.ndarray  # float64
    terminated: np.ndarray
    truncated: np.ndarray

    @property
    def dones(self) -> np.ndarray:
        """Whether the episode has ended."""
        found: np.ndarray = self.terminated | self.truncated
        return found


class Episodes:
    """Base class: each episode is reset with its own seed, a function of (seed, environment, episode).

    A subclass implements `close` and the methods from `_reset` on.

    Args:
        space: what is observed.
        count: the number of environments.
        first: the number of the first one, for its seeds.
    """

    space: ObservationSpace
    count: int
    current: list[Episode]

    restored_together = False  # whether restoring one environment moves the others

    def __init__(self, space: ObservationSpace, count: int, first: int = 0) -> None:
        self.space, self.count, self._first = space, count, first
        self.seen: dict[str, np.ndarray[Any, Any]] = space.empty(count)  # the latest observations
        self.seed = 0
        self._initial = (  # what wrappers have counted before the first episode
            [self.statistics_at(index) for index in range(count)],
            self.whole_statistics(),
        )
        self.restart()

    def restart(self) -> None:
        """Returns to the state before the first episodes."""
        self._load_statistics(*self._initial)
        self.current = [Episode(0) for _ in range(self.count)]

    def begin(self) -> None:
        """Resets the environments whose episode has not begun."""
        waiting = [index for index, each in enumerate(self.current) if not each.has_begun]
        if waiting:
            self._begin(waiting)

    def _begin(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.current[index].statistics = self.statistics_at(index)
        self._reset(indices)
        for index in indices:
            self.current[index].has_begun = True

    @property
    def starts(self) -> np.ndarray:
        """Whether the next step is the first of its episode."""
        return np.array([not each.actions for each in self.current])

    def next_episode(self, index: int) -> None:
        """Ends an episode; `begin` starts the next."""
        self.current[index] = Episode(self.current[index].number + 1)

    def step(self, actions: Sequence[Any] | np.ndarray) -> Step:
        """Steps all environments; `seen` then has the observations after it, the last ones of ended episodes too."""
        found = self._step(actions)
        for episode, action, reward in zip(self.current, actions, found.rewards.tolist(), strict=True):
            episode.actions.append(action)
            episode.gained += reward
        return found

    def seed_of(self, index: int) -> int:
        """The seed of the present episode of an environment."""
        # numpy, which seeds most environments, accepts any whole number, but some environments only 32 bits
        return rng.derive(self.seed, self._first + index, self.current[index].number) % 2**31

    def close(self) -> None:
        """Closes the environments."""
        raise NotImplementedError

    def adopt_statistics(self, other: Episodes) -> None:
        """Takes the statistics of the wrappers of other environments, and keeps their running means as they are."""
        each = [other.statistics_at(index if index < other.count else 0) for index in range(self.count)]
        self._load_statistics(each, other.whole_statistics())
        self.freeze()

    def _load_statistics(self, each: Sequence[list[dict[str, Any]] | None], whole: list[dict[str, Any]]) -> None:
        for index, states in enumerate(each):
            if states is not None:
                self.load_statistics_at(index, states)
        self.load_whole_statistics(whole)

    def freeze(self) -> None:
        """Keeps the running means of wrappers as they are."""
        raise NotImplementedError

    def whole_statistics(self) -> list[dict[str, Any]]:
        """The statistics of wrappers around all environments."""
        return []

    def load_whole_statistics(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores the result of `whole_statistics`.

        Raises:
            CheckpointError: there are no such wrappers here.
        """
        if states:
            raise CheckpointError(
                "EnvironmentRollouts: the checkpoint has statistics of wrappers around a vector environment, and these "
                "environments are separate; resume with the environments that the run started with"
            )

    # ------------------------------------------------------------------------------------------------ for subclasses

    def _reset(self, indices: Sequence[int]) -> None:
        """Resets these environments and writes their observations into `seen`."""
        raise NotImplementedError

    def _step(self, actions: Sequence[Any] | np.ndarray) -> Step:
        """Steps all environments and writes the observations into `seen`."""
        raise NotImplementedError

    def _replay(self, indices: Sequence[int], actions: Sequence[Sequence[Any]]) -> None:
        """Resets these environments and repeats their actions; `current` has their numbers already."""
        raise NotImplementedError

    def statistics_at(self, index: int) -> list[dict[str, Any]] | None:
        """The statistics of an environment's wrappers; None if there are none."""
        raise NotImplementedError

    def load_statistics_at(self, index: int, states: Sequence[Mapping[str, Any]]) -> None:
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------------------- state

    def state_dicts(self) -> list[dict[str, Any]]:
        """The state of each environment: its episode's actions, and what they led to."""
        return [self._state_of(index) for index in range(self.count)]

    def _state_of(self, index: int) -> dict[str, Any]:
        episode = self.current[index]
        state = {
            "episode": episode.number,
            "actions": _stacked(episode.actions),
            "observation": self._observation(index) if episode.has_begun else None,
            "gained": episode.gained,
        }
        statistics = episode.statistics if episode.has_begun else self.statistics_at(index)
        return state if statistics is None else {**state, "statistics": statistics}

    def _observation(self, index: int) -> Tensor | dict[str, Tensor]:
        return self.space.inputs({name: torch.tensor(each[index]) for name, each in self.seen.items()})

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores the state of each environment by repeating the actions of its episode.

        Raises:
            CheckpointError: an environment returned something else than before.
        """
        changed = [index for index, state in enumerate(states) if not self._is_at(index, state)]
        if changed and self.restored_together:
            changed = list(range(self.count))
        for index in changed:
            self.current[index] = Episode(states[index]["episode"])
            if "statistics" in states[index]:
                self.load_statistics_at(index, states[index]["statistics"])
        begun = [index for index in changed if states[index]["observation"] is not None]
        self._replay(begun, [_unstacked(states[index]["actions"]) for index in begun])
        for index in begun:
            self._compare(index, states[index])

    def _is_at(self, index: int, state: Mapping[str, Any]) -> bool:
        """Whether it is in this state: a resume loads a state several times, and an episode may be long."""
        episode, seen = self.current[index], state["observation"]
        return (
            episode.has_begun
            and seen is not None
            and "statistics" not in state
            and episode.number == state["episode"]
            and _same(_stacked(episode.actions), state["actions"])
            and _same(self._observation(index), seen)
            and episode.gained == state.get("gained", episode.gained)
        )

    def _compare(self, index: int, state: Mapping[str, Any]) -> None:
        episode = self.current[index]
        differs = "a different observation" if not _same(self._observation(index), state["observation"]) else ""
        if not differs and episode.gained != state.get("gained", episode.gained):  # older checkpoints have none
            differs = f"rewards of {episode.gained!r} in all, and not {state['gained']!r},"
        if differs:
            raise CheckpointError(
                f"EnvironmentRollouts: environment {index} returned {differs} after the same seed and the same "
                f"{len(episode.actions)} actions of episode {episode.number}: it depends on more than those; let its "
                "reset(seed=...) seed everything it draws from, and give a wrapper that keeps statistics the methods "
                "state_dict() and load_state_dict(state)"
            )


class SeparateEpisodes(Episodes):
    """Episodes of environments that are separate objects.

    Args:
        environments: with gymnasium's interface.
    """

    def __init__(self, environments: Iterable[Any], space: ObservationSpace, first: int = 0) -> None:
        self.environments: list[Any] = list(environments)
        self._keep = [has_statistics(each) for each in self.environments]
        super().__init__(space, len(self.environments), first)

    def close(self) -> None:
        for environment in self.environments:
            close = getattr(environment, "close", None)
            if callable(close):
                close()

    def freeze(self) -> None:
        for environment in self.environments:
            freeze_statistics(environment)

    def _reset(self, indices: Sequence[int]) -> None:
        for index in indices:
            observation, _ = self.environments[index].reset(seed=self.seed_of(index))
            self.space.write(self.seen, index, observation)

    def _step(self, actions: Sequence[Any] | np.ndarray) -> Step:
        rewards, ends = np.zeros(self.count), np.zeros((2, self.count), bool)
        for index, action in enumerate(actions):
            rewards[index], ends[0, index], ends[1, index] = self._step_one(index, action)
        return Step(rewards, ends[0], ends[1])

    def _step_one(self, index: int, action: Any) -> tuple[float, bool, bool]:
        found = self.environments[index].step(action)
        if len(found) != 5:
            raise TypeError(
                f"EnvironmentRollouts: the environment's step() returned {len(found)} values; needs (observation, "
                "reward, terminated, truncated, info), as in gymnasium"
            )
        observation, reward, terminated, truncated, _ = found
        self.space.write(self.seen, index, observation)
        return float(reward), bool(terminated), bool(truncated)

    def _replay(self, indices: Sequence[int], actions: Sequence[Sequence[Any]]) -> None:
        self._begin(indices)
        for index, taken in zip(indices, actions, strict=True):
            episode = self.current[index]
            for action in taken:
                reward, _, _ = self._step_one(index, action)
                episode.actions.append(action)
                episode.gained += reward

    def statistics_at(self, index: int) -> list[dict[str, Any]] | None:
        return statistics_of(self.environments[index]) if self._keep[index] else None

    def load_statistics_at(self, index: int, states: Sequence[Mapping[str, Any]]) -> None:
        load_statistics(self.environments[index], states)


def _stacked(actions: Sequence[Any]) -> Tensor:
    """The actions of an episode as a tensor."""
    if actions and isinstance(actions[0], np.ndarray):
        return torch.from_numpy(np.stack(actions))
    return torch.tensor(actions, dtype=torch.int64)


def _unstacked(actions: Tensor) -> list[Any]:
    return actions.tolist() if actions.ndim < 2 else list(actions.numpy())


def _same(one: Tensor | Mapping[str, Tensor], other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return isinstance(other, Mapping) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
