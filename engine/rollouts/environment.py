"""Rollouts in environments of gymnasium's kind."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.rollouts.base import Rollouts
from pulsetrain.engine.step.model_call import eval_mode
from pulsetrain.engine.strategies.language import logits_of, values_of
from pulsetrain.engine.strategies.ppo import PPOStrategy

__all__ = ["EnvironmentRollouts"]

_EVALUATION = 1 << 32  # where the numbers of environments for evaluation begin


class EnvironmentRollouts(Rollouts):
    """Steps of a policy with discrete actions in several environments.

    A rollout is `steps` steps in each of the environments, whose episodes go on from one rollout to the next. The model
    is given observations, float32 of shape (environments, ...), and gives logits and values, shapes (environments,
    actions) and (environments,). An episode that is cut off is worth what its last observation was.

    Each episode is reset with a seed of its own, made of the run's. A checkpoint keeps the actions of the episodes
    under way, and a resume takes them again: environments that depend on seed and actions alone go on exactly.

    ROLLOUT_COMPLETED tells "rollout/reward", a step; and where episodes have ended, "rollout/return" and
    "rollout/length", their means, and "rollout/episodes".

    Args:
        environment: a name that gymnasium knows, or a function that makes one.
        environments: how many are stepped side by side.
        steps: in each of them, a rollout.
        options: for gymnasium.make.

    Raises:
        ConfigurationError: a number out of range, gymnasium is not installed, or does not know the name; or spaces that
            this does not serve.
    """

    def __init__(
        self,
        environment: str | Callable[[], Any],
        environments: int = 8,
        steps: int = 128,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("environments", environments), ("steps", steps)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"EnvironmentRollouts({name}={value!r}): needs a whole number of at least 1")
        self._make = _maker(environment, dict(options or {}))
        self.environments, self.steps = environments, steps
        self._lanes: list[_Lane] = []
        made = [self._make() for _ in range(environments)]
        for each in made:
            _check_spaces(each)
        if len({id(each) for each in made}) < environments:
            raise ConfigurationError(
                "EnvironmentRollouts(environment=...): the function gives the same environment again; let it make a "
                "new one each time"
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

    def begin(self, trainer: Any) -> None:
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
        parts: dict[str, list[Tensor]] = {
            name: []
            for name in ("observations", "actions", "log_probs", "values", "rewards", "dones", "truncation_values")
        }
        for _ in range(self.steps):
            seen = torch.stack([lane.observation for lane in lanes])
            if not seen.isfinite().all():
                index = int((~seen.flatten(1).isfinite()).any(1).nonzero()[0])
                raise ValueError(
                    f"EnvironmentRollouts: environment {index} gave an observation that is not finite: "
                    f"{reprlib.repr(seen[index].tolist())}; mend the environment"
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
                "truncation_values": self._worth(cut_off, device),
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

    def _choose(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """Actions drawn from the policy, and their log-probabilities."""
        logits = self.strategy.scores(outputs)
        if logits.ndim != 2 or logits.shape[1] != self._actions or not logits.isfinite().all():
            raise ValueError(
                f"EnvironmentRollouts: the policy gave logits of shape {tuple(logits.shape)}"
                f"{'' if logits.isfinite().all() else ' that are not finite'}; needs finite numbers, shape "
                f"(environments, actions), and this environment has {self._actions} actions"
            )
        actions = torch.multinomial(logits.float().softmax(-1), 1).squeeze(-1)
        return actions, self.strategy.action_log_probs(outputs, actions)

    def _worth(self, cut_off: list[tuple[int, Tensor]], device: Any) -> Tensor:
        """The values of the last observations of episodes that were cut off; 0 for the other environments."""
        worth = torch.zeros(self.environments, device=device)
        if cut_off:
            # all of them in one batch of the usual shape: what compiles for each shape has seen it
            last = torch.stack([lane.observation for lane in self._lanes])
            for index, observation in cut_off:
                last[index] = observation
            values = values_of(self.act(last.to(device)), (self.environments,))
            indices = torch.tensor([index for index, _ in cut_off], device=device)
            worth[indices] = values[indices].to(worth.dtype)
        return worth

    @torch.no_grad()
    def evaluate(self, episodes: int = 20, *, greedy: bool = True, seed: int | None = None) -> list[float]:
        """Returns of whole episodes in an environment of their own; the rollouts go on as if nothing had been asked.

        Args:
            episodes: how many.
            greedy: take the likeliest action, else draw.
            seed: of the environment; None is another than any rollout's, made of the run's.
        """
        if not isinstance(episodes, int) or isinstance(episodes, bool) or episodes < 1:
            raise ValueError(f"EnvironmentRollouts.evaluate(episodes={episodes!r}): needs a whole number of at least 1")
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

    def go_on(self, progress: Mapping[str, Any]) -> None:
        if len(progress["lanes"]) != len(self._lanes):
            raise CheckpointError(
                f"EnvironmentRollouts(environments={self.environments}): the checkpoint has {len(progress['lanes'])}; "
                "go on with as many"
            )
        for lane, state in zip(self._lanes, progress["lanes"], strict=True):
            if lane.seed != self.seed:
                lane.seed = self.seed
                lane.restart()
            lane.load_state_dict(state)


class _Lane:
    """One environment, and what brings it back to where it is: the seed and the actions of its episode."""

    def __init__(self, environment: Any, index: int) -> None:
        self.environment, self.index = environment, index
        self.seed = 0
        self.restart()

    def restart(self) -> None:
        """Stand before the first episode."""
        self.episode = -1
        self.next_episode()

    def next_episode(self) -> None:
        """The episode is over; `begin` begins the next."""
        self.episode += 1
        self.actions: list[int] = []
        self.gained = 0.0
        self._begun = False

    @property
    def observation(self) -> Tensor:
        """The newest, float32."""
        self.begin()
        # a copy: an environment may write the next one into the same array
        return torch.as_tensor(self._observation).to(torch.float32, copy=True)

    def begin(self) -> None:
        """Reset the environment, if the episode has not begun."""
        if not self._begun:
            # numpy, which seeds an environment, takes any whole number; some environments 32 bits alone
            seed = rng.derive(self.seed, self.index, self.episode) % 2**31
            self._observation, _ = self.environment.reset(seed=seed)
            self._begun = True

    def step(self, action: int) -> tuple[float, bool, bool]:
        """Reward, whether the episode has ended, and whether it was cut off."""
        found = self.environment.step(action)
        if len(found) != 5:
            raise TypeError(
                f"EnvironmentRollouts: the environment's step() gave {len(found)} things; needs (observation, reward, "
                "terminated, truncated, info), as gymnasium's environments give"
            )
        self._observation, reward, terminated, truncated, _ = found
        self.actions.append(action)
        self.gained += float(reward)
        return float(reward), bool(terminated), bool(truncated)

    def state_dict(self) -> dict[str, Any]:
        seen = self.observation if self._begun else None
        return {"episode": self.episode, "actions": torch.tensor(self.actions, dtype=torch.int64), "observation": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the episode's actions again.

        Raises:
            CheckpointError: they lead elsewhere: the environment depends on more than seed and actions.
        """
        actions, seen = state["actions"].tolist(), state["observation"]
        same = self._begun and seen is not None and (self.episode, self.actions) == (state["episode"], actions)
        if same and torch.equal(self.observation, seen):
            return  # it is there: a resume loads a state several times, and an episode may be long
        self.episode = state["episode"] - 1
        self.next_episode()
        if seen is None:
            return
        self.begin()
        for action in actions:
            self.step(action)
        if not torch.equal(self.observation, seen):
            raise CheckpointError(
                f"EnvironmentRollouts: environment {self.index}, its episode {self.episode} begun with the same seed "
                f"and taken the same {len(self.actions)} actions, is not where it was: it depends on more than those; "
                "let its reset(seed=...) seed all that it draws from"
            )


