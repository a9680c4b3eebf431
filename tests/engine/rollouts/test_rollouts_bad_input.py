"""Policies, rollouts and options that do not fit: refused with words that say what to do, and no weight has moved."""

import builtins
import math
import re

import pytest
import torch
from torch import nn

from pulsetrain.engine import GRPOStrategy, PPOStrategy, SFTStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts, TextRollouts
from pulsetrain.engine.schedules import Exponential, Linear
from tests.support.models import trainer
from tests.support.models_language import Short, Valued, assert_refused, refusal
from tests.support.rollouts import Counting, Policy, Space

PROMPTS = [[1, 2], [3], [0]]


def texts(strategy=None, *, model=None, updates=1, **options):
    """A run over texts of 2 groups of 2."""
    options = {"reward": lambda prompts, found: [float(len(each)) for each in found], "max_new_tokens": 3, **options}
    rollouts = TextRollouts(options.pop("prompts", PROMPTS), prompts_per_rollout=2, **options)
    torch.manual_seed(0)
    strategy = strategy or GRPOStrategy(2)
    return trainer({"max_updates": updates}, model=model or Short(), train_loader=rollouts, strategy=strategy)


def steps(strategy=None, *, model=None, environment=Counting):
    rollouts = EnvironmentRollouts(environment, 2, 4)
    strategy = strategy or PPOStrategy(minibatch_epochs=1)
    return trainer({"max_updates": 2}, model=model or Policy(), train_loader=rollouts, strategy=strategy)


# -------------------------------------------------------------------------------------------- what comes of a rollout


def later(first, then):
    """A function that does as it should in the first rollout, and not in the second."""
    calls = []

    def both(*arguments, **options):
        calls.append(arguments)
        return (first if len(calls) == 1 else then)(*arguments, **options)

    return both


def good_reward(prompts, completions):
    return [1.0, 2.0, 3.0, 5.0]


def good_sampler(prompts, max_new_tokens, **options):
    return [[1, 2]] * len(prompts)


REWARDS = [
    ([1.0, math.nan, 0.0, 0.0], ValueError, "returned nan for text 1: needs finite numbers, and 1 of 4 are not"),
    ([1.0, 0.0, math.inf, -math.inf], ValueError, "returned inf for text 2: needs finite numbers, and 2 of 4"),
    ([1e300, 0.0, 0.0, 0.0], ValueError, "returned inf for text 0"),
    ([1.0, 2.0], ValueError, "returned numbers of shape (2,) for 4 texts; needs one for each"),
    ([[1.0]] * 4, ValueError, "returned numbers of shape (4, 1) for 4 texts"),
    (2.0, ValueError, "returned numbers of shape () for 4 texts"),
    (None, TypeError, "returned None; needs a list of numbers, one for each of the 4 texts"),
    (["good"] * 4, TypeError, "returned ['good', 'good', 'good', 'good']; needs a list of numbers"),
    ([[1.0], [1.0, 2.0], [], []], TypeError, "needs a list of numbers, one for each of the 4 texts"),
]


@pytest.mark.parametrize(("given", "error", "message"), REWARDS, ids=[str(given) for given, *_ in REWARDS])
def test_rewards_that_are_not_numbers_are_refused(given, error, message):
    run = texts(reward=later(good_reward, lambda prompts, completions: given), updates=3)
    assert_refused(run, error, ["TextRollouts: the reward 'both' ", message])
    assert run.state.update == 1


def test_a_text_that_no_reward_applies_to_is_named():
    run = texts(reward=later(good_reward, lambda prompts, completions: [1.0, None, 2.0, 3.0]), updates=3)
    assert_refused(run, ValueError, ["TextRollouts: no reward applies to text 1 of 4, for the prompt ["])
    assert run.state.update == 1


@pytest.mark.parametrize(
    "given", [(1.0, 2, 3, 4.5), torch.tensor([1, 2, 3, 4]), torch.ones(4, dtype=torch.float64, requires_grad=True)]
)
def test_rewards_may_be_any_numbers(given):
    run = texts(reward=lambda prompts, completions: given)
    run.train()
    assert run.history["rollout/reward"] == [pytest.approx(float(torch.as_tensor(given).detach().double().mean()))]


