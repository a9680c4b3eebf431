"""The family of GRPO as a strategy, beside formulas: ratios, objectives, entropy, truncated texts, advantages."""

import math

import numpy
import pytest
import torch

from pulsetrain.engine import GRPOStrategy
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import gdpo_advantages, rloo_advantages
from tests.support import formulas, trl_trainers
from tests.support.formulas import ROWS, STRATEGY_RUNS, assert_is, assert_near
from tests.support.models import Tokens, trainer
from tests.support.models_language import refusal

FAMILY = [
    {"ratio": "sequence", "entropy_coef": 0.1},
    {"ratio": "product", "advantages": "rloo", "temperature": 0.7},
    {"objective": "cispo", "clip_range_high": 0.1, "normalization": "token_mean", "entropy_coef": 0.05},
    {"mask_truncated": True, "clip_range": 0.1},
    {"mask_truncated": True, "normalization": "token_mean", "entropy_coef": 0.2, "kl_coef": 0.3},
    {"mask_truncated": True, "normalization": "dr_grpo", "max_length": 9, "objective": "cispo", "ratio": "sequence"},
    {"advantages": "gdpo", "normalization": "dr_grpo", "max_length": 9, "entropy_coef": 0.3},
]


def rollout_of(seed, dtype, logits, temperature):
    """Texts of a policy near to these logits; the second of three was truncated."""
    generator = numpy.random.default_rng(seed)
    tokens, mask = formulas.tokens_of(seed), formulas.answers_of(seed)
    here = formulas.log_probs_of(logits / temperature, tokens[:, 1:])
    parts = generator.normal(size=(ROWS, 2))
    kind = getattr(torch, dtype)
    return {
        "input_ids": tokens,
        "completion_mask": mask,
        "log_probs": torch.tensor(here + 0.3 * generator.standard_normal(here.shape), dtype=kind),
        "reference_log_probs": torch.tensor(here + 0.3 * generator.standard_normal(here.shape), dtype=kind),
        "rewards": torch.tensor(parts.sum(1), dtype=kind),
        "reward_parts": torch.tensor(parts, dtype=kind),
        "reward_weights": torch.ones(2, dtype=kind),
        "truncated": torch.tensor([False, True, False]),
    }


def ratio_of(log_probs, old, taken, ratio):
    """Of each token of a text, before any clipping."""
    apart = (log_probs - old)[taken]
    if ratio == "sequence":
        apart = numpy.full(len(apart), apart.mean())
    if ratio == "product":
        apart = numpy.full(len(apart), apart.sum())
    return numpy.exp(apart)


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize("options", FAMILY, ids=str)
def test_each_member_learns_by_its_formula(library, dtype, options):
    temperature, ratio = options.get("temperature", 1.0), options.get("ratio", "token")
    logits = formulas.logits_of(6, dtype)
    rollout = rollout_of(2, dtype, logits, temperature)
    strategy = GRPOStrategy(3, **options)
    rows = strategy.learn_from(rollout, 0.0)
    mask = rollout["completion_mask"].numpy()[:, 1:]
    counted = mask & ~numpy.array([[False], [bool(options.get("mask_truncated"))], [False]])
    old, reference = (rollout[name].double().numpy() for name in ("log_probs", "reference_log_probs"))
    advantages = rows["advantages"].double().numpy()
    low = options.get("clip_range", 0.2)
    high = options.get("clip_range_high", low)

    def log_probs_at(logits):
        return formulas.log_probs_of(numpy.asarray(logits, "float64") / temperature, rollout["input_ids"][:, 1:])

    acted = log_probs_at(logits)  # CISPO's weights have no gradient

    def formula(logits):
        now, entropies = log_probs_at(logits), formulas.entropies(numpy.asarray(logits, "float64") / temperature)
        by_row = []
        for row, taken in enumerate(counted):
            if not taken.any():
                by_row.append(numpy.zeros(0))
                continue
            if options.get("objective") == "cispo":
                weight = numpy.minimum(ratio_of(acted[row], old[row], taken, ratio), 1 + high)
                losses = -weight * advantages[row] * now[row][taken]
            else:
                found = ratio_of(now[row], old[row], taken, ratio)
                losses = numpy.maximum(
                    -advantages[row] * found, -advantages[row] * numpy.clip(found, 1 - low, 1 + high)
                )
            losses = losses + options.get("kl_coef", 0.0) * formulas.kl_k3(now[row], reference[row])[taken]
            by_row.append(losses - options.get("entropy_coef", 0.0) * entropies[row][taken])
        normalization = options.get("normalization", "sequence_mean")
        if normalization == "sequence_mean":
            return sum(row.mean() if len(row) else 0.0 for row in by_row) / ROWS
        total = sum(row.sum() for row in by_row)
        return total / (counted.sum() if normalization == "token_mean" else 9 * ROWS)

    metrics = assert_is(formula, strategy, rows, library, logits)
    ratios = numpy.concatenate([ratio_of(acted[row], old[row], mask[row], ratio) for row in range(ROWS)])
    outside = ratios > 1 + high if options.get("objective") == "cispo" else (ratios > 1 + high) | (ratios < 1 - low)
    assert metrics["clip_fraction"] == pytest.approx(outside.mean(), abs=2e-6)
    assert metrics["kl"] == pytest.approx(formulas.kl_k3(old, acted)[mask].mean(), abs=2e-6), "over all tokens"
    is_token_mean = options.get("normalization") == "token_mean"
    assert strategy.prepare_batch(rows).size == (counted.sum() if is_token_mean else ROWS)


