"""The reference model of a strategy, and stored log-probabilities."""

import pytest
import torch
from torch import nn

from pulsetrain.engine import DPOStrategy, Every, GRPOStrategy, PPOStrategy
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.rollouts import EnvironmentRollouts, TextRollouts
from pulsetrain.engine.strategies import WithValueHead, answers, language
from pulsetrain.handlers import Checkpointer
from tests.support.formulas import IGNORED
from tests.support.models import trainer
from tests.support.models_language import PAIRS, TOKENS, Mean, Short, Valued, assert_refused, refusal, run_of
from tests.support.rollouts import Counting, Policy


def texts(strategy, model):
    rollouts = TextRollouts([[1, 2], [3]], lambda p, c: [1.0] * len(p), max_new_tokens=2, prompts_per_rollout=2)
    return run_of(rollouts, strategy, model)


REFERRING = [
    (DPOStrategy, Short, lambda strategy, model: run_of([PAIRS], strategy, model)),
    (lambda: PPOStrategy(0.1), Valued, texts),
    (lambda: GRPOStrategy(2, kl_coef=0.1), Short, texts),
]


@pytest.mark.parametrize(("strategy", "model", "run"), REFERRING, ids=["dpo", "ppo", "grpo"])
def test_one_strategy_refers_to_one_model(strategy, model, run):
    shared, first = strategy(), model()
    run(shared, first)
    run(shared, first)
    message = refusal(lambda: run(shared, model()))
    assert message.startswith(
        f"{type(shared).__name__}: already holds the reference of another model; give each Trainer"
    )


SELVES = {"itself": lambda model: model, "a part of it": lambda model: model.table}


@pytest.mark.parametrize("kind", SELVES)
@pytest.mark.parametrize(
    "make",
    [
        lambda reference: DPOStrategy(reference=reference),
        lambda reference: GRPOStrategy(2, kl_coef=0.1, reference=reference),
        lambda reference: PPOStrategy(0.1, reference=reference),
    ],
    ids=["dpo", "grpo", "ppo"],
)
def test_a_reference_that_would_move_along_is_refused(make, kind):
    model = Valued()
    strategy = make(SELVES[kind](model))
    message = refusal(lambda: strategy.bind(model))
    what = "is the model that learns itself" if kind == "itself" else "shares 'weight' with the model"
    assert f"{what}, so it would be trained too; pass reference='copy'" in message
    assert all(each.requires_grad for each in model.parameters())


def test_a_model_beneath_a_value_head_is_not_a_reference_of_it():
    beneath = Mean(apart=True)
    strategy = PPOStrategy(0.1, reference=beneath)
    assert "shares 'table.weight' with the model" in refusal(lambda: texts(strategy, WithValueHead(beneath, "head")))
    assert all(each.requires_grad for each in beneath.parameters())


def test_a_reference_is_evaluated_in_eval_mode_and_its_mode_restored():
    class Dropping(Short):
        def __init__(self):
            super().__init__()
            self.dropout, self.asked = nn.Dropout(0.5), []

        def forward(self, tokens):
            self.asked.append(self.dropout.training)
            return self.dropout(super().forward(tokens))

    reference = Dropping()
    strategy = DPOStrategy(reference=reference)
    strategy.bind(Short())
    one, other = (strategy.prepare_batch(PAIRS).targets["reference"] for _ in range(2))
    assert torch.equal(one, other)
    assert reference.asked
    assert not any(reference.asked)
    assert reference.training


def test_a_run_continues_with_the_reference_that_was_given_to_it(tmp_path):
    def run(seed, folder):
        torch.manual_seed(seed)
        reference = Short()
        torch.manual_seed(0)
        handlers = [Checkpointer(tmp_path / folder, every=Every(iterations=1))]
        return trainer({"max_epochs": 1}, model=Short(), train_loader=[PAIRS], handlers=handlers,
                       strategy=DPOStrategy(reference=reference))  # fmt: skip

    checkpoint = run(1, "run").save_checkpoint()
    run(1, "same").load_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match=r": DPOStrategy: the reference model has other weights than the one"):
        run(2, "other").load_checkpoint(checkpoint)


IPO = "ipo"


