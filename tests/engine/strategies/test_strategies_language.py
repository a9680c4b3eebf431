"""Pretraining, fine-tuning and preferences: losses, gradients and metrics beside formulas in NumPy."""

import copy
import math
import re

import numpy
import pytest
import torch

from pulsetrain.engine import DPOStrategy, JaxBackend, PretrainStrategy, SFTStrategy
from pulsetrain.engine.data.sequences import pack, pad_examples
from pulsetrain.engine.errors import ConfigurationError
from tests.support import formulas
from tests.support.formulas import IGNORED, LENGTH, ROWS, STRATEGY_RUNS, VOCABULARY, assert_is, assert_near
from tests.support.losses import needs_jax
from tests.support.models import Tokens, trainer
from tests.support.models_language import Attending, documents

OPTIONS = [{}, {"z_loss": 0.01}, {"z_loss": 0.1, "label_smoothing": 0.3}]
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0], [3, 4, 0, 0, 1, 2]])


def with_options(options):
    return " ".join(options) or "plain"


# ------------------------------------------------------------------------------------------------------ pretraining


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize("options", OPTIONS, ids=with_options)
def test_pretraining_is_the_mean_over_all_tokens_but_the_first(library, dtype, options):
    tokens = formulas.tokens_of(0)

    def formula(logits):
        return formulas.cross_entropy(logits, tokens[:, 1:].numpy(), **options)

    assert_is(formula, PretrainStrategy(loss_options=options), tokens, library, formulas.logits_of(0, dtype))


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize("options", OPTIONS[::2], ids=with_options)
@pytest.mark.parametrize("kept_apart_by", ["separator", "position_ids"])
def test_the_first_token_of_a_document_is_predicted_from_nothing(library, dtype, options, kept_apart_by):
    tokens = formulas.tokens_of(1)
    labels = tokens[:, 1:].clone()
    if kept_apart_by == "separator":
        assert (tokens[:, :-1] == 2).any()
        strategy, batch = PretrainStrategy(loss_options=options, separator=2), tokens
        labels[tokens[:, :-1] == 2] = IGNORED
    else:
        strategy, batch = PretrainStrategy(loss_options=options), {"input_ids": tokens, "position_ids": POSITIONS}
        labels[POSITIONS[:, 1:] == 0] = IGNORED

    def formula(logits):
        return formulas.cross_entropy(logits, labels.numpy(), **options)

    assert_is(formula, strategy, batch, library, formulas.logits_of(1, dtype))
    assert strategy.prepare_batch(batch).size == (labels != IGNORED).sum() < labels.numel()


@pytest.mark.parametrize("strategy", [PretrainStrategy, SFTStrategy])
def test_tokens_that_are_not_trained_on_cannot_have_another_label(strategy):
    message = f"{strategy.__name__}(loss_options={{'ignore_index': 0}}): needs -100; leave it out, and let the loader"
    with pytest.raises(ConfigurationError, match=re.escape(message) + ".*attention_mask"):
        strategy(loss_options={"ignore_index": 0})
    batch = strategy(loss_options={"ignore_index": IGNORED}).prepare_batch(formulas.labelled(0))
    assert batch.size > 0


def test_a_separator_shows_the_model_where_documents_begin():
    tokens = torch.tensor([[3, 2, 1, 1, 2, 4], [2, 2, 3, 0, 0, 0]])
    inputs = PretrainStrategy(separator=2).prepare_batch(tokens).inputs
    assert inputs["input_ids"].tolist() == tokens[:, :-1].tolist()
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]


@pytest.mark.parametrize(("unit", "length", "expected"), [("byte", None, 1.0), ("token", 4.0, 4.0)])
def test_bits_per_byte_are_nats_over_the_bytes_of_a_token(unit, length, expected):
    derived = PretrainStrategy(unit, length).derive_metrics(2.5)
    assert_near(derived["bits_per_byte"], 2.5 / math.log(2) / expected)
    assert_near(derived["perplexity"], math.exp(2.5))
    assert "bits_per_byte" not in PretrainStrategy().derive_metrics(2.5)