SAMPLES = [
    ([], ValueError, "TextRollouts: the sampler returned 0 texts of 0 to 0 tokens; needs 4 of 1 to 3"),
    ([[1]] * 3, ValueError, "TextRollouts: the sampler returned 3 texts of 1 to 1 tokens; needs 4 of 1 to 3"),
    ([[1, 2], [], [1], [1]], ValueError, "the sampler returned 4 texts of 0 to 2 tokens; needs 4 of 1 to 3"),
    ([[1, 2, 3, 4]] * 4, ValueError, "the sampler returned 4 texts of 4 to 4 tokens; needs 4 of 1 to 3"),
    (None, TypeError, "TextRollouts: the sampler returned None; needs a list of token ids for each of the 4 prompts"),
    ([1, 2, 3, 4], TypeError, "TextRollouts: the sampler returned [1, 2, 3, 4]; needs a list of token ids"),
    (["one"] * 4, TypeError, "TextRollouts: the sampler returned ['one', 'one', 'one', 'one']"),
    (
        [[99]] * 4,
        ValueError,
        "=99): needs ids from 0 to 4, as the logits have a vocabulary of 5, and 4 of 8 tokens",
    ),
    ([[99, 1]] * 4, IndexError, "from 1 to 99"),
]


@pytest.mark.parametrize(("given", "error", "message"), SAMPLES, ids=[str(given) for given, *_ in SAMPLES])
def test_texts_that_are_not_token_lists_are_refused(given, error, message):
    run = texts(sampler=later(good_sampler, lambda *arguments, **options: given), updates=3)
    assert_refused(run, error, [message])
    assert run.state.update == 1


def test_prompts_of_another_vocabulary_are_reported():
    run = texts(prompts=[[1], [70]])
    assert_refused(run, IndexError, ["in TextRollouts, while drawing texts for 4 prompts of tokens 1 to 70"])


def test_an_exception_of_the_reward_reaches_the_caller():
    def fail(prompts, completions):
        raise KeyError("no score")

    assert_refused(texts(reward=fail), KeyError, ["no score"])


def test_a_model_without_values_is_not_a_critic_of_texts_nor_of_steps():
    refused = ["needs a pair (logits, values), values of shape (2, ", "WithValueHead"]
    run = texts(PPOStrategy(), reward=lambda prompts, completions: [1.0, 2.0])
    assert_refused(run, TypeError, refused)

    class Actor(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)

    assert_refused(steps(model=Actor()), TypeError, ["needs a pair (logits, values), values of shape (2,)"])


def test_a_policy_for_other_actions_is_refused():
    class Other(Policy):
        def __init__(self):
            super().__init__()
            self.actor = nn.Linear(2, 3)

    refused = "EnvironmentRollouts: the policy returned logits of shape (2, 3); needs finite numbers, shape "
    assert_refused(steps(model=Other()), ValueError, [refused, "this environment has 2 actions"])


def test_a_policy_that_gives_nan_is_refused():
    model = Policy()
    with torch.no_grad():
        model.actor.bias.fill_(math.inf)
    assert_refused(steps(model=model), ValueError, ["logits of shape (2, 2) that are not finite"])


def test_rewards_of_an_environment_that_are_not_finite_are_refused():
    class Endless(Counting):
        def step(self, action):
            seen, reward, *rest = super().step(action)
            return seen, math.inf if self.step_number == 3 else reward, *rest

    refused = ["EnvironmentRollouts: rewards[2, 0]=inf: needs finite numbers, and 2 of 8 are not"]
    assert_refused(steps(environment=Endless), ValueError, refused)


# ----------------------------------------------------------------------------------------------- what does not fit


def rollouts(**options):
    return TextRollouts(PROMPTS, good_reward, prompts_per_rollout=2, max_new_tokens=3, **options)


def run_of(data, strategy, model=None):
    return trainer({}, model=model or Valued(), train_loader=data, strategy=strategy)


def test_rollouts_serve_one_trainer_which_learns_from_rollouts():
    given = rollouts()
    assert refusal(lambda: len(given)) == "TextRollouts: has no policy yet; pass it to a Trainer as train_loader"
    assert "has no policy yet" in refusal(lambda: next(iter(given)))
    for strategy in (SFTStrategy(), "supervised"):
        refused = refusal(lambda strategy=strategy: run_of(given, strategy))
        assert "does not learn from rollouts; use PPOStrategy or GRPOStrategy" in refused
    refused = refusal(lambda: run_of(given, GRPOStrategy(2, minibatch_size=3)))
    assert refused.startswith("GRPOStrategy(minibatch_size=3): a rollout of TextRollouts has 4 rows, which do not make")
    run_of(given, GRPOStrategy(2, minibatch_size=4))  # what was refused has left no trace
    refused = refusal(lambda: run_of(given, GRPOStrategy(2)))
    assert refused == "TextRollouts: already belongs to another trainer; give each Trainer its own rollouts"


