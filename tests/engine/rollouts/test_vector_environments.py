"""Vectors of environments: made by name or by a function, reset one by one, and the same as separate ones."""

import numpy
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not there: pip install 'pulsetrain[gymnasium]'")

from gymnasium.vector import AutoresetMode  # noqa: E402  # where it is there

from pulsetrain.engine import PPOStrategy  # noqa: E402
from pulsetrain.engine.rollouts import EnvironmentRollouts  # noqa: E402
from tests.support.control import BOX, Policy, Target  # noqa: E402
from tests.support.models import trainer  # noqa: E402
from tests.support.models_language import refusal  # noqa: E402
from tests.support.runs_strategies import ActorCritic  # noqa: E402


def run_of(rollouts, model=None):
    strategy = PPOStrategy(minibatch_epochs=1)
    kept, learn = [], strategy.learn_from
    strategy.learn_from = lambda rollout, kl_coef: kept.append(rollout) or learn(rollout, kl_coef)
    run = trainer({"max_updates": 3}, model=model or ActorCritic(), train_loader=rollouts, strategy=strategy)
    run.train()
    return kept


def made_of(make, count, **options):
    return lambda: gymnasium.vector.SyncVectorEnv([make] * count, autoreset_mode=AutoresetMode.DISABLED, **options)


@pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_a_vector_gives_the_rollouts_of_separate_environments(vectorization):
    vector, separate = (EnvironmentRollouts("CartPole-v1", 3, 16, vectorization=each) for each in (vectorization, None))
    found, expected = run_of(vector), run_of(separate)
    assert vector.evaluate(2) == separate.evaluate(2)
    vector.close()
    assert len(found) == len(expected) == 3
    assert expected[1]["dones"].any()
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name


def test_a_vector_that_a_user_makes_may_have_any_actions_and_a_dict():
    found = run_of(EnvironmentRollouts(made_of(lambda: Target(BOX, named=True), 2), steps=8), Policy(named=True))
    expected = run_of(EnvironmentRollouts(lambda: Target(BOX, named=True), 2, 8), Policy(named=True))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_an_evaluation_in_a_vector_plays_each_environment_alike():
    rollouts = EnvironmentRollouts(made_of(lambda: Target(BOX), 2), steps=8)
    assert rollouts.environments == 2
    run_of(rollouts, Policy())
    assert len(rollouts.evaluate(5)) == 5
    assert rollouts.evaluate(4, seed=1) == rollouts.evaluate(4, seed=1) != rollouts.evaluate(4, seed=2)


def test_a_vector_that_resets_by_itself_is_refused_with_what_to_pass():
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        kind = {"autoreset_mode": mode}
        refused = refusal(lambda kind=kind: EnvironmentRollouts(
            lambda: gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs=kind)
        ))  # fmt: skip
        assert f"the vector environment has autoreset_mode {mode}; needs AutoresetMode.DISABLED" in refused
        assert "vector_kwargs={'autoreset_mode': gymnasium.vector.AutoresetMode.DISABLED}" in refused


def test_arguments_of_a_vector_are_checked():
    refused = refusal(lambda: EnvironmentRollouts(made_of(lambda: Target(BOX), 2), 3))
    assert refused == "EnvironmentRollouts(environments=3): the vector has 2; leave it out, or pass the same number"
    refused = refusal(lambda: EnvironmentRollouts("CartPole-v1", vectorization="threads"))
    assert refused.startswith("EnvironmentRollouts(vectorization='threads'): unknown; choose one of async, sync")
    refused = refusal(lambda: EnvironmentRollouts(lambda: Target(BOX), vectorization="sync"))
    assert refused.startswith(
        "EnvironmentRollouts(vectorization='sync'): only applies to a name; use gymnasium.make_ve"
    )


def test_episodes_of_a_vector_are_restored_at_any_step():
    """Also where some have just begun, and others are as long as can be."""
    model = Policy()

    def episodes(steps):
        rollouts = EnvironmentRollouts(made_of(lambda: Target(BOX, length=4), 3), steps=8)
        trainer({}, model=model, train_loader=rollouts, strategy=PPOStrategy())
        found = rollouts.episodes
        found.seed = 5
        found.begin()
        draw = numpy.random.default_rng(0)
        for _ in range(steps):
            done = found.step(draw.uniform(BOX.low, BOX.high, (3, 2)).astype("float32")).dones
            for index in numpy.flatnonzero(done).tolist():
                found.next_episode(index)
            found.begin()
        return found

    lengths = set()
    for steps in range(1, 12):
        expected = episodes(steps)
        lengths |= {tuple(len(each.actions) for each in expected.current)}
        found = episodes(0)
        found.load_state_dicts(expected.state_dicts())
        assert numpy.array_equal(found.seen["observations"], expected.seen["observations"])
        action = numpy.zeros((3, 2), "float32")
        one, other = expected.step(action), found.step(action)
        assert numpy.array_equal(one.rewards, other.rewards)
        assert numpy.array_equal(one.dones, other.dones)
        assert numpy.array_equal(found.seen["observations"], expected.seen["observations"])
    assert any(0 in each and max(each) > 0 for each in lengths)
