"""Batches that a strategy cannot learn from: the error says what and where and what to do, and no weight has moved."""

import re
from fractions import Fraction

import numpy
import numpy as np
import pytest
import torch

from pulsetrain.engine import (
    DPOStrategy,
    GRPOStrategy,
    KTOStrategy,
    PPOStrategy,
    PretrainStrategy,
    RewardModelStrategy,
    SFTStrategy,
)
from pulsetrain.engine.errors import ConfigurationError
from tests.support.formulas import IGNORED, VOCABULARY
from tests.support.models import Tokens, trainer
from tests.support.models_language import (
    CONTEXT,
    GROUP,
    LABELS,
    NOT_A_NUMBER,
    ONE_LABEL_OUT,
    ONE_MASKED,
    PAIRS,
    ROWS,
    STEPS,
    TEXTS,
    TOKENS,
    Acting,
    Placed,
    Short,
    Valued,
    assert_refused,
    without,
)


def case(name, strategy, model, good, bad, error, *parts):
    return pytest.param(strategy, model, good, bad, error, parts, id=name)


def stored(**changed):
    given = {f"reference_{side}_log_probs": torch.tensor([-1.0, -2.0]) for side in ("chosen", "rejected")}
    return {**PAIRS, **given, **changed}


JUDGED = {**TEXTS, "desirable": torch.tensor([True, False]), "kl_input_ids": TOKENS, "kl_labels": LABELS}
LONG = torch.zeros(2, CONTEXT + 2, dtype=torch.int64)
LEFT = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
CASES = [
    # ---------------------------------------------------------------------------------------------------- SFTStrategy
    case("sft-nothing", SFTStrategy, Short, TEXTS, {}, TypeError,
         "SFTStrategy: a batch with no field lacks 'input_ids'", "pad_examples"),
    case("sft-no labels", SFTStrategy, Short, TEXTS, without(TEXTS, "labels"), TypeError,
         "SFTStrategy: a batch with input_ids lacks 'labels'", "to train on every token use PretrainStrategy"),
    case("sft-a tensor", SFTStrategy, Short, TEXTS, TOKENS, TypeError,
         "SFTStrategy: a batch of int64 (2, 6) is not a mapping with 'input_ids'"),
    case("sft-a pair", SFTStrategy, Short, TEXTS, (TOKENS, LABELS), TypeError,
         "SFTStrategy: a batch of (int64 (2, 6), int64 (2, 6)) is not a mapping"),
    case("sft-lists", SFTStrategy, Short, TEXTS, {**TEXTS, "input_ids": TOKENS.tolist()}, TypeError,
         "the batch's 'input_ids' is list, not a tensor", "pad_examples"),
    case("sft-arrays", SFTStrategy, Short, TEXTS, {**TEXTS, "labels": LABELS.numpy()}, TypeError,
         "SFTStrategy(labels=numpy.ndarray int64 (2, 6)): needs torch tensors", "torch.from_numpy"),
    case("sft-fractions", SFTStrategy, Short, TEXTS, {**TEXTS, "input_ids": TOKENS.float()}, TypeError,
         "SFTStrategy: 'input_ids' is float32 (2, 6); needs a tensor of token ids, shape (batch, length + 1)"),
    case("sft-one row", SFTStrategy, Short, TEXTS, {"input_ids": TOKENS[0], "labels": LABELS[0]}, TypeError,
         "SFTStrategy: 'input_ids' is int64 (6,); needs a tensor of token ids, shape (batch, length + 1)"),
    case("sft-shapes", SFTStrategy, Short, TEXTS, {**TEXTS, "labels": LABELS[:, :-1]}, ValueError,
         "'labels' is int64 (2, 5), the tokens have shape (2, 6)", "one label for each token"),
    case("sft-all masked", SFTStrategy, Short, TEXTS, {**TEXTS, "labels": torch.full_like(LABELS, IGNORED)}, ValueError,
         "'labels' of row 0 mask all of it (as do 2 of 2 rows)", "cut prompts"),
    case("sft-a row masked", SFTStrategy, Short, TEXTS, {**TEXTS, "labels": ONE_MASKED}, ValueError,
         "'labels' of row 1 mask all of it (as do 1 of 2 rows)", "leave such rows out"),
    case("sft-documents of a token", SFTStrategy, Placed, TEXTS, {**TEXTS, "position_ids": torch.zeros_like(TOKENS)},
         ValueError, "'labels' of row 0 mask all of it (as do 2 of 2 rows)"),
    case("sft-all padding", SFTStrategy, Short, TEXTS, {**TEXTS, "attention_mask": torch.zeros_like(TOKENS)},
         ValueError, "'labels' of row 0 mask all of it (as do 2 of 2 rows)"),
    case("sft-padded left", SFTStrategy, Short, TEXTS, {**TEXTS, "attention_mask": LEFT}, ValueError,
         "SFTStrategy: 'attention_mask' has padding before tokens", "pad on the right", "padding_side='right'"),
    case("sft-too long", SFTStrategy, Short, TEXTS, {"input_ids": LONG, "labels": LONG}, ValueError,
         "'input_ids' of shape (2, 8): 7 positions are more than the model's context of 6", "truncation='left'"),
    case("sft-positions' shape", SFTStrategy, Placed, TEXTS, {**TEXTS, "position_ids": torch.arange(6)}, ValueError,
         "'position_ids' is int64 (6,), the tokens have shape (2, 6)", "restarts at 0 with each document"),
    case("sft-documents beside a model that mixes them", SFTStrategy, Short, TEXTS,
         {**TEXTS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)}, ConfigurationError,
         "SFTStrategy: several documents share a row", "give each document its own row",
         "forward(input_ids, position_ids)"),
    case("sft-no such label", SFTStrategy, Short, TEXTS, {**TEXTS, "labels": ONE_LABEL_OUT}, ValueError,
         "cross_entropy(targets[1, 2]=99): needs class indices from 0 to 4", "1 of 10 targets are outside",
         "give the model 100 outputs"),
    case("sft-no such token", SFTStrategy, Short, TEXTS, {**TEXTS, "input_ids": TOKENS + 50}, IndexError,
         "index out of range", "from 50 to 54"),
    # ----------------------------------------------------------------------------------------------- PretrainStrategy
    case("pretrain-text", PretrainStrategy, Short, TOKENS, "a text", TypeError,
         "PretrainStrategy: 'tokens' is str; needs a tensor of token ids, shape (batch, length + 1)"),
    case("pretrain-no tokens", PretrainStrategy, Short, TOKENS, {"text": TOKENS}, TypeError,
         "PretrainStrategy: a batch with text lacks 'input_ids'"),
    case("pretrain-arrays", PretrainStrategy, Short, TOKENS, TOKENS.numpy(), TypeError,
         "PretrainStrategy(tokens=numpy.ndarray int64 (2, 6)): needs torch tensors"),
    case("pretrain-too long", PretrainStrategy, Short, TOKENS, LONG, ValueError,
         "7 positions are more than the model's context of 6"),
    case("pretrain-separators alone", lambda: PretrainStrategy(separator=2), Placed, TOKENS,
         torch.full_like(TOKENS, 2), ValueError, "PretrainStrategy: nothing is trained on in this batch",
         "check the separator"),
    case("pretrain-documents beside a model that mixes them", PretrainStrategy, Short, TOKENS,
         {"input_ids": TOKENS, "position_ids": torch.zeros_like(TOKENS) + torch.arange(6) % 3}, ConfigurationError,
         "PretrainStrategy: several documents share a row"),
    case("pretrain-no such token", PretrainStrategy, Short, TOKENS, TOKENS + 50, IndexError, "from 50 to 54"),
    # ---------------------------------------------------------------------------------------------------- DPOStrategy
    case("dpo-texts", DPOStrategy, Short, PAIRS, TEXTS, TypeError,
         "DPOStrategy: a batch with input_ids, labels lacks 'chosen_input_ids'", "(pairs, length)"),
    case("dpo-one side", DPOStrategy, Short, PAIRS, without(PAIRS, "rejected_labels"), TypeError,
         "lacks 'rejected_labels'"),
    case("dpo-another number", DPOStrategy, Short, PAIRS,
         {**PAIRS, "rejected_input_ids": TOKENS[:1], "rejected_labels": LABELS[:1]}, ValueError,
         "DPOStrategy: 2 rows of 'chosen_input_ids' and 1 of 'rejected_input_ids'"),
    case("dpo-masked", DPOStrategy, Short, PAIRS, {**PAIRS, "rejected_labels": ONE_MASKED}, ValueError,
         "'rejected_labels' of row 1 mask all of it", "leave such rows out"),
    case("dpo-padded left", DPOStrategy, Short, PAIRS, {**PAIRS, "chosen_attention_mask": LEFT}, ValueError,
         "DPOStrategy: 'chosen_attention_mask' has padding before tokens"),
    case("dpo-packed", DPOStrategy, Placed, PAIRS, {**PAIRS, "chosen_position_ids": TOKENS}, ValueError,
         "DPOStrategy: 'chosen_position_ids' mark rows of several documents", "do not pack them"),
    case("dpo-too long", DPOStrategy, Short, PAIRS, {**PAIRS, "chosen_input_ids": LONG, "chosen_labels": LONG},
         ValueError, "'chosen_input_ids' of shape (2, 8): 7 positions are more than", "from_preferences(..., length="),
    case("dpo-no such label", DPOStrategy, Short, PAIRS, {**PAIRS, "rejected_labels": ONE_LABEL_OUT}, ValueError,
         "=99): needs ids from 0 to 4", "1 of 20 tokens are outside"),
    case("dpo-no such label, free", lambda: DPOStrategy(reference_free=True), Short, PAIRS,
         {**PAIRS, "rejected_labels": ONE_LABEL_OUT}, ValueError, "=99): needs", "from 0 to 4", "1 of 20 t"),
    case("dpo-nothing stored", lambda: DPOStrategy(reference=None), Short, stored(), PAIRS, TypeError,
         "lacks 'reference_chosen_log_probs'; store_reference computes it; or let the strategy keep a reference"),
    case("dpo-half stored", DPOStrategy, Short, PAIRS, without(stored(), "reference_chosen_log_probs"), TypeError,
         "lacks 'reference_chosen_log_probs'; store_reference computes both"),
    case("dpo-stored nan", lambda: DPOStrategy(reference=None), Short, stored(),
         stored(reference_rejected_log_probs=torch.tensor([-1.0, float("nan")])), ValueError,
         "DPOStrategy: stored log-probabilities of the reference are not finite", "store them again"),
    case("dpo-stored tokens", lambda: DPOStrategy(reference=None), Short, stored(),
         stored(reference_rejected_log_probs=torch.zeros(3)), ValueError,
         "'reference_rejected_log_probs' has shape (3,), and there are 2 rows; one number for each"),
    # --------------------------------------------------------------------------------- KTOStrategy, RewardModelStrategy
    case("kto-not judged", KTOStrategy, Short, JUDGED, without(JUDGED, "desirable"), TypeError,
         "lacks 'desirable'", "pad_unpaired makes them"),
    case("kto-judged by numbers", KTOStrategy, Short, JUDGED, {**JUDGED, "desirable": torch.tensor([1, 0])}, TypeError,
         "KTOStrategy: 'desirable' is int64 (2,); needs booleans, pass desirable != 0"),
    case("kto-judged by token", KTOStrategy, Short, JUDGED, {**JUDGED, "desirable": LABELS > 0}, ValueError,
         "KTOStrategy: 'desirable' is bool (2, 6), and there are 2 rows; one boolean for each"),
    case("kto-no divergence", KTOStrategy, Short, JUDGED, without(JUDGED, "kl_labels"), TypeError, "lacks 'kl_labels'"),
    case("kto-another number", KTOStrategy, Short, JUDGED,
         {**JUDGED, "kl_input_ids": TOKENS[:1], "kl_labels": LABELS[:1]}, ValueError,
         "KTOStrategy: 2 rows of 'input_ids' and 1 of 'kl_input_ids'"),
    case("kto-no such label", KTOStrategy, Short, JUDGED, {**JUDGED, "labels": ONE_LABEL_OUT}, ValueError,
         "=99): needs ids from 0 to 4"),
    case("reward-one side", RewardModelStrategy, Valued, PAIRS, without(PAIRS, "rejected_input_ids"), TypeError,
         "RewardModelStrategy: a batch with", "lacks 'rejected_input_ids'", "pad_pairs"),
    case("reward-no labels", RewardModelStrategy, Valued, PAIRS, without(PAIRS, "chosen_labels"), TypeError,
         "lacks 'chosen_labels'"),
    case("reward-another number", RewardModelStrategy, Valued, PAIRS,
         {**PAIRS, "rejected_input_ids": TOKENS[:1], "rejected_labels": LABELS[:1]}, ValueError,
         "RewardModelStrategy: 2 rows of 'chosen_input_ids' and 1 of 'rejected_input_ids'"),
    case("reward-shapes", RewardModelStrategy, Valued, PAIRS, {**PAIRS, "chosen_labels": LABELS[:, 1:]}, ValueError,
         "'chosen_labels' is int64 (2, 5), the tokens have shape (2, 6)"),
    case("reward-nothing", RewardModelStrategy, Valued, PAIRS,
         {**PAIRS, "rejected_labels": torch.full_like(LABELS, IGNORED)}, ValueError,
         "RewardModelStrategy: 'rejected_labels' of row 0 mask all of it", "leave such rows out"),
    case("reward-padded left", RewardModelStrategy, Valued, PAIRS, {**PAIRS, "chosen_attention_mask": LEFT}, ValueError,
         "RewardModelStrategy: 'chosen_attention_mask' has padding before tokens"),
    case("reward-packed", RewardModelStrategy, Valued, PAIRS, {**PAIRS, "chosen_position_ids": TOKENS}, ValueError,
         "RewardModelStrategy: 'chosen_position_ids' mark rows of several documents"),
    case("reward-too long", RewardModelStrategy, Valued, PAIRS,
         {**PAIRS, "chosen_input_ids": LONG, "chosen_labels": LONG}, ValueError,
         "'chosen_input_ids' of shape (2, 8): 8 positions are more than"),
    case("reward-a margin for all", RewardModelStrategy, Valued, PAIRS, {**PAIRS, "margin": torch.tensor(0.5)},
         ValueError,
         "RewardModelStrategy: 'margin' is float32 (), and there are 2 pairs; one number for each"),
    case("reward-no margin", RewardModelStrategy, Valued, PAIRS, {**PAIRS, "margin": torch.tensor([0.5, float("inf")])},
         ValueError, "'margin' has numbers that are not finite"),
    # ---------------------------------------------------------------------------------------- PPOStrategy, GRPOStrategy
    case("ppo-plain texts", PPOStrategy, Valued, ROWS, TEXTS, TypeError,
         "PPOStrategy: a batch with input_ids, labels lacks 'log_probs'",
         "pulsetrain.engine.rollouts makes such batches"),
    case("ppo-no returns", PPOStrategy, Valued, ROWS, without(ROWS, "returns"), TypeError, "lacks 'returns'"),
    case("ppo-nothing generated", PPOStrategy, Valued, ROWS, {**ROWS, "completion_mask": ONE_MASKED != IGNORED},
         ValueError, "'completion_mask' of row 1 masks all of it", "leave such rows out"),
    case("ppo-mask's shape", PPOStrategy, Valued, ROWS, {**ROWS, "completion_mask": LABELS[:, 1:] > 0}, ValueError,
         "'completion_mask' is bool (2, 5), the tokens have shape (2, 6)"),
    case("ppo-shapes", PPOStrategy, Valued, ROWS, {**ROWS, "returns": torch.zeros(2, 6)}, ValueError,
         "PPOStrategy: 'returns' is float32 (2, 6), the actions have shape (2, 5)"),
    case("ppo-not finite", PPOStrategy, Valued, ROWS, {**ROWS, "advantages": NOT_A_NUMBER}, ValueError,
         "PPOStrategy: 2 of 10 'advantages' are not finite", "check the rewards"),
    case("ppo-log-probs not finite", PPOStrategy, Valued, ROWS, {**ROWS, "log_probs": NOT_A_NUMBER}, ValueError,
         "PPOStrategy: 2 of 10 'log_probs' are not finite"),
    case("ppo-too long", PPOStrategy, Valued, ROWS,
         {**{name: torch.zeros(2, 7) for name in ROWS}, "input_ids": LONG, "completion_mask": LONG == 0}, ValueError,
         "7 positions are more than the model's context of 6"),
    case("ppo-steps of fractions", PPOStrategy, Acting, STEPS, {**STEPS, "actions": torch.ones(2)}, TypeError,
         "PPOStrategy: 'actions' is float32 (2,); needs the numbers of actions, shape (rows,)"),
    case("ppo-no such action", PPOStrategy, Acting, STEPS, {**STEPS, "actions": torch.tensor([0, 2])}, ValueError,
         "[1]=2): needs", "from 0 to 1", "1 of 2 t"),
    case("grpo-steps", lambda: GRPOStrategy(2), Valued, GROUP, STEPS, TypeError,
         "GRPOStrategy: compares texts, and the batch has 'observations'", "in environments use PPOStrategy"),
    case("grpo-no reference", lambda: GRPOStrategy(2, kl_coef=0.1), Short,
         {**GROUP, "reference_log_probs": GROUP["log_probs"]}, GROUP, TypeError, "lacks 'reference_log_probs'"),
    case("grpo-an advantage a token", lambda: GRPOStrategy(2), Short, GROUP, ROWS, ValueError,
         "advantages of shape (2, 5)", "needs log_probs (batch, length) and advantages (batch,)"),
]  # fmt: skip


