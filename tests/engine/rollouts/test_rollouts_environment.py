"""Rollouts in a small environment whose every number is known."""

import math

import numpy
import pytest
import torch

from pulsetrain.engine import Events, PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts
from tests.support import formulas
from tests.support.models import trainer
from tests.support.rollouts import LENGTH, LIMIT, Counting, Policy


def run_of(strategy=None, *, environments=2, steps=6, updates=2, **config):
    Counting.made = 0
    rollouts = EnvironmentRollouts(Counting, environments, steps)
    kept = []
    strategy = strategy or PPOStrategy(0.0, gamma=0.9, lam=0.7, minibatch_epochs=1, normalize_advantages=False)
    learn = strategy.learn_from
    strategy.learn_from = lambda rollout, kl_coef: kept.append(rollout) or learn(rollout, kl_coef)
    settings = {"max_updates": updates, "learning_rate": 1e-3, **config}
    run = trainer(settings, model=Policy(), train_loader=rollouts, strategy=strategy)
    reported = []
    run.add_event_handler(Events.ROLLOUT_COMPLETED, lambda engine, event: reported.append(event.payload.metrics))
    return run, kept, reported


def places(steps, first=0):
    """(episode, step) of each step of an environment: episodes of 3 and of 4 steps in turns."""
    found, episode, step = [], 1, 0
    for _ in range(first + steps):
        step += 1
        found.append((episode, step))
        if step == (LIMIT if episode % 2 else LENGTH):
            episode, step = episode + 1, 0
    return found[first:]


def test_episodes_continue_from_one_rollout_to_the_next():
    run, kept, _ = run_of(updates=3)
    run.train()
    for rollout, first in zip(kept, (0, 6, 12), strict=True):
        expected = places(6, first)
        for number in range(2):
            assert rollout["observations"][:, number].tolist() == [[step - 1, number + 1] for _, step in expected]
            earned = [
                step + 0.5 * a for (_, step), a in zip(expected, rollout["actions"][:, number].tolist(), strict=True)
            ]
            assert rollout["rewards"][:, number].tolist() == earned
            ends = [step == (LIMIT if episode % 2 else LENGTH) for episode, step in expected]
            assert rollout["dones"][:, number].tolist() == ends


def test_a_truncated_episode_has_the_value_of_its_last_observation():
    run, kept, _ = run_of(steps=8, updates=1)
    critic = [each.detach().clone() for each in run.model.critic.parameters()]

    def worth(step, number):
        return float(critic[0][0] @ torch.tensor([float(step), float(number)]) + critic[1])

    run.train()
    (rollout,) = kept
    expected = places(8)
    for number in (0, 1):
        values = [worth(step - 1, number + 1) for _, step in expected]
        following = worth(expected[-1][1], number + 1)
        numpy.testing.assert_allclose(rollout["values"][:, number].tolist(), [*values, following], atol=1e-6)
        cut_off = [worth(LIMIT, number + 1) if e % 2 and step == LIMIT else 0.0 for e, step in expected]
        assert sum(each != 0 for each in cut_off) == 1, "an end is worth nothing more, also where time was over"
        numpy.testing.assert_allclose(rollout["truncation_values"][:, number].tolist(), cut_off, atol=1e-6)
        rewards = [r + 0.9 * v for r, v in zip(rollout["rewards"][:, number].tolist(), cut_off, strict=True)]
        ends = rollout["dones"][:, number].tolist()
        advantages = formulas.gae_by_loop(rewards, [*values, following], ends, 0.9, 0.7)
        rows = run.strategy.learn_from(rollout, 0.0)
        numpy.testing.assert_allclose(rows["advantages"][number::2].tolist(), advantages, atol=1e-5)


def test_actions_are_drawn_by_the_policy_and_their_log_probabilities_kept():
    run, kept, _ = run_of(PPOStrategy(0.0, minibatch_epochs=1, temperature=0.5), environments=4, steps=500, updates=1)
    weight, bias = (each.detach().double().numpy().copy() for each in run.model.actor.parameters())
    run.train()
    (rollout,) = kept
    logits = (rollout["observations"].double().numpy() @ weight.T + bias) / 0.5
    expected = formulas.log_probs_of(logits, rollout["actions"])
    numpy.testing.assert_allclose(rollout["log_probs"].numpy(), expected, atol=1e-6)
    chances = numpy.exp(formulas.log_softmax(logits))[..., 1]
    spread = math.sqrt((chances * (1 - chances)).sum())
    assert abs(rollout["actions"].sum().item() - chances.sum()) < 4 * spread


def test_the_first_batch_of_a_rollout_is_of_the_policy_that_acted():
    strategy = PPOStrategy(0.1, minibatch_size=4, temperature=0.7)
    run, _, _ = run_of(strategy, updates=14)
    seen = []

    @run.on(Events.ITERATION_STARTED)
    def look():
        batch = strategy.prepare_batch(run.state.batch)
        with torch.no_grad():
            found = strategy.compute_metrics(run.model(batch.inputs), batch)
        seen.append((float(found["kl"]), float(found["clip_fraction"])))

    run.train()
    assert [seen[0], seen[12]] == [(pytest.approx(0.0, abs=1e-9), 0.0)] * 2
    assert seen[1][0] > 1e-9


def test_the_metrics_are_means_over_steps_and_over_episodes_that_have_ended():
    run, kept, reported = run_of(steps=2, updates=3)
    run.train()
    assert reported[0].keys() == {"rollout/reward", "rollout/episodes"}
    assert reported[0]["rollout/episodes"] == 0.0
    assert reported[0]["rollout/reward"] == pytest.approx(kept[0]["rewards"].mean().item())
    # each environment's first episode ends with its third step
    gained = (kept[0]["rewards"].sum(0) + kept[1]["rewards"][0]).mean().item()
    assert reported[1]["rollout/return"] == pytest.approx(gained)
    assert (reported[1]["rollout/length"], reported[1]["rollout/episodes"]) == (3.0, 2.0)
    assert "rollout/return" not in reported[2]
    assert run.history["rollout/return"] == [reported[1]["rollout/return"]]


def test_each_episodes_seed_is_derived_from_the_runs():
    def seeds(seed):
        run, _, _ = run_of(updates=2, seed=seed)
        run.train()
        return [each.seeds for each in run.train_loader.episodes.environments]

    first = seeds(1)
    assert first == seeds(1)
    assert len({each for lane in first + seeds(2) for each in lane}) == sum(map(len, first + seeds(2)))


def test_an_evaluation_leaves_the_rollouts_as_they_were():
    def train(evaluated):
        run, kept, _ = run_of(updates=4)
        returns = []
        if evaluated:
            run.on(Events.ITERATION_COMPLETED)(lambda: returns.extend(run.train_loader.evaluate(2, greedy=False)))
        run.train()
        return [each["actions"].tolist() for each in kept], returns

    (actions, _), (others, returns) = train(False), train(True)
    assert others == actions
    assert len(returns) == 8
    # two episodes: 3 steps and 4, each action 1 earning half more
    assert all(6.0 <= each <= 7.5 for each in returns[::2])
    assert all(10.0 <= each <= 12.0 for each in returns[1::2])


def test_a_greedy_evaluation_takes_the_likeliest_actions():
    run, _, _ = run_of()
    with torch.no_grad():
        run.model.actor.weight.zero_()
        run.model.actor.bias.copy_(torch.tensor([0.0, 0.1]))
    assert run.train_loader.evaluate(2) == [7.5, 12.0]