def test_groups_are_compared_over_texts_and_not_over_steps():
    refused = refusal(lambda: steps(GRPOStrategy(2)))
    assert refused == "EnvironmentRollouts: GRPOStrategy learns from texts; use PPOStrategy"


def test_texts_fit_the_models_context():
    refused = refusal(lambda: run_of(TextRollouts([[1] * 4], good_reward, max_new_tokens=4), GRPOStrategy(2)))
    assert refused.startswith(
        "TextRollouts(max_new_tokens=4): with the longest prompt a text has 8 tokens, more than the"
    )
    assert "context of 6" in refused
    assert refused.endswith("cut the prompts, or pass a smaller max_new_tokens")
    refused = refusal(lambda: run_of(rollouts(pad_to=8), GRPOStrategy(2)))
    assert refused.startswith("TextRollouts(pad_to=8): rows are longer than the model's context of 6")
    run_of(TextRollouts([[1] * 4], good_reward, max_new_tokens=3, pad_to=7), GRPOStrategy(2))


TEXT_OPTIONS = [
    (lambda: TextRollouts([], good_reward), "TextRollouts(prompts=[]): needs token ids"),
    (lambda: TextRollouts([[1], []], good_reward), "TextRollouts(prompts[1]=[]): needs token ids"),
    (lambda: TextRollouts(PROMPTS, good_reward, max_new_tokens=0), "TextRollouts(max_new_tokens=0): needs a whole"),
    (lambda: TextRollouts(PROMPTS, good_reward, max_new_tokens=2.0), "TextRollouts(max_new_tokens=2.0): needs a whole"),
    (lambda: TextRollouts(PROMPTS, good_reward, prompts_per_rollout=True), "TextRollouts(prompts_per_rollout=True)"),
    (
        lambda: rollouts(pad_to=4),
        "TextRollouts(pad_to=4): the longest prompt and max_new_tokens=3 make 5 tokens; pass",
    ),
]


@pytest.mark.parametrize(("make", "message"), TEXT_OPTIONS, ids=[message for _, message in TEXT_OPTIONS])
def test_options_of_texts_are_checked(make, message):
    assert refusal(make).startswith(message)


def test_a_reward_is_a_function():
    assert refusal(lambda: TextRollouts(PROMPTS, 1.0), TypeError).startswith(
        "TextRollouts(reward=1.0): needs a function"
    )


POLICY_OPTIONS = [
    (PPOStrategy, "kl_coef", -0.1, "at least 0"),
    (PPOStrategy, "kl_coef", math.nan, "at least 0"),
    (PPOStrategy, "kl_coef", math.inf, "at least 0"),
    (PPOStrategy, "kl_coef", "0.1", "at least 0"),
    (PPOStrategy, "clip_range", 1.0, "a positive number below 1"),
    (PPOStrategy, "clip_range", 0.0, "a positive number below 1"),
    (PPOStrategy, "clip_range_high", -1.0, "a positive number"),
    (PPOStrategy, "value_coef", -1.0, "at least 0"),
    (PPOStrategy, "value_clip_range", 0.0, "a positive number"),
    (PPOStrategy, "entropy_coef", -1.0, "at least 0"),
    (PPOStrategy, "target_kl", 0.0, "a positive number"),
    (PPOStrategy, "adaptive_kl", -0.1, "a positive number"),
    (PPOStrategy, "temperature", 0.0, "a positive number"),
    (PPOStrategy, "minibatch_epochs", 0, "a whole number of at least 1"),
    (PPOStrategy, "minibatch_size", 2.5, "a whole number of at least 1"),
    (GRPOStrategy, "group_size", 1, "a whole number of at least 2"),
    (GRPOStrategy, "group_size", 2.0, "a whole number of at least 2"),
    (GRPOStrategy, "kl_coef", -0.1, "at least 0"),
    (GRPOStrategy, "clip_range", 1.0, "a positive number below 1"),
    (GRPOStrategy, "temperature", -1, "a positive number"),
]


@pytest.mark.parametrize(("strategy", "name", "value", "needs"), POLICY_OPTIONS)
def test_options_of_a_policy_are_checked(strategy, name, value, needs):
    refused = refusal(lambda: strategy(**{name: value}))
    assert refused.startswith(f"{strategy.__name__}({name}={value!r}): needs a")
    assert refused.endswith(needs)


