"""Arguments of TextRollouts that cannot be used are rejected."""

import pytest

from pulsetrain.engine import GRPOStrategy, PPOStrategy
from pulsetrain.engine.rollouts import EnvironmentRollouts, TextRollouts
from tests.support.models import Tokens, trainer
from tests.support.models_language import refusal
from tests.support.rollouts import Counting, Policy, Valued


def judge(prompts, completions):
    return [1.0] * len(prompts)


def made(**options):
    return TextRollouts(options.pop("prompts", [[1], [2]]), judge, max_new_tokens=3, **options)


@pytest.mark.parametrize("prompts", [["a text", "another"], [[1.0, 2.0]], [[1, "2"]], [1, 2], 3])
def test_prompts_are_token_numbers(prompts):
    message = refusal(lambda: made(prompts=prompts), TypeError)
    assert message.startswith("TextRollouts(prompts=")
    assert "): needs a list of token ids for each prompt; texts and messages need tokenizer=, the model's" in message


NUMBERS = [
    ("end_token", -1), ("end_token", True), ("end_token", 2.5), ("pad_token", -1), ("pad_token", None),
    ("pad_to", "x"), ("pad_to", -1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NUMBERS)
def test_tokens_and_lengths_are_whole_numbers(name, value):
    message = refusal(lambda: made(**{name: value}))
    assert message == f"TextRollouts({name}={value!r}): needs a whole number of at least 0"


def test_a_sampler_is_a_function():
    message = refusal(lambda: made(sampler=3), TypeError)
    assert message == "TextRollouts(sampler=3): needs a function of prompts and a number of tokens"


def test_a_text_cannot_exceed_the_length_that_divides_its_loss():
    def run(length):
        strategy = GRPOStrategy(2, normalization="dr_grpo", max_length=length)
        return trainer({}, model=Tokens(), train_loader=made(), strategy=strategy)

    message = refusal(lambda: run(2))
    assert message == "GRPOStrategy(max_length=2): a text may have max_new_tokens=3; pass at least max_length=3"
    assert run(3).strategy.max_length == 3


def test_a_divergence_penalty_needs_a_reference():
    def run(strategy):
        return trainer({}, model=Valued(), train_loader=made(), strategy=strategy)

    message = refusal(lambda: run(PPOStrategy(0.25, reference=None)))
    assert message.startswith(
        "PPOStrategy(kl_coef=0.25, reference=None): for texts it weights the divergence from the ref"
    )
    assert run(PPOStrategy(0.0, reference=None)).strategy.kl_coef == 0.0
    steps_run = trainer({"max_updates": 1}, model=Policy(), train_loader=EnvironmentRollouts(Counting, 2, 4),
                        strategy=PPOStrategy(0.25, reference=None, minibatch_epochs=1))  # fmt: skip
    steps_run.train()  # there it is the divergence from who acted, which needs no reference
