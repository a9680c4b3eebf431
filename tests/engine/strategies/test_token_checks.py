"""Prompt tokens outside the vocabulary, and metrics beside losses that are more than the cross entropy."""

import types

import pytest
import torch
from torch import nn

from pulsetrain.engine import DPOStrategy, JaxBackend, PretrainStrategy, SFTStrategy
from tests.support.formulas import IGNORED, VOCABULARY
from tests.support.losses import needs_jax
from tests.support.models import trainer
from tests.support.models_language import LABELS, PAIRS, TOKENS, Short, assert_refused, run_of
from tests.support.runs_strategies import jax_language_model


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
    expected = [
        f"{strategy.__name__}: {name}[1, 1]={token}: the model's vocabulary has 5 tokens, numbered from 0, and 1 of"
    ]
    assert_refused(run_of([batch(with_prompt_token(token))], strategy(), Wide()), ValueError, expected)


@needs_jax
@pytest.mark.parametrize("token", [99, -7])
@pytest.mark.parametrize(("strategy", "batch"), [each[:2] for each in UNKNOWN], ids=["sft", "dpo"])
def test_a_function_in_jax_is_given_no_prompts_token_that_it_would_take_for_another(strategy, batch, token):
    data = [batch(with_prompt_token(token))]
    run = trainer({"max_epochs": 1}, model=jax_language_model(), train_loader=data, strategy=strategy(),
                  backend=JaxBackend())  # fmt: skip
    row = "[1, 1]" if strategy is SFTStrategy else "[3, 1]"  # rejected rows follow the chosen ones
    expected = [f"{strategy.__name__}: input_ids{row}={token}: the model's vocabulary has 12 tokens"]
    assert_refused(run, ValueError, expected)


@pytest.mark.parametrize("options", [{"z_loss": 0.1}, {"label_smoothing": 0.1}, None], ids=["z", "smooth", "plain"])
def test_perplexity_is_left_out_if_the_loss_has_more_terms(options):
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


def test_the_cross_entropy_of_answers_is_reported_beside_a_z_loss():
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
