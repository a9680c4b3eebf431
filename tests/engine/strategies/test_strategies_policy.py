"""PPO and GRPO: what they make of a rollout and learn from its rows, beside formulas in NumPy."""

import numpy
import pytest
import torch

from pulsetrain.engine import GRPOStrategy, PPOStrategy
from pulsetrain.engine.schedules import Linear
from pulsetrain.engine.strategies.distributions import Gaussian
from tests.support import formulas
from tests.support.formulas import ROWS, STRATEGY_RUNS, assert_is, assert_near

STEPS, ENVIRONMENTS, ACTIONS = 7, 3, 4


def normal(advantages, mask=True):
    chosen = advantages[numpy.broadcast_to(mask, advantages.shape)]
    return numpy.where(mask, (advantages - chosen.mean()) / (chosen.std() + 1e-8), 0.0)


def tensors(dtype, **arrays):
    kinds = {"f": getattr(torch, dtype), "i": torch.int64, "b": torch.bool}
    return {name: torch.tensor(value, dtype=kinds[numpy.asarray(value).dtype.kind]) for name, value in arrays.items()}


# ----------------------------------------------------------------------------------------------- steps in environments


def steps_of(seed, dtype="float64"):
    """A rollout in which episodes end, and some are truncated."""
    generator = numpy.random.default_rng(seed)
    shape = (STEPS, ENVIRONMENTS)
    dones = generator.random(shape) < 0.3
    cut_off = dones & (generator.random(shape) < 0.5)
    assert cut_off.any()
    assert (dones & ~cut_off).any()
    return tensors(
        dtype,
        observations=generator.normal(size=(*shape, 2)),
        actions=generator.integers(ACTIONS, size=shape),
        log_probs=-2 * generator.random(shape),
        values=generator.normal(size=(STEPS + 1, ENVIRONMENTS)),
        rewards=generator.normal(size=shape),
        dones=dones,
        truncation_values=numpy.where(cut_off, generator.normal(size=shape), 0.0),
    )


def advantages_of(rollout, gamma, lam):
    """One environment after the other; the value of a truncated episode is that of its last observation."""
    found = numpy.zeros((STEPS, ENVIRONMENTS))
    for number in range(ENVIRONMENTS):
        series = {
            name: rollout[name][:, number].tolist() for name in ("values", "rewards", "dones", "truncation_values")
        }
        rewards = [r + gamma * v for r, v in zip(series["rewards"], series["truncation_values"], strict=True)]
        found[:, number] = formulas.gae_by_loop(rewards, series["values"], series["dones"], gamma, lam)
    return found


@pytest.mark.parametrize("normalize", ["rollout", True, False])
def test_rows_of_steps_have_the_advantages_and_returns_of_each_environment(normalize):
    rollout = steps_of(0)
    rows = PPOStrategy(gamma=0.9, lam=0.8, normalize_advantages=normalize).learn_from(rollout, 0.25)
    advantages = advantages_of(rollout, 0.9, 0.8)
    values = rollout["values"][:-1].numpy()
    assert_near(rows["returns"].numpy(), (advantages + values).reshape(-1), 1e-12)
    assert_near(
        rows["advantages"].numpy(), (normal(advantages) if normalize == "rollout" else advantages).reshape(-1), 1e-12
    )
    assert_near(rows["values"].numpy(), values.reshape(-1), 1e-12)
    for name in ("observations", "actions", "log_probs"):
        assert torch.equal(rows[name], torch.cat(list(rollout[name])))
    assert rows["kl_coef"].item() == 0.25
    assert "kl_coef" not in PPOStrategy().learn_from(rollout, 0.0)


PPO = [
    {"kl_coef": 0.0},
    {"kl_coef": 0.3, "entropy_coef": 0.05, "value_coef": 0.7, "value_clip_range": 0.2, "clip_range": 0.1},
    {"kl_coef": 0.0, "clip_range_high": 0.4, "value_coef": 0.0, "temperature": 0.7, "entropy_coef": 0.1},
]


