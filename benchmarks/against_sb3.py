"""PPO in environments beside Stable-Baselines3 with the same hyper-parameters: the return, and the time for a step.

    python -m benchmarks against_sb3                                  # short: 2 seeds of 20,000 steps
    python -m benchmarks against_sb3 --seeds 10 --steps 100000        # with the bound of the return; takes hours

The hyper-parameters are those that rl-baselines3-zoo publishes for CartPole, Acrobot, Pendulum (without state-dependent
exploration, which ours does not have) and LunarLander (if Box2D and pygame are there: pip install 'gymnasium[box2d]').
The networks are its own, too: two layers of 64 with tanh for the policy and for the values, from orthogonal weights.
Both run on the CPU with one thread and take turns; a seed determines weights, actions and episodes.

The return is the mean over 20 new episodes with the most likely actions. A difference is ours minus that of
Stable-Baselines3 with the same seed, in percent of the span of possible returns, and its lower end is that of the 95%
interval of the mean difference over the seeds, by bootstrap with 10,000 draws. With fewer than 10 seeds or 100,000
steps it has no bound.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness.results import Row, make_parser, ratios, report
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts
from pulsetrain.engine.schedules import Linear
from pulsetrain.engine.strategies import GaussianHead

EPISODES, WIDTH = 20, 64
VALUE_COEF = 0.5  # of the mean square
SEEDS, STEPS = 10, 100_000  # from which on the return has a bound
FASTER, GOAL, LOWEST = 1.0, 1.3, -5.0  # times the steps of a CPU-second; percent of the span
DRAWS = 10_000


@dataclass(frozen=True)
class Work:
    """An environment and the published hyper-parameters for it."""

    name: str
    span: float  # between the worst and the best return
    environments: int
    steps: int  # of a rollout in each
    epochs: int
    gamma: float
    lam: float
    rate: float = 3e-4
    batch: int = 64
    decays: bool = False  # whether the learning rate and the clip range fall to 0
    normalizes: bool = False
    entropy: float = 0.0  # the coefficient


WORK = {
    "CartPole": Work("CartPole-v1", 500.0, 8, 32, 20, 0.98, 0.8, rate=1e-3, batch=256, decays=True),
    "Acrobot": Work("Acrobot-v1", 500.0, 16, 256, 4, 0.99, 0.94, normalizes=True),
    "Pendulum": Work("Pendulum-v1", 1627.0, 4, 1024, 10, 0.9, 0.95, rate=1e-3),
    "LunarLander": Work("LunarLander-v3", 500.0, 16, 1024, 4, 0.999, 0.98, entropy=0.01),
}


@dataclass(frozen=True)
class Result:
    """Of one run."""

    returned: float
    rate: float  # environment steps per second of processor time


# ------------------------------------------------------------------------------------------------------------- ours


class ActorCritic(nn.Module):
    """The networks that Stable-Baselines3 calls MlpPolicy."""

    def __init__(self, observed: int, actions: int, continuous: bool) -> None:
        super().__init__()
        self.actor, self.critic = (nn.Sequential(*_layers(observed)) for _ in range(2))
        self.head = GaussianHead(WIDTH, actions) if continuous else nn.Linear(WIDTH, actions)
        self.value = nn.Linear(WIDTH, 1)
        for part, gain in ((self.actor, math.sqrt(2)), (self.critic, math.sqrt(2)), (self.head, 0.01), (self.value, 1)):
            for layer in part.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.orthogonal_(layer.weight, gain)
                    nn.init.zeros_(layer.bias)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the actions, and values."""
        return self.head(self.actor(observations)), self.value(self.critic(observations)).squeeze(-1)


