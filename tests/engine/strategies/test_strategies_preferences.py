"""Preference learning of every kind: losses, gradients and metrics beside formulas in NumPy."""

import math

import numpy
import pytest
import torch

from pulsetrain.engine import (
    CPOStrategy,
    DPOStrategy,
    KTOStrategy,
    ORPOStrategy,
    RewardModelStrategy,
    SimPOStrategy,
)
from pulsetrain.engine.data.preferences import pad_unpaired
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.strategies import STRATEGIES, WithValueHead
from pulsetrain.engine.strategies.value_head import PolicyOutputs
from tests.support import formulas
from tests.support.formulas import IGNORED, LENGTH, ROWS, STRATEGY_RUNS, VOCABULARY, assert_is, assert_near
from tests.support.models import Tokens
from tests.support.models_language import PAIRS, Short, refusal


def pairs_of(seed, length=LENGTH):
    """Rows of two lengths: the rejected answers are shorter."""
    sides = {
        "chosen": formulas.labelled(seed, length=length),
        "rejected": formulas.labelled(seed + 7, length=length - 1),
    }
    return {f"{side}_{name}": value for side, fields in sides.items() for name, value in fields.items()}


def log_probs_of(batch, logits, sides=("chosen_", "rejected_")):
    """A list for each row of each side: the log-probabilities of the tokens of its answer."""
    logged, found = formulas.log_softmax(logits), []
    for number, side in enumerate(sides):
        labels = batch[f"{side}labels"].numpy()[:, 1:]
        rows = len(labels)
        found.append([
            [logged[number * rows + row, t, labels[row, t]] for t in numpy.nonzero(labels[row] != IGNORED)[0]]
            for row in range(rows)
        ])  # fmt: skip
    return found


def sums(rows):
    return numpy.array([sum(each) for each in rows])


def means(rows):
    return numpy.array([sum(each) / len(each) for each in rows])


def cross_entropy(rows):
    return -numpy.mean([each for row in rows for each in row])


def softplus(x):
    return numpy.log1p(numpy.exp(x))


def sigmoid(x):
    return 1 / (1 + numpy.exp(-x))


def rewarded(chosen, rejected):
    return {
        "reward_accuracy": (chosen > rejected).mean(),
        "reward_margin": (chosen - rejected).mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
    }


def stored(batch, dtype, sides=("chosen_", "rejected_")):
    """The reference's log-probabilities, and the batch with them."""
    references = numpy.random.default_rng(5).normal(-3, 1, (len(sides), ROWS)).astype(dtype)
    names = [f"reference_{side}log_probs" for side in sides]
    return references, {**batch, **dict(zip(names, map(torch.from_numpy, references), strict=True))}


# ------------------------------------------------------------------------------------------------------ several losses


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
def test_several_losses_of_sums_and_of_means_are_added_with_their_weights(library, dtype):
    beta, weights = 0.3, [0.5, 2.0, 0.25]
    strategy = DPOStrategy(beta, ["sigmoid", "ipo", "sft"], 0.1, loss_weights=weights, reference=None)
    references, batch = stored(pairs_of(0), dtype)
    logits = formulas.logits_of(3, dtype, rows=2 * ROWS)

    def formula(logits):
        rows = log_probs_of(batch, logits)
        counts = [numpy.array(list(map(len, side))) for side in rows]
        ratios = [sums(side) - reference for side, reference in zip(rows, references, strict=True)]
        x = beta * (ratios[0] - ratios[1])
        h = ratios[0] / counts[0] - ratios[1] / counts[1]
        terms = (0.9 * softplus(-x) + 0.1 * softplus(x)).mean(), ((h - 1 / (2 * beta)) ** 2).mean()
        return weights[0] * terms[0] + weights[1] * terms[1] + weights[2] * cross_entropy(rows[0])

    metrics = assert_is(formula, strategy, batch, library, logits)
    rewards = [beta * (sums(side) - ref) for side, ref in zip(log_probs_of(batch, logits), references, strict=True)]
    assert metrics == pytest.approx(rewarded(*rewards), abs=2e-6)


def test_losses_of_means_alone_are_computed_from_means():
    strategy = DPOStrategy(0.3, ["ipo", "sigmoid_norm", "sft"], reference=Short())
    (batch,) = strategy.store_reference([PAIRS])
    assert set(batch) - set(PAIRS) == {"reference_chosen_mean_log_probs", "reference_rejected_mean_log_probs"}
    mixed = DPOStrategy(0.3, ["ipo", "sigmoid"], reference=Short())
    (batch,) = mixed.store_reference([PAIRS])
    assert set(batch) - set(PAIRS) == {"reference_chosen_log_probs", "reference_rejected_log_probs"}


