"""Environments in resumed runs: restored by replaying their actions, or rejected."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pulsetrain.engine import Events
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.rollouts import EnvironmentRollouts
from tests.support.runs_backends import saved, whole_state
from tests.support.runs_strategies import CARTPOLE, TORCH, differences, make, needs_gymnasium


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in CartPole, with two environments of 16 steps."""
    folder = tmp_path_factory.mktemp("whole")
    make(CARTPOLE, TORCH, folder).train()
    return folder


def environments(maker: Any = "CartPole-v1", number: int = 2, steps: int = 16) -> EnvironmentRollouts:
    return EnvironmentRollouts(maker, environments=number, steps=steps)


@needs_gymnasium
@pytest.mark.parametrize(
    ("number", "steps", "match"),
    [
        (4, 8, r"EnvironmentRollouts\(environments=4\): the checkpoint has 2; resume with the same number"),
        (2, 32, r"the checkpoint's rollout has 32 rows, and this one has 64; resume with the sizes"),
    ],
)
@pytest.mark.parametrize("iteration", [4, 6])
def test_other_sizes_are_refused(
    number: int,
    steps: int,
    match: str,
    iteration: int,
    whole: Path,
    tmp_path: Path,
) -> None:
    other = make(CARTPOLE, TORCH, tmp_path, data=environments(number=number, steps=steps))
    before = whole_state(other)
    with pytest.raises(CheckpointError, match=match):
        other.load_checkpoint(saved(whole, iteration))
    assert whole_state(other) == before


class Walk:
    """Four numbers moved by the actions; episodes are truncated at some length. It reuses one array.

    Args:
        drift: added to each step, independent of the seed.
    """

    def __init__(self, drift: float = 0.0, length: int = 7) -> None:
        self.action_space, self.observation_space = SimpleNamespace(n=2), SimpleNamespace(shape=(4,), dtype="float32")
        self._drift, self._length = drift, length
        self._place = np.zeros(4, np.float32)
        self.taken = 0  # steps

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        self._draw, self._steps = np.random.default_rng(seed), 0
        self._place[:] = 0.0
        return self._place, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps, self.taken = self._steps + 1, self.taken + 1
        self._place[:] += self._draw.normal(0, 0.1, 4) + (0.1 if action else -0.1) + self._drift
        return self._place, 1.0, False, self._steps == self._length, {}

    def close(self) -> None:
        """It has no resources."""


def test_an_environment_that_cannot_be_restored_is_rejected(tmp_path: Path) -> None:
    """The seed does not determine all its random numbers."""
    run = make(CARTPOLE, TORCH, tmp_path / "run", data=environments(Walk))
    run.train()
    other = make(CARTPOLE, TORCH, tmp_path / "other", data=environments(lambda: Walk(drift=0.001)))
    with pytest.raises(
        CheckpointError,
        match=r"environment 0 returned a different observation after .* same 2 actions of episode 2",
    ):
        other.train(resume=saved(tmp_path / "run", 3))


def test_a_custom_environment_resumes_exactly(tmp_path: Path) -> None:
    """And it is restored once, although a resume loads its state several times."""
    run = make(CARTPOLE, TORCH, tmp_path / "run", data=environments(Walk))
    run.train()
    made: list[Walk] = []

    def remembered() -> Walk:
        made.append(Walk())
        return made[-1]

    again = make(CARTPOLE, TORCH, tmp_path / "again", data=environments(remembered))
    again.train(resume=saved(tmp_path / "run", 5))
    assert differences(again, run) == set()
    # after 32 steps each is in its fifth episode of 7 steps, and 16 more follow
    assert [each.taken for each in made] == [32 % 7 + 16] * 2


def test_the_value_of_a_truncated_episode_is_that_of_its_last_observation(tmp_path: Path) -> None:
    """Although the environment writes the next episode's first one into the same array."""
    asked: list[torch.Tensor] = []
    rollouts = environments(Walk, number=1, steps=16)
    run = make(CARTPOLE, TORCH, tmp_path, data=rollouts)
    act = rollouts.act

    def act_and_keep(inputs: torch.Tensor) -> Any:
        asked.append(inputs.clone())
        return act(inputs)

    rollouts.act = act_and_keep  # type: ignore[method-assign]
    run.add_event_handler(Events.ROLLOUT_COMPLETED, run.terminate)
    run.train()
    # 16 steps, the 7th and the 14th of which end episodes, and the value after the last
    assert len(asked) == 16 + 2 + 1
    assert asked[7].abs().sum() > 0
    assert not asked[8].any()