def _maker(environment: Any, options: dict[str, Any]) -> Callable[[], Any]:
    if not isinstance(environment, str):
        if not callable(environment):
            raise TypeError(
                f"EnvironmentRollouts(environment={type(environment).__name__}): needs a name, or a function that "
                "makes an environment, as each of them is one of its own"
            )
        if options:
            raise ConfigurationError(
                f"EnvironmentRollouts(options={options!r}): are for gymnasium.make; give them to the function that "
                "makes the environment"
            )
        return environment  # type: ignore[no-any-return]
    try:
        import gymnasium
    except ImportError:
        raise ConfigurationError(
            f"EnvironmentRollouts(environment={environment!r}): gymnasium is not installed; "
            "pip install 'pulsetrain[gymnasium]', or pass a function that makes an environment"
        ) from None
    try:
        gymnasium.spec(environment)
    except gymnasium.error.Error as error:
        raise ConfigurationError(f"EnvironmentRollouts(environment={environment!r}): {error}") from None
    return lambda: gymnasium.make(environment, **options)


def _check_spaces(environment: Any) -> None:
    lacking = [
        name for name in ("action_space", "observation_space", "reset", "step") if not hasattr(environment, name)
    ]
    if lacking:
        raise TypeError(
            f"EnvironmentRollouts: {type(environment).__name__} has no {', '.join(lacking)}; needs an environment of "
            "gymnasium's kind"
        )
    actions, observations = environment.action_space, environment.observation_space
    # a space of several actions at a time may have an `n`, too
    if not hasattr(actions, "n") or getattr(actions, "shape", None) or int(getattr(actions, "start", 0)) != 0:
        raise ConfigurationError(
            f"EnvironmentRollouts: the environment's actions are {actions}; serves discrete ones, numbered from 0"
        )
    if not getattr(observations, "shape", None) or getattr(observations, "dtype", None) is None:
        raise ConfigurationError(
            f"EnvironmentRollouts: the environment's observations are {observations}; serves arrays of numbers "
            "(gymnasium.wrappers.FlattenObservation makes such)"
        )
