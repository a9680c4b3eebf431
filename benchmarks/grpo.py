"""GRPO beside TRL's: the rewards that are reached.

    python -m benchmarks grpo                 # 2 seeds, which show no difference reliably
    python -m benchmarks grpo --seeds 10      # with the bounds

With each seed, both learn a task for UPDATES updates: texts with many even tokens. They have the same model, prompts,
reward and hyper-parameters, and draw texts of their own. Compared are the mean reward of the last LAST rollouts, and
that of all rollouts, which also shows how fast it rose. A difference is ours minus TRL's with the same seed, in percent
of the span of possible rewards. Its lower end is that of the 95% interval of the mean difference over the seeds, by
bootstrap. With fewer than 10 seeds it has no bound. The speeds are compared by `against_trl`.
That losses and weights are those of TRL is a test: tests/integration/test_trl_strategies.py.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import against_sb3, against_trl
from benchmarks.harness.results import Row, make_parser, report

UPDATES, LAST, RATE = 120, 10, 2e-3
SEEDS, LOWEST = 10, -5.0  # from which on the reward has a bound; percent of the span, which is 1


def reached(train: Any, model: Any, seed: int, updates: int) -> tuple[float, float]:
    """The mean reward of the last rollouts of a run, and of all."""
    rewards: list[float] = []

    def score(completions: list[list[int]]) -> list[float]:
        found = against_trl.reward(completions)
        rewards.append(statistics.mean(found))
        return found

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with tempfile.TemporaryDirectory() as folder, against_trl.quiet():
        train(model, optimizer, updates, Path(folder), score, seed)
    return statistics.mean(rewards[-LAST:]), statistics.mean(rewards)


def measure(seeds: int, updates: int) -> list[Row]:
    """How far apart the rewards are that GRPO reaches."""
    pairs: list[list[tuple[float, float]]] = []
    for seed in range(seeds):
        model = against_trl.model_of(seed)
        sides = (against_trl.our_grpo, against_trl.trl_grpo)
        pairs.append([reached(train, copy.deepcopy(model), seed, updates) for train in sides])
    bounded = seeds >= SEEDS and updates >= UPDATES
    rows = []
    for number, what in enumerate(("the last rewards", "all rewards")):
        mine, theirs = ([side[number] for side in sides] for sides in zip(*pairs, strict=True))
        apart = [100 * (one - other) for one, other in zip(mine, theirs, strict=True)]
        rows.append(
            Row(
                name=f"difference of {what}, lower end, % of the span", measured=against_sb3.lower_end(apart),
                kind="size", bound=LOWEST if bounded else None, at_least=True,
                also={"ours": statistics.mean(mine), "reference": statistics.mean(theirs)},
            )
        )  # fmt: skip
    return rows


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("grpo", __doc__)
    parser.add_argument("--seeds", type=int, default=2, help="the number of seeds [%(default)s]")
    parser.add_argument("--updates", type=int, default=UPDATES, help="with a seed [%(default)s]")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def rows() -> tuple[list[Row], list[str]]:
        try:
            import trl
        except ImportError as error:
            return [], [f"TRL: absent: {error}; pip install -e '.[bench]'"]
        note = f"trl {trl.__version__}, {options.seeds} seeds, {options.updates} updates"
        return measure(options.seeds, options.updates), [note]

    return report(options, "rewards of GRPO, ours and TRL's", rows)


if __name__ == "__main__":
    raise SystemExit(main())
