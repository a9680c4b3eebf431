"""What would be learnt wrongly without a word: mixed documents, moving references, other numbers, unknown tokens."""

import types

import pytest
import torch
from torch import nn

from pulsetrain.engine import DPOStrategy, Every, GRPOStrategy, JaxBackend, PPOStrategy, PretrainStrategy, SFTStrategy
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.rollouts import TextRollouts
from pulsetrain.engine.strategies import WithValueHead, dpo, language
from pulsetrain.handlers import Checkpointer
from tests.engine.strategies.test_strategies_bad_input import (
    LABELS,
    PAIRS,
    TEXTS,
    TOKENS,
    Short,
    Valued,
    assert_refused,
)
from tests.support.libraries import needs_jax
from tests.support.on_strategies import jax_language_model
from tests.support.small import Tokens, trainer
from tests.support.strategy_formulas import IGNORED, VOCABULARY

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
PACKED = {**TEXTS, "labels": TOKENS, "position_ids": POSITIONS}


def refusal(make, error=ConfigurationError):
    with pytest.raises(error) as caught:
        make()
    return str(caught.value)


def run_of(data, strategy, model=None):
    return trainer(
        {"max_epochs": 1, "learning_rate": 0.1}, model=model or Short(), train_loader=data, strategy=strategy
    )


# ------------------------------------------------------------------------------------------------ documents in one row


class Mean(Tokens):
    """Each position sees the mean of all before it, in its document alone if `apart`; counts its calls."""

    def __init__(self, apart, zero=False):
        super().__init__(VOCABULARY)
        self.head = nn.Linear(VOCABULARY, VOCABULARY)
        self.dropout = nn.Dropout(0.2)  # two answers of one model differ, too, unless it is asked in eval mode
        self.apart, self.calls = apart, 0
        if zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, input_ids, position_ids):
        self.calls += 1
        place = torch.arange(input_ids.shape[1])
        begun = place - position_ids if self.apart else torch.zeros_like(position_ids)
        seen = ((begun[:, :, None] == begun[:, None]) & (place[:, None] >= place)).float()
        return self.head(seen / seen.sum(-1, keepdim=True) @ self.dropout(self.table(input_ids)))


class Swallowing(Mean):
    """Takes whatever it is given, and looks at the tokens alone."""

    def __init__(self):
        super().__init__(apart=False)

    def forward(self, input_ids, **kwargs):
        return super().forward(input_ids, torch.zeros_like(input_ids))


@pytest.mark.parametrize("make", [lambda: Mean(apart=False), Swallowing], ids=["seen", "swallowed"])
@pytest.mark.parametrize(
    ("strategy", "batch"),
    [
        (SFTStrategy, PACKED),
        (PretrainStrategy, {"input_ids": TOKENS, "position_ids": POSITIONS}),
        (lambda: PretrainStrategy(separator=0), TOKENS),
    ],
    ids=["sft", "pretrain", "separator"],
)
def test_a_model_that_sees_the_document_before_is_refused(make, strategy, batch):
    torch.manual_seed(0)
    model = make()
    told = ["several documents share a row, and", f"{type(model).__name__} lets each see the one before it", "no separ"]
    run = run_of([batch], strategy(), model)
    assert_refused(run, ConfigurationError, told)
    assert_refused(run, ConfigurationError, told)  # a second try is no way past it
    assert run.state.update == 0


def test_a_model_that_keeps_documents_apart_is_asked_once():
    torch.manual_seed(0)
    model = Mean(apart=True)
    run = run_of([PACKED] * 3, SFTStrategy(), model)
    run.train()
    assert run.state.update == 3
    assert model.calls == 3 + 1
    assert model.training


def test_a_head_of_zeros_shows_nothing_and_the_model_is_asked_again():
    torch.manual_seed(0)
    run = run_of([PACKED] * 3, SFTStrategy(), Mean(apart=False, zero=True))
    with pytest.raises(ConfigurationError, match="lets each see the one before it"):
        run.train()
    assert run.state.update == 1  # which has made the head another


# ---------------------------------------------------------------------------------------------------------- references


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
    told = refusal(lambda: run(shared, model()))
    assert told.startswith(f"{type(shared).__name__}: holds the reference of another model already; give each Trainer")


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
    told = refusal(lambda: strategy.bind(model))
    what = "is the model that learns itself" if kind == "itself" else "shares 'weight' with the model"
    assert f"{what}, so that it would move along; pass reference='copy'" in told
    assert all(each.requires_grad for each in model.parameters())