@pytest.mark.parametrize("at", [0, 4], ids=["first", "fifth"])
@pytest.mark.parametrize(("strategy", "model", "good", "bad", "error", "parts"), CASES)
def test_a_bad_batch_is_refused_before_it_moves_a_weight(strategy, model, good, bad, error, parts, at):
    torch.manual_seed(0)
    data = [good] * at + [bad]
    run = trainer({"max_epochs": 1, "learning_rate": 0.1}, model=model(), train_loader=data, strategy=strategy())
    assert_refused(run, error, parts)
    assert run.state.update == at


@pytest.mark.parametrize("accumulate", [2, 3])
def test_what_waited_for_a_bad_batch_moves_no_weight_either(accumulate):
    masked = {**TEXTS, "labels": ONE_MASKED}
    data = [TEXTS] * (2 * accumulate - 1) + [masked]
    run = trainer({"max_epochs": 1, "accumulate": accumulate}, model=Short(), train_loader=data, strategy=SFTStrategy())
    assert_refused(run, ValueError, ["'labels' of row 1 mask all of it"])
    assert run.state.update == 1


def test_a_model_without_values_is_not_a_critic():
    run = trainer({"max_epochs": 1}, model=Short(), train_loader=[ROWS], strategy=PPOStrategy())
    expected = [
        "the model returned float32 (2, 5, 5); needs a pair (logits, values), values of shape (2, 5)",
        "WithValueHead",
    ]
    assert_refused(run, TypeError, expected)


