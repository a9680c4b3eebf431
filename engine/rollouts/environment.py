"""Rollouts in environments with gymnasium's interface."""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_type, check_whole_number
from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.rollouts.base import PolicyTrainer, Rollouts
from pulsetrain.engine.step.model_call import eval_mode
from pulsetrain.engine.strategies.language import logits_of, values_of
from pulsetrain.engine.strategies.ppo import PPOStrategy

__all__ = ["EnvironmentRollouts"]

_EVALUATION = 1 << 32  # the first index of environments for evaluation


class EnvironmentRollouts(Rollouts):
    """Steps of a policy with discrete actions in several environments.

    A rollout is `steps` steps in each environment; episodes continue from one rollout to the next. The model receives
    observations, float32 of shape (environments, ...), and returns logits of shape (environments, actions) and values
    of shape (environments,). A truncated episode is credited with the value of its last observation.

    Each episode is reset with its own seed, derived from the run's. A checkpoint stores the actions of unfinished
    episodes, and resuming replays them: environments that depend only on seed and actions continue exactly.

    ROLLOUT_COMPLETED reports "rollout/reward" per step, and if episodes have ended, the means "rollout/return" and
    "rollout/length", and "rollout/episodes".

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
        environment: a name registered with gymnasium, or a function that creates an environment.
        environments: the number of environments that are stepped together.
        steps: the steps of a rollout in each environment.
        options: keywords for gymnasium.make.

    Raises:
        ConfigurationError: a number is out of range, gymnasium is not installed or does not know the name, or the
            environment's spaces are not supported.
    """

    def __init__(
        self,
        environment: str | Callable[[], Any],
        environments: int = 8,
        steps: int = 128,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("environments", environments), ("steps", steps)):
            check_whole_number("EnvironmentRollouts", name, value)
        self._make = _maker(environment, dict(options or {}))
        self.environments, self.steps = environments, steps
        self._lanes: list[_Lane] = []
        made = [self._make() for _ in range(environments)]
        for each in made:
            _check_spaces(each)
        if len({id(each) for each in made}) < environments:
            raise ConfigurationError(
                "the function returns the same environment again; let it create a new one each time",
                "EnvironmentRollouts",
                environment=environment,
            )
        self._lanes = [_Lane(each, index) for index, each in enumerate(made)]
        self._actions = int(self._lanes[0].environment.action_space.n)
        super().__init__()

    @property
    def rows(self) -> int:
        return self.environments * self.steps

    def restart(self) -> None:
        super().restart()
        for lane in self._lanes:
            lane.restart()

    def begin(self, trainer: PolicyTrainer) -> None:
        if not isinstance(trainer.strategy, PPOStrategy):
            raise ConfigurationError(
                f"EnvironmentRollouts: {type(trainer.strategy).__name__} learns from texts; use PPOStrategy"
            )

    def collect(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        lanes, device = self._lanes, self.trainer.backend.device
        for lane in lanes:
            lane.seed = self.seed
            lane.begin()
        returns: list[float] = []
        lengths: list[int] = []
        parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        for _ in range(self.steps):
            seen = torch.stack([lane.observation for lane in lanes])
            if not seen.isfinite().all():
                index = int((~seen.flatten(1).isfinite()).any(1).nonzero()[0])
                raise ValueError(
                    f"EnvironmentRollouts: environment {index} returned an observation that is not finite: "
                    f"{reprlib.repr(seen[index].tolist())}; fix the environment"
                )
            observations = seen.to(device)
            outputs = self.act(observations)
            actions, log_probs = self._choose(outputs)
            rewards, dones = torch.zeros(len(lanes)), torch.zeros(len(lanes), dtype=torch.bool)
            cut_off: list[tuple[int, Tensor]] = []
            for index, (lane, action) in enumerate(zip(lanes, actions.tolist(), strict=True)):
                rewards[index], terminated, truncated = lane.step(action)
                dones[index] = terminated or truncated
                if truncated and not terminated:
                    cut_off.append((index, lane.observation))
                if terminated or truncated:
                    returns.append(lane.gained)
                    lengths.append(len(lane.actions))
                    lane.next_episode()
            step = {
                "observations": observations, "actions": actions, "log_probs": log_probs,
                "values": values_of(outputs, actions.shape), "rewards": rewards.to(device), "dones": dones.to(device),
                "truncation_values": self._truncation_values(cut_off, device),
            }  # fmt: skip
            for name, value in step.items():
                parts[name].append(value)
        last = torch.stack([lane.observation for lane in lanes]).to(device)
        parts["values"].append(values_of(self.act(last), (len(lanes),)))
        rollout = {name: torch.stack(each) for name, each in parts.items()}
        metrics = {"rollout/reward": rollout["rewards"].mean().item()}
        if returns:
            metrics["rollout/return"] = sum(returns) / len(returns)
            metrics["rollout/length"] = sum(lengths) / len(lengths)
        return rollout, {**metrics, "rollout/episodes": float(len(returns))}

    def _choose(self, outputs: object) -> tuple[Tensor, Tensor]:
        """Actions drawn from the policy, and their log-probabilities."""
        logits = self.strategy.scores(outputs)
        if logits.ndim != 2 or logits.shape[1] != self._actions or not logits.isfinite().all():
            raise ValueError(
                f"EnvironmentRollouts: the policy returned logits of shape {tuple(logits.shape)}"
                f"{'' if logits.isfinite().all() else ' that are not finite'}; needs finite numbers, shape "
                f"(environments, actions), and this environment has {self._actions} actions"
            )
        actions = torch.multinomial(logits.float().softmax(-1), 1).squeeze(-1)
        return actions, self.strategy.action_log_probs(outputs, actions)

    def _truncation_values(self, cut_off: list[tuple[int, Tensor]], device: torch.device) -> Tensor:
        """The values of the last observations of truncated episodes; 0 for the other environments."""
        worth = torch.zeros(self.environments, device=device)
        if cut_off:
            # one batch of the usual shape, for which a compiled model is already compiled
            last = torch.stack([lane.observation for lane in self._lanes])
            for index, observation in cut_off:
                last[index] = observation
            values = values_of(self.act(last.to(device)), (self.environments,))
            indices = torch.tensor([index for index, _ in cut_off], device=device)
            worth[indices] = values[indices].to(worth.dtype)
        return worth

    @torch.no_grad()
    def evaluate(self, episodes: int = 20, *, greedy: bool = True, seed: int | None = None) -> list[float]:
        """The returns of whole episodes in a separate environment; it does not affect the rollouts.

        Args:
            episodes: the number of episodes.
            greedy: choose the most likely action instead of drawing one.
            seed: the environment's seed; None derives one from the run's that no rollout uses.
        """
        check_whole_number("EnvironmentRollouts.evaluate", "episodes", episodes)
        lane = _Lane(self._make(), _EVALUATION)
        lane.seed = self.seed if seed is None else seed
        returns: list[float] = []
        try:
            with rng.preserve_rng(), eval_mode(self.trainer.model):
                rng.seed_everything(rng.derive(lane.seed, _EVALUATION))
                for _ in range(episodes):
                    lane.next_episode()
                    lane.begin()
                    over = False
                    while not over:
                        outputs = self.act(lane.observation.unsqueeze(0).to(self.trainer.backend.device))
                        action = logits_of(outputs).argmax(-1) if greedy else self._choose(outputs)[0]
                        _, terminated, truncated = lane.step(int(action))
                        over = terminated or truncated
                    returns.append(lane.gained)
        finally:
            close = getattr(lane.environment, "close", None)
            if callable(close):
                close()
        return returns

    def progress(self) -> dict[str, Any]:
        return {"lanes": [lane.state_dict() for lane in self._lanes]}

    def resume(self, progress: Mapping[str, Any]) -> None:
        if len(progress["lanes"]) != len(self._lanes):
            raise CheckpointError(
                f"the checkpoint has {len(progress['lanes'])}; resume with the same number",
                "EnvironmentRollouts",
                environments=self.environments,
            )
        for lane, state in zip(self._lanes, progress["lanes"], strict=True):
            if lane.seed != self.seed:
                lane.seed = self.seed
                lane.restart()
            lane.load_state_dict(state)


class _Lane:
    """One environment with the seed and the actions of its episode, which restore it to its current state."""

    def __init__(self, environment: Any, index: int) -> None:
        self.environment, self.index = environment, index
        self.seed = 0
        self.restart()

    def restart(self) -> None:
        """Returns to the state before the first episode."""
        self.episode = -1
        self.next_episode()

    def next_episode(self) -> None:
        """Ends the episode; `begin` starts the next."""
        self.episode += 1
        self.actions: list[int] = []
        self.gained = 0.0
        self._begun = False

    @property
    def observation(self) -> Tensor:
        """The latest observation, float32."""
        self.begin()
        # a copy: an environment may write the next observation into the same array
        return torch.as_tensor(self._observation).to(torch.float32, copy=True)

    def begin(self) -> None:
        """Resets the environment if the episode has not started."""
        if not self._begun:
            # numpy, which seeds most environments, accepts any whole number, but some environments only 32 bits
            seed = rng.derive(self.seed, self.index, self.episode) % 2**31
            self._observation, _ = self.environment.reset(seed=seed)
            self._begun = True

    def step(self, action: int) -> tuple[float, bool, bool]:
        """The reward, whether the episode has terminated, and whether it was truncated."""
        found = self.environment.step(action)
        if len(found) != 5:
            raise TypeError(
                f"EnvironmentRollouts: the environment's step() returned {len(found)} values; needs (observation, "
                "reward, terminated, truncated, info), as in gymnasium"
            )
        self._observation, reward, terminated, truncated, _ = found
        self.actions.append(action)
        self.gained += float(reward)
        return float(reward), bool(terminated), bool(truncated)

    def state_dict(self) -> dict[str, Any]:
        seen = self.observation if self._begun else None
        return {"episode": self.episode, "actions": torch.tensor(self.actions, dtype=torch.int64), "observation": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replays the episode's actions.

        Raises:
            CheckpointError: the observation differs: the environment depends on more than seed and actions.
        """
        actions, seen = state["actions"].tolist(), state["observation"]
        same = self._begun and seen is not None and (self.episode, self.actions) == (state["episode"], actions)
        if same and torch.equal(self.observation, seen):
            return  # already in this state: a resume loads a state several times, and an episode may be long
        self.episode = state["episode"] - 1
        self.next_episode()
        if seen is None:
            return
        self.begin()
        for action in actions:
            self.step(action)
        if not torch.equal(self.observation, seen):
            raise CheckpointError(
                f"EnvironmentRollouts: environment {self.index} returned a different observation after the same seed "
                f"and the same {len(self.actions)} actions of episode {self.episode}: it depends on more than those; "
                "let its reset(seed=...) seed everything it draws from"
            )


def _maker(environment: str | Callable[[], Any], options: dict[str, Any]) -> Callable[[], Any]:
    if not isinstance(environment, str):
        needs = "a name, or a function that creates a new environment at each call"
        check_type("EnvironmentRollouts", "environment", environment, Callable, needs)
        if options:
            raise ConfigurationError(
                "only apply to gymnasium.make; use them in the function that creates the environment",
                "EnvironmentRollouts",
                options=options,
            )
        return environment
    try:
        import gymnasium
    except ImportError:
        raise ConfigurationError(
            "gymnasium is not installed; "
            "pip install 'pulsetrain[gymnasium]', or pass a function that creates an environment",
            "EnvironmentRollouts",
            environment=environment,
        ) from None
    try:
        gymnasium.spec(environment)
    except gymnasium.error.Error as error:
        raise ConfigurationError(f"{error}", "EnvironmentRollouts", environment=environment) from None
    return lambda: gymnasium.make(environment, **options)


def _check_spaces(environment: Any) -> None:
    lacking = [
        name for name in ("action_space", "observation_space", "reset", "step") if not hasattr(environment, name)
    ]
    if lacking:
        raise TypeError(
            f"EnvironmentRollouts: {type(environment).__name__} has no {', '.join(lacking)}; needs an environment with "
            "gymnasium's interface"
        )
    actions, observations = environment.action_space, environment.observation_space
    # a space of several simultaneous actions may have an `n` too
    if not hasattr(actions, "n") or getattr(actions, "shape", None) or int(getattr(actions, "start", 0)) != 0:
        raise ConfigurationError(
            f"EnvironmentRollouts: the environment's actions are {actions}; needs discrete actions numbered from 0"
        )
    if not getattr(observations, "shape", None) or getattr(observations, "dtype", None) is None:
        raise ConfigurationError(
            f"EnvironmentRollouts: the environment's observations are {observations}; needs arrays of numbers "
            "(use gymnasium.wrappers.FlattenObservation)"
        )
