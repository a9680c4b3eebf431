"""Runs in environments of each kind, interrupted after some iteration and resumed, end with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not there: pip install 'pulsetrain[gymnasium]'")

import gymnasium
from gymnasium import wrappers

from pulsetrain import verify
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.rollouts import EnvironmentRollouts
from pulsetrain.engine.schedules import Linear
from tests.support.catch import catch, seeing
from tests.support.control import BOX, SEVERAL, SWITCHES, Policy, Recurrent, Target, target, task
from tests.support.runs_backends import needs_jax, saved, whole_state
from tests.support.runs_strategies import FUNCTIONAL, JAX, TORCH, ActorCritic, Task, make


def cartpole(wrap: Any = None, number: int = 2, **options: Any) -> EnvironmentRollouts:
    """CartPole in wrappers."""
    if wrap is None:
        return EnvironmentRollouts("CartPole-v1", number, 16, **options)
    return EnvironmentRollouts(lambda: wrap(gymnasium.make("CartPole-v1")), number, 16, **options)


def normalized(environment: Any) -> Any:
    return wrappers.NormalizeReward(wrappers.NormalizeObservation(wrappers.RecordEpisodeStatistics(environment)))


def vector(mode: str = "sync", wrap: Any = None, inner: Any = ()) -> EnvironmentRollouts:
    """A vector that a user has made."""

    def made() -> Any:
        kind = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
        found = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode=mode, vector_kwargs=kind, wrappers=inner)
        return found if wrap is None else wrap(found)

    return EnvironmentRollouts(made, steps=16)


def stacked() -> Policy:
    return Policy(2, observed=12)


KINDS = [
    task("gaussian", lambda: target(BOX), Policy),
    task("squashed", lambda: target(BOX), Policy, distribution="squashed_gaussian"),
    task("several", lambda: target(SEVERAL), lambda: Policy(5)),
    task("switches", lambda: target(SWITCHES), lambda: Policy(8)),
    task("named", lambda: target(BOX, named=True), lambda: Policy(named=True)),
    task("normalized", lambda: target(BOX, named=True, normalize_observations=True, normalize_rewards=True),
         lambda: Policy(named=True)),
    task("wrapped", lambda: cartpole(normalized), ActorCritic),
    task("frames", lambda: cartpole(lambda each: wrappers.FrameStackObservation(each, 3)), stacked),
    task("images", lambda: catch(2, 16), seeing),
    task("sync", lambda: cartpole(vectorization="sync"), ActorCritic),
    task("vector", lambda: vector(inner=(wrappers.NormalizeObservation, wrappers.NormalizeReward)), ActorCritic),
    task("wrapped vector", lambda: vector(wrap=wrappers.vector.NormalizeReward), ActorCritic),
    task("recurrent", lambda: cartpole(sequence_length=4), Recurrent, minibatch_size=4),
    task("schedules", cartpole, ActorCritic, clip_range=Linear(0.3, 3), entropy_coef=Linear(0.1, 3), target_kl=0.003),
    task("rollouts", cartpole, ActorCritic, normalize_advantages="rollout", kl_coef=0.2),
]  # fmt: skip
SLOW = [
    task("async", lambda: cartpole(vectorization="async"), ActorCritic),
    task("pendulum", lambda: EnvironmentRollouts("Pendulum-v1", 2, 16), lambda: Policy(size=1)),
]


def assert_resumes(kind: Task, on: str, folder: Path) -> None:
    run = make(kind, on, folder / "whole")
    run.train()
    expected = whole_state(run)
    assert run.train_loader.rollouts >= 3
    for iteration in kind.cuts:
        again = make(kind, on, folder / str(iteration))
        again.train(resume=saved(folder / "whole", iteration))
        found = whole_state(again)
        assert {path for path in expected | found if found.get(path) != expected.get(path)} == set(), iteration
        again.train_loader.close()
    run.train_loader.close()


@pytest.mark.parametrize("kind", [pytest.param(each, id=each.name) for each in KINDS])
def test_a_run_resumes_after_any_iteration(kind: Task, tmp_path: Path) -> None:
    assert_resumes(kind, TORCH, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(each, id=each.name) for each in SLOW])
def test_a_run_that_takes_longer_resumes_too(kind: Task, tmp_path: Path) -> None:
    assert_resumes(kind, TORCH, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(KINDS[number], id=KINDS[number].name) for number in (0, 5, 12)])
def test_a_run_of_values_resumes_too(kind: Task, tmp_path: Path) -> None:
    assert_resumes(kind, FUNCTIONAL, tmp_path)


@needs_jax
def test_continuous_actions_are_learnt_on_jax_and_resume(tmp_path: Path) -> None:
    import jax.numpy as jnp

    def net(weights: Any, observations: Any) -> Any:
        hidden = jnp.tanh(observations @ weights["hidden"])
        mean = hidden @ weights["actor"]
        return jnp.concatenate([mean, jnp.zeros_like(mean) + weights["log_std"]], -1), hidden @ weights["critic"]

    def model() -> Any:
        draw = np.random.default_rng(3)
        shapes = {"hidden": (3, 8), "actor": (8, 2), "log_std": (2,), "critic": (8,)}
        return net, {name: draw.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}

    options = {"clip_range": Linear(0.3, 4), "distribution": "squashed_gaussian"}
    assert_resumes(replace(task("jax", lambda: target(BOX), Policy, (5,), **options), jax_model=model), JAX, tmp_path)


def test_a_run_with_statistics_is_reproduced(tmp_path: Path) -> None:
    kind = next(each for each in KINDS if each.name == "wrapped")
    make(kind, TORCH, tmp_path).train()
    found = verify(tmp_path, lambda: make(kind, TORCH, tmp_path), from_iteration=6)
    assert found, str(found)


def test_a_vector_makes_the_same_run_as_separate_environments(tmp_path: Path) -> None:
    states = []
    for name in ("sync", "separate"):
        mode = "sync" if name == "sync" else None
        kind = task(name, lambda mode=mode: cartpole(vectorization=mode), ActorCritic)
        run = make(kind, TORCH, tmp_path / name)
        run.train()
        states.append({path: value for path, value in whole_state(run).items() if path.startswith(("model", "optim"))})
    assert states[0] == states[1]
    assert states[0]


class Drifting(gymnasium.RewardWrapper):
    """Adds to each reward the number of all steps so far."""

    steps = 0

    def reward(self, reward: Any) -> float:
        self.steps += 1
        return float(reward) + self.steps


class Kept(Drifting):
    """The same, with a state that can be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