@pytest.mark.parametrize(("storing", "reading"), [(IPO, "sigmoid"), ("sigmoid", IPO), (IPO, "hinge")])
def test_stored_means_are_not_used_as_sums(storing, reading):
    stored = DPOStrategy(loss_type=storing, reference=Short()).store_reference([PAIRS])
    run_of(stored, DPOStrategy(loss_type=storing, reference=None)).train()
    name = "reference_chosen_mean_log_probs" if reading == IPO else "reference_chosen_log_probs"
    run = run_of(stored, DPOStrategy(loss_type=reading, reference=None))
    assert_refused(run, TypeError, [f"lacks '{name}'; store_reference computes it"])


def test_means_that_were_stored_already_are_computed_again():
    (first,) = DPOStrategy(loss_type=IPO, reference=Short()).store_reference([PAIRS])
    strategy = DPOStrategy(loss_type=IPO, reference=Short())
    (found,), (again,) = strategy.store_reference([PAIRS]), strategy.store_reference([first])
    name = "reference_chosen_mean_log_probs"
    assert torch.equal(again[name], found[name])
    assert not torch.equal(again[name], first[name])


def test_each_side_has_one_stored_number_for_each_pair():
    numbers = {"reference_chosen_log_probs": torch.zeros(3), "reference_rejected_log_probs": torch.zeros(1)}
    run = run_of([{**PAIRS, **numbers}], DPOStrategy(reference=None))
    assert_refused(run, ValueError, ["'reference_chosen_log_probs' has shape (3,), and there are 2 rows"])


def test_nothing_is_measured_against_two_things():
    message = refusal(lambda: DPOStrategy(reference_free=True, reference=Short()))
    assert message.startswith("DPOStrategy(reference_free=True, reference=Short): uses no reference")


def test_a_tie_prefers_nothing():
    strategy = DPOStrategy()
    model = Short()
    strategy.bind(model)
    batch = strategy.prepare_batch(PAIRS)
    metrics = strategy.compute_metrics(model(batch.inputs), batch)
    assert {name: float(value) for name, value in metrics.items()} == {
        "reward_accuracy": 0.0, "reward_margin": 0.0, "chosen_reward": 0.0, "rejected_reward": 0.0
    }  # fmt: skip


@pytest.mark.parametrize("loss_type", ["sigmoid", IPO])
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_pair_with_only_one_answer_adds_no_gradient_if_values_are_unchecked(monkeypatch, loss_type, side):
    for module in (language, answers):
        monkeypatch.setattr(module, "on_host", lambda value: False)
    torch.manual_seed(0)
    model, reference = Short(), Short()
    pairs = {**PAIRS, "rejected_input_ids": TOKENS.flip(1), "rejected_labels": TOKENS.flip(1)}
    masked = pairs[f"{side}_labels"].clone()
    masked[1] = IGNORED

    def gradient(batch):
        strategy = DPOStrategy(loss_type=loss_type, reference=reference)
        strategy.bind(model)
        strategy.check_values = False
        prepared = strategy.prepare_batch(batch)
        (found,) = torch.autograd.grad(strategy.compute_loss(model(prepared.inputs), prepared), [model.table.weight])
        return found

    one = gradient({name: value[:1] for name, value in pairs.items()})
    assert one.abs().max() > 0.01
    torch.testing.assert_close(gradient({**pairs, f"{side}_labels": masked}), one / 2)
    assert not torch.allclose(gradient(pairs), one / 2)


def test_in_environments_no_reference_is_kept_and_no_divergence_is_penalised_by_default():
    for given, coefficient in ((None, 0.0), (0.3, 0.3)):
        strategy = PPOStrategy(given)
        assert strategy.has_reference
        run = trainer({}, model=Policy(), train_loader=EnvironmentRollouts(Counting, 2, 4), strategy=strategy)
        assert (strategy.kl_coef, strategy.has_reference) == (coefficient, False)
        assert strategy.state_dict() == {"reference": None}
        run.train()
        assert run.history["policy/kl_coef"] == [coefficient]
    adaptive = PPOStrategy(adaptive_kl=0.1)
    trainer({}, model=Policy(), train_loader=EnvironmentRollouts(Counting, 2, 4), strategy=adaptive)
    assert adaptive.kl_coef == 0.1


def test_over_texts_the_reference_and_its_weight_are_there_by_default():
    strategy = PPOStrategy()
    texts(strategy, Valued())
    assert (strategy.kl_coef, strategy.has_reference) == (0.1, True)