def test_a_language_model_without_a_head_for_rewards_is_not_a_reward_model():
    run = trainer({"max_epochs": 1}, model=Short(), train_loader=[PAIRS], strategy=RewardModelStrategy())
    expected = ["the model returned float32 (4, 6, 5); needs a reward for each row", "WithValueHead"]
    assert_refused(run, TypeError, expected)


def test_a_model_that_gives_no_logits_is_named():
    class Silent(Short):
        def forward(self, tokens):
            return {"scores": self.table(tokens)}

    run = trainer({"max_epochs": 1}, model=Silent(), train_loader=[TEXTS], strategy=SFTStrategy())
    assert_refused(run, TypeError, ["the model returned {scores: float32 (2, 5, 5)}; needs logits", "`.logits`"])


@pytest.mark.parametrize("kind", ["given", "function"])
def test_a_reference_of_another_vocabulary_is_refused(kind):
    other = Tokens(VOCABULARY + 2)
    reference = other if kind == "given" else lambda tokens: other(tokens)
    run = trainer({"max_epochs": 1}, model=Short(), train_loader=[PAIRS], strategy=DPOStrategy(reference=reference))
    expected = [
        "DPOStrategy: the reference model has a vocabulary of 7 tokens, the policy one of 5",
        "reference='copy'",
    ]
    assert_refused(run, ValueError, expected)


