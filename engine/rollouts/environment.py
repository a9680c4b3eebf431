"""Rollouts in environments with gymnasium's interface."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_bool, check_whole_number
from pulsetrain.engine.arrays import all_finite
from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import CheckpointError, ConfigurationError, refused
from pulsetrain.engine.rollouts.actor import Actor, is_recurrent
from pulsetrain.engine.rollouts.base import PolicyTrainer, Rollouts
from pulsetrain.engine.rollouts.episodes import Episodes
from pulsetrain.engine.rollouts.makers import EnvironmentMaker
from pulsetrain.engine.rollouts.normalization import Normalization
from pulsetrain.engine.rollouts.spaces import distribution_of
from pulsetrain.engine.step.model_call import eval_mode
from pulsetrain.engine.strategies.distributions import Categorical
from pulsetrain.engine.strategies.ppo import PPOStrategy

__all__ = ["EnvironmentRollouts"]

_EVALUATION = 1 << 32  # the first number of environments for evaluation


class EnvironmentRollouts(Rollouts):
    """Steps of a policy in several environments.

    A rollout is `steps` steps in each environment; episodes continue from one rollout to the next. The model receives
    observations, float32 of shape (environments, ...), those of a Dict space by name as keyword arguments. It returns
    the parameters of the distribution of actions, shape (environments, width), and values of shape (environments,):

    - Discrete actions: a logit for each; MultiDiscrete and MultiBinary: the logits of all choices, one after the other;
    - a Box: the means, then the logarithms of standard deviations (`GaussianHead`). Actions are clipped to the bounds,
      or squashed into them with `PPOStrategy(distribution="squashed_gaussian")`.

    A truncated episode is credited with the value of its last observation. A recurrent policy, whose model has
    `initial_state(count)`, receives and returns its state, too (docs/strategies.md), and rows are sequences.

    Each episode is reset with its own seed, derived from the run's. A checkpoint stores the actions of unfinished
    episodes and the statistics of wrappers, and resuming repeats the actions: environments that depend only on seed and
    actions continue exactly, others are refused.

    ROLLOUT_COMPLETED reports "rollout/reward" per step, and if episodes have ended, the means "rollout/return" and
    "rollout/length", and "rollout/episodes", all of rewards as the environment gave them.

    >>> class Corridor:  # observe the position, move right (1) or stay (0), five steps
    ...     action_space = type("Discrete", (), {"n": 2})()
    ...     observation_space = type("Box", (), {"shape": (1,), "dtype": "float32"})()
    ...     def reset(self, seed=None):
    ...         self.position, self.left = 0.0, 5
    ...         return [self.position], {}
    ...     def step(self, action):
    ...         self.position, self.left = self.position + action, self.left - 1
    ...         return [self.position], float(action), self.left == 0, False, {}
    >>> EnvironmentRollouts(Corridor, environments=2, steps=16).rows
    32

    Args:
        environment: a name registered with gymnasium, or a function that creates an environment, or a vector of several
            that does not reset by itself (autoreset_mode=AutoresetMode.DISABLED).
        environments: the number of environments that are stepped together; None: 8, or that of a vector.
        steps: the steps of a rollout in each environment.
        options: keywords for gymnasium.make.
        vectorization: "sync" or "async" steps a named environment by gymnasium.make_vec, in one process or in one for
            each.
        normalize_observations: shift and scale each entry to mean 0 and variance 1 over all steps so far, in -10 .. 10.
        normalize_rewards: divide by the standard deviation of discounted returns so far, in -10 .. 10.
        sequence_length: steps of a row of a recurrent policy; a divisor of `steps`. None: all.

    Raises:
        ConfigurationError: a number is out of range, gymnasium is not installed or does not know the name, or the
            environment's spaces are not supported.
    """

    steps: int
    sequence_length: int | None
    environments: int

    def __init__(
        self,
        environment: str | Callable[[], Any],
        environments: int | None = None,
        steps: int = 128,
        options: Mapping[str, Any] | None = None,
        *,
        vectorization: str | None = None,
        normalize_observations: bool = False,
        normalize_rewards: bool = False,
        sequence_length: int | None = None,
    ) -> None:
        place = "EnvironmentRollouts"
        check_whole_number(place, "environments", environments, or_none=True)
        check_whole_number(place, "steps", steps)
        check_whole_number(place, "sequence_length", sequence_length, or_none=True)
        check_bool(place, "normalize_observations", normalize_observations)
        check_bool(place, "normalize_rewards", normalize_rewards)
        self.steps, self.sequence_length = steps, sequence_length
        if sequence_length is not None and steps % sequence_length:
            raise refused(self, "needs a divisor of {steps}", "sequence_length", "steps")
        self._maker = EnvironmentMaker(environment, dict(options or {}), vectorization)
        self.episodes: Episodes = self._maker.episodes(environments)
        self.environments, self._space = self.episodes.count, self.episodes.space
        self._actions = distribution_of(self._maker.action_space)
        shapes = self._space.shapes if normalize_observations else {}
        self.normalization: Normalization = Normalization(shapes, self.environments if normalize_rewards else None)
        self._actor: Actor | None = None
        super().__init__()

    @property
    def rows(self) -> int:
        return self.steps_per_rollout // self._length

    @property
    def steps_per_rollout(self) -> int:
        """The steps of a rollout in all environments."""
        return self.environments * self.steps

    @property
    def environment_steps(self) -> int:
        """The steps of all rollouts that have been learnt from."""
        return max(0, self.rollouts - (0 if self._done else 1)) * self.steps_per_rollout

    @property
    def _length(self) -> int:
        """The steps of a row."""
        recurrent = self._trainer is not None and is_recurrent(self._trainer.model)
        return (self.sequence_length or self.steps) if recurrent else 1

    def restart(self) -> None:
        super().restart()
        self.episodes.restart()
        self.normalization.restart()
        self._actor = None

    def begin(self, trainer: PolicyTrainer) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, PPOStrategy):
            raise ConfigurationError(
                f"EnvironmentRollouts: {type(strategy).__name__} learns from texts; use PPOStrategy"
            )
        if self.sequence_length is not None and not is_recurrent(trainer.model):
            rule = (
                f"{type(trainer.model).__name__} is not recurrent: it has no method initial_state(count); leave it out"
            )
            raise refused(self, rule, "sequence_length")
        self._actions = distribution_of(self._maker.action_space, strategy.distribution)
        if self._actions.distribution.is_continuous and strategy.temperature != 1.0:
            rule = "divides logits, and these actions are continuous; leave it out, and start with another log_std"
            raise refused(strategy, rule, "temperature")
        strategy.bind_environment(self._actions.distribution)

    def _new_actor(self, count: int) -> Actor:
        return Actor(self.act, self.trainer.model, count, self.trainer.backend.device)

    def collect(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        episodes, device = self.episodes, self.trainer.backend.device
        actor = self._actor = self._actor or self._new_actor(self.environments)
        episodes.seed = self.seed
        gained, lengths, earned = [], [], []
        parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        for place in range(self.steps):
            fields, starts = self._observe(episodes, update=True), episodes.starts
            if actor.is_recurrent:
                for number, each in enumerate(actor.state if place % self._length == 0 else ()):
                    parts[f"state/{number}"].append(each)
                fields["starts"] = torch.from_numpy(starts).to(device)
            outputs = actor.step(self._space.inputs(fields), starts)
            actions, log_probs = self._choose(outputs)
            found = episodes.step(self._actions.for_environment(actions))
            dones, rewards = found.dones, torch.from_numpy(found.rewards).float()
            earned.append(rewards)
            scaled = self.normalization.rewards(found.rewards, dones, self._gamma)
            step = {
                **fields, "actions": actions, "log_probs": log_probs, "values": outputs[1],
                "rewards": torch.from_numpy(scaled).float().to(device), "dones": torch.from_numpy(dones).to(device),
                "truncation_values": self._truncation_values(actor, found.truncated & ~found.terminated),
            }  # fmt: skip
            for name, value in step.items():
                parts[name].append(value)
            for index in np.flatnonzero(dones).tolist():
                gained.append(episodes.current[index].gained)
                lengths.append(len(episodes.current[index].actions))
                episodes.next_episode(index)
        last = self._observe(episodes)
        parts["values"].append(actor.values(self._space.inputs(last), episodes.starts))
        rollout = {name: torch.stack(each) for name, each in parts.items()}
        metrics = {"rollout/reward": torch.stack(earned).mean().item()}
        if gained:
            metrics["rollout/return"] = sum(gained) / len(gained)
            metrics["rollout/length"] = sum(lengths) / len(lengths)
        return rollout, {**metrics, "rollout/episodes": float(len(gained))}

    @property
    def _gamma(self) -> float:
        strategy = self.strategy
        assert isinstance(strategy, PPOStrategy)
        return strategy.gamma

    def _observe(self, episodes: Episodes, *, update: bool = False) -> dict[str, Tensor]:
        """The latest observations as the model receives them, by their flat names; new episodes begin."""
        episodes.begin()
        self._space.check_finite(episodes.seen)
        return self._tensors(episodes, update)

    def _tensors(self, episodes: Episodes, update: bool = False) -> dict[str, Tensor]:
        arrays = self.normalization.observations(episodes.seen, update=update)
        return {name: torch.tensor(each, device=self.trainer.backend.device) for name, each in arrays.items()}

    def _choose(self, outputs: object, greedy: bool = False) -> tuple[Tensor, Tensor]:
        """Actions drawn from the policy, or the most likely ones, and their log-probabilities."""
        distribution = self._actions.distribution
        parameters = self.strategy.scores(outputs)
        if parameters.ndim != 2 or parameters.shape[1] != distribution.width or not all_finite(parameters):
            kind = "parameters" if distribution.is_continuous else "logits"
            raise ValueError(
                f"EnvironmentRollouts: the policy returned {kind} of shape {tuple(parameters.shape)}"
                f"{'' if parameters.isfinite().all() else ' that are not finite'}; needs finite numbers, shape "
                f"(environments, {'actions' if isinstance(distribution, Categorical) else distribution.width}), and "
                f"this environment has {self._actions.described}"
            )
        actions = distribution.mode(parameters) if greedy else distribution.sample(parameters)
        return actions, self.strategy.action_log_probs(outputs, actions)

    def _truncation_values(self, actor: Actor, cut_off: np.ndarray) -> Tensor:
        """The values of the last observations of truncated episodes; 0 for the other environments."""
        worth = torch.zeros(self.environments, device=self.trainer.backend.device)
        if cut_off.any():
            # one batch of the usual shape, for which a compiled model is already compiled
            inputs = self._space.inputs(self._tensors(self.episodes))
            values = actor.values(inputs, np.zeros(self.environments, bool))
            worth = torch.where(torch.from_numpy(cut_off).to(worth.device), values.to(worth.dtype), worth)
        return worth

    @torch.no_grad()
    def evaluate(self, episodes: int = 20, *, greedy: bool = True, seed: int | None = None) -> list[float]:
        """The returns of whole episodes in a separate environment; it does not affect the rollouts.

        Statistics with which observations or rewards are normalised are those of the rollouts so far (of wrappers:
        those of the first environment) and do not change. Returns are of rewards as the environment, with its wrappers,
        gives them.

        Args:
            episodes: the number of episodes.
            greedy: choose the most likely action instead of drawing one.
            seed: the environment's seed; None derives one from the run's that no rollout uses.
        """
        check_whole_number("EnvironmentRollouts.evaluate", "episodes", episodes)
        played = self._maker.episodes_to_evaluate(_EVALUATION)
        played.seed = self.seed if seed is None else seed
        try:
            played.adopt_statistics(self.episodes)
            with rng.preserve_rng(), eval_mode(self.trainer.model):
                rng.seed_everything(rng.derive(played.seed, _EVALUATION))
                return self._play(played, episodes, greedy)
        finally:
            played.close()

    def _play(self, played: Episodes, number: int, greedy: bool) -> list[float]:
        """The returns of that many episodes, of which each environment plays the same number, or one more."""
        actor, count = self._new_actor(played.count), played.count
        left = [number // count + (index < number % count) for index in range(count)]
        returns: list[list[float]] = [[] for _ in range(count)]
        for index in range(count):
            played.next_episode(index)
        while any(left):
            outputs = actor.step(self._space.inputs(self._observe(played)), played.starts)
            actions, _ = self._choose(outputs, greedy)
            found = played.step(self._actions.for_environment(actions))
            for index in np.flatnonzero(found.dones).tolist():
                if left[index]:
                    returns[index].append(played.current[index].gained)
                    left[index] -= 1
                played.next_episode(index)
        return [each for those in returns for each in those]

    def close(self) -> None:
        """Closes the environments, and the processes of an asynchronous vector."""
        self.episodes.close()

    def progress(self) -> dict[str, Any]:
        return {
            "lanes": self.episodes.state_dicts(),
            "wrappers": self.episodes.whole_statistics(),
            "normalization": self.normalization.state_dict(),
            "policy_state": list(self._actor.state) if self._actor is not None else [],
        }

    def resume(self, progress: Mapping[str, Any]) -> None:
        if len(progress["lanes"]) != self.environments:
            raise CheckpointError(
                f"the checkpoint has {len(progress['lanes'])}; resume with the same number",
                "EnvironmentRollouts",
                environments=self.environments,
            )
        self.normalization.load_state_dict(progress.get("normalization", {}))
        if self.episodes.seed != self.seed:
            self.episodes.seed = self.seed
            self.episodes.restart()
        self.episodes.load_state_dicts(progress["lanes"])
        self.episodes.load_whole_statistics(progress.get("wrappers", []))
        state = progress.get("policy_state", [])
        self._actor = self._new_actor(self.environments) if state else None
        if self._actor is not None:
            self._actor.state = tuple(each.to(self.trainer.backend.device) for each in state)
