"""Reward functions as users write them: how they are called, what they may return, and what is refused."""

import asyncio
import functools
import math

import numpy
import pytest
import torch

from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.losses import grpo_advantages
from pulsetrain.engine.rollouts.rewards import Rewards
from tests.support import trl_trainers

PROMPTS, COMPLETIONS, IDS = ["a", "b", "c"], ["x", "yy", "zzz"], [[1], [2, 2], [3, 3, 3]]
COLUMNS = {"answer": ["x", "no", None], "level": [1, 2, 3]}


def scored(functions, weights=None, columns=COLUMNS):
    rewards = Rewards(functions, weights, columns)
    return rewards, rewards(PROMPTS, COMPLETIONS, IDS, columns)


class Called:
    """Records how it is called."""

    def __init__(self, function):
        self.given = None
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *arguments, **keywords):
        self.given = (arguments, keywords)
        return [1.0] * 3


# ------------------------------------------------------------------------------------------------- how they are called


def by_position(p, c): ...
def by_position_and_column(p, c, level): ...
def by_position_and_anything(p, c, **more): ...
def by_keyword(prompts, completions): ...
def by_keyword_without_prompts(completions): ...
def by_keyword_and_column(completions, answer, level=0): ...
def by_keyword_and_ids(completions, completion_ids): ...
def by_ids(completion_ids): ...
def by_keyword_and_anything(completions, **more): ...
def by_anything(**given): ...
def by_only_keywords(*, completions, answer): ...
def by_only_a_column(*, answer): ...
def by_position_alone(prompts, completions, /): ...
def by_any_position(prompts, *completions): ...


EVERYTHING = {"prompts": PROMPTS, "completions": COMPLETIONS, "completion_ids": IDS, **COLUMNS}
CALLS = [
    (by_position, 2, []),
    (by_position_and_column, 2, ["level"]),
    (by_position_and_anything, 2, ["answer", "level"]),
    (by_keyword, 0, ["prompts", "completions"]),
    (by_keyword_without_prompts, 0, ["completions"]),
    (by_keyword_and_column, 0, ["completions", "answer", "level"]),
    (by_keyword_and_ids, 0, ["completions", "completion_ids"]),
    (by_ids, 0, ["completion_ids"]),
    (by_keyword_and_anything, 0, list(EVERYTHING)),
    (by_anything, 0, list(EVERYTHING)),
    (by_only_keywords, 0, ["completions", "answer"]),
    (by_only_a_column, 0, ["answer"]),
    (by_position_alone, 2, []),
    (by_any_position, 2, []),
]


@pytest.mark.parametrize(("function", "placed", "named"), CALLS, ids=[each.__name__ for each, *_ in CALLS])
def test_a_function_gets_what_it_names(function, placed, named):
    called = Called(function)
    scored(called)
    arguments, keywords = called.given
    assert arguments == (PROMPTS, COMPLETIONS)[:placed]
    assert keywords == {name: EVERYTHING[name] for name in named}


def test_a_builtin_a_partial_and_an_object_are_functions():
    class Judge:
        def __call__(self, prompts, completions):
            return [2.0] * 3

    def scaled(scale, completions):
        return [scale] * 3

    found = scored({"object": Judge(), "partial": functools.partial(scaled, 3.0)})[1]
    assert found.tolist() == [[2.0, 3.0]] * 3
    assert Rewards(max).names == ("max",)  # it has no signature


def test_a_module_gets_what_its_forward_names():
    class Judge(torch.nn.Module):
        def forward(self, completions):
            return torch.tensor([float(len(each)) for each in completions], requires_grad=True)

    assert scored(Judge())[1].tolist() == [[1.0], [2.0], [3.0]]


def test_what_a_function_changes_reaches_nobody_else():
    def spoils(prompts, completions, completion_ids):
        for given in (prompts, completions):
            for message in given:
                message[0]["content"] = "spoilt"
        completion_ids[0].append(9)
        prompts.clear()
        return [1.0] * 2

    seen = []

    def looks(prompts, completions, completion_ids):
        seen.append((prompts, completions, completion_ids))
        return [1.0] * 2

    chats = [[{"role": "user", "content": "hi"}] for _ in range(2)]
    answers = [[{"role": "assistant", "content": "yo"}] for _ in range(2)]
    ids = [[1], [2]]
    Rewards([spoils, looks])(chats, answers, ids, {})
    assert seen == [([[{"role": "user", "content": "hi"}]] * 2, [[{"role": "assistant", "content": "yo"}]] * 2, ids)]
    assert ids == [[1], [2]]


