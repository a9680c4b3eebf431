"""The auxiliary loss of a mixture of experts: added as transformers adds it, reported by name, left out if asked."""

import pytest
import torch

from pulsetrain.engine import (
    ConfigurationError,
    DPOStrategy,
    Events,
    JaxBackend,
    PretrainStrategy,
    RewardModelStrategy,
    SFTStrategy,
)
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.step.log_point import split_loss
from pulsetrain.engine.step.model_call import call
from tests.support.formulas import VOCABULARY
from tests.support.models import Tokens
from tests.support.models_language import PAIRS, TEXTS, assert_refused, refusal, run_of
from tests.support.runs_backends import needs_jax

transformers = pytest.importorskip("transformers")

WIDTHS = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "router_aux_loss_coef": 0.3,
}  # fmt: skip
FAMILIES = {
    "mixtral": lambda **more: transformers.MixtralConfig(**WIDTHS, num_local_experts=3, **more),
    "qwen2_moe": lambda **more: transformers.Qwen2MoeConfig(
        **WIDTHS, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        **more,
    ),
    "olmoe": lambda **more: transformers.OlmoeConfig(**WIDTHS, num_experts=3, num_experts_per_tok=2, **more),
}  # fmt: skip


def model_of(family="mixtral", **more):
    torch.manual_seed(0)
    more = {"output_router_logits": True, **more}
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[family](**more)).train()


def texts(padding=0):
    """Two rows; with padding, the second one ends so many tokens earlier. The model does not see the last position."""
    tokens = torch.randint(1, 32, (2, 10), generator=torch.Generator().manual_seed(1))
    labels, mask = torch.where(torch.arange(10) < 3, IGNORED, tokens), torch.ones_like(tokens)
    labels[:, -1] = IGNORED
    if padding:
        tokens[1, -padding - 1 :], labels[1, -padding - 1 :], mask[1, -padding - 1 :] = 0, IGNORED, 0
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def loss_of(strategy, model, batch):
    strategy.bind(model)
    prepared = strategy.prepare_batch(batch)
    return split_loss(strategy.compute_loss(call(model, prepared.inputs), prepared, check=True), strategy)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_its_gradients_are_those_of_transformers_with_labels(family, padding):
    model, batch = model_of(family), texts(padding)
    loss, parts = loss_of(SFTStrategy(), model, batch)
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters()}
    theirs = model_of(family)
    seen = {name: each[:, :-1] for name, each in batch.items()}
    expected = theirs(**seen)
    expected.loss.backward()
    assert expected.aux_loss > 0.5, "it would show"
    torch.testing.assert_close(parts["aux_loss"], expected.aux_loss)
    torch.testing.assert_close(loss, expected.loss)
    for name, each in theirs.named_parameters():
        torch.testing.assert_close(found[name], each.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_it_is_off_where_the_configuration_does_not_ask_for_it():
    model = model_of(output_router_logits=False)
    loss, parts = loss_of(SFTStrategy(), model, texts())
    assert parts == {}
    torch.testing.assert_close(loss, model(**{name: each[:, :-1] for name, each in texts().items()}).loss)


@pytest.mark.parametrize("asked", [True, False])
def test_a_weight_of_its_own_decides_whatever_the_configuration_says(asked):
    plain, parts = loss_of(SFTStrategy(aux_loss_coef=0.0), model_of(output_router_logits=asked), texts())
    assert parts == {}
    loss, parts = loss_of(SFTStrategy(aux_loss_coef=2.0), model_of(output_router_logits=asked), texts())
    torch.testing.assert_close(loss, plain + 2.0 * parts["aux_loss"])
    pretrained, parts = loss_of(PretrainStrategy(aux_loss_coef=2.0), model_of(output_router_logits=asked), texts())
    assert pretrained > 2.0 * parts["aux_loss"]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), "0.1"])
def test_a_weight_is_a_number_of_at_least_0(weight):
    for strategy in (SFTStrategy, PretrainStrategy):
        message = refusal(lambda strategy=strategy: strategy(aux_loss_coef=weight))
        assert f"{strategy.__name__}(aux_loss_coef={weight!r})" in message