def test_the_advantages_are_those_of_the_kind_that_is_asked_for():
    rollout = rollout_of(0, "float64", formulas.logits_of(0), 1.0)
    found = GRPOStrategy(3, advantages="rloo").learn_from(rollout, 0.0)["advantages"]
    assert_near(found, rloo_advantages(rollout["rewards"], 3))
    found = GRPOStrategy(3, advantages="rloo", scale_rewards="batch").learn_from(rollout, 0.0)["advantages"]
    assert_near(found, rloo_advantages(rollout["rewards"], 3, "batch"))
    rollout["reward_weights"] = torch.tensor([1.0, -0.5], dtype=torch.float64)
    found = GRPOStrategy(3, advantages="gdpo").learn_from(rollout, 0.0)["advantages"]
    assert_near(found, gdpo_advantages(rollout["reward_parts"], rollout["reward_weights"], 3))


def test_a_truncated_text_gets_no_gradient_and_the_others_keep_theirs():
    logits = torch.from_numpy(formulas.logits_of(1)).requires_grad_()
    rollout = rollout_of(1, "float64", logits.detach().numpy(), 1.0)
    found = {}
    for masks in (False, True):
        strategy = GRPOStrategy(3, mask_truncated=masks, entropy_coef=0.1)
        batch = strategy.prepare_batch(strategy.learn_from(rollout, 0.0))
        (found[masks],) = torch.autograd.grad(strategy.compute_loss(logits, batch), logits)
    assert not found[True][1].any()
    assert found[False][1].any()
    for row in (0, 2):
        torch.testing.assert_close(found[True][row], found[False][row])