def test_asynchronous_functions_are_awaited_together():
    order = []

    async def slow(completions):
        order.append("slow starts")
        await meeting.wait()
        order.append("slow ends")
        return [1.0, None, 3.0]

    async def quick(completions):
        order.append("quick starts")
        meeting.set()  # without this, the other would wait for ever
        return torch.tensor([4.0, 5.0, 6.0])

    meeting = asyncio.Event()
    found = scored([slow, quick, lambda_like])[1]
    assert order == ["slow starts", "quick starts", "slow ends"]
    assert found[:, 1:].tolist() == [[4.0, 0.5], [5.0, 0.5], [6.0, 0.5]]
    assert found[0, 0] == 1.0
    assert math.isnan(found[1, 0])


def lambda_like(completions):
    return [0.5] * 3


def test_asynchronous_functions_work_where_a_loop_runs_already():
    async def one(completions):
        await asyncio.sleep(0)
        return [1.0] * 3

    async def of_a_notebook():
        return scored([one, lambda_like])[1]

    assert asyncio.run(of_a_notebook()).tolist() == [[1.0, 0.5]] * 3


# ----------------------------------------------------------------------------------------------------- what they return


def test_none_is_left_out_of_the_sum_and_of_the_means():
    def one(completions):
        return [1.0, None, 3.0]

    def other(completions):
        return [None, 4, True]

    rewards, parts = scored([one, other], [2.0, 0.5])
    numpy.testing.assert_array_equal(parts, [[1.0, math.nan], [math.nan, 4.0], [3.0, 1.0]])
    expected = numpy.nansum(parts.double().numpy() * [2.0, 0.5], 1)
    assert rewards.totals(parts).tolist() == expected.tolist() == [2.0, 2.0, 6.5]
    assert rewards.metrics(parts) == pytest.approx({
        "reward/one": 2.0, "reward_std/one": 1.0, "reward/other": 2.5, "reward_std/other": 1.5
    })  # fmt: skip


def test_a_function_that_applies_nowhere_has_no_metric():
    rewards, parts = scored({"a": lambda completions: [None] * 3, "b": lambda completions: [1.0] * 3})
    assert rewards.metrics(parts) == {"reward/b": 1.0, "reward_std/b": 0.0}


def test_a_function_alone_has_no_metrics_of_its_own():
    rewards, parts = scored(lambda completions: [1.0, 2.0, 3.0])
    assert rewards.metrics(parts) == {}
    assert scored([lambda_like])[0].metrics(parts[:, :1]) != {}


@pytest.mark.parametrize(
    "given",
    [(1, 2.0, 1), torch.tensor([1.0, 2.0, 1.0], requires_grad=True), numpy.array([1, 2, 1])],
)
def test_numbers_may_come_in_any_form(given):
    parts = scored(lambda completions: given)[1]
    assert parts.dtype == torch.float32
    assert not parts.requires_grad
    assert parts.tolist() == [[1.0], [2.0], [1.0]]