def ppo(options, log_probs, entropies, values, rows, mask=None):
    """The loss, and its parts as metrics; all arrays of one shape."""
    low = options.get("clip_range", 0.2)
    high = options.get("clip_range_high", low)
    old = rows["log_probs"].double().numpy()
    taken = numpy.ones(old.shape, bool) if mask is None else mask
    policy = formulas.surrogate(log_probs, old, rows["advantages"].double().numpy(), low, high)
    before, returns = rows["values"].double().numpy(), rows["returns"].double().numpy()
    value = (values - returns) ** 2
    if (most := options.get("value_clip_range")) is not None:
        value = numpy.maximum(value, (numpy.clip(values, before - most, before + most) - returns) ** 2)
    kl = formulas.kl_k3(old, log_probs)
    ratio = numpy.exp(log_probs - old)
    metrics = {
        "kl": kl[taken].mean(),
        "clip_fraction": ((ratio > 1 + high) | (ratio < 1 - low))[taken].mean(),
        "entropy": entropies[taken].mean(),
        "value_loss": 0.5 * value[taken].mean(),
    }
    loss = policy[taken].mean() + options.get("value_coef", 0.5) * metrics["value_loss"]
    loss -= options.get("entropy_coef", 0.0) * metrics["entropy"]
    return loss + (options["kl_coef"] * metrics["kl"] if "kl_coef" in rows else 0.0), metrics


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize("options", PPO, ids=str)
def test_steps_are_learnt_by_the_clipped_losses_the_entropy_and_the_divergence(library, dtype, options):
    strategy = PPOStrategy(**options)
    rows = strategy.learn_from(steps_of(1, dtype), options["kl_coef"])
    generator = numpy.random.default_rng(2)
    logits = (0.5 * generator.standard_normal((STEPS * ENVIRONMENTS, ACTIONS))).astype(dtype)
    values = generator.standard_normal(STEPS * ENVIRONMENTS).astype(dtype)
    # near to what acted, so that some ratios are clipped and some are not
    noise = torch.from_numpy(0.2 * generator.standard_normal(len(logits))).to(rows["log_probs"].dtype)
    tempered = logits / options.get("temperature", 1.0)
    rows["log_probs"] = torch.from_numpy(formulas.log_probs_of(tempered, rows["actions"])).to(noise.dtype) + noise

    def parts(logits, values):
        logits = numpy.asarray(logits, "float64") / options.get("temperature", 1.0)
        log_probs = formulas.log_probs_of(logits, rows["actions"])
        return ppo(options, log_probs, formulas.entropies(logits), numpy.asarray(values, "float64"), rows)

    metrics = assert_is(lambda *outputs: parts(*outputs)[0], strategy, rows, library, logits, values)
    assert metrics == pytest.approx(parts(logits, values)[1], abs=2e-6)
    assert 0 < metrics["clip_fraction"] < 1
    assert strategy.prepare_batch(rows).size == STEPS * ENVIRONMENTS


@pytest.mark.parametrize("normalize", ["minibatch", "rollout", True, False])
def test_advantages_are_normalised_over_the_minibatches_of_steps_and_the_rollouts_of_texts(normalize):
    strategy = PPOStrategy(gamma=0.9, lam=0.8, normalize_advantages=normalize)
    steps = strategy.learn_from(steps_of(0), 0.0)
    size = ENVIRONMENTS * STEPS // 3
    part = {name: value[:size] for name, value in steps.items()}
    advantages = part["advantages"].numpy()
    by_minibatch = normalize in ("minibatch", True)
    found = strategy.minibatch(part)
    assert_near(found["advantages"].numpy(), normal(advantages) if by_minibatch else advantages, 1e-12)
    assert found.keys() == part.keys()
    assert torch.equal(found["returns"], part["returns"])
    texts = strategy.learn_from(texts_of(0), 0.3)
    mask = texts["completion_mask"].numpy()[:, 1:]
    advantages = texts["advantages"].numpy()
    expected = normal(advantages, mask) if normalize == "minibatch" else advantages
    assert_near(strategy.minibatch(texts)["advantages"].numpy(), expected, 1e-12)


def gaussian_log_probs(parameters, actions):
    mean, log_std = numpy.split(parameters, 2, -1)
    return (-0.5 * ((actions - mean) / numpy.exp(log_std)) ** 2 - log_std - 0.5 * numpy.log(2 * numpy.pi)).sum(-1)


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
def test_continuous_actions_are_learnt_with_ranges_and_coefficients_of_a_schedule(library, dtype):
    options = {"kl_coef": 0.0, "clip_range": 0.15, "entropy_coef": 0.04}
    names = {"clip_range": Linear(0.3, 2), "entropy_coef": Linear(0.08, 2)}
    strategy = PPOStrategy(0.0, **names)
    strategy.bind_environment(Gaussian(2))
    assert strategy.scheduled(1) == {"clip_range": 0.15, "entropy_coef": 0.04}
    generator = numpy.random.default_rng(3)
    rollout = steps_of(1, dtype)
    rollout["actions"] = torch.from_numpy(generator.normal(size=(STEPS, ENVIRONMENTS, 2)).astype(dtype))
    rows = strategy.learn_from(rollout, 0.0)
    rows |= {name: rows["returns"].new_tensor(value) for name, value in strategy.scheduled(1).items()}
    parameters = 0.3 * generator.normal(size=(STEPS * ENVIRONMENTS, 4)).astype(dtype)
    values = generator.normal(size=STEPS * ENVIRONMENTS).astype(dtype)
    actions = rows["actions"].double().numpy()
    here = gaussian_log_probs(parameters, actions) + 0.2 * generator.normal(size=len(parameters))
    rows["log_probs"] = torch.from_numpy(here).to(rows["log_probs"].dtype)

    def parts(parameters, values):
        parameters = numpy.asarray(parameters, "float64")
        entropies = (parameters[:, 2:] + 0.5 * (1 + numpy.log(2 * numpy.pi))).sum(-1)
        log_probs = gaussian_log_probs(parameters, actions)
        return ppo(options, log_probs, entropies, numpy.asarray(values, "float64"), rows)

    metrics = assert_is(lambda *outputs: parts(*outputs)[0], strategy, rows, library, parameters, values)
    assert metrics == pytest.approx(parts(parameters, values)[1], abs=3e-6)
    assert 0 < metrics["clip_fraction"] < 1


