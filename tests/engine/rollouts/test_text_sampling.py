"""How texts of rollouts are drawn: options, ends, seeds, and samplers that are not the policy."""

import math
from itertools import pairwise

import numpy
import pytest
import torch

from pulsetrain.engine import Events, GRPOStrategy, PPOStrategy
from pulsetrain.engine.rollouts import Sampling, TextRollouts
from pulsetrain.engine.rollouts.completions import Completion, check_completions
from tests.support import formulas
from tests.support.models import Tokens, trainer
from tests.support.models_language import refusal
from tests.support.rollouts import PROMPTS, VOCABULARY, Reward, texts


class Asked:
    """A sampler that keeps its arguments."""

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, count, *, temperature, end_token, sampling, seeds):
        self.calls.append({"end_token": end_token, "sampling": sampling, "seeds": seeds})
        return [[1]] * len(prompts)


@pytest.mark.parametrize(("given", "passed"), [(None, None), (3, 3), ([3, 4], (3, 4)), ((3,), (3,))])
def test_a_sampler_gets_the_end_tokens_and_the_sampling(given, passed):
    sampler, sampling = Asked(), Sampling(top_p=0.5)
    run, _, _ = texts(GRPOStrategy(2), sampler=sampler, end_token=given, sampling=sampling, prompts_per_rollout=5)
    run.train()
    assert sampler.calls[0]["end_token"] == passed
    assert sampler.calls[0]["sampling"] is sampling


def test_each_text_of_each_rollout_has_a_seed_that_follows_from_that_of_the_run():
    def seeds(seed):
        sampler = Asked()
        run, _, _ = texts(GRPOStrategy(2), sampler=sampler, updates=3, prompts_per_rollout=5, config={"seed": seed})
        run.train()
        return [each for call in sampler.calls for each in call["seeds"]]

    found = seeds(1)
    assert len(set(found)) == len(found) == 3 * 10
    assert seeds(1) == found
    assert not set(seeds(2)) & set(found)


def test_the_texts_do_not_depend_on_what_else_draws_random_numbers():
    def written(noise):
        run, _, reward = texts(GRPOStrategy(2), updates=3, prompts_per_rollout=5)
        run.on(Events.ROLLOUT_STARTED)(lambda: torch.rand(noise))
        run.train()
        return reward.completions

    assert written(0) == written(7)


@pytest.mark.parametrize("end_token", [0, [0, 2]])
def test_texts_end_by_tokens_and_stops_and_that_is_counted(end_token):
    sampling = Sampling(stop=[[1, 1], "3"], decode=lambda tokens: "".join(map(str, tokens)))
    run, recorded, reward = texts(GRPOStrategy(4), sampling=sampling, end_token=end_token, prompts_per_rollout=5)
    run.train()
    ends = {0, 3} if end_token == 0 else {0, 2, 3}

    def over(text):
        return text[-1] in ends or text[-2:] == [1, 1]

    completions = reward.completions[0]
    assert all(over(text) or len(text) == 4 for text in completions)
    assert not any(over(text[:length]) for text in completions for length in range(1, len(text)))
    expected = sum(map(over, completions)) / len(completions)
    assert expected > 0
    assert recorded.rollouts[0].metrics["rollout/ended"] == pytest.approx(expected)


def test_log_probabilities_are_those_of_all_tokens_also_where_few_may_be_drawn():
    run, recorded, _ = texts(GRPOStrategy(2, target_kl=9.0), sampling=Sampling(top_k=1), prompts_per_rollout=5)
    table = run.model.table.weight.detach().double().numpy().copy()
    run.train()
    batch = recorded.batches[0]
    tokens, mask = batch["input_ids"], batch["completion_mask"]
    expected = formulas.log_probs_of(table[tokens[:, :-1].numpy()], tokens[:, 1:])
    torch.testing.assert_close(batch["log_probs"].double(), torch.tensor(expected), rtol=0, atol=1e-6)
    likeliest = torch.tensor(table).argmax(-1)[tokens[:, :-1]]
    assert (likeliest == tokens[:, 1:])[mask[:, 1:]].all(), "only the likeliest token was drawn"