# ------------------------------------------------------------------------------------------------------- fine-tuning


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize("options", OPTIONS, ids=with_options)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_fine_tuning_is_the_mean_over_the_tokens_of_answers(library, dtype, options, packed):
    batch, labels = formulas.labelled(0), formulas.labelled(0)["labels"][:, 1:]
    if packed:
        batch["labels"] = torch.where(POSITIONS > 0, batch["labels"], batch["input_ids"])  # which is not learnt
        batch["position_ids"] = POSITIONS
        labels = torch.where(POSITIONS[:, 1:] > 0, labels, IGNORED)

    def formula(logits):
        return formulas.cross_entropy(logits, labels.numpy(), **options)

    strategy, logits = SFTStrategy(loss_options=options), formulas.logits_of(2, dtype)
    metrics = assert_is(formula, strategy, batch, library, logits)
    learnt = labels.numpy() != IGNORED
    assert_near(metrics["token_accuracy"], (logits.argmax(-1) == labels.numpy())[learnt].mean())
    assert strategy.prepare_batch(batch).size == learnt.sum()


def gradient_of(strategy, model, batch):
    model = copy.deepcopy(model).double()
    prepared = strategy.prepare_batch(batch)
    outputs = model(**prepared.inputs) if isinstance(prepared.inputs, dict) else model(prepared.inputs)
    loss = strategy.compute_loss(outputs, prepared)
    loss.backward()
    return loss.item(), torch.cat([each.grad.flatten() for each in model.parameters()]), int(prepared.size)


def test_packed_rows_have_the_loss_and_the_gradient_of_padded_ones():
    strategy, model = SFTStrategy(), Attending()
    packed, padded = pad_examples(pack(documents(), 12)), pad_examples(documents())
    assert len(packed["input_ids"]) < len(padded["input_ids"]) == 5
    (loss, gradient, size), (other, expected, tokens) = (gradient_of(strategy, model, b) for b in (packed, padded))
    assert size == tokens
    assert_near(loss, other, 1e-12)
    assert_near(gradient, expected, 1e-12)


# ------------------------------------------------------------------------------------------------------- preferences


def pairs_of(seed, length=LENGTH):
    """Rows of two lengths: the rejected answers are shorter."""
    sides = {
        "chosen": formulas.labelled(seed, length=length),
        "rejected": formulas.labelled(seed + 7, length=length - 1),
    }
    return {f"{side}_{name}": value for side, fields in sides.items() for name, value in fields.items()}


def of_sides(batch, log_probs_of_tokens, average):
    """Sums or means over each answer's tokens, of (side, row, position after the first)."""
    found = []
    for number, side in enumerate(("chosen", "rejected")):
        labels = batch[f"{side}_labels"].numpy()[:, 1:]
        for row in range(len(labels)):
            places = numpy.nonzero(labels[row] != IGNORED)[0]
            taken = [log_probs_of_tokens[number * ROWS + row, t, labels[row, t]] for t in places]
            found.append(numpy.mean(taken) if average else numpy.sum(taken))
    return numpy.array(found[:ROWS]), numpy.array(found[ROWS:])


def dpo(policies, references, beta, loss_type, smoothing):
    h = (policies[0] - references[0]) - (policies[1] - references[1])
    if loss_type == "sigmoid":
        right, wrong = numpy.log1p(numpy.exp(-beta * h)), numpy.log1p(numpy.exp(beta * h))
        return ((1 - smoothing) * right + smoothing * wrong).mean()
    return (numpy.maximum(0, 1 - beta * h) if loss_type == "hinge" else (h - 1 / (2 * beta)) ** 2).mean()