OTHER_OPTIONS = [
    (lambda: PPOStrategy(gamma=1.5), ["gamma=1.5", "from 0 to 1"]),
    (lambda: PPOStrategy(lam=-0.5), ["lam=-0.5", "from 0 to 1"]),
    (lambda: PPOStrategy(0.0, adaptive_kl=0.1), ["PPOStrategy(kl_coef=0.0, adaptive_kl=0.1)", "leave adaptive_kl out"]),
    (lambda: PPOStrategy(reference="frozen"), ["PPOStrategy(reference='frozen'): needs 'copy', a model, or None"]),
    (lambda: GRPOStrategy(kl_coef=0.1, reference=None), ["GRPOStrategy(kl_coef=0.1, reference=None)", "kl_coef=0.0"]),
    (lambda: GRPOStrategy(normalization="tokens"), ["normalization='tokens'", "token_mean"]),
    (lambda: GRPOStrategy(normalization="dr_grpo"), ["normalization='dr_grpo'", "max_length"]),
    (lambda: GRPOStrategy(scale_rewards="groups"), ["scale_rewards='groups'", "group"]),
]


@pytest.mark.parametrize(("make", "parts"), OTHER_OPTIONS, ids=[parts[0] for _, parts in OTHER_OPTIONS])
def test_options_that_do_not_go_together_are_refused(make, parts):
    refused = refusal(make)
    for part in parts:
        assert part in refused


# ------------------------------------------------------------------------------------------------------ environments


def test_an_environment_is_a_name_or_a_function_that_makes_one():
    refused = refusal(lambda: EnvironmentRollouts(Counting()), TypeError)
    assert refused.startswith("EnvironmentRollouts(environment=Counting): needs a name, or a function that creates")
    for name, value in (("environments", 0), ("steps", 1.5)):
        refused = refusal(lambda name=name, value=value: EnvironmentRollouts(Counting, **{name: value}))
        assert refused == f"EnvironmentRollouts({name}={value!r}): needs a whole number of at least 1"


def test_an_environment_that_gymnasium_does_not_know_is_named():
    pytest.importorskip("gymnasium", reason="gymnasium is not there: pip install 'pulsetrain[gymnasium]'")
    refused = refusal(lambda: EnvironmentRollouts("CartPoles-v1"))
    assert refused.startswith("EnvironmentRollouts(environment='CartPoles-v1'): ")
    assert "CartPole" in refused


def test_without_gymnasium_the_extra_is_named(monkeypatch):
    before = builtins.__import__

    def importing(name, *arguments, **options):
        if name == "gymnasium":
            raise ImportError(name)
        return before(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", importing)
    refused = refusal(lambda: EnvironmentRollouts("CartPole-v1"))
    assert re.search(r"environment='CartPole-v1'\): gymnasium is not installed; pip install 'pulsetrain\[gym", refused)
    assert EnvironmentRollouts(Counting).environments == 8


SPACES = [
    (Space(shape=(2,)), Space(shape=(2,), dtype="float32"), "actions are"),
    (Space(n=3, start=1), Space(shape=(2,), dtype="float32"), "actions are"),
    (Space(spaces=()), Space(shape=(2,), dtype="float32"), "actions are"),
    (Space(n=2), Space(n=16, shape=()), "observations are"),
    (Space(n=2), Space(spaces=()), "observations are"),
]


@pytest.mark.parametrize(("actions", "observations", "message"), SPACES)
def test_spaces_that_are_not_served_are_refused(actions, observations, message):
    class Other(Counting):
        def __init__(self):
            super().__init__()
            self.action_space, self.observation_space = actions, observations

    refused = refusal(lambda: EnvironmentRollouts(Other))
    assert f"EnvironmentRollouts: the environment's {message}" in refused
    assert "; needs " in refused


SCHEDULES = [
    (lambda: PPOStrategy(clip_range=Linear(1.0, 9)), "PPOStrategy(clip_range=1.0): needs a positive number below 1"),
    (lambda: PPOStrategy(entropy_coef="0.1"), "PPOStrategy(entropy_coef='0.1'): needs a finite number of at least 0"),
    (
        lambda: PPOStrategy(clip_range=Exponential(0.5, 2.0)).scheduled(2),
        "PPOStrategy(clip_range=Exponential(initial_lr=0.5, gamma=2.0)): is 2.0 after 2 rollouts; needs a number of at "
        "least 0 and below 1",
    ),
]


@pytest.mark.parametrize(("make", "message"), SCHEDULES, ids=[message for _, message in SCHEDULES])
def test_schedules_out_of_range_are_refused(make, message):
    assert refusal(make) == message
