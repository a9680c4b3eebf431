"""PPO on CartPole-v1: the return after 100 rollouts, and the time for them, for several seeds.

    python -m benchmarks cartpole            # prints a table and exits with 1 if the bound is missed
    python -m benchmarks cartpole --seeds 0 1 2

A seed determines weights, actions and episodes: 102,400 steps in 8 environments, on one thread. The return is the mean
over 20 new episodes with the most likely actions; 500 is the maximum. The bound is for the median of the seeds: PPO may
lose at the end what it had learned, and for which seed depends on the rounding of the processor. The model is that
of examples/cartpole.py, which stops when the pole is balanced; here every rollout is made. Needs gymnasium
(pip install 'pulsetrain[gymnasium]').
"""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.harness.results import Row, make_parser, report
from examples.cartpole import ActorCritic
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts

BOUND = 475.0  # at least, of the median: CartPole-v1 then counts as solved
EPISODES = 20


def measure(seed: int, rollouts: int) -> dict[str, float]:
    """The return after training, the best mean return of a rollout during it, and seconds of processor time."""
    torch.manual_seed(seed)
    data = EnvironmentRollouts("CartPole-v1", environments=8, steps=128)
    trainer = Trainer(
        ActorCritic(4, 2),
        data,
        strategy=PPOStrategy(kl_coef=0.0, minibatch_size=256, minibatch_epochs=10),
        config=TrainingConfig(
            max_epochs=rollouts,
            optimizer="adam",
            learning_rate=1e-3,
            schedule="linear",
            min_lr_ratio=0.0,
            clip_grad_norm=0.5,
            seed=seed,
            device="cpu",
        ),
    )
    begun = time.process_time()
    history = trainer.train()
    seconds = time.process_time() - begun
    returns = data.evaluate(EPISODES)
    best = max(history.get("rollout/return", [0.0]))
    return {"return": sum(returns) / EPISODES, "least": min(returns), "best rollout": best, "cpu, s": seconds}


def main() -> int:
    """Measure and print; the exit status is 1 if the median misses the bound."""
    parser = make_parser("cartpole", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rollouts", type=int, default=100, help="rollouts of 8 x 128 steps [%(default)s]")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other

    def rows() -> tuple[list[Row], list[str]]:
        found = []
        for seed in options.seeds:
            figures = measure(seed, options.rollouts)
            mean = figures.pop("return")
            found.append(Row(name=f"seed {seed}", measured=mean, kind="size", also=figures))
        median = statistics.median(row.measured for row in found)
        # a return depends on the seed and the processor, and not on the load
        return [*found, Row(name="median of the seeds", measured=median, kind="size", bound=BOUND, at_least=True)], []

    return report(options, "the mean return", rows)


if __name__ == "__main__":
    raise SystemExit(main())
