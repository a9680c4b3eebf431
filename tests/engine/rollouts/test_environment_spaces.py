"""Action and observation spaces of each kind: what reaches the environment and the model, and what is refused."""

import math

import numpy
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not there: pip install 'pulsetrain[gymnasium]'")

from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple  # noqa: E402  # where it is there

from pulsetrain.engine import PPOStrategy  # noqa: E402
from pulsetrain.engine.rollouts import EnvironmentRollouts  # noqa: E402
from pulsetrain.engine.rollouts.spaces import distribution_of  # noqa: E402
from pulsetrain.engine.strategies.distributions import Gaussian, MultiCategorical, SquashedGaussian  # noqa: E402
from tests.support.control import BOX, SEVERAL, SWITCHES, Policy, Target, target  # noqa: E402
from tests.support.models import trainer  # noqa: E402
from tests.support.models_language import assert_refused, refusal  # noqa: E402


def run_of(rollouts, model, strategy=None, updates=1):
    strategy = strategy or PPOStrategy(minibatch_epochs=1)
    return trainer({"max_updates": updates}, model=model, train_loader=rollouts, strategy=strategy)


def rollouts_of(run):
    """The rollouts of a run, after it."""
    found, learn = [], run.strategy.learn_from
    run.strategy.learn_from = lambda rollout, kl_coef: found.append(rollout) or learn(rollout, kl_coef)
    run.train()
    return found


DISTRIBUTIONS = [
    (BOX, None, Gaussian(2)),
    (BOX, "squashed_gaussian", SquashedGaussian(2)),
    (SEVERAL, None, MultiCategorical((2, 3))),
    (MultiDiscrete([[2, 3], [4, 5]]), "multi_categorical", MultiCategorical((2, 3, 4, 5))),
    (SWITCHES, None, MultiCategorical((2, 2, 2, 2))),
]


@pytest.mark.parametrize(("space", "chosen", "expected"), DISTRIBUTIONS, ids=str)
def test_the_distribution_follows_from_the_space_and_its_actions_are_of_it(space, chosen, expected):
    actions = distribution_of(space, chosen)
    assert actions.distribution == expected
    drawn = expected.sample(torch.zeros(50, expected.width))
    taken = actions.for_environment(drawn)
    assert len(taken) == 50
    assert all(space.contains(each) for each in taken)


def test_normal_actions_are_clipped_and_squashed_ones_are_scaled_to_the_bounds():
    actions = torch.tensor([[0.5, 0.25], [-7.0, 3.0], [0.0, 0.0]])
    assert distribution_of(BOX).for_environment(actions).tolist() == [[0.5, 0.25], [-2.0, 1.0], [0.0, 0.0]]
    squashed = distribution_of(BOX, "squashed_gaussian").for_environment(actions)
    expected = [[2 * math.tanh(one), (math.tanh(other) + 1) / 2] for one, other in actions.tolist()]
    numpy.testing.assert_allclose(squashed, expected, atol=1e-6)


def test_the_rows_have_the_actions_of_the_policy_and_the_environment_those_in_its_bounds():
    rollouts = target(BOX, count=2)
    model = Policy()
    with torch.no_grad():
        model.actor.log_std.fill_(2.0)  # far outside
    (rollout,) = rollouts_of(run_of(rollouts, model))
    actions = rollout["actions"].numpy()
    assert actions.shape == (16, 2, 2)
    assert abs(actions).max() > 4
    for number, environment in enumerate(rollouts.episodes.environments):
        assert numpy.array_equal(numpy.stack(environment.taken), actions[:, number].clip(BOX.low, BOX.high))


def test_log_probabilities_are_kept_of_the_policy_that_acted():
    run = run_of(target(SEVERAL), Policy(5))
    model = run.model
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    (rollout,) = rollouts_of(run)
    for name, each in model.named_parameters():
        each.data.copy_(before[name])
    logits = model(rollout["observations"].flatten(0, 1))[0].detach()
    actions = rollout["actions"].flatten(0, 1)
    parts = [torch.distributions.Categorical(logits=each) for each in logits.split((2, 3), -1)]
    expected = sum(each.log_prob(actions[:, number]) for number, each in enumerate(parts))
    torch.testing.assert_close(rollout["log_probs"].flatten(), expected, atol=1e-6, rtol=0)


def test_a_dict_reaches_the_model_by_its_names():
    rollouts = target(BOX, named=True)
    (rollout,) = rollouts_of(run_of(rollouts, Policy(named=True)))
    assert rollout["observations/image"].shape == (16, 2, 2, 2)
    assert rollout["observations/place"].shape == (16, 2, 3)
    assert rollout["observations/image"].dtype == torch.float32
    assert rollout["observations/image"].max() > 10
    assert len(rollouts.evaluate(2)) == 2