def test_a_wrapper_that_changes_rewards_over_episodes_is_refused_unless_it_has_a_state(tmp_path: Path) -> None:
    kind = task("drifting", lambda: target_in(Drifting), Policy, cuts=(5,))
    make(kind, TORCH, tmp_path / "run").train()
    again = make(kind, TORCH, tmp_path / "again")
    message = (
        r": EnvironmentRollouts: environment 0 returned rewards of .* in all, and not .*, after the same seed and the "
        r"same \d+ actions of episode \d+: .*give a wrapper that keeps statistics the methods state_dict"
    )
    with pytest.raises(CheckpointError, match=message):
        again.train(resume=saved(tmp_path / "run", 4))
    assert_resumes(task("kept", lambda: target_in(Kept), Policy, cuts=(4, 5)), TORCH, tmp_path / "kept")


def target_in(wrap: Any) -> EnvironmentRollouts:
    return EnvironmentRollouts(lambda: wrap(Target(BOX)), 2, 16)


REFUSED = [
    (normalized, {}, None, {}, "statistics of NormalizeReward, NormalizeObservation, RecordEpisodeStatistics, and this "
     "environment has no wrapper with statistics; resume with the wrappers"),
    (None, {"normalize_rewards": True}, None, {}, "statistics of returns, sums, and these rollouts need those of noth"),
    (None, {}, None, {"normalize_observations": True}, "statistics of nothing, and these rollouts need those of obs"),
]  # fmt: skip


@pytest.mark.parametrize(("wrap", "options", "other_wrap", "others", "message"), REFUSED)
def test_a_run_resumes_with_the_statistics_that_it_was_started_with(
    wrap: Any, options: Any, other_wrap: Any, others: Any, message: str, tmp_path: Path
) -> None:
    make(task("run", lambda: cartpole(wrap, **options), ActorCritic), TORCH, tmp_path / "run").train()
    other = make(task("other", lambda: cartpole(other_wrap, **others), ActorCritic), TORCH, tmp_path / "other")
    with pytest.raises(CheckpointError, match=message):
        other.load_checkpoint(saved(tmp_path / "run", 5))
