"""Rollouts of texts and of environments, counted, summed up and drawn by hand."""

import math

import numpy
import pytest
import torch
from torch import nn

from pulsetrain.engine import Events, GRPOStrategy, PPOStrategy
from tests.support import formulas
from tests.support.rollouts import PROMPTS, VOCABULARY, texts


class Headed(nn.Module):
    """Logits by a linear layer, which autocast computes in less than float32; and values."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY + 1)

    def forward(self, tokens):
        found = 3 * self.head(self.embedding(tokens))
        return found[..., 1:], found[..., 0]


# ------------------------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize("prompts_per_rollout", [1, 2, 5, 7])
def test_every_prompt_is_used_once_before_any_is_repeated(prompts_per_rollout):
    turns = 4
    updates = -(-turns * len(PROMPTS) // prompts_per_rollout)
    run, _, reward = texts(GRPOStrategy(2), updates=updates, prompts_per_rollout=prompts_per_rollout)
    run.train()
    assert len(reward.prompts) == updates
    asked = [prompt for prompts in reward.prompts for prompt in prompts]
    assert asked[::2] == asked[1::2], "a group stands together"
    orders = [asked[::2][at : at + len(PROMPTS)] for at in range(0, turns * len(PROMPTS), len(PROMPTS))]
    assert all(sorted(order) == sorted(PROMPTS) for order in orders)
    assert len({str(order) for order in orders}) > 1


def test_a_different_seed_gives_a_different_order_of_prompts():
    def asked(seed):
        run, _, reward = texts(GRPOStrategy(2), prompts_per_rollout=5, config={"seed": seed})
        run.train()
        return reward.prompts

    assert asked(1) == asked(1)
    assert len({str(asked(seed)) for seed in range(4)}) > 1


def test_texts_come_after_their_prompts_and_the_mask_shows_them():
    run, recorded, reward = texts(GRPOStrategy(2), prompts_per_rollout=5, end_token=0, pad_token=3)
    run.train()
    (batch,) = recorded.batches
    rows = [(tokens[mask].tolist(), tokens.tolist()) for tokens, mask in zip(*_fields(batch), strict=True)]
    for prompt, completion in zip(reward.prompts[0], reward.completions[0], strict=True):
        row = prompt + completion
        assert (completion, row + [3] * (batch["input_ids"].shape[1] - len(row))) in rows


def _fields(batch):
    return batch["input_ids"], batch["completion_mask"]


@pytest.mark.parametrize("size", [None, 2, 5])
def test_every_row_is_learnt_from_once_an_epoch(size):
    strategy = GRPOStrategy(2, minibatch_epochs=3, minibatch_size=size)
    batches = 3 * 10 // (size or 10)
    run, recorded, _ = texts(strategy, updates=batches, prompts_per_rollout=5)
    assert len(run.train_loader) == batches
    run.train()
    assert len(recorded.rollouts) == 1
    each = batches // 3
    epochs = [recorded.batches[at : at + each] for at in range(0, batches, each)]
    seen = [sorted(row for batch in epoch for row in batch["input_ids"].tolist()) for epoch in epochs]
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 10


# ------------------------------------------------------------------------------------------- what is learnt from first


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: PPOStrategy(minibatch_size=5, temperature=t),
        lambda t: GRPOStrategy(2, 0.1, temperature=t, target_kl=9.0),
    ],
    ids=["ppo", "grpo"],
)
def test_the_first_batch_is_of_the_policy_that_acted(make, temperature, precision):
    run, recorded, _ = texts(make(temperature), model=Headed(), prompts_per_rollout=5, config={"precision": precision})
    losses = []
    run.on(Events.ITERATION_COMPLETED)(lambda: losses.append(float(run.state.output["loss"])))
    batches = recorded.batches
    compared = []
    compute = run.strategy.action_log_probs

    def looked(outputs, actions):
        found = compute(outputs, actions)
        if torch.is_grad_enabled():
            compared.append(found.detach())
        return found

    run.strategy.action_log_probs = looked
    run.train()
    mask = batches[0]["completion_mask"][:, 1:]
    torch.testing.assert_close(compared[0][mask], batches[0]["log_probs"][mask], rtol=0, atol=1e-6)
    if precision == "fp32":  # Observed asks without autocast
        assert recorded.metrics[0]["clip_fraction"] == 0.0
        assert recorded.metrics[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    if isinstance(run.strategy, GRPOStrategy):  # ratios are 1 and the reference is the policy: only advantages are left
        assert losses[0] == pytest.approx(-batches[0]["advantages"].mean().item(), abs=1e-6)


def test_log_probabilities_are_those_of_the_tempered_model():
    run, recorded, _ = texts(GRPOStrategy(2, temperature=0.6, target_kl=9.0), prompts_per_rollout=5)
    table = run.model.table.weight.detach().double().numpy().copy()
    run.train()
    tokens, mask = _fields(recorded.batches[0])
    expected = formulas.log_probs_of(table[tokens[:, :-1].numpy()] / 0.6, tokens[:, 1:])
    numpy.testing.assert_allclose(recorded.batches[0]["log_probs"].numpy(), expected, atol=1e-6)
    assert mask[:, 1:].any(1).all()


def test_advantages_over_texts_are_those_of_each_text_by_itself():
    strategy = PPOStrategy(0.2, gamma=0.9, lam=0.7, normalize_advantages=False)
    run, recorded, reward = texts(strategy, updates=8, prompts_per_rollout=5, end_token=0)
    reference = run.model.table.weight.detach().double().numpy().copy()  # as it was at first
    weights = {}

    @run.on(Events.ROLLOUT_STARTED)
    def keep():
        weights["table"] = run.model.table.weight.detach().double().numpy().copy()
        weights["worth"] = run.model.worth.weight.detach().double().numpy()[:, 0].copy()

    run.train()
    assert len(recorded.rollouts) == 2
    batch = recorded.batches[-1]  # of the second rollout, whose policy has moved
    assert numpy.abs(weights["table"] - reference).max() > 0.01
    asked = [[*p, *c] for p, c in zip(reward.prompts[1], reward.completions[1], strict=True)]
    for number, (tokens, mask) in enumerate(zip(*_fields(batch), strict=True)):
        places = numpy.nonzero(mask[1:].numpy())[0]
        text = tokens[: places[-1] + 2].tolist()
        before, after = text[places[0] : -1], text[places[0] + 1 :]
        now, then = (formulas.log_probs_of(table[before], after) for table in (weights["table"], reference))
        rewards = (-0.2 * (now - then)).tolist()
        rewards[-1] += reward.given[1][asked.index(text)]
        values = weights["worth"][before].tolist()
        ends = [False] * (len(places) - 1) + [True]
        expected = formulas.gae_by_loop(rewards, [*values, 0.0], ends, 0.9, 0.7)
        numpy.testing.assert_allclose(batch["advantages"][number].numpy()[places], expected, atol=2e-6)
        returns = [a + v for a, v in zip(expected, values, strict=True)]
        numpy.testing.assert_allclose(batch["returns"][number].numpy()[places], returns, atol=2e-6)


# ----------------------------------------------------------------------------------------------------- reported metrics


def test_the_metrics_of_a_rollout_of_texts_are_right_by_hand():
    completions = [[2, 0], [1, 1, 1, 1], [0], [4, 4, 0], [0], [5, 1, 0]]

    def given(prompts, completions):
        return [1.0, 2.0, 4.0, -1.0, 0.0, 6.0]

    run, recorded, _ = texts(
        GRPOStrategy(2, kl_coef=0.1, target_kl=9.0), prompts_per_rollout=3, end_token=0, reward=given,
        sampler=lambda prompts, count, **options: completions,
    )  # fmt: skip
    run.train()
    values = recorded.rollouts[0].metrics
    assert values["rollout/reward"] == pytest.approx(2.0)
    assert values["rollout/reward_std"] == pytest.approx(math.sqrt(34 / 6))
    assert values["rollout/length"] == pytest.approx(14 / 6)
    assert (values["rollout/length_min"], values["rollout/length_max"]) == (1.0, 4.0)
    assert values["rollout/ended"] == pytest.approx(5 / 6)
    assert values["rollout/truncated"] == pytest.approx(1 / 6)
    assert values["rollout/zero_variance_groups"] == 0.0
    assert values["rollout/reference_kl"] == 0.0
    (rewards,) = recorded.rewards
    assert (rewards.mean, rewards.minimum, rewards.maximum, rewards.count) == (2.0, -1.0, 6.0, 6)
    assert rewards.std == pytest.approx(math.sqrt(34 / 6))
    assert run.history["rollout/reward"] == [2.0]
    assert recorded.rollouts[0].seconds > 0


def test_metrics_of_an_update_are_means_over_all_rows_and_epochs_are_counted():
    strategy = PPOStrategy(minibatch_size=5, minibatch_epochs=2)
    run, recorded, _ = texts(strategy, updates=2, prompts_per_rollout=5)
    run.train()
    (update,) = recorded.updates
    assert update.metrics["policy/epochs"] == 2.0
    assert update.metrics["policy/kl_coef"] == 0.1
    batch = strategy.prepare_batch(recorded.batches[-1])  # all rows, in the last of the orders
    with torch.no_grad():
        expected = strategy.compute_metrics(run.model(batch.inputs), batch)
    for name, value in expected.items():
        assert update.metrics[f"policy/{name}"] == pytest.approx(value.item(), abs=1e-6)
    assert update.metrics["policy/kl"] > 0


@pytest.mark.parametrize(("kl", "factor"), [(0.151, 2.0), (0.149, 1.0), (0.067, 1.0), (0.066, 0.5), (-1.0, 0.5)])
def test_the_coefficient_follows_the_divergence(kl, factor):
    assert PPOStrategy(0.3, adaptive_kl=0.1).adapted(0.3, kl) == 0.3 * factor
    assert PPOStrategy(0.3).adapted(0.3, kl) == 0.3


def test_each_rollout_uses_the_coefficient_left_by_the_previous_one():
    def sampler(prompts, count, **options):
        return [[number % VOCABULARY] * 2 for number, _ in enumerate(prompts)]

    strategy = PPOStrategy(0.4, adaptive_kl=1e-6, normalize_advantages=False, minibatch_epochs=1, value_coef=0.0)
    run, recorded, _ = texts(strategy, updates=3, prompts_per_rollout=5, sampler=sampler)
    used, learn = [], strategy.learn_from
    strategy.learn_from = lambda rollout, kl_coef: used.append(kl_coef) or learn(rollout, kl_coef)
    run.train()
    values = [each.metrics["policy/kl_coef"] for each in recorded.updates]
    # nothing to diverge from in the first rollout; far more than 1e-6 in the others, in one direction or the other
    assert used == [0.4, *values[:-1]]
    assert values[0] == 0.2
    kls = [each.metrics["rollout/reference_kl"] for each in recorded.rollouts]
    for before, after, kl in zip(used[1:], values[1:], kls[1:], strict=True):
        assert after == (2 * before if kl > 0 else before / 2)


@pytest.mark.parametrize(("target", "epochs"), [(1e-9, 1.0), (1e9, 4.0), (None, 4.0)])
def test_a_rollout_ends_once_the_policy_has_diverged_enough(target, epochs):
    strategy = GRPOStrategy(2, minibatch_epochs=4, minibatch_size=5, target_kl=target)
    run, recorded, _ = texts(strategy, updates=8, prompts_per_rollout=5)
    run.train()
    assert [each.metrics["policy/epochs"] for each in recorded.updates] == [epochs] * int(4 / epochs)
    assert len(recorded.rollouts) == 4 / epochs