@pytest.mark.parametrize("normalization", ["sequence_mean", "token_mean"])
def test_where_every_text_is_truncated_nothing_is_learnt_and_no_number_is_nan(normalization):
    logits = torch.from_numpy(formulas.logits_of(1)).requires_grad_()
    rollout = rollout_of(1, "float64", logits.detach().numpy(), 1.0)
    rollout["truncated"] = torch.ones(ROWS, dtype=torch.bool)
    strategy = GRPOStrategy(3, mask_truncated=True, entropy_coef=0.1, normalization=normalization)
    batch = strategy.prepare_batch(strategy.learn_from(rollout, 0.0))
    loss = strategy.compute_loss(logits, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()
    assert batch.size == (pytest.approx(1e-9) if normalization == "token_mean" else ROWS)
    assert all(math.isfinite(value) for value in strategy.compute_metrics(logits.detach(), batch).values())


def rows_of(count, truncated):
    tokens = torch.randint(0, 8, (count, 6), generator=torch.Generator().manual_seed(count))
    mask = torch.arange(6).expand(count, -1) > 1
    return {
        "input_ids": tokens, "completion_mask": mask, "log_probs": torch.full((count, 5), -2.0),
        "advantages": torch.linspace(-1.0, 2.0, count), "truncated": torch.full((count,), truncated),
    }  # fmt: skip


def trained_on(batches, accumulate):
    torch.manual_seed(0)
    strategy = GRPOStrategy(2, mask_truncated=True, normalization="token_mean")
    config = {"accumulate": accumulate, "learning_rate": 1.0, "max_iterations": len(batches)}
    run = trainer(config, model=Tokens(8), train_loader=batches, strategy=strategy)
    before = run.model.table.weight.detach().clone()
    history = run.train()
    return run.model.table.weight.detach() - before, history["train/loss"]


def test_a_minibatch_of_truncated_texts_alone_weighs_nothing_among_those_of_an_update():
    learnt, cut = rows_of(3, False), rows_of(2, True)
    whole, _ = trained_on([{name: torch.cat([learnt[name], cut[name]]) for name in learnt}], 1)
    parts, losses = trained_on([learnt, cut], 2)
    assert whole.any()
    torch.testing.assert_close(parts, whole)
    assert all(map(math.isfinite, losses))


def test_an_update_of_truncated_texts_alone_changes_nothing():
    changed, losses = trained_on([rows_of(2, True)], 1)
    assert not changed.any()
    assert losses == [0.0]


REFUSED = [
    ({"ratio": "text"}, "GRPOStrategy(ratio='text'): unknown; choose one of product, sequence, token"),
    ({"objective": "ppo"}, "GRPOStrategy(objective='ppo'): unknown; choose one of cispo, clip"),
    ({"advantages": "loo"}, "GRPOStrategy(advantages='loo'): unknown; choose one of gdpo, grpo, rloo"),
    (
        {"advantages": "rloo", "scale_rewards": "group"},
        "GRPOStrategy(scale_rewards='group', advantages='rloo'): a text is compared with the others alone",
    ),
    ({"scale_rewards": "std"}, "GRPOStrategy(scale_rewards='std'): unknown; choose one of batch, group, none"),
    (
        {"advantages": "gdpo", "scale_rewards": "none"},
        "GRPOStrategy(scale_rewards='none', advantages='gdpo'): 'gdpo' always divides by each group's; leave it out",
    ),
    ({"entropy_coef": -0.1}, "GRPOStrategy(entropy_coef=-0.1): needs a finite number of at least 0"),
    ({"mask_truncated": 1}, "GRPOStrategy(mask_truncated=1): needs True or False"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_wrong_options_are_refused(options, message):
    assert refusal(lambda: GRPOStrategy(2, **options)).startswith(message)


def test_a_rollout_that_lacks_what_an_option_needs_is_refused():
    rollout = rollout_of(0, "float32", formulas.logits_of(0), 1.0)
    for options, name in (({"advantages": "gdpo"}, "reward_parts"), ({"mask_truncated": True}, "truncated")):
        lacking = {key: value for key, value in rollout.items() if key != name}
        (argument,) = options
        with pytest.raises(ConfigurationError, match=rf"^GRPOStrategy\({argument}=.*\): the rollout has no '{name}'"):
            GRPOStrategy(3, **options).learn_from(lacking, 0.0)


def test_the_entropy_bonus_is_trls():
    pytest.importorskip("trl", reason="trl is not there: pip install trl")
    logits = torch.from_numpy(formulas.logits_of(3)).requires_grad_()
    rollout = rollout_of(3, "float64", logits.detach().numpy(), 1.0)
    strategy = GRPOStrategy(3, normalization="token_mean", entropy_coef=0.3)
    rows = strategy.learn_from(rollout, 0.0)
    batch = strategy.prepare_batch(rows)
    ours = strategy.compute_loss(logits, batch)
    (gradient,) = torch.autograd.grad(ours, logits)
    log_softmax = logits.log_softmax(-1)
    log_probs = log_softmax.gather(-1, batch.targets["actions"].unsqueeze(-1)).squeeze(-1)
    entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    theirs, _ = trl_trainers.grpo_loss(
        log_probs, rows["log_probs"], rows["advantages"], batch.targets["mask"], "bnpo", entropies=entropies,
        entropy_coef=0.3,
    )  # fmt: skip
    (expected,) = torch.autograd.grad(theirs, logits)
    assert_near(ours.detach(), theirs.detach(), 1e-9)
    assert_near(gradient, expected, 1e-9)