def test_a_list_of_one_loss_is_that_loss():
    batch, logits = pairs_of(0), torch.from_numpy(formulas.logits_of(3, rows=2 * ROWS))
    for loss_type in ("robust", "sigmoid_norm", "discopop"):
        losses = []
        for given in (loss_type, [loss_type], (loss_type,)):
            strategy = DPOStrategy(0.3, given, reference_free=True)
            losses.append(strategy.compute_loss(logits, strategy.prepare_batch(batch)))
        assert len(set(map(float, losses))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0]}, r"loss_weights=\[1.0\].*: needs a weight for each"),
        ({"loss_weights": [1.0, 2.0]}, r"Strategy\(loss_weights=\[1.0, 2.0\], loss_type='sigmoid'\): needs a weight"),
        ({"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, math.nan]}, r"loss_weights=.*: needs finite numbers"),
        ({"loss_type": ["sft"]}, r"DPOStrategy\(loss_type=\['sft'\]\): needs a loss that compares .*use SFTStrategy"),
        ({"loss_type": []}, r"DPOStrategy\(loss_type=\[\]\): needs a loss that compares"),
        ({"loss_type": ["sigmoid", "ipoo"]}, r"DPOStrategy\(loss_type='ipoo'\): unknown; .* sft, .* mean 'ipo'"),
        ({"loss_type": ["hinge", "ipo"], "label_smoothing": 0.1}, r"loss_type='hinge'\): only aot, .*take label smoot"),
        ({"loss_type": "exo_pair"}, r"loss_type='exo_pair'\): needs a label smoothing above 0"),
        ({"discopop_tau": -1.0}, r"DPOStrategy\(discopop_tau=-1.0\): needs a positive number"),
    ],
)
def test_losses_that_cannot_be_added_are_refused_at_once(options, message):
    with pytest.raises(ConfigurationError, match=message):
        DPOStrategy(**options)


# --------------------------------------------------------------------------------------------------- without reference


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize(("loss_type", "weight"), [("sigmoid", 1.0), ("hinge", 0.5), ("ipo", 0.0)])
def test_cpo_is_dpo_without_a_reference_and_the_cross_entropy(library, dtype, loss_type, weight):
    strategy = CPOStrategy(0.3, loss_type, sft_weight=weight)
    batch, logits = pairs_of(0), formulas.logits_of(3, dtype, rows=2 * ROWS)
    measure = means if loss_type == "ipo" else sums

    def formula(logits):
        rows = log_probs_of(batch, logits)
        h = measure(rows[0]) - measure(rows[1])
        losses = {"sigmoid": softplus(-0.3 * h), "hinge": numpy.maximum(0, 1 - 0.3 * h), "ipo": (h - 1 / 0.6) ** 2}
        return losses[loss_type].mean() + weight * cross_entropy(rows[0])

    metrics = assert_is(formula, strategy, batch, library, logits)
    rewards = [0.3 * measure(side) for side in log_probs_of(batch, logits)]
    assert metrics == pytest.approx(rewarded(*rewards), abs=2e-6)


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_simpo_compares_means_with_a_margin(library, dtype, weight):
    strategy = SimPOStrategy(2.0, 0.8, 0.1, sft_weight=weight)
    batch, logits = pairs_of(1), formulas.logits_of(4, dtype, rows=2 * ROWS)

    def formula(logits):
        rows = log_probs_of(batch, logits)
        x = 2.0 * (means(rows[0]) - means(rows[1])) - 0.8
        return (0.9 * softplus(-x) + 0.1 * softplus(x)).mean() + weight * cross_entropy(rows[0])

    metrics = assert_is(formula, strategy, batch, library, logits)
    assert metrics == pytest.approx(rewarded(*(2.0 * means(side) for side in log_probs_of(batch, logits))), abs=2e-6)


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
def test_orpo_is_the_cross_entropy_and_the_log_of_the_odds_ratio(library, dtype):
    strategy = ORPOStrategy(0.4)
    batch, logits = pairs_of(2), formulas.logits_of(5, dtype, rows=2 * ROWS)

    def formula(logits):
        rows = log_probs_of(batch, logits)
        odds = [numpy.exp(means(side)) / (1 - numpy.exp(means(side))) for side in rows]
        return cross_entropy(rows[0]) + 0.4 * softplus(-numpy.log(odds[0] / odds[1])).mean()

    metrics = assert_is(formula, strategy, batch, library, logits)
    assert metrics == pytest.approx(rewarded(*(0.4 * means(side) for side in log_probs_of(batch, logits))), abs=2e-6)


