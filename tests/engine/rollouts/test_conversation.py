"""Conversations: what is learnt of them, token by token, when they end, and that they resume."""

import re

import numpy
import pytest
import torch

from pulsetrain.engine import Events, Every, GRPOStrategy, PPOStrategy
from pulsetrain.engine.rollouts import ConversationRollouts, Sampling, TextRollouts
from pulsetrain.engine.rollouts.completions import Completion
from pulsetrain.handlers import Checkpointer
from tests.support import formulas
from tests.support.models import Tokens, trainer
from tests.support.models_language import refusal
from tests.support.rollouts import PROMPTS, VOCABULARY, Observed, Reward, Valued
from tests.support.runs_backends import saved
from tests.support.runs_strategies import differences

MARK = 5  # what environments write


class Once:
    """Ends after one turn, with the reward that the tests of single turns give."""

    def reset(self, prompt):
        self.prompt = prompt
        return []

    def step(self, completion):
        return [MARK] * 3, float(sum(completion) % 5), True


class Counting:
    """Answers each turn with as many marks as it has seen turns; the third turn is the last."""

    made = ()

    def reset(self, prompt):
        self.turns = []
        Counting.made = (*Counting.made, self)
        return [MARK] * (prompt[0] % 2)

    def step(self, completion):
        self.turns.append(completion)
        completion = list(completion)
        completion.clear()  # what an environment does with its argument changes no text
        number = len(self.turns)
        return [MARK] * number, 0.5 * number + sum(self.turns[-1]), number == 3


@pytest.fixture(autouse=True)
def _nothing_made():
    Counting.made = ()


def talks(strategy, environment=Counting, *, updates=1, handlers=(), config=None, prompts=PROMPTS, **options):
    torch.manual_seed(0)
    model = Valued() if isinstance(strategy, PPOStrategy) else Tokens(VOCABULARY)
    options = {"max_new_tokens": 2, "max_length": 20, "prompts_per_rollout": 5, **options}
    rollouts = ConversationRollouts(prompts, environment, options.pop("reward", None), **options)
    settings = {"max_updates": updates, "learning_rate": 0.5, "seed": 3, **(config or {})}
    run = trainer(settings, model=model, train_loader=rollouts, strategy=strategy, handlers=list(handlers))
    return run, Observed(run)


def rows_of(batch):
    """Each row as (tokens, mask), with its padding."""
    return {
        (tuple(tokens.tolist()), tuple(mask.tolist()))
        for tokens, mask in zip(batch["input_ids"], batch["completion_mask"], strict=True)
    }


def expected_rows(prompts, environments, width):
    found = set()
    for prompt, environment in zip(prompts, environments, strict=True):
        start = [MARK] * (prompt[0] % 2)
        tokens, mask = [*prompt, *start], [False] * (len(prompt) + len(start))
        for number, turn in enumerate(environment.turns, 1):
            shown = [MARK] * number if number < len(environment.turns) else []
            tokens, mask = [*tokens, *turn, *shown], [*mask, *[True] * len(turn), *[False] * len(shown)]
        found.add((tuple(tokens + [0] * (width - len(tokens))), tuple(mask + [False] * (width - len(mask)))))
    return found


@pytest.mark.parametrize("end_token", [None, 0])
def test_each_token_that_the_policy_wrote_is_learnt_and_no_other(end_token):
    reward = Reward()
    run, recorded = talks(GRPOStrategy(2), end_token=end_token, reward=reward)
    run.train()
    (batch,) = recorded.batches
    assert rows_of(batch) == expected_rows(reward.prompts[0], Counting.made, batch["input_ids"].shape[1])
    assert all(len(environment.turns) == 3 for environment in Counting.made)
    written = sum(len(turn) for environment in Counting.made for turn in environment.turns)
    assert batch["completion_mask"].sum() == written
    metrics = recorded.rollouts[0].metrics
    assert metrics["rollout/length"] == pytest.approx(written / 10)
    assert metrics["rollout/turns"] == 3.0
    assert metrics["rollout/ended"] == 1.0


def test_the_reward_is_the_sum_of_those_of_the_turns_and_of_the_function():
    reward = Reward()
    run, recorded = talks(GRPOStrategy(2), reward=reward)
    run.train()
    earned = [0.5 + 1.0 + 1.5 + sum(map(sum, environment.turns)) for environment in Counting.made]
    total = numpy.array(earned) + reward.given[0]
    assert recorded.rewards[0].mean == pytest.approx(total.mean())
    assert recorded.rewards[0].std == pytest.approx(total.std(), rel=1e-6)
    # the function sees all that follows the prompt
    assert all(MARK in completion for completion in reward.completions[0])