def test_a_model_beneath_a_value_head_is_no_reference_of_it():
    beneath = Mean(apart=True)
    strategy = PPOStrategy(0.1, reference=beneath)
    assert "shares 'table.weight' with the model" in refusal(lambda: texts(strategy, WithValueHead(beneath, "head")))
    assert all(each.requires_grad for each in beneath.parameters())


def test_a_reference_is_asked_in_eval_mode_and_put_back():
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


def test_a_run_goes_on_with_the_reference_that_was_given_to_it(tmp_path):
    def run(seed, folder):
        torch.manual_seed(seed)
        reference = Short()
        torch.manual_seed(0)
        handlers = [Checkpointer(tmp_path / folder, every=Every(iterations=1))]
        return trainer({"max_epochs": 1}, model=Short(), train_loader=[PAIRS], handlers=handlers,
                       strategy=DPOStrategy(reference=reference))  # fmt: skip

    place = run(1, "run").save_checkpoint()
    run(1, "same").load_checkpoint(place)
    with pytest.raises(CheckpointError, match=r"^DPOStrategy: the reference model has other weights than the one"):
        run(2, "other").load_checkpoint(place)


# ------------------------------------------------------------------------------------ log-probabilities that are stored

IPO = "ipo"


@pytest.mark.parametrize(("storing", "reading"), [(IPO, "sigmoid"), ("sigmoid", IPO), (IPO, "hinge")])
def test_means_that_were_stored_are_not_taken_for_sums(storing, reading):
    stored = DPOStrategy(loss_type=storing, reference=Short()).store_reference([PAIRS])
    run_of(stored, DPOStrategy(loss_type=storing, reference=None)).train()
    name = "reference_chosen_mean_log_probs" if reading == IPO else "reference_chosen_log_probs"
    run = run_of(stored, DPOStrategy(loss_type=reading, reference=None))
    assert_refused(run, TypeError, [f"lacks '{name}'; store_reference computes it"])


def test_means_that_were_stored_already_are_computed_anew():
    (first,) = DPOStrategy(loss_type=IPO, reference=Short()).store_reference([PAIRS])
    strategy = DPOStrategy(loss_type=IPO, reference=Short())
    (found,), (again,) = strategy.store_reference([PAIRS]), strategy.store_reference([first])
    name = "reference_chosen_mean_log_probs"
    assert torch.equal(again[name], found[name])
    assert not torch.equal(again[name], first[name])


def test_each_side_has_one_stored_number_for_each_pair():
    numbers = {"reference_chosen_log_probs": torch.zeros(3), "reference_rejected_log_probs": torch.zeros(1)}
    run = run_of([{**PAIRS, **numbers}], DPOStrategy(reference=None))
    assert_refused(run, ValueError, ["'reference_chosen_log_probs' has shape (3,), and there are 2 pairs"])


def test_nothing_is_measured_against_two_things():
    told = refusal(lambda: DPOStrategy(reference_free=True, reference=Short()))
    assert told.startswith("DPOStrategy(reference_free=True, reference=...): measures against nothing")


# ---------------------------------------------------------------------------------------------------- preference pairs


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
def test_a_pair_with_one_answer_alone_adds_no_gradient_where_nobody_looks(monkeypatch, loss_type, side):
    for module in (language, dpo):
        monkeypatch.setattr(module, "on_host", lambda value: False)
    torch.manual_seed(0)
    model, reference = Short(), Short()
    pairs = {**PAIRS, "rejected_input_ids": TOKENS.flip(1), "rejected_labels": TOKENS.flip(1)}
    masked = pairs[f"{side}_labels"].clone()
    masked[1] = IGNORED

    def gradient(batch):
        strategy = DPOStrategy(loss_type=loss_type, reference=reference)
        strategy.bind(model)
        prepared = strategy.prepare_batch(batch)
        (found,) = torch.autograd.grad(strategy.compute_loss(model(prepared.inputs), prepared), [model.table.weight])
        return found

    one = gradient({name: value[:1] for name, value in pairs.items()})
    assert one.abs().max() > 0.01
    torch.testing.assert_close(gradient({**pairs, f"{side}_labels": masked}), one / 2)
    assert not torch.allclose(gradient(pairs), one / 2)