# ------------------------------------------------------------------------------------- samplers that are not the policy


def table_of(model):
    return model.table.weight.detach().double()


class Other:
    """Draws from a table of its own, and says how likely each token was."""

    def __init__(self, seed=5):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        self.drawn = []

    def __call__(self, prompts, count, *, temperature, end_token, seeds):
        found = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            generator, text, chances = torch.Generator().manual_seed(seed), list(prompt), []
            for _ in range(count - seed % 2):
                likely = (self.table[text[-1]] / temperature).log_softmax(-1)
                text.append(int(torch.multinomial(likely.exp(), 1, generator=generator)))
                chances.append(float(likely[text[-1]]))
            found.append(Completion(text[len(prompt) :], chances))
        self.drawn.append(found)
        return found


def weights_by_hand(table, temperature, prompts, completions):
    found = []
    for prompt, each in zip(prompts, completions, strict=True):
        text = [prompt[-1], *each.tokens]
        likely = (table / temperature).log_softmax(-1)
        ours = sum(float(likely[before, after]) for before, after in pairwise(text))
        found.append(math.exp(ours - sum(each.log_probs)))
    return found


def corrected(strategy, **options):
    """A run of one update whose texts a different table has drawn, and the ratios by hand."""
    sampler = Other()
    run, recorded, reward = texts(strategy, sampler=sampler, prompts_per_rollout=5, **options)
    table = table_of(run.model)
    run.train()
    ratios = weights_by_hand(table, run.strategy.temperature, reward.prompts[0], sampler.drawn[0])
    return run, recorded, reward, ratios


@pytest.mark.parametrize("cap", [2.0, 0.5, 1e9, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_advantage_of_a_text_is_weighted_by_how_much_likelier_it_is_under_the_policy(temperature, cap):
    strategy = GRPOStrategy(2, scale_rewards="none", temperature=temperature)
    _, recorded, reward, ratios = corrected(strategy, importance_cap=cap)
    rewards = torch.tensor(reward.given[0]).reshape(-1, 2)
    plain = (rewards - rewards.mean(1, keepdim=True)).flatten()
    weights = torch.ones(10) if cap is None else torch.tensor(ratios).clamp(max=cap)
    batch = recorded.batches[0]
    found = {
        tuple(row[mask.nonzero().min() - 1 :][: mask.sum() + 1].tolist()): float(advantage)
        for row, mask, advantage in zip(
            batch["input_ids"], batch["completion_mask"].long(), batch["advantages"], strict=True
        )
    }
    for prompt, text, advantage in zip(reward.prompts[0], reward.completions[0], plain * weights, strict=True):
        assert found[(prompt[-1], *text)] == pytest.approx(float(advantage), abs=1e-5)
    metrics = recorded.rollouts[0].metrics
    if cap is None:
        assert "rollout/sampler_ratio" not in metrics
    else:
        assert metrics["rollout/sampler_ratio"] == pytest.approx(sum(ratios) / 10, rel=1e-5)
        assert metrics["rollout/sampler_capped"] == pytest.approx(sum(ratio > cap for ratio in ratios) / 10)


def test_the_weights_apply_to_each_tokens_advantage_of_ppo():
    def advantages(cap):
        strategy = PPOStrategy(gamma=1.0, normalize_advantages=False, minibatch_epochs=1)
        _, recorded, _, _ = corrected(strategy, importance_cap=cap)
        return recorded.batches[0]["advantages"], recorded.batches[0]["returns"]

    plain, returns = advantages(None)
    weighted, same = advantages(1e-6)  # below all ratios
    torch.testing.assert_close(weighted, plain * 1e-6, rtol=1e-5, atol=0)
    torch.testing.assert_close(same, returns)


def test_a_sampler_that_is_the_policy_has_ratios_of_one():
    class Same(Other):
        def __init__(self):
            self.drawn = []

    sampler = Same()
    run, recorded, _ = texts(GRPOStrategy(2), sampler=sampler, updates=3, prompts_per_rollout=5)
    run.on(Events.ROLLOUT_STARTED)(lambda: setattr(sampler, "table", table_of(run.model)))
    run.train()
    assert len(recorded.rollouts) == 3
    for rollout in recorded.rollouts:
        assert rollout.metrics["rollout/sampler_ratio"] == pytest.approx(1.0, abs=1e-5)


def test_a_sampler_with_weights_of_its_own_gets_the_policys_before_each_rollout():
    given = []

    class Copying(Other):
        def update_weights(self, model, version):
            given.append((version, model.table.weight.detach().clone()))

    run, _, _ = texts(GRPOStrategy(2), sampler=Copying(), updates=3, prompts_per_rollout=5)
    before = []
    run.on(Events.ROLLOUT_STARTED)(lambda: before.append(run.model.table.weight.detach().clone()))
    run.train()
    assert [version for version, _ in given] == [1, 2, 3]
    assert all(torch.equal(mine, theirs) for (_, mine), theirs in zip(given, before, strict=True))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_options_that_a_sampler_does_not_take_are_refused():
    def refused(model=None, **options):
        rollouts = TextRollouts([[1], [2]], Reward(), max_new_tokens=3, **options)
        return refusal(lambda: trainer({}, model=model or Tokens(), train_loader=rollouts, strategy=GRPOStrategy(2)))

    def sampler(prompts, count, *, temperature, end_token):
        return [[1]] * len(prompts)

    message = refused(sampler=sampler, sampling=Sampling(top_k=3))
    assert message.startswith("TextRollouts(sampling=Sampling(top_k=3")
    assert message.endswith("sampler= does not take sampling=, which this needs; add it, or leave this out")

    class Writing(Tokens):
        def sample(self, prompts, max_new_tokens, *, temperature, end_token):
            return [[1]] * len(prompts)

    message = refused(Writing(), end_token=[1, 2])
    assert message.startswith("TextRollouts(end_token=[1, 2]): the sample() of Writing does not take draw=")


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan, "2"])
def test_the_cap_is_a_positive_number(cap):
    message = refusal(lambda: TextRollouts([[1]], Reward(), importance_cap=cap))
    assert message.startswith(f"TextRollouts(importance_cap={cap!r}): needs a positive number")


