"""A trainer whose batches come from rollouts with known returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pulsetrain import Trainer
from pulsetrain.engine import Events, Phase
from pulsetrain.engine.events.payloads import PolicyUpdated, RewardsComputed, RolloutCompleted
from tests.support.models import trainer

BATCHES = 3  # of a rollout; an epoch has those of two
RETURNS = (None, 1.0, 2.0, None, 1.5, 2.0, 0.5)  # no episode ends in the first rollout, nor in the fourth


class Acting:
    """Replaces an acting policy: each rollout gives the next of the returns, and batches to learn from."""

    fires_rollouts = True

    def __init__(self) -> None:
        self.rollouts = self.left = 0  # made; batches of the last one that were not given yet
        self.trainer: Any = None

    def attach(self, run: Trainer) -> None:
        self.trainer = run
        run.add_event_handler(Events.ITERATION_COMPLETED, self._on_iteration, phase=Phase.COMPUTE)

    def __len__(self) -> int:
        return 2 * BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            if self.left == 0:
                self._act()
            self.left -= 1
            draw = torch.Generator().manual_seed(10 * self.rollouts + self.left)
            inputs = torch.randn(4, 4, generator=draw)
            yield inputs, inputs.sum(1, keepdim=True)

    def _act(self) -> None:
        self.trainer.fire(Events.ROLLOUT_STARTED)
        gained = RETURNS[self.rollouts]
        self.rollouts, self.left = self.rollouts + 1, BATCHES
        rewards = RewardsComputed(mean=0.5 * self.rollouts, std=0.0, minimum=0.0, maximum=1.0, count=4)
        self.trainer.fire(Events.REWARDS_COMPUTED, rewards)
        reported = {} if gained is None else {"rollout/return": gained}
        metrics = {"rollout/reward": 0.5 * self.rollouts, **reported}
        self._tell(metrics)
        self.trainer.fire(Events.ROLLOUT_COMPLETED, RolloutCompleted(metrics=metrics, seconds=0.25))

    def _on_iteration(self) -> None:
        if self.left == 0:
            metrics = {"policy/kl": 0.01 * self.rollouts}
            self._tell(metrics)
            self.trainer.fire(Events.POLICY_UPDATED, PolicyUpdated(metrics=metrics))

    def _tell(self, metrics: dict[str, float]) -> None:
        self.trainer.state.metrics.update(metrics)
        self.trainer.history.update(metrics)

    def state_dict(self) -> dict[str, int]:
        return self.state_before(0)

    def state_before(self, batches: int) -> dict[str, int]:
        return {"rollouts": self.rollouts, "left": self.left + batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rollouts, self.left = state["rollouts"], state["left"]


def acting(rollouts: int = len(RETURNS), handlers: Sequence[Any] = (), **arguments: Any) -> Trainer:
    """A run over so many rollouts."""
    settings = {"max_iterations": BATCHES * rollouts, "schedule": None, "seed": 3, "log_every_n_steps": 2}
    config = settings | arguments.pop("config", {})
    return trainer(config, train_loader=Acting(), handlers=handlers, **arguments)