def test_a_preference_loss_has_it_too():
    torch.manual_seed(0)
    pairs = {name: each.clamp(-100, 31) for name, each in PAIRS.items()}
    plain, none = loss_of(DPOStrategy(reference_free=True), model_of(output_router_logits=False), pairs)
    loss, parts = loss_of(DPOStrategy(reference_free=True), model_of(), pairs)
    assert none == {}
    torch.testing.assert_close(loss, plain + 0.3 * parts["aux_loss"])


def test_a_run_reports_it_by_name_and_no_perplexity_of_the_sum():
    found = []
    run = run_of([texts()] * 5, SFTStrategy(), model_of())
    run.on(Events.METRICS_LOGGED)(lambda engine, event: found.append(event.payload.metrics))
    run.train()
    (metrics,) = found
    assert metrics["train/aux_loss"] > 0.5
    assert metrics["train/cross_entropy"] > 0
    assert "train/perplexity" not in metrics
    values = run.evaluation.run("val", [texts(), texts(4)])
    assert values["val/loss"] == pytest.approx(values["val/cross_entropy"] + 0.3 * values["val/aux_loss"], rel=1e-5)


class Balanced(Tokens):
    """A model of one's own with an auxiliary loss: the mean square of its table."""

    def __init__(self):
        super().__init__(VOCABULARY)

    def forward(self, tokens):
        return {"logits": self.table(tokens), "aux_loss": self.table.weight.square().mean()}


def test_a_model_of_ones_own_needs_a_weight():
    parts = ["SFTStrategy(aux_loss_coef=None)", "returns an `aux_loss`", "0.0 to leave it out"]
    assert_refused(run_of([TEXTS], SFTStrategy(), Balanced()), ConfigurationError, parts)
    for weight in (0.0, 0.5):
        model = Balanced()
        loss, found = loss_of(SFTStrategy(aux_loss_coef=weight), model, TEXTS)
        assert set(found) == ({"aux_loss"} if weight else set())
        plain, _ = loss_of(SFTStrategy(aux_loss_coef=0.0), model, TEXTS)
        torch.testing.assert_close(loss, plain + weight * model.table.weight.square().mean())


def test_a_model_that_returns_none_is_refused_where_one_is_to_be_added():
    run = run_of([TEXTS], SFTStrategy(aux_loss_coef=0.1), Tokens(VOCABULARY))
    assert_refused(run, ConfigurationError, ["with a weight of 0.1", "returned none", "aux_loss_coef=0.0"])


@needs_jax
def test_it_is_added_in_jax():
    from tests.support.models import trainer

    def net(weights, tokens):
        return {"logits": weights[tokens], "aux_loss": (weights**2).mean()}

    found = []
    run = trainer(
        {"max_epochs": 1, "log_every_n_steps": 1}, model=(net, torch.eye(VOCABULARY).numpy()), train_loader=[TEXTS],
        strategy=SFTStrategy(aux_loss_coef=0.5), backend=JaxBackend(),
    )  # fmt: skip
    run.on(Events.METRICS_LOGGED)(lambda engine, event: found.append(event.payload.metrics))
    run.train()
    assert found[0]["train/aux_loss"] == pytest.approx(1 / VOCABULARY)
    expected = found[0]["train/cross_entropy"] + 0.5 / VOCABULARY
    assert found[0]["train/loss"] == pytest.approx(expected, rel=1e-5)


class Judge(torch.nn.Module):
    """Rewards and an auxiliary loss, as a model with experts of one's own may return them."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, 1)

    def forward(self, input_ids):
        return {"logits": self.table(input_ids), "aux_loss": self.table.weight.square().mean()}


def test_a_reward_model_adds_it_and_refuses_to_leave_it_out_unasked():
    torch.manual_seed(0)
    model = Judge()
    pair = {f"{side}_{name}": torch.tensor([[1, 2 + (side == "chosen")]]) for side in ("chosen", "rejected")
            for name in ("input_ids", "labels")}  # fmt: skip
    plain, parts = loss_of(RewardModelStrategy(aux_loss_coef=0.0), model, pair)
    assert parts == {}
    added, parts = loss_of(RewardModelStrategy(aux_loss_coef=0.5), model, pair)
    torch.testing.assert_close(added, plain + 0.5 * model.table.weight.square().mean())
    torch.testing.assert_close(parts["aux_loss"], model.table.weight.square().mean())
    with pytest.raises(ConfigurationError, match=r"RewardModelStrategy.*the model returns an `aux_loss`"):
        loss_of(RewardModelStrategy(), model, pair)
