"""Observations and rewards normalised by running statistics, and statistics in evaluations."""

import math

import numpy
import pytest
import torch

from pulsetrain.engine import PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts
from pulsetrain.engine.rollouts.normalization import RunningMoments
from tests.support.models import trainer
from tests.support.models_language import refusal
from tests.support.rollouts import Counting, Policy


def run_of(updates=2, **options):
    Counting.made = 0
    rollouts = EnvironmentRollouts(Counting, 2, 6, **options)
    strategy = PPOStrategy(gamma=0.9, minibatch_epochs=1)
    kept, learn = [], strategy.learn_from
    strategy.learn_from = lambda rollout, kl_coef: kept.append(rollout) or learn(rollout, kl_coef)
    run = trainer({"max_updates": updates}, model=Policy(), train_loader=rollouts, strategy=strategy)
    return run, kept


def test_moments_are_those_of_all_values_and_a_little_of_the_start():
    values = numpy.random.default_rng(0).normal(3.0, 2.0, (50, 3))
    moments = RunningMoments((3,))
    for part in numpy.split(values, [7, 8, 30]):
        moments.update(part.astype("float32"))
    exact = values.astype("float32").astype("float64")
    # 1e-4 values of mean 0 and variance 1 come first
    mean = exact.sum(0) / 50.0001
    square = ((exact**2).sum(0) + 1e-4) / 50.0001
    numpy.testing.assert_allclose(moments.mean, mean, atol=1e-12)
    numpy.testing.assert_allclose(moments.variance, square - mean**2, atol=1e-10)


def test_observations_are_scaled_by_all_steps_before_and_the_present_one():
    (plain, raw), (run, kept) = run_of(), run_of(normalize_observations=True)
    plain.train()
    run.train()
    moments = RunningMoments((2,))
    for rollout, before in zip(kept, raw, strict=True):
        for seen, original in zip(rollout["observations"], before["observations"].numpy(), strict=True):
            moments.update(original)  # which do not depend on the actions
            expected = (original - moments.mean) / numpy.sqrt(moments.variance + 1e-8)
            numpy.testing.assert_allclose(seen.numpy(), expected.clip(-10, 10), atol=1e-6)
    assert torch.equal(kept[0]["dones"], raw[0]["dones"])


def test_values_after_the_last_step_and_of_truncated_episodes_are_of_scaled_observations():
    run, kept = run_of(updates=1, normalize_observations=True)
    critic = [each.detach().clone() for each in run.model.critic.parameters()]
    asked, observations = [], run.train_loader.normalization.observations

    def looked(arrays, *, update=False):
        found = observations(arrays, update=update)
        if not update:
            asked.append(torch.from_numpy(found["observations"]))
        return found

    run.train_loader.normalization.observations = looked
    run.train()
    (rollout,) = kept
    values = [(each @ critic[0][0] + critic[1]).tolist() for each in asked]
    assert len(asked) == 2, "the first episode of each is truncated after its third step, at the same time"
    numpy.testing.assert_allclose(rollout["truncation_values"][2].tolist(), values[0], atol=1e-6)
    numpy.testing.assert_allclose(rollout["values"][-1].tolist(), values[1], atol=1e-6)


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    run, kept = run_of(normalize_rewards=True)
    reported = run.train()
    moments, sums = RunningMoments(), numpy.zeros(2)
    earned = []
    for rollout in kept:
        for step in range(6):
            # what the environment gave: the number of the step, and half the action
            raw = rollout["observations"][step, :, 0].numpy() + 1 + 0.5 * rollout["actions"][step].numpy()
            sums = 0.9 * sums + raw
            moments.update(sums)
            scaled = (raw / math.sqrt(float(moments.variance) + 1e-8)).clip(-10, 10)
            numpy.testing.assert_allclose(rollout["rewards"][step].numpy(), scaled, atol=1e-5)
            sums[rollout["dones"][step].numpy()] = 0
            earned.append(raw)
    assert reported["rollout/reward"] == pytest.approx([numpy.mean(earned[:6]), numpy.mean(earned[6:])], abs=1e-6)
    assert min(reported["rollout/return"]) >= 6.0, "returns are those of the environment"


def test_an_evaluation_sees_by_the_statistics_of_the_rollouts_and_leaves_them():
    run, _ = run_of(normalize_observations=True, normalize_rewards=True)
    run.train()
    before = run.train_loader.normalization.state_dict()
    with torch.no_grad():
        # chooses 1 as long as the scaled number of the step is below 0, that is in the first steps of an episode
        run.model.actor.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        run.model.actor.bias.zero_()
    mean = before["observations"]["mean"][0].item()
    assert 0 < mean < 3
    first = [sum(step + 0.5 * (step - 1 < mean) for step in range(1, steps + 1)) for steps in (3, 4)]
    assert run.train_loader.evaluate(2) == first
    after = run.train_loader.normalization.state_dict()
    assert torch.equal(after["observations"]["mean"], before["observations"]["mean"])
    assert after["returns"]["count"] == before["returns"]["count"]


def test_an_evaluation_has_the_statistics_of_wrappers_and_keeps_them():
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not there: pip install 'pulsetrain[gymnasium]'")
    made = []

    def normalized():
        made.append(gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1")))
        return made[-1]

    from tests.support.runs_strategies import ActorCritic

    rollouts = EnvironmentRollouts(normalized, 2, 16)
    run = trainer({"max_updates": 2}, model=ActorCritic(), train_loader=rollouts, strategy=PPOStrategy())
    run.train()
    rollouts.evaluate(3)
    first, _, evaluated = made
    assert evaluated.obs_rms.count == first.obs_rms.count > 10
    assert numpy.array_equal(evaluated.obs_rms.mean, first.obs_rms.mean)
    assert not evaluated.update_running_mean
    assert first.update_running_mean


@pytest.mark.parametrize("name", ["normalize_observations", "normalize_rewards"])
def test_the_options_are_true_or_false(name):
    refused = refusal(lambda: EnvironmentRollouts(Counting, **{name: 1}))
    assert refused == f"EnvironmentRollouts({name}=1): needs True or False"


def test_a_new_run_begins_without_the_statistics_of_the_last():
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not there: pip install 'pulsetrain[gymnasium]'")
    wrappers = gymnasium.wrappers

    def wrapped():
        return wrappers.NormalizeReward(wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1")))

    from tests.support.runs_strategies import ActorCritic

    rollouts = EnvironmentRollouts(wrapped, 2, 64, normalize_observations=True)
    run = trainer({"max_updates": 1}, model=ActorCritic(), train_loader=rollouts, strategy=PPOStrategy())

    def counted():
        outer = rollouts.episodes.environments[0]
        found = rollouts.normalization.state_dict()["observations"]["count"]
        return found, outer.return_rms.count, outer.env.episode_count, list(outer.env.return_queue)

    before = counted()
    run.train()
    found = counted()
    assert found[0] == pytest.approx(128.0001)
    assert found[1] == pytest.approx(64.0001)
    assert found[2] == len(found[3]) > 0
    rollouts.restart()
    assert counted() == before == (1e-4, 1e-4, 0, [])