PREFERENCES = [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)]


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize(("loss_type", "smoothing"), PREFERENCES)
@pytest.mark.parametrize("reference_free", [False, True], ids=["stored", "reference_free"])
def test_preferences_are_the_formula_of_log_ratios(library, dtype, loss_type, smoothing, reference_free):
    beta, average = 0.3, loss_type == "ipo"
    strategy = DPOStrategy(beta, loss_type, smoothing, reference_free=reference_free, reference=None)
    batch, logits = pairs_of(0), formulas.logits_of(3, dtype, rows=2 * ROWS)
    references = numpy.zeros((2, ROWS))
    if not reference_free:
        references = numpy.random.default_rng(5).normal(-3, 1, (2, ROWS)).astype(dtype)
        for side, values in zip(("chosen", "rejected"), references, strict=True):
            batch[f"reference_{side}_{'mean_' if average else ''}log_probs"] = torch.from_numpy(values)

    def formula(logits):
        policies = of_sides(batch, formulas.log_softmax(logits), average)
        return dpo(policies, references, beta, loss_type, smoothing)

    metrics = assert_is(formula, strategy, batch, library, logits)
    policies = of_sides(batch, formulas.log_softmax(logits), average)
    chosen, rejected = (beta * (p - r) for p, r in zip(policies, references, strict=True))
    expected = {
        "reward_accuracy": (chosen > rejected).mean(),
        "reward_margin": (chosen - rejected).mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
    }
    assert metrics == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("kind", ["copied", "given", "given as a function", "stored"])
def test_the_reference_is_the_initial_model_however_it_is_kept(loss_type, kind):
    torch.manual_seed(0)
    policy, batch, average = Tokens(VOCABULARY).double(), pairs_of(1), loss_type == "ipo"
    other = Tokens(VOCABULARY).double()
    reference = {"copied": "copy", "given": other, "given as a function": lambda x: other.table(x), "stored": other}[
        kind
    ]
    strategy = DPOStrategy(0.3, loss_type, reference=reference)
    strategy.bind(policy)
    held = (policy if kind == "copied" else other).table.weight.detach().numpy().copy()
    if kind == "stored":
        batches = strategy.store_reference([batch])
        scores = "mean_log_probs" if average else "log_probs"
        assert set(batches[0]) - set(batch) == {f"reference_chosen_{scores}", f"reference_rejected_{scores}"}
        strategy, batch = DPOStrategy(0.3, loss_type, reference=None), batches[0]
        strategy.bind(policy)
    with torch.no_grad():
        policy.table.weight += torch.randn(VOCABULARY, VOCABULARY)  # as if it had learnt
    prepared = strategy.prepare_batch(batch)
    expected = of_sides(batch, formulas.log_softmax(held)[prepared.inputs.numpy()], average)
    assert_near(prepared.targets["reference"].numpy(), numpy.concatenate(expected), 1e-12)
    assert not prepared.targets["reference"].requires_grad
    now = of_sides(batch, formulas.log_softmax(policy.table.weight.detach().numpy())[prepared.inputs.numpy()], average)
    loss = strategy.compute_loss(policy(prepared.inputs), prepared)
    assert_near(loss.item(), dpo(now, expected, 0.3, loss_type, 0.0), 1e-12)


def test_a_policy_that_has_not_moved_is_indifferent_and_learns_to_prefer_the_chosen_answer():
    policy, strategy = Tokens(VOCABULARY), DPOStrategy()
    strategy.bind(policy)
    prepared = strategy.prepare_batch(pairs_of(2))
    loss = strategy.compute_loss(policy(prepared.inputs), prepared)
    assert_near(loss.item(), math.log(2))
    loss.backward()
    with torch.no_grad():
        policy.table.weight -= 0.1 * policy.table.weight.grad
    assert strategy.compute_metrics(policy(prepared.inputs), prepared)["reward_margin"] > 0
    assert all(not each.requires_grad for each in strategy._reference._model.parameters())


@pytest.mark.slow
@needs_jax
def test_a_copy_stays_what_it_was_where_steps_reuse_the_memory_of_the_weights():
    import jax.numpy

    table = formulas.logits_of(0, "float32", 1, VOCABULARY + 1)[0]
    model = (lambda weights, tokens: weights["table"][tokens], {"table": jax.numpy.asarray(table)})
    config = {"max_epochs": 1, "learning_rate": 0.5, "optimizer": "sgd"}
    run = trainer(config, model=model, train_loader=[pairs_of(3)] * 3, strategy=DPOStrategy(), backend=JaxBackend())
    run.train()
    assert abs(run.model.table.detach().numpy() - table).max() > 1e-3
    batch = pairs_of(4)
    prepared = run.strategy.prepare_batch(batch)
    expected = of_sides(batch, formulas.log_softmax(table)[prepared.inputs.numpy()], False)
    assert_near(prepared.targets["reference"].numpy(), numpy.concatenate(expected))