def other(actions=None, observations=None):
    class Other(Target):
        def __init__(self):
            super().__init__(BOX)
            self.action_space = actions or self.action_space
            self.observation_space = observations or self.observation_space

    return Other


REFUSED = [
    (other(actions=Tuple([Discrete(2), BOX])), "the environment's actions are Tuple(Discrete(2), Box("),
    (other(actions=Dict(move=BOX)), "the environment's actions are Dict('move': Box("),
    (other(actions=Discrete(3, start=1)), "the environment's actions are Discrete(3, start=1); needs discrete"),
    (
        other(actions=Box(0, 9, (2,), numpy.int64)),
        "the environment's actions are Box(0, 9, (2,), int64); needs discret",
    ),
    (other(observations=Tuple([BOX, BOX])), "the environment's observations are Tuple(Box("),
    (other(observations=Dict(deep=Dict(box=BOX))), "needs arrays of numbers, or a Dict of arrays at 'deep'"),
    (other(observations=Dict(box=BOX, number=Discrete(4))), "a Dict of arrays at 'number' (use gymnasium.wrappers.Fla"),
    (other(observations=Discrete(4)), "the environment's observations are Discrete(4); needs arrays of numbers"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_spaces_that_are_not_served_are_refused_by_name(make, message):
    refused = refusal(lambda: EnvironmentRollouts(make))
    assert refused.startswith("EnvironmentRollouts: ")
    assert message in refused


UNBOUNDED = Box(-numpy.inf, numpy.inf, (2,), numpy.float32)
CHOICES = [
    (BOX, "categorical", "PPOStrategy(distribution='categorical'): does not fit the environment's actions, Box("),
    (Discrete(2), "gaussian", "PPOStrategy(distribution='gaussian'): does not fit the environment's actions, Discrete"),
    (UNBOUNDED, "squashed_gaussian", "PPOStrategy(distribution='squashed_gaussian'): needs finite bounds, and the env"),
]


@pytest.mark.parametrize(("space", "chosen", "message"), CHOICES, ids=[message for *_, message in CHOICES])
def test_distributions_that_do_not_fit_are_refused(space, chosen, message):
    strategy = PPOStrategy(distribution=chosen)
    assert refusal(lambda: run_of(target(space), Policy(), strategy)).startswith(message)


def test_unbounded_actions_may_be_normal():
    run_of(target(UNBOUNDED), Policy()).train()


def test_the_name_of_a_distribution_and_a_temperature_are_checked():
    refused = refusal(lambda: PPOStrategy(distribution="normal"))
    assert refused.startswith("PPOStrategy(distribution='normal'): unknown; choose one of categorical, gaussian, ")
    refused = refusal(lambda: run_of(target(BOX), Policy(), PPOStrategy(temperature=0.5)))
    assert refused.startswith("PPOStrategy(temperature=0.5): divides logits, and these actions are continuous")
    refused = refusal(lambda: PPOStrategy(normalize_advantages="batch"))
    assert refused.startswith("PPOStrategy(normalize_advantages='batch'): unknown; choose one of minibatch, rollout")


WIDTHS = [
    (
        BOX,
        3,
        "parameters of shape (2, 3); needs finite numbers, shape (environments, 4), and this environment has acti",
    ),
    (
        BOX,
        2,
        "this environment has actions of 2 numbers: their means, then the logarithms of their standard deviations",
    ),
    (
        SEVERAL,
        2,
        "logits of shape (2, 2); needs finite numbers, shape (environments, 5), and this environment has choic",
    ),
]


@pytest.mark.parametrize(("space", "width", "message"), WIDTHS)
def test_a_head_of_another_width_is_refused(space, width, message):
    assert_refused(run_of(target(space), Policy(width)), ValueError, [message])


def test_an_observation_of_another_shape_is_refused():
    class Shrinking(Target):
        def _seen(self):
            return super()._seen()[: 2 if getattr(self, "_steps", 0) == 3 else 3]

    run = run_of(EnvironmentRollouts(lambda: Shrinking(BOX), 2, 4), Policy())
    assert_refused(run, ValueError, ["the environment returned the observation array([", "its space has shape (3,)"])


def test_environments_have_the_same_spaces():
    spaces = iter([BOX, UNBOUNDED, BOX, SEVERAL])
    assert EnvironmentRollouts(lambda: Target(next(spaces)), 2).environments == 2
    refused = refusal(lambda: EnvironmentRollouts(lambda: Target(next(spaces)), 2))
    assert "the function creates environments with different spaces; use the same for all" in refused


def test_a_strategy_serves_one_kind_of_actions():
    strategy = PPOStrategy()
    run_of(target(BOX), Policy(), strategy)
    run_of(target(UNBOUNDED), Policy(), strategy)
    refused = refusal(lambda: run_of(target(MultiBinary(2)), Policy(4), strategy))
    assert refused.startswith("PPOStrategy: serves an environment with Gaussian(size=2) already, and this one has Mult")