def test_they_keep_no_reference_and_store_none():
    for strategy in (CPOStrategy(), SimPOStrategy(), ORPOStrategy()):
        strategy.bind(Short())
        assert strategy._reference._model is None
        assert strategy.state_dict() == {"reference": None}
        assert not strategy.copies_model(Short())
        message = refusal(lambda strategy=strategy: strategy.store_reference([PAIRS]))
        assert message.startswith(f"{type(strategy).__name__}: uses no reference, so store_reference() has nothing")


# --------------------------------------------------------------------------------------------------------------- KTO


def judged(rows=ROWS):
    """Prompts with an answer each, of several lengths."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for number in range(rows):
        tokens = torch.randint(VOCABULARY, (4 + number % 3,), generator=generator).tolist()
        prompt = 1 + number % 2
        labels = [IGNORED] * prompt + tokens[prompt:]
        examples.append({"input_ids": tokens, "labels": labels, "desirable": number % 3 != 1})
    return pad_unpaired(examples, length=LENGTH)


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize(("loss_type", "shift"), [("kto", 0.0), ("kto", -40.0), ("apo_zero_unpaired", 0.0)])
def test_kto_weighs_what_exceeds_the_divergence_by_how_it_is_judged(library, dtype, loss_type, shift):
    beta, weights = 0.4, (1.5, 0.7)
    strategy = KTOStrategy(beta, loss_type, desirable_weight=weights[0], undesirable_weight=weights[1], reference=None)
    sides = ("", "kl_") if loss_type == "kto" else ("",)
    references, batch = stored(judged(), dtype, sides)
    if loss_type == "kto":  # far below the policy, the divergence is above 0, and otherwise below
        references[1] += shift
        batch["reference_kl_log_probs"] = torch.from_numpy(references[1])
    logits = formulas.logits_of(6, dtype, rows=len(sides) * ROWS)
    fixed = log_probs_of(batch, logits, sides)
    kl = max(0.0, (sums(fixed[1]) - references[1]).mean()) if loss_type == "kto" else 0.0
    assert (kl > 10) == (shift < 0)
    desirable = batch["desirable"].numpy()

    def rewards_of(logits):
        return beta * (sums(log_probs_of(batch, logits, sides)[0]) - references[0] - kl)

    def formula(logits):  # the divergence has no gradient
        rewards = rewards_of(logits)
        return numpy.where(desirable, weights[0] * sigmoid(-rewards), weights[1] * sigmoid(rewards)).mean()

    metrics = assert_is(formula, strategy, batch, library, logits)
    margins = numpy.where(desirable, rewards_of(logits), -rewards_of(logits))
    expected = {"reward_accuracy": (margins > 0).mean(), "reward_margin": margins.mean()}
    if loss_type == "kto":
        expected["kl"] = kl
    assert metrics == pytest.approx(expected, rel=1e-5, abs=2e-6)


def test_a_policy_equal_to_its_reference_has_half_the_weights_as_loss_and_learns_what_is_desirable():
    torch.manual_seed(0)
    policy, strategy, batch = Tokens(VOCABULARY), KTOStrategy(), judged()
    strategy.bind(policy)
    prepared = strategy.prepare_batch(batch)
    loss = strategy.compute_loss(policy(prepared.inputs), prepared)
    assert_near(loss.item(), 0.5)
    loss.backward()
    with torch.no_grad():
        policy.table.weight -= 0.1 * policy.table.weight.grad
    assert strategy.compute_metrics(policy(prepared.inputs), prepared)["reward_margin"] > 0


def test_a_prompt_with_the_answer_to_another_is_cut_at_the_models_context():
    examples = [{"input_ids": [1] * start + [2] * (8 - start), "labels": [IGNORED] * start + [2] * (8 - start)}
                for start in (7, 1)]  # fmt: skip
    batch = pad_unpaired([{**each, "desirable": True} for each in examples])
    assert batch["kl_input_ids"].shape == (2, 14)
    policy, strategy = Tokens(VOCABULARY), KTOStrategy()
    policy.context = 7
    strategy.bind(policy)
    prepared = strategy.prepare_batch(batch)
    assert prepared.inputs.shape == (4, 7)
    assert (prepared.targets["labels"] != IGNORED).sum(1).tolist() == [1, 7, 1, 1]


def test_the_references_log_probabilities_of_single_answers_may_be_stored():
    strategy = KTOStrategy(reference=Short())
    batch = judged()
    (kept,) = strategy.store_reference([batch])
    assert set(kept) - set(batch) == {"reference_log_probs", "reference_kl_log_probs"}
    found = KTOStrategy(reference=None).prepare_batch(kept).targets["reference"]
    assert torch.equal(found, strategy.prepare_batch(batch).targets["reference"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0}, r"KTOStrategy\(beta=0\): needs a positive number"),
        ({"loss_type": "kt"}, r"KTOStrategy\(loss_type='kt'\): unknown; choose one of apo_zero_unpaired, kto"),
        ({"desirable_weight": -1.0}, r"desirable_weight=-1.0\): needs a positive number"),
        ({"reference": "base"}, r"KTOStrategy\(reference='base'\): needs 'copy', a model, or None"),
    ],
)
def test_options_of_kto_are_checked(options, message):
    with pytest.raises(ConfigurationError, match=message):
        KTOStrategy(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPOStrategy(reference_free="no"), r"DPOStrategy\(reference_free='no'\): needs True or False"),
        (lambda: CPOStrategy(0), r"CPOStrategy\(beta=0\): needs a positive number"),
        (lambda: CPOStrategy(sft_weight=-1), r"CPOStrategy\(sft_weight=-1\): needs a finite number of at least 0"),
        (lambda: CPOStrategy(loss_type="simpo"), r"CPOStrategy\(loss_type='simpo'\): unknown"),
        (lambda: SimPOStrategy(gamma=-0.1), r"SimPOStrategy\(gamma=-0.1\): needs a finite number of at least 0"),
        (lambda: SimPOStrategy(label_smoothing=0.7), r"label_smoothing=0.7\): needs a number of at least 0"),
        (lambda: ORPOStrategy(-0.1), r"ORPOStrategy\(beta=-0.1\): needs a positive number"),
        (lambda: RewardModelStrategy(-0.1), r"RewardModelStrategy\(center_coef=-0.1\): needs a finite number"),
    ],
)
def test_options_are_checked(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


# ------------------------------------------------------------------------------------------------------ reward models


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize("shape", ["tokens", "tokens, 1", "rows", "rows, 1"])
@pytest.mark.parametrize("marked_by", ["labels", "attention_mask"])
def test_the_reward_of_a_row_is_that_of_its_last_token(library, dtype, shape, marked_by):
    batch = {**pairs_of(3), "margin": torch.tensor([0.3, 0.0, 1.0])}
    ends = []
    for side in ("chosen", "rejected"):
        places = numpy.arange(batch[f"{side}_labels"].shape[1])
        ends += [int(places[row != IGNORED].max()) for row in batch[f"{side}_labels"].numpy()]
        if marked_by == "attention_mask":
            ends[-ROWS:] = [2, 3, 4]
            mask = places <= numpy.array(ends[-ROWS:])[:, None]
            batch[f"{side}_attention_mask"] = torch.from_numpy(mask.astype("int64"))
    assert len(set(ends)) > 1
    generator = numpy.random.default_rng(0)
    of_tokens = shape.startswith("tokens")
    outputs = generator.standard_normal((2 * ROWS, LENGTH) if of_tokens else 2 * ROWS).astype(dtype)
    outputs = outputs[..., None] if shape.endswith("1") else outputs

    def rewards_of(outputs):
        flat = outputs[..., 0] if shape.endswith("1") else outputs
        return (flat[numpy.arange(2 * ROWS), ends] if of_tokens else flat).reshape(2, ROWS)

    def formula(outputs):
        chosen, rejected = rewards_of(outputs)
        return (softplus(-(chosen - rejected - batch["margin"].numpy())) + 0.05 * (chosen + rejected) ** 2).mean()

    metrics = assert_is(formula, RewardModelStrategy(0.05), batch, library, outputs)
    assert metrics == pytest.approx(rewarded(*rewards_of(outputs)), abs=2e-6)


def test_a_value_head_over_a_language_model_is_a_reward_model():
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))
    model, strategy = WithValueHead(inner, head="1"), RewardModelStrategy()
    strategy.bind(model)
    prepared = strategy.prepare_batch(pairs_of(0))
    outputs = model(prepared.inputs)
    assert isinstance(outputs, PolicyOutputs)
    loss = strategy.compute_loss(outputs, prepared)
    assert_near(loss.item(), math.log(2))  # values are 0 at first
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    assert strategy.compute_loss(model(prepared.inputs), prepared) < loss


@pytest.mark.parametrize("shape", [(2 * ROWS, LENGTH, VOCABULARY), (2 * ROWS, 2), (ROWS,), ()])
def test_outputs_that_are_not_rewards_are_refused(shape):
    strategy = RewardModelStrategy()
    batch = strategy.prepare_batch(pairs_of(0))
    with pytest.raises(TypeError, match=r"RewardModelStrategy: the model returned .*; needs a reward for each row"):
        strategy.compute_loss(torch.zeros(shape), batch)


def test_every_strategy_has_a_name_for_configurations():
    named = {"cpo": CPOStrategy, "kto": KTOStrategy, "orpo": ORPOStrategy, "simpo": SimPOStrategy}
    assert named | {"reward_model": RewardModelStrategy} == {
        name: STRATEGIES[name] for name in (*named, "reward_model")
    }