def test_sequences_keep_the_steps_of_an_environment_in_order():
    rollout = {name: each[:6] for name, each in steps_of(2).items()}
    rollout["values"] = steps_of(2)["values"][:7]
    rollout["starts"] = torch.zeros(6, ENVIRONMENTS, dtype=torch.bool)
    rollout["state/0"] = torch.arange(2 * ENVIRONMENTS * 5.0).reshape(2, ENVIRONMENTS, 5)
    rows = PPOStrategy().learn_from(rollout, 0.0)
    for row in range(2 * ENVIRONMENTS):
        chunk, number = divmod(row, ENVIRONMENTS)
        assert torch.equal(rows["observations"][row], rollout["observations"][3 * chunk : 3 * chunk + 3, number])
        assert torch.equal(rows["actions"][row], rollout["actions"][3 * chunk : 3 * chunk + 3, number])
        assert torch.equal(rows["state/0"][row], rollout["state/0"][chunk, number])
    prepared = PPOStrategy().prepare_batch(rows)
    assert prepared.size == 2 * ENVIRONMENTS
    assert prepared.inputs["observations"].shape == (2 * ENVIRONMENTS, 3, 2)
    assert prepared.targets["actions"].shape == (2 * ENVIRONMENTS, 3)


# ------------------------------------------------------------------------------------------------------------- texts


def texts_of(seed, dtype="float64", reference=True):
    generator = numpy.random.default_rng(seed)
    tokens, mask = formulas.tokens_of(seed), formulas.answers_of(seed)
    shape = tokens[:, 1:].shape
    numbers = {"log_probs": -2 * generator.random(shape), "rewards": generator.normal(size=ROWS)}
    numbers["values"] = generator.normal(size=shape)
    if reference:
        numbers["reference_log_probs"] = numbers["log_probs"] + 0.3 * generator.standard_normal(shape)
    return {"input_ids": tokens, "completion_mask": mask, **tensors(dtype, **numbers)}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reference", [True, False])
def test_a_text_is_rewarded_at_its_end_and_each_token_pays_for_leaving_the_reference(reference, normalize):
    rollout, kl_coef = texts_of(0, reference=reference), 0.3
    strategy = PPOStrategy(kl_coef, gamma=0.9, lam=0.8, normalize_advantages=normalize)
    rows = strategy.learn_from(rollout, kl_coef)
    mask = rollout["completion_mask"].numpy()[:, 1:]
    advantages, returns = numpy.zeros(mask.shape), numpy.zeros(mask.shape)
    for row in range(ROWS):
        places = numpy.nonzero(mask[row])[0]
        values = rollout["values"][row].numpy()[places].tolist()
        rewards = [0.0] * len(places)
        if reference:
            apart = (rollout["log_probs"] - rollout["reference_log_probs"])[row].numpy()[places]
            rewards = (-kl_coef * apart).tolist()
        rewards[-1] += rollout["rewards"][row].item()
        ends = [False] * (len(places) - 1) + [True]
        advantages[row, places] = formulas.gae_by_loop(rewards, [*values, 0.0], ends, 0.9, 0.8)
        returns[row, places] = advantages[row, places] + values
    assert_near(rows["returns"].numpy(), returns, 1e-12)
    assert_near(rows["advantages"].numpy(), normal(advantages, mask) if normalize else advantages, 1e-12)