def test_a_missing_reference_is_reported():
    with pytest.raises(ConfigurationError, match=r"DPOStrategy\(reference='copy'\): has no reference model yet.*bind"):
        DPOStrategy().prepare_batch(PAIRS)
    with pytest.raises(
        ConfigurationError, match=r"DPOStrategy\(reference_free=True\): .*store_reference\(\) has nothing to store"
    ):
        DPOStrategy(reference_free=True).store_reference([PAIRS])
    with pytest.raises(TypeError, match="lacks 'reference_chosen_log_probs'"):
        DPOStrategy(reference=None).store_reference([PAIRS])


def test_what_is_stored_already_is_computed_again():
    strategy = DPOStrategy(reference=Short())
    strategy.bind(Short())
    (found,), (again,) = strategy.store_reference([PAIRS]), strategy.store_reference([stored()])
    assert torch.equal(found["reference_chosen_log_probs"], again["reference_chosen_log_probs"])


def test_numpy_arrays_are_not_a_batch_of_tokens():
    with pytest.raises(TypeError, match=re.escape("DPOStrategy(chosen_input_ids=numpy.ndarray int64 (2, 3))")):
        DPOStrategy().prepare_batch({**PAIRS, "chosen_input_ids": numpy.ones((2, 3), int)})


@pytest.mark.parametrize("share", [np.float32(0.2), Fraction(1, 5)])
def test_an_option_may_be_a_number_of_another_library(share):
    assert PPOStrategy(clip_range=share).clip_range == share