@pytest.mark.parametrize("named", [False, True])
def test_the_environment_is_one_of_several_rewards_with_weights(named):
    def brief(completion_ids):
        return [-float(len(each)) for each in completion_ids]

    run, recorded = talks(
        GRPOStrategy(2), reward={"brief": brief} if named else [brief], reward_weights=[2.0, 0.5], end_token=0
    )
    run.train()
    earned = [3.0 + sum(map(sum, environment.turns)) for environment in Counting.made]
    metrics = recorded.rollouts[0].metrics
    assert metrics["rollout/reward/environment_reward"] == pytest.approx(sum(earned) / 10)
    total = 2.0 * sum(earned) / 10 + 0.5 * metrics["rollout/reward/brief"]
    assert metrics["rollout/reward"] == pytest.approx(total)


def test_conversations_are_a_validation_set():
    held_out = ConversationRollouts([[4], [5, 2]], Counting, max_new_tokens=2, max_length=20, prompts_per_rollout=1)
    training = TextRollouts(PROMPTS, Reward(), max_new_tokens=2, prompts_per_rollout=5)
    run = trainer(
        {"max_updates": 2, "learning_rate": 0.5}, model=Tokens(VOCABULARY), train_loader=training,
        val_loader=held_out, strategy=GRPOStrategy(2),
    )  # fmt: skip
    run.train()
    last = Counting.made[-2:]
    expected = sum(3.0 + sum(map(sum, environment.turns)) for environment in last) / 2
    assert run.history["val/reward"][-1] == pytest.approx(expected)
    assert run.history["val/turns"][-1] == 3.0
    assert run.history["val/truncated"][-1] == 0.0


def test_conversations_that_were_cut_count_as_truncated():
    strategy = GRPOStrategy(2, mask_truncated=True)
    run, recorded = talks(strategy, prompts=[[2, 4, 4], [4]], prompts_per_rollout=2, max_length=11)
    run.train()
    assert recorded.rollouts[0].metrics["rollout/truncated"] == 0.5
    cut = recorded.batches[0]["truncated"]
    assert cut.sum() == 2
    assert (recorded.batches[0]["input_ids"][cut][:, :3] == torch.tensor([2, 4, 4])).all()


