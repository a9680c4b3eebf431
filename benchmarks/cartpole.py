"""PPO on CartPole-v1: the return after 100 rollouts, and the time for them, for several seeds.

    python benchmarks/cartpole.py            # prints a table and a JSON line, exits with 1 if the bound is missed
    python benchmarks/cartpole.py --seeds 0 1 2 3 4

A seed determines weights, actions and episodes: 102,400 steps in 8 environments, on one thread. The return is the mean
over 20 new episodes with the most likely actions; 500 is the maximum. The model and its settings are those of
examples/cartpole.py, which stops early; here every rollout is made. Needs gymnasium
(pip install 'pulsetrain[gymnasium]').
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts

sys.path.insert(0, str(Path(__file__).parent.parent))  # when run as a script
from examples.cartpole import ActorCritic

BOUND = 475.0  # at least: CartPole-v1 then counts as solved
EPISODES = 20


def measure(seed: int, rollouts: int) -> dict[str, float]:
    """The return after training, the best mean return of a rollout during it, and seconds of processor time."""
    torch.manual_seed(seed)
    data = EnvironmentRollouts("CartPole-v1", environments=8, steps=128)
    trainer = Trainer(
        ActorCritic(4, 2),
        data,
        strategy=PPOStrategy(minibatch_size=256, minibatch_epochs=4),
        config=TrainingConfig(
            max_epochs=rollouts,
            optimizer="adam",
            learning_rate=2.5e-3,
            schedule="linear",
            min_lr_ratio=0.05,
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
    """Measure and print; the exit status is 1 if a seed misses the bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=100, help="rollouts of 8 x 128 steps [%(default)s]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    found = {}
    print(f"{'seed':>6}{'return':>10}{'least':>10}{'best rollout':>14}{'cpu, s':>10}")
    for seed in arguments.seeds:
        figures = found[seed] = measure(seed, arguments.rollouts)
        print(
            f"{seed:>6}{figures['return']:>10.1f}{figures['least']:>10.1f}{figures['best rollout']:>14.1f}"
            f"{figures['cpu, s']:>10.1f}",
            flush=True,
        )
    results = {name: [figures[name] for figures in found.values()] for name in ("return", "cpu, s")}
    print(f"every return must be at least {BOUND:g}")
    print(json.dumps({"rollouts": arguments.rollouts, "seeds": arguments.seeds, **results, "bound": BOUND}))
    return int(min(results["return"]) < BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
