"""Policies with a memory: their state while they act, the sequences they learn from, and what is refused."""

import pytest
import torch

from pulsetrain.engine import Events, PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts
from pulsetrain.engine.strategies import EpisodicLSTM
from tests.support.models import trainer
from tests.support.models_language import assert_refused, refusal
from tests.support.rollouts import Counting, Policy


class Summing(torch.nn.Module):
    """Its state is the sum of the first number of all observations of the episode; the value is this sum."""

    def __init__(self):
        super().__init__()
        self.actor = torch.nn.Linear(2, 2)

    def initial_state(self, count):
        return torch.zeros(count, 1)

    def forward(self, observations, state, starts):
        values = []
        for step, first in zip(observations[..., 0].unbind(1), starts.unbind(1), strict=True):
            state = torch.where(first.unsqueeze(-1), 0.0, state) + step.unsqueeze(-1)
            values.append(state[:, 0])
        return self.actor(observations), torch.stack(values, 1) + 0 * self.actor.bias.sum(), state


def run_of(model=None, strategy=None, updates=2, length=3, steps=6):
    Counting.made = 0
    rollouts = EnvironmentRollouts(Counting, 2, steps, sequence_length=length)
    strategy = strategy or PPOStrategy(minibatch_epochs=1)
    kept, learn = [], strategy.learn_from
    strategy.learn_from = lambda rollout, kl_coef: kept.append(rollout) or learn(rollout, kl_coef)
    run = trainer({"max_updates": updates}, model=model or Summing(), train_loader=rollouts, strategy=strategy)
    return run, kept


def test_the_state_lasts_for_an_episode_and_over_rollouts():
    run, kept = run_of()
    run.train()
    # episodes of 3 and of 4 steps in turns, which count their steps from 0; rollouts of 6
    sums = [0, 1, 3, 0, 1, 3, 6, 0, 1, 3, 0, 1]
    for number in (0, 1):
        assert [value for each in kept for value in each["values"][:-1, number].tolist()] == sums
    starts = [value == 0 for value in sums]
    assert [value for each in kept for value in each["starts"][:, 0].tolist()] == starts
    assert kept[0]["values"][-1].tolist() == [6.0, 6.0], "of the step after the last, with the state before it"
    # the first episode of each is truncated after observation 3: the state was 0 + 1 + 2 before
    assert kept[0]["truncation_values"][2].tolist() == [6.0, 6.0]
    assert [each["state/0"][:, 0, 0].tolist() for each in kept] == [[0.0, 3.0], [3.0, 1.0]]


def test_a_row_is_a_sequence_and_begins_with_the_state_that_the_policy_had():
    strategy = PPOStrategy(minibatch_epochs=2, minibatch_size=2)
    run, kept = run_of(strategy=strategy, updates=4)
    assert run.train_loader.rows == 4
    assert len(run.train_loader) == 4
    checked = []

    @run.on(Events.ITERATION_STARTED)
    def look():
        batch = strategy.prepare_batch(run.state.batch)
        assert batch.size == 2
        logits, values, _ = run.model(**batch.inputs)
        assert torch.equal(values, batch.targets["values"])
        assert logits.shape == (2, 3, 2)
        checked.append(values)

    run.train()
    assert len(checked) == 4
    assert len(kept) == 1


def test_an_evaluation_begins_each_episode_without_a_state():
    run, _ = run_of()
    run.train()
    asked = []
    forward = run.model.forward

    def looked(observations, state, starts):
        asked.append((starts.item(), state.item(), observations[0, 0, 0].item()))
        return forward(observations, state, starts)

    run.model.forward = looked
    assert len(run.train_loader.evaluate(2)) == 2
    assert [start for start, *_ in asked] == [True, False, False, True, False, False, False]
    assert [state for _, state, _ in asked] == [0, 0, 1, 3, 0, 1, 3]


def test_an_lstm_over_a_sequence_is_that_of_its_steps():
    torch.manual_seed(0)
    lstm = EpisodicLSTM(3, 4).double()
    inputs = torch.randn(2, 5, 3, dtype=torch.float64)
    starts = torch.tensor([[True, False, False, True, False], [False, False, True, False, False]])
    state = (torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64))
    found, last = lstm(inputs, state, starts)
    whole = torch.nn.LSTM(3, 4, batch_first=True).double()
    whole.load_state_dict({f"{name}_l0": value for name, value in lstm.cell.state_dict().items()})
    for row, parts in enumerate([[(0, 3), (3, 5)], [(0, 2), (2, 5)]]):
        for first, end in parts:
            zero = starts[row, first]
            before = tuple(torch.zeros(1, 1, 4).double() if zero else each[row].view(1, 1, 4) for each in state)
            expected, (hidden, memory) = whole(inputs[row : row + 1, first:end], before)
            torch.testing.assert_close(found[row, first:end], expected[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(last[0][row], hidden[0, 0], atol=1e-12, rtol=0)
        torch.testing.assert_close(last[1][row], memory[0, 0], atol=1e-12, rtol=0)


def test_lengths_that_do_not_fit_are_refused():
    refused = refusal(lambda: run_of(length=4))
    assert refused == "EnvironmentRollouts(sequence_length=4): needs a divisor of steps=6"
    refused = refusal(lambda: run_of(model=Policy()))
    assert refused.startswith("EnvironmentRollouts(sequence_length=3): Policy is not recurrent: it has no method initi")
    refused = refusal(lambda: run_of(strategy=PPOStrategy(minibatch_size=3)))
    assert "a rollout of EnvironmentRollouts has 4 rows, which do not make whole batches" in refused


class Forgetful(Summing):
    def forward(self, observations, state, starts):
        return super().forward(observations, state, starts)[:2]


class Growing(Summing):
    def forward(self, observations, state, starts):
        parameters, values, state = super().forward(observations, state, starts)
        return parameters, values, torch.cat([state, state], -1)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Forgetful, TypeError, "the recurrent policy returned (float32 (2, 1, 2), float32 (2, 1)); needs three"),
        (Growing, ValueError, "returned the state (float32 (2, 2)); its initial_state(2) has (float32 (2, 1))"),
    ],
)
def test_a_policy_that_loses_or_changes_its_state_is_refused(model, error, message):
    assert_refused(run_of(model=model())[0], error, [message])
