"""The episodes of an environment that steps several at once, with gymnasium's interface for vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.rollouts.episodes import Episodes, Step
from pulsetrain.engine.rollouts.spaces import ObservationSpace
from pulsetrain.engine.rollouts.wrapper_statistics import (
    freeze_statistics,
    has_statistics,
    load_statistics,
    statistics_of,
)

__all__ = ["VectorEpisodes", "is_vector"]


def is_vector(environment: Any) -> bool:
    """Whether it steps several environments at once, as gymnasium's VectorEnv."""
    return all(hasattr(environment, name) for name in ("num_envs", "single_action_space", "single_observation_space"))


class VectorEpisodes(Episodes):
    """Episodes of the environments of a vector, which are reset one by one, each with its own seed.

    A vector that resets by itself would draw the next episode from the end of the last one, so a run could resume
    exactly only by repeating all its steps.

    Args:
        vector: with gymnasium's interface for vectors, which does not reset by itself.

    Raises:
        ConfigurationError: the vector resets by itself.
    """

    restored_together = True

    def __init__(self, vector: Any, space: ObservationSpace, first: int = 0) -> None:
        mode = getattr(vector, "metadata", {}).get("autoreset_mode")
        if getattr(mode, "name", mode) != "DISABLED":
            raise ConfigurationError(
                f"EnvironmentRollouts: the vector environment has autoreset_mode {mode}; needs AutoresetMode.DISABLED, "
                "since each episode is reset with its own seed: gymnasium.make_vec(..., vector_kwargs="
                "{'autoreset_mode': gymnasium.vector.AutoresetMode.DISABLED})"
            )
        self.vector = vector
        self._parts: list[Any] | None = getattr(getattr(vector, "unwrapped", vector), "envs", None)
        self._keep = [has_statistics(each) for each in self._parts or ()]
        self.has_statistics: bool = has_statistics(vector)  # of wrappers around the whole vector
        super().__init__(space, int(vector.num_envs), first)

    def close(self) -> None:
        self.vector.close()

    def freeze(self) -> None:
        for each in (self.vector, *(self._parts or ())):
            freeze_statistics(each)

    def _reset(self, indices: Sequence[int]) -> None:
        seeds: list[int | None] = [None] * self.count
        mask = np.zeros(self.count, bool)
        for index in indices:
            seeds[index], mask[index] = self.seed_of(index), True
        options = {} if mask.all() else {"options": {"reset_mask": mask.copy()}}
        observations, _ = self.vector.reset(seed=seeds, **options)
        for name, key in self.space.keys.items():
            self.seen[key][mask] = (observations[name] if self.space.is_named else observations)[mask]

    def _step(self, actions: Sequence[Any] | np.ndarray) -> Step:
        observations, rewards, terminated, truncated, _ = self.vector.step(np.asarray(actions))
        self.space.write(self.seen, slice(None), observations)
        return Step(np.array(rewards, np.float64), np.array(terminated, bool), np.array(truncated, bool))

    def _replay(self, indices: Sequence[int], actions: Sequence[Sequence[Any]]) -> None:
        """Steps all environments until each has repeated its own actions.

        The others wait in a new episode: they are reset before each step, and take an action of the longest one.
        """
        if len(indices) < self.count:  # a run is saved before its first episodes, or when all have begun
            return
        statistics = {index: self.statistics_at(index) for index in range(self.count)}
        taken = dict(zip(indices, actions, strict=True))
        longest = max(map(len, actions))
        anyway = next((each[0] for each in actions if each), None)
        for place in range(longest):
            waiting = [index for index in range(self.count) if longest - len(taken.get(index, ())) >= place]
            self._return(waiting, statistics)
            chosen = []
            for index in range(self.count):
                own = taken.get(index, ())
                start = longest - len(own)
                chosen.append(own[place - start] if place >= start else anyway)
            found = self._step(chosen)
            for index, action, reward in zip(range(self.count), chosen, found.rewards.tolist(), strict=True):
                episode = self.current[index]
                if place >= longest - len(taken.get(index, ())):
                    episode.actions.append(action)
                    episode.gained += reward
        self._return([index for index in range(self.count) if not taken.get(index)], statistics)

    def _return(self, indices: Sequence[int], statistics: Mapping[int, Any]) -> None:
        """Resets environments, with the statistics that their wrappers had before."""
        for index in indices:
            states = statistics[index]
            if states is not None:
                self.load_statistics_at(index, states)
        if indices:
            self._begin(indices)

    def statistics_at(self, index: int) -> list[dict[str, Any]] | None:
        return statistics_of(self._parts[index]) if self._parts and self._keep[index] else None

    def load_statistics_at(self, index: int, states: Sequence[Mapping[str, Any]]) -> None:
        if self._parts:
            load_statistics(self._parts[index], states)

    def _is_at(self, index: int, state: Mapping[str, Any]) -> bool:
        return not self.has_statistics and super()._is_at(index, state)

    def _compare(self, index: int, state: Mapping[str, Any]) -> None:
        if self.has_statistics:  # these counted other steps in between, so the rewards were scaled otherwise
            self.current[index].gained = state["gained"]
        super()._compare(index, state)

    def whole_statistics(self) -> list[dict[str, Any]]:
        return statistics_of(self.vector)

    def load_whole_statistics(self, states: Sequence[Mapping[str, Any]]) -> None:
        load_statistics(self.vector, states)
