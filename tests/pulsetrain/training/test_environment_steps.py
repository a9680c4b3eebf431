"""A bound in steps of environments: the rollout that reaches it is the last, and it is learnt from."""

import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not there: pip install 'pulsetrain[gymnasium]'")

from pulsetrain.engine import Events, PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts
from pulsetrain.handlers import Checkpointer
from tests.support.control import BOX, Policy, Target
from tests.support.models import trainer
from tests.support.models_language import refusal


def run_of(steps, handlers=(), *, target_kl=None, rate=1e-3, **config):
    strategy = PPOStrategy(minibatch_epochs=2, minibatch_size=4, target_kl=target_kl)
    settings = {"max_environment_steps": steps, "learning_rate": rate, **config}
    rollouts = EnvironmentRollouts(lambda: Target(BOX), 2, 6)
    return trainer(settings, model=Policy(), train_loader=rollouts, strategy=strategy, handlers=handlers)


@pytest.mark.parametrize(("steps", "rollouts"), [(1, 1), (12, 1), (13, 2), (36, 3)])
def test_a_run_ends_with_the_rollout_that_reaches_its_bound(steps, rollouts):
    run = run_of(steps)
    assert run.length.total_iterations == 6 * rollouts
    run.train()
    assert run.train_loader.rollouts == rollouts
    assert run.train_loader.environment_steps == 12 * rollouts
    assert run.state.iteration == 6 * rollouts
    assert run.state.stop_reason == f"max_environment_steps={steps} was reached"


def test_a_rollout_that_a_target_ends_early_counts_with_all_its_steps():
    run = run_of(36, target_kl=1e-9, rate=0.1)
    run.train()
    assert run.train_loader.rollouts == 3
    assert run.state.iteration == 9, "one epoch of three batches each"
    assert run.state.stop_reason == "max_environment_steps=36 was reached"


def test_a_schedule_of_the_rate_lasts_as_long_as_the_steps():
    run = run_of(24, schedule="linear")
    rates = []
    run.on(Events.ITERATION_COMPLETED)(lambda: rates.append(run.learning_rates[0]))
    run.train()
    assert len(rates) == 12
    assert rates == pytest.approx([1e-3 * (1 - update / 12) for update in range(12)])


def test_a_run_resumes_to_its_bound_and_a_finished_one_is_done(tmp_path):
    run = run_of(36, [Checkpointer(tmp_path, keep_last=9)])
    run.train()
    again = run_of(36, [Checkpointer(tmp_path, keep_last=9)])
    again.train(resume="latest")
    assert again.state.iteration == 18
    longer = run_of(60, [Checkpointer(tmp_path, keep_last=9)])
    longer.train(resume="latest")
    assert longer.train_loader.rollouts == 5


def test_the_bound_needs_environments_and_is_the_only_one():
    refused = refusal(lambda: trainer({"max_environment_steps": 9}))
    assert refused.startswith(
        "TrainingConfig(max_environment_steps=9): needs EnvironmentRollouts as the train_loader, and this is DataLoader"
    )
    refused = refusal(lambda: run_of(9, max_epochs=2))
    assert "max_epochs=2, max_environment_steps=9): a run has one bound" in refused
    refused = refusal(lambda: run_of(0))
    assert "max_environment_steps=0): needs to be a whole number of at least 1" in refused
