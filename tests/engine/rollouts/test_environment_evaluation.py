"""Environments are separate, checked at each step, and evaluated without a trace."""

import math

import pytest
from torch import nn

from pulsetrain.engine import PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts
from tests.support.models import trainer
from tests.support.models_language import assert_refused, refusal
from tests.support.rollouts import Counting, Policy


def steps(environment=Counting, model=None, updates=2):
    rollouts = EnvironmentRollouts(environment, 2, 4)
    strategy = PPOStrategy(minibatch_epochs=1)
    return trainer({"max_updates": updates}, model=model or Policy(), train_loader=rollouts, strategy=strategy)


def test_each_environment_is_a_separate_object():
    one = Counting()
    message = refusal(lambda: EnvironmentRollouts(lambda: one, 2))
    assert message.startswith("EnvironmentRollouts(environment=<function ")
    assert ">): the function returns the same environment again" in message
    assert EnvironmentRollouts(lambda: one, 1).environments == 1
    message = refusal(lambda: EnvironmentRollouts(Counting, 2, options={"goal": 3}))
    assert message.startswith("EnvironmentRollouts(options={'goal': 3}): only apply to gymnasium.make")
    message = refusal(lambda: EnvironmentRollouts(lambda: 3, 2), TypeError)
    assert message.startswith(
        "EnvironmentRollouts: int has no action_space, observation_space, reset, step; needs an env"
    )


def test_a_step_that_returns_four_values_is_refused():
    class Old(Counting):
        def step(self, action):
            return super().step(action)[:4]

    message = ["EnvironmentRollouts: the environment's step() returned 4 values; needs (observation, reward, "]
    assert_refused(steps(Old), TypeError, message)


def test_an_observation_that_is_not_a_number_names_its_environment():
    class Lost(Counting):
        def _seen(self):
            seen = super()._seen()
            if self.number % 2 == 0 and self.step_number == 2:
                seen[0] = math.nan
            return seen

    Counting.made = 0
    message = ["EnvironmentRollouts: environment 1 returned an observation that is not finite: [nan, 2.0]"]
    assert_refused(steps(Lost), ValueError, message)


@pytest.mark.parametrize("episodes", [0, -1, 1.5, True])
def test_an_evaluation_needs_at_least_one_episode(episodes):
    message = refusal(lambda: steps().train_loader.evaluate(episodes), ValueError)
    assert message == f"EnvironmentRollouts.evaluate(episodes={episodes!r}): needs a whole number of at least 1"


class Closing(Counting):
    """Records which have been closed, and fails on request."""

    closed, fails = [], False

    def step(self, action):
        if Closing.fails:
            raise OSError("the simulator went")
        return super().step(action)

    def close(self):
        Closing.closed.append(self.number)


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_closes_its_environment(monkeypatch, fails):
    monkeypatch.setattr(Closing, "closed", [])
    run = steps(Closing)
    monkeypatch.setattr(Closing, "fails", fails)
    if fails:
        with pytest.raises(OSError, match="the simulator went"):
            run.train_loader.evaluate(1)
    else:
        run.train_loader.evaluate(1)
    assert Closing.closed == [Counting.made], "the newest, and none of those of the rollouts"
    assert run.model.training


def test_an_evaluation_is_without_dropout():
    class Dropping(Policy):
        def __init__(self):
            super().__init__()
            self.dropout, self.modes = nn.Dropout(0.5), []

        def forward(self, observations):
            self.modes.append(self.dropout.training)
            logits, values = super().forward(observations)
            return self.dropout(logits), values

    run = steps(model=Dropping())
    run.train_loader.evaluate(1)
    assert run.model.modes
    assert not any(run.model.modes)
    assert run.model.training