WRONG = [
    ([1.0, 2.0], ValueError, "the reward 'judge' returned numbers of shape (2,) for 3 texts; needs one for each"),
    ([1.0] * 4, ValueError, "the reward 'judge' returned numbers of shape (4,) for 3 texts"),
    (2.0, ValueError, "the reward 'judge' returned numbers of shape () for 3 texts"),
    ([[1.0]] * 3, ValueError, "the reward 'judge' returned numbers of shape (3, 1) for 3 texts"),
    (None, TypeError, "the reward 'judge' returned None; needs a list of numbers, one for each of the 3 texts"),
    (["a", "b", "c"], TypeError, "the reward 'judge' returned ['a', 'b', 'c']; needs a list of numbers"),
    ({"a": 1.0}, TypeError, "the reward 'judge' returned {'a': 1.0}; needs a list of numbers"),
    ([1.0, math.nan, 2.0], ValueError, "the reward 'judge' returned nan for text 1: needs finite numbers, and 1 of 3"),
    ([None, 1.0, -math.inf], ValueError, "the reward 'judge' returned -inf for text 2: needs finite numbers"),
    ([1e300, 0.0, 0.0], ValueError, "the reward 'judge' returned inf for text 0"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=[str(given) for given, *_ in WRONG])
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_not_a_number_for_each_text_is_refused(given, error, message, waits):
    def judge(completions):
        return given

    async def later(completions):
        return given

    with pytest.raises(error) as caught:
        scored({"fine": lambda_like, "judge": later if waits else judge})
    assert str(caught.value).startswith(f"TextRollouts: {message}")


def test_a_text_without_any_reward_is_named():
    functions = {"a": lambda completions: [1.0, None, None], "b": lambda completions: [1.0, 1.0, None]}
    with pytest.raises(ValueError, match=r"no reward applies to text 2 of 3, for the prompt 'c': 'a' and 'b' returned"):
        scored(functions)


@pytest.mark.parametrize("waits", [False, True])
def test_an_exception_names_its_function(waits):
    def fails(completions):
        raise KeyError("no score")

    async def fails_later(completions):
        raise KeyError("no score")

    async def never(completions):  # awaited or not, it must not leave a warning
        await asyncio.sleep(3600)

    with pytest.raises(KeyError) as caught:
        scored({"waits": never, "broken": fails_later if waits else fails})
    assert caught.value.__notes__ == ["in TextRollouts, in the reward 'broken' of 3 texts"]


# ----------------------------------------------------------------------------------------------------- what is refused


def rejects(error, message, *arguments, **options):
    with pytest.raises(error) as caught:
        Rewards(*arguments, **options)
    assert str(caught.value).startswith(message), str(caught.value)


def test_functions_are_callables():
    for given in (1.0, [], {}, [lambda_like, 2], {"a": "b"}, "text"):
        rejects(ArgumentTypeError, "TextRollouts(reward=", given)


def test_each_of_several_functions_has_a_name():
    two = [lambda p, c: [], lambda p, c: []]
    rejects(ConfigurationError, "TextRollouts(reward): each function needs a name of its own, and these are ['<", two)
    rejects(ConfigurationError, "TextRollouts(reward): each function needs a name of its own", [lambda_like] * 2)
    rejects(ConfigurationError, "TextRollouts(reward): each function needs a name of its own", {"": lambda_like})
    rejects(ConfigurationError, "TextRollouts(reward): each function needs a name of its own", {1: lambda_like})


def test_a_column_that_does_not_exist_is_named():
    message = "TextRollouts(reward='by_keyword_and_column'): the function needs 'answer', and the prompts are without "
    rejects(ConfigurationError, message, by_keyword_and_column)
    message = "TextRollouts(reward='by_position_and_column'): the function needs 'level', and the prompts are with the"
    rejects(ConfigurationError, message, [by_keyword, by_position_and_column], None, ["answer"])


def of_texts(texts): ...
def of_nothing(): ...
def of_completions_alone(completions, /): ...
def of_a_column_by_position(prompts, texts, level, /): ...


@pytest.mark.parametrize(
    "function",
    [of_texts, of_nothing, of_completions_alone, of_a_column_by_position, lambda texts: [], type("Judge", (), {})],
)
def test_a_function_that_cannot_be_called_is_refused_at_once(function):
    rejects(ConfigurationError, "TextRollouts(reward=", function, None, ["level"])


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 2.0, 3.0], [1.0, math.nan], ["1", 2], {"by_keyword": 1.0}, {"a": 1, "b": 2}, 1.0, "ab"]
)
def test_weights_are_a_number_for_each_function(weights):
    message = "TextRollouts(reward_weights="
    rejects(ConfigurationError, message, [by_keyword, lambda_like], weights)


def test_weights_may_be_named_or_negative_but_not_all_0():
    rewards = Rewards([by_keyword, lambda_like], {"lambda_like": -1, "by_keyword": 0.0})
    assert rewards.weights.tolist() == [0.0, -1.0]
    message = "TextRollouts(reward_weights=[0, 0.0]): all are 0: no text would be better"
    rejects(ConfigurationError, message, [by_keyword, lambda_like], [0, 0.0])


# ------------------------------------------------------------------------------------------------------------------ TRL


@pytest.mark.slow
def test_functions_written_for_trl_give_the_same_rewards():
    pytest.importorskip("trl", reason="trl is not there: pip install trl")

    def right(completions, answer, **more):
        return [None if a is None else float(c == a) for c, a in zip(completions, answer, strict=True)]

    def brief(prompts, completions, completion_ids, **more):
        texts = zip(prompts, completions, completion_ids, strict=True)
        return [-len(tokens) / (1 + len(prompt) + len(text)) for prompt, text, tokens in texts]

    async def level(completions, level, **more):
        await asyncio.sleep(0)
        return [each / 3 for each in level]

    functions, weights = [right, brief, level], [1.0, 0.3, -0.5]
    prompts, completions = [*PROMPTS, "d"], [*COMPLETIONS, "no"]
    ids = [*IDS, [4]]
    columns = {"answer": ["x", "no", None, "no"], "level": [1, 2, 3, 4]}
    expected = trl_trainers.rewards(functions, prompts, completions, ids, columns)
    rewards = Rewards(functions, weights, columns)
    parts = rewards(prompts, completions, ids, columns)
    torch.testing.assert_close(parts, expected, rtol=0, atol=0, equal_nan=True)
    advantages = trl_trainers.grpo_advantages(expected, 2, "group", torch.tensor(weights))
    torch.testing.assert_close(grpo_advantages(rewards.totals(parts), 2), advantages, rtol=1e-6, atol=1e-6)