# ------------------------------------------------------------------------------------------------------ unknown tokens


class Wide(Short):
    """More rows in its table than tokens in its vocabulary, as models that are padded have."""

    config = types.SimpleNamespace(vocab_size=VOCABULARY)

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(100, VOCABULARY)

    def forward(self, tokens):
        return self.rows(tokens)


def with_prompt_token(token):
    tokens = TOKENS.clone()
    tokens[1, 1] = token
    return tokens


UNKNOWN = [
    (SFTStrategy, lambda tokens: {"input_ids": tokens, "labels": LABELS}, "input_ids"),
    (DPOStrategy, lambda tokens: {**PAIRS, "rejected_input_ids": tokens}, "rejected_input_ids"),
]


@pytest.mark.parametrize("token", [VOCABULARY, 99, -7])
@pytest.mark.parametrize(("strategy", "batch", "name"), UNKNOWN, ids=["sft", "dpo"])
def test_a_prompts_token_outside_the_vocabulary_is_named(strategy, batch, name, token):
    told = [
        f"{strategy.__name__}: {name}[1, 1]={token}: the model's vocabulary has 5 tokens, numbered from 0, and 1 of"
    ]
    assert_refused(run_of([batch(with_prompt_token(token))], strategy(), Wide()), ValueError, told)


@needs_jax
@pytest.mark.parametrize("token", [99, -7])
@pytest.mark.parametrize(("strategy", "batch"), [each[:2] for each in UNKNOWN], ids=["sft", "dpo"])
def test_a_function_in_jax_is_given_no_prompts_token_that_it_would_take_for_another(strategy, batch, token):
    data = [batch(with_prompt_token(token))]
    run = trainer({"max_epochs": 1}, model=jax_language_model(), train_loader=data, strategy=strategy(),
                  backend=JaxBackend())  # fmt: skip
    row = "[1, 1]" if strategy is SFTStrategy else "[3, 1]"  # rejected rows stand behind the chosen ones
    told = [f"{strategy.__name__}: input_ids{row}={token}: the model's vocabulary has 12 tokens"]
    assert_refused(run, ValueError, told)


# ------------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("options", [{"z_loss": 0.1}, {"label_smoothing": 0.1}, None], ids=["z", "smooth", "plain"])
def test_what_follows_from_a_cross_entropy_alone_is_left_out_beside_more(options):
    torch.manual_seed(0)
    data, strategy = [TOKENS], PretrainStrategy(bytes_per_token=2.0, loss_options=options)
    run = trainer({"max_epochs": 1, "learning_rate": 0.1}, model=Short(), train_loader=data, val_loader=data,
                  strategy=strategy)  # fmt: skip
    run.train()
    names = {name for name in run.history.get_history() if "perplexity" in name}
    assert names == ({"train/perplexity", "val/perplexity"} if options is None else set())
    with torch.no_grad():
        logits = run.model(TOKENS[:, :-1])
    nats = nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).item()
    assert run.history["val/bits_per_byte"][-1] == pytest.approx(nats / torch.tensor(2.0).log().item() / 2, abs=1e-5)
    if options is not None:
        assert run.history["val/cross_entropy"][-1] == pytest.approx(nats, abs=1e-5)
        assert abs(run.history["val/loss"][-1] - nats) > 1e-3


def test_the_cross_entropy_of_answers_is_told_beside_a_z_loss():
    torch.manual_seed(0)
    data = [{"input_ids": TOKENS, "labels": LABELS}]
    run = trainer({"max_epochs": 1, "learning_rate": 0.1}, model=Short(), train_loader=data, val_loader=data,
                  strategy=SFTStrategy({"z_loss": 0.1}))  # fmt: skip
    run.train()
    with torch.no_grad():
        logits = run.model(TOKENS[:, :-1])
    nats = nn.functional.cross_entropy(logits.flatten(0, 1), LABELS[:, 1:].flatten(), ignore_index=IGNORED).item()
    assert run.history["val/cross_entropy"][-1] == pytest.approx(nats, abs=1e-5)
    assert not {name for name in run.history.get_history() if "perplexity" in name}