@pytest.mark.parametrize("make", [lambda: GRPOStrategy(2, 0.1), lambda: PPOStrategy(gamma=0.9, lam=0.8)])
@pytest.mark.parametrize("options", [{}, {"end_token": 0, "sampling": Sampling(top_p=0.9)}], ids=str)
def test_conversations_of_one_turn_are_texts(make, options):
    run, recorded = talks(make(), Once, updates=3, max_new_tokens=4, **options)
    run.train()
    torch.manual_seed(0)
    model = Valued() if isinstance(run.strategy, PPOStrategy) else Tokens(VOCABULARY)
    rollouts = TextRollouts(PROMPTS, Reward(), max_new_tokens=4, prompts_per_rollout=5, **options)
    settings = {"max_updates": 3, "learning_rate": 0.5, "seed": 3}
    single = trainer(settings, model=model, train_loader=rollouts, strategy=make())
    other = Observed(single)
    single.train()
    for mine, theirs in zip(recorded.batches, other.batches, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert all(torch.equal(value, single.model.state_dict()[name]) for name, value in run.model.state_dict().items())


def test_advantages_of_ppo_run_from_turn_to_turn_past_what_the_environment_wrote():
    strategy = PPOStrategy(0.2, gamma=0.9, lam=0.7, normalize_advantages=False, minibatch_epochs=2)
    run, recorded = talks(strategy, updates=4)
    reference = run.model.table.weight.detach().double().numpy().copy()
    weights = {}

    @run.on(Events.ROLLOUT_STARTED)
    def keep():
        Counting.made = ()
        weights["table"] = run.model.table.weight.detach().double().numpy().copy()
        weights["worth"] = run.model.worth.weight.detach().double().numpy()[:, 0].copy()

    run.train()
    batch = recorded.batches[-1]
    assert numpy.abs(weights["table"] - reference).max() > 0.01
    earned = {
        tuple(token for turn in environment.turns for token in turn): 3.0 + sum(map(sum, environment.turns))
        for environment in Counting.made
    }
    gaps = 0
    for number, (tokens, mask) in enumerate(zip(batch["input_ids"], batch["completion_mask"], strict=True)):
        places = numpy.nonzero(mask[1:].numpy())[0]
        gaps += int((numpy.diff(places) > 1).any())
        text = tokens.numpy()
        before, after = text[places], text[places + 1]
        now, then = (formulas.log_probs_of(table[before], after) for table in (weights["table"], reference))
        rewards = (-0.2 * (now - then)).tolist()
        rewards[-1] += earned[tuple(after.tolist())]
        values = weights["worth"][before].tolist()
        ends = [False] * (len(places) - 1) + [True]
        expected = formulas.gae_by_loop(rewards, [*values, 0.0], ends, 0.9, 0.7)
        numpy.testing.assert_allclose(batch["advantages"][number].numpy()[places], expected, atol=2e-6)
        returns = [a + v for a, v in zip(expected, values, strict=True)]
        numpy.testing.assert_allclose(batch["returns"][number].numpy()[places], returns, atol=2e-6)
        outside = numpy.setdiff1d(numpy.arange(len(text) - 1), places)
        assert not batch["advantages"][number].numpy()[outside].any()
    assert gaps == 5, "there was something to get past in each row"


# ------------------------------------------------------------------------------------------------------- when they end


@pytest.mark.parametrize(("max_turns", "turns"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_a_conversation_ends_after_the_largest_number_of_turns(max_turns, turns):
    run, recorded = talks(GRPOStrategy(2), max_turns=max_turns)
    run.train()
    assert {len(environment.turns) for environment in Counting.made} == {turns}
    assert recorded.rollouts[0].metrics["rollout/ended"] == float(turns == 3)
    mask = recorded.batches[0]["completion_mask"]
    tokens = recorded.batches[0]["input_ids"]
    last = [int(row.nonzero().max()) for row in mask]
    assert max(last) == tokens.shape[1] - 1, "nothing is shown after the last turn"


def test_a_conversation_ends_where_another_turn_might_not_fit():
    # a prompt of 3 or 1, turns of 2, and marks of 1 and 2: 3 + 2 + 1 + 2 = 8, and 8 + 2 + 2 is too much for 11
    run, recorded = talks(GRPOStrategy(2), prompts=[[2, 4, 4], [4]], prompts_per_rollout=2, max_length=11)
    run.train()
    lengths = {len(environment.turns) for environment in Counting.made}
    assert lengths == {2, 3}
    assert recorded.rollouts[0].metrics["rollout/ended"] == 0.5
    assert recorded.batches[0]["input_ids"].shape[1] <= 11


def test_conversations_that_have_ended_are_asked_no_further():
    asked = []

    class Ending(Counting):
        def step(self, completion):
            observation, reward, _ = super().step(completion)
            return observation, reward, len(self.turns) >= 1 + completion[0] % 3

    def sampler(prompts, count, *, temperature, end_token, seeds):
        asked.append((len(prompts), list(seeds)))
        return [Completion([number % 3, 1]) for number, _ in enumerate(prompts)]

    run, recorded = talks(GRPOStrategy(2), Ending, sampler=sampler, max_turns=4)
    run.train()
    assert [count for count, _ in asked] == sorted((count for count, _ in asked), reverse=True)
    assert asked[0][0] == 10 > asked[-1][0]
    seeds = [seed for _, given in asked for seed in given]
    assert len(set(seeds)) == len(seeds), "each turn has random numbers of its own"
    mean = sum(len(environment.turns) for environment in Counting.made) / 10
    assert recorded.rollouts[0].metrics["rollout/turns"] == pytest.approx(mean)


def test_a_sampler_that_is_not_the_policy_is_corrected_over_all_turns():
    def sampler(prompts, count, *, temperature, end_token):
        return [Completion([1, 2], [-0.25, -0.5]) for _ in prompts]

    run, recorded = talks(GRPOStrategy(2), sampler=sampler, max_turns=2, importance_cap=1e9)
    table = run.model.table.weight.detach().double().log_softmax(-1)
    run.train()
    ratios = []
    for tokens, mask in zip(recorded.batches[0]["input_ids"], recorded.batches[0]["completion_mask"], strict=True):
        places = mask.nonzero().flatten()
        assert len(places) == 4
        ratios.append(float((table[tokens[places - 1], tokens[places]].sum() - 2 * (-0.75)).exp()))
    assert recorded.rollouts[0].metrics["rollout/sampler_ratio"] == pytest.approx(sum(ratios) / 10, rel=1e-5)


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_run_resumes_inside_a_rollout_bit_for_bit(kind, tmp_path):
    def run(folder):
        strategies = {
            "grpo": lambda: GRPOStrategy(2, 0.1, minibatch_epochs=2, minibatch_size=5),
            "ppo": lambda: PPOStrategy(minibatch_epochs=2, minibatch_size=1),
        }
        saving = Checkpointer(tmp_path / folder, every=Every(iterations=1), keep_last=100)
        return talks(strategies[kind](), end_token=0, config={"max_updates": 12}, handlers=[saving])[0]

    whole = run("whole")
    whole.train()
    for cut in (3, 4, 9):
        again = run(f"again {cut}")
        again.train(resume=saved(tmp_path / "whole", cut))
        assert differences(again, whole) == set()


# ------------------------------------------------------------------------------------------------------------- refusals


def made(environment=Counting, **options):
    return ConversationRollouts(PROMPTS, environment, **{"max_length": 20, "max_new_tokens": 2, **options})


WRONG = [
    ({"max_length": 0}, "ConversationRollouts(max_length=0): needs a whole number of at least 1"),
    ({"max_length": 4}, "ConversationRollouts(max_length=4): the longest prompt and one turn make 5 tokens; pass"),
    ({"max_turns": 0}, "ConversationRollouts(max_turns=0): needs a whole number of at least 1"),
    ({"pad_to": 19}, "ConversationRollouts(pad_to=19): rows may have 20 tokens; pass at least that"),
    ({"max_new_tokens": 0}, "TextRollouts(max_new_tokens=0): needs a whole number of at least 1"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_numbers_out_of_range_are_refused(options, message):
    assert refusal(lambda: made(**options)).startswith(message)


def test_an_environment_is_a_function_that_makes_one():
    message = refusal(lambda: made(Counting()), TypeError)
    assert message.startswith("ConversationRollouts(environment=")
    assert message.endswith("needs a function that makes an environment")
    one = Counting()
    with pytest.raises(ValueError, match="returns the same environment again; let it make a new one each time"):
        talks(GRPOStrategy(2), lambda: one)[0].train()


def test_conversations_fit_the_models_context_and_the_strategys_length():
    class Short(Tokens):
        context = 12

    def run(strategy, **options):
        return trainer({}, model=Short(), train_loader=made(**options), strategy=strategy)

    message = refusal(lambda: run(GRPOStrategy(2)))
    assert message.startswith("ConversationRollouts(max_length=20): more than the model's context of 12 plus the token")
    strategy = GRPOStrategy(2, normalization="dr_grpo", max_length=5)
    message = refusal(lambda: run(strategy, max_length=13, max_turns=3))
    assert message == (
        "GRPOStrategy(max_length=5): the policy may write 6 tokens in one conversation; pass at least that"
    )
    run(GRPOStrategy(2, normalization="dr_grpo", max_length=6), max_length=13, max_turns=3)


class Wrong(Counting):
    reset_gives, step_gives = [], ([], 0.0, True)

    def reset(self, prompt):
        return self.reset_gives

    def step(self, completion):
        return self.step_gives


STEPS = [
    ({"reset_gives": None}, TypeError, "the environment's reset() returned None as its observation; needs token ids"),
    ({"reset_gives": [1] * 30}, ValueError, "after reset(), the conversation of row 0 has 32 tokens, and"),
    ({"step_gives": ([], 0.0)}, TypeError, "step() returned ([], 0.0); needs (observation, reward, done)"),
    ({"step_gives": ([], "1", True)}, TypeError, "step() returned ([], '1', True); needs (observation, reward, done)"),
    ({"step_gives": ("hi", 0.0, False)}, TypeError, "step() returned 'hi' as its observation; needs token ids"),
    ({"step_gives": ([], float("nan"), True)}, ValueError, "returned nan for text 0: needs finite numbers"),
]


@pytest.mark.parametrize(("given", "error", "message"), STEPS, ids=str)
def test_what_is_not_an_answer_is_refused(given, error, message):
    run, _ = talks(GRPOStrategy(2), type("Environment", (Wrong,), given), prompts=[[2, 2]], prompts_per_rollout=1)
    with pytest.raises(error, match=re.escape(message)):
        run.train()
    assert run.state.update == 0


def test_a_token_of_the_environment_that_the_model_does_not_know_is_named():
    given = {"step_gives": ([-3], 0.0, False)}
    run, _ = talks(GRPOStrategy(2), type("Environment", (Wrong,), given), prompts=[[2, 2]], prompts_per_rollout=1)
    with pytest.raises(ValueError, match=r"a prompt, or what follows it, has the token -3; tokens are numbered from 0"):
        run.train()


@pytest.mark.parametrize("place", ["reset", "step"])
def test_an_exception_of_the_environment_names_the_conversation(place):
    def fail(self, tokens):
        raise KeyError("no entry")

    run, _ = talks(GRPOStrategy(2), type("Environment", (Counting,), {place: fail}))
    with pytest.raises(KeyError, match="no entry") as caught:
        run.train()
    note = f"in the environment's {place}(), conversation of row 0, after {int(place == 'step')} turns"
    assert any(note in each for each in caught.value.__notes__)