def test_a_sampling_is_a_sampling():
    message = refusal(lambda: TextRollouts([[1]], Reward(), sampling={"top_p": 0.5}), TypeError)
    assert message == "TextRollouts(sampling={'top_p': 0.5}): needs a Sampling"


@pytest.mark.parametrize("log_probs", [[[-1.0], [-1.0, -2.0]], [[-1.0, math.nan], [-1.0, -2.0]], [None, [-1.0, -2.0]]])
def test_log_probabilities_that_do_not_fit_are_refused(log_probs):
    def sampler(prompts, count, **options):
        return [Completion([1, 2], log_probs[number % 2]) for number, _ in enumerate(prompts)]

    run, _, _ = texts(GRPOStrategy(2), prompts=PROMPTS, prompts_per_rollout=5, sampler=sampler)
    with pytest.raises(ValueError, match=r"^TextRollouts: the sampler returned log-probabilities that do not fit"):
        run.train()


@pytest.mark.parametrize("likely", [[-1.0], torch.tensor([-1.0]), numpy.array([-1.0])], ids=["list", "torch", "numpy"])
def test_log_probabilities_of_a_sampler_may_be_arrays(likely):
    (found,) = check_completions("TextRollouts", [Completion([1], likely)], 1, 1)
    assert found.log_probs == [-1.0]
    assert type(found.log_probs) is list


@pytest.mark.parametrize("likely", [["x"], 5, [None]], ids=str)
def test_log_probabilities_that_are_not_numbers_are_named(likely):
    with pytest.raises(
        TypeError, match=r"^TextRollouts: the sampler returned .*, or a Completion with these and a log"
    ):
        check_completions("TextRollouts", [Completion([1], likely)], 1, 1)