def near_by(rollout, logits, temperature):
    """The rollout's log-probabilities as those of a policy near to these logits, so that some ratios are clipped."""
    here = formulas.log_probs_of(logits / temperature, rollout["input_ids"][:, 1:])
    noise = 0.3 * numpy.random.default_rng(9).standard_normal(here.shape)
    return torch.from_numpy(here + noise).to(rollout["log_probs"].dtype)


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize("options", PPO, ids=str)
def test_texts_are_learnt_by_the_means_over_generated_tokens(library, dtype, options):
    strategy, temperature = PPOStrategy(**options), options.get("temperature", 1.0)
    logits = formulas.logits_of(4, dtype)
    values = numpy.random.default_rng(5).standard_normal(logits.shape[:2]).astype(dtype)
    rollout = texts_of(1, dtype)
    rollout["log_probs"] = near_by(rollout, logits, temperature)
    rows = strategy.learn_from(rollout, options["kl_coef"])
    mask = rollout["completion_mask"].numpy()[:, 1:]

    def parts(logits, values):
        logits = numpy.asarray(logits, "float64") / temperature
        log_probs = formulas.log_probs_of(logits, rows["input_ids"][:, 1:])
        return ppo(options, log_probs, formulas.entropies(logits), numpy.asarray(values, "float64"), rows, mask)

    metrics = assert_is(lambda *outputs: parts(*outputs)[0], strategy, rows, library, logits, values)
    assert metrics == pytest.approx(parts(logits, values)[1], abs=2e-6)
    assert strategy.prepare_batch(rows).size == mask.sum()


GRPO = [
    {"normalization": "sequence_mean"},
    {"normalization": "token_mean", "clip_range_high": 0.35},
    {"normalization": "dr_grpo", "max_length": 9, "temperature": 1.5},
    {"normalization": "sequence_mean", "kl_coef": 0.2, "temperature": 0.7},
    {"normalization": "dr_grpo", "max_length": 9, "kl_coef": 0.2},
]


@pytest.mark.parametrize(("library", "dtype"), STRATEGY_RUNS)
@pytest.mark.parametrize("options", GRPO, ids=str)
def test_groups_are_learnt_by_each_normalisation(library, dtype, options):
    strategy, temperature = GRPOStrategy(3, **options), options.get("temperature", 1.0)
    logits, rollout = formulas.logits_of(6, dtype), texts_of(2, dtype)
    rollout["log_probs"] = near_by(rollout, logits, temperature)
    rows = strategy.learn_from(rollout, 0.0)
    mask, kl_coef = rollout["completion_mask"].numpy()[:, 1:], options.get("kl_coef", 0.0)
    old = rows["log_probs"].double().numpy()

    def formula(logits):
        log_probs = formulas.log_probs_of(numpy.asarray(logits, "float64") / temperature, rows["input_ids"][:, 1:])
        advantages = rows["advantages"].double().numpy()[:, None]
        losses = formulas.surrogate(log_probs, old, advantages, 0.2, options.get("clip_range_high", 0.2))
        losses = losses + kl_coef * formulas.kl_k3(log_probs, rollout["reference_log_probs"].double().numpy())
        by_row = [losses[row][mask[row]] for row in range(ROWS)]
        if options["normalization"] == "sequence_mean":
            return numpy.mean([row.mean() for row in by_row])
        total = sum(row.sum() for row in by_row)
        return total / (mask.sum() if options["normalization"] == "token_mean" else 9 * ROWS)

    metrics = assert_is(formula, strategy, rows, library, logits)
    tempered = numpy.asarray(logits, "float64") / temperature
    now = formulas.log_probs_of(tempered, rows["input_ids"][:, 1:])
    assert metrics["kl"] == pytest.approx(formulas.kl_k3(old, now)[mask].mean(), abs=2e-6)
    assert metrics["entropy"] == pytest.approx(formulas.entropies(tempered)[mask].mean(), abs=2e-6)
    expected = mask.sum() if options["normalization"] == "token_mean" else ROWS
    assert strategy.prepare_batch(rows).size == expected


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_advantage_is_how_much_better_a_text_was_than_its_group(scale):
    rollout = {**texts_of(3), "rewards": torch.tensor([1.0, 4.0, 2.0, 2.5, 0.0, 9.0], dtype=torch.float64)}
    rows = GRPOStrategy(2, scale_rewards=scale).learn_from(rollout, 0.0)
    groups = rollout["rewards"].numpy().reshape(3, 2)
    spread = {"group": groups.std(1, ddof=1, keepdims=True), "batch": groups.std(ddof=1), "none": None}[scale]
    expected = groups - groups.mean(1, keepdims=True)
    assert_near(rows["advantages"].numpy(), (expected / (spread + 1e-4) if spread is not None else expected).ravel())
    assert "rewards" not in rows
    assert "kl_coef" not in rows


def test_without_a_coefficient_a_reference_is_left_out_of_the_loss():
    rollout = texts_of(4)
    rows = GRPOStrategy(3).learn_from(rollout, 0.0)
    assert "reference_log_probs" not in GRPOStrategy(3).prepare_batch(rows).targets
    assert "reference_log_probs" in GRPOStrategy(3, kl_coef=0.1).prepare_batch(rows).targets