def _layers(observed: int) -> list[nn.Module]:
    return [nn.Linear(observed, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]


def ours(work: Work, seed: int, steps: int) -> Result:
    """Train with our Trainer."""
    import gymnasium

    torch.manual_seed(seed)
    made = gymnasium.make(work.name)
    space: Any = made.action_space
    continuous = isinstance(space, gymnasium.spaces.Box)
    observed = int(np.prod(made.observation_space.shape or ()))
    model = ActorCritic(observed, int(np.prod(space.shape)) if continuous else int(space.n), continuous)
    rollouts = EnvironmentRollouts(
        work.name, work.environments, work.steps, normalize_observations=work.normalizes,
        normalize_rewards=work.normalizes,
    )  # fmt: skip
    number = math.ceil(steps / rollouts.steps_per_rollout)
    strategy = PPOStrategy(
        clip_range=Linear(0.2, number) if work.decays else 0.2, gamma=work.gamma, lam=work.lam,
        minibatch_epochs=work.epochs, minibatch_size=work.batch, value_coef=2 * VALUE_COEF,  # ours is the half
        entropy_coef=work.entropy,
    )  # fmt: skip
    config = TrainingConfig(
        max_environment_steps=steps, optimizer="adam", optimizer_options={"eps": 1e-5}, learning_rate=work.rate,
        schedule="linear" if work.decays else "constant", clip_grad_norm=0.5, seed=seed, device="cpu", progress=False,
    )  # fmt: skip
    trainer = Trainer(model, rollouts, strategy=strategy, config=config)
    begun = time.process_time()
    trainer.train()
    seconds = time.process_time() - begun
    return Result(statistics.mean(rollouts.evaluate(EPISODES)), rollouts.environment_steps / seconds)


# --------------------------------------------------------------------------------------------------- Stable-Baselines3


def theirs(work: Work, seed: int, steps: int) -> Result:
    """Train with PPO of Stable-Baselines3."""
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    environments: Any = make_vec_env(work.name, work.environments, seed=seed)
    if work.normalizes:
        environments = VecNormalize(environments, gamma=work.gamma)

    def falling(start: float) -> Any:
        return (lambda left: left * start) if work.decays else start

    model = PPO(
        "MlpPolicy", environments, learning_rate=falling(work.rate), n_steps=work.steps, batch_size=work.batch,
        n_epochs=work.epochs, gamma=work.gamma, gae_lambda=work.lam, clip_range=falling(0.2), vf_coef=VALUE_COEF,
        ent_coef=work.entropy, seed=seed, device="cpu",
    )  # fmt: skip
    begun = time.process_time()
    model.learn(steps)
    seconds = time.process_time() - begun
    evaluated = gymnasium.make(work.name)
    returns = []
    for episode in range(EPISODES):
        seen, _ = evaluated.reset(seed=1_000_000 * (seed + 1) + episode)
        over, gained = False, 0.0
        while not over:
            given = environments.normalize_obs(seen) if work.normalizes else seen
            seen, reward, terminated, truncated, _ = evaluated.step(model.predict(given, deterministic=True)[0])
            gained, over = gained + float(reward), terminated or truncated
        returns.append(gained)
    return Result(statistics.mean(returns), model.num_timesteps / seconds)


# --------------------------------------------------------------------------------------------------- the comparison


def lower_end(differences: list[float]) -> float:
    """The lower end of the 95% interval of the mean, by bootstrap.

    >>> lower_end([1.0, 1.0, 1.0])
    1.0
    """
    draws = np.random.default_rng(0).choice(differences, (DRAWS, len(differences)))
    return float(np.quantile(draws.mean(1), 0.025))


def rows_of(name: str, results: list[tuple[Result, Result]], steps: int) -> list[Row]:
    """The difference of the returns and the ratio of the speeds."""
    mine, others = zip(*results, strict=True)
    shares = [100 * (one.returned - other.returned) / WORK[name].span for one, other in results]
    bounded = len(results) >= SEEDS and steps >= STEPS
    returned = {
        "ours": statistics.mean(each.returned for each in mine),
        "SB3": statistics.mean(each.returned for each in others),
    }
    rates = {"ours": statistics.median(each.rate for each in mine), "SB3": statistics.median(e.rate for e in others)}
    speed = ratios([each.rate for each in mine], [each.rate for each in others])
    return [
        Row(
            name=f"{name}: difference of the returns, lower end, % of the span", measured=lower_end(shares),
            kind="size", bound=LOWEST if bounded else None, at_least=True, also=returned,
        ),
        Row(
            name=f"{name}: steps per CPU-second, ours / SB3", kind="ratio", bound=FASTER, goal=GOAL, at_least=True,
            also=rates, **speed,
        ),
    ]  # fmt: skip


def measured(names: list[str], seeds: int, steps: int) -> tuple[list[Row], list[str]]:
    """The rows of these environments, and notes such as which are absent."""
    try:
        import stable_baselines3
    except ImportError as error:
        return [], [f"Stable-Baselines3: absent: {error}; pip install -e '.[bench]'"]
    found: list[Row] = []
    notes = [f"stable-baselines3 {stable_baselines3.__version__}, {seeds} seeds, {steps} steps"]
    for name in names:
        if name == "LunarLander" and not all(map(find_spec, ("Box2D", "pygame"))):
            notes.append("LunarLander: absent; pip install 'gymnasium[box2d]'")
            continue
        results = [(ours(WORK[name], seed, steps), theirs(WORK[name], seed, steps)) for seed in range(seeds)]
        found += rows_of(name, results, steps)
    return found, notes


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("against_sb3", __doc__)
    parser.add_argument("--seeds", type=int, default=2, help="the number of seeds [%(default)s]")
    parser.add_argument("--steps", type=int, default=20_000, help="environment steps of a run [%(default)s]")
    parser.add_argument("--only", nargs="+", choices=list(WORK), default=list(WORK), metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return report(options, "returns and speeds", lambda: measured(options.only, options.seeds, options.steps))


if __name__ == "__main__":
    raise SystemExit(main())
