"""The reference of a model with adapters is the model as it was when training was set up, trained adapters included."""

import math

import pytest
import torch

from pulsetrain.engine import DPOStrategy, Events, Every, GRPOStrategy, PPOStrategy, TorchBackend
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.strategies import WithValueHead
from pulsetrain.handlers import Checkpointer
from tests.support.formulas import VOCABULARY, assert_near
from tests.support.models import trainer
from tests.support.models_language import PAIRS, TOKENS, Adapted

PAIR = {**PAIRS, "rejected_input_ids": TOKENS.flip(1), "rejected_labels": TOKENS.flip(1)}


def loss_of(strategy, model):
    prepared = strategy.prepare_batch(PAIR)
    return strategy.compute_loss(model(prepared.inputs), prepared).item()


def move(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape))


def test_a_trained_adapter_is_part_of_the_reference():
    model, strategy = Adapted(trained=True), DPOStrategy()
    strategy.bind(model)
    assert_near(loss_of(strategy, model), math.log(2))
    prepared = strategy.prepare_batch(PAIR)
    with model.disable_adapter():  # the model without it has another loss
        assert abs(strategy.compute_loss(model(prepared.inputs), prepared).item() - math.log(2)) > 1e-3
    expected = prepared.targets["reference"]
    move(model)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(strategy.prepare_batch(PAIR).targets["reference"], expected)
    assert abs(loss_of(strategy, model) - math.log(2)) > 1e-3
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    assert set(model.state_dict()) == {"table.weight", "head.weight", "lora_A.weight", "lora_B.weight"}
    assert {name for name, each in model.named_parameters() if each.requires_grad} == {"lora_A.weight", "lora_B.weight"}


def test_a_new_adapter_takes_no_memory():
    model, strategy = Adapted(), DPOStrategy()
    strategy.bind(model)
    assert strategy._reference._initial is None
    assert_near(loss_of(strategy, model), math.log(2))
    expected = strategy.prepare_batch(PAIR).targets["reference"]
    move(model)
    assert torch.equal(strategy.prepare_batch(PAIR).targets["reference"], expected)
    assert strategy.state_dict() == {"reference": None}


def test_weights_that_learn_beside_a_new_adapter_are_part_of_the_reference():
    model, strategy = Adapted(), DPOStrategy()
    model.head.requires_grad_(True)
    strategy.bind(model)
    expected = strategy.prepare_batch(PAIR).targets["reference"]
    move(model)
    assert torch.equal(strategy.prepare_batch(PAIR).targets["reference"], expected)


def test_own_weights_return_after_an_error():
    model, strategy = Adapted(trained=True), DPOStrategy()
    strategy.bind(model)
    move(model)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(IndexError):
        strategy._reference.log_probs(torch.tensor([[VOCABULARY + 1]]), torch.tensor([[0]]))
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("make", [lambda: GRPOStrategy(2, kl_coef=0.1), lambda: PPOStrategy(0.1)], ids=["grpo", "ppo"])
def test_so_it_is_for_policies_that_act(make):
    adapted, strategy = Adapted(trained=True), make()
    model = WithValueHead(adapted, head="head") if strategy.needs_values else adapted
    strategy.bind(model)
    inputs, tokens = TOKENS[:, :-1], TOKENS[:, 1:]
    with torch.no_grad():
        expected = strategy.action_log_probs(model(inputs), tokens)
    move(adapted)
    assert_near(strategy.reference_log_probs(inputs, tokens).numpy(), expected.numpy())
    with torch.no_grad():
        assert (strategy.action_log_probs(model(inputs), tokens) - expected).abs().max() > 1e-2


def run(folder, model, updates, functional=False):
    """A run, and the losses of its iterations."""
    losses = []
    made = trainer(
        {"max_updates": updates, "learning_rate": 0.5, "optimizer": "sgd", "log_every_n_steps": 1},
        model=model,
        train_loader=[PAIR] * 4,
        strategy=DPOStrategy(),
        backend=TorchBackend(functional=functional),
        handlers=[Checkpointer(folder, every=Every(iterations=1), keep_last=9)],
    )
    made.on(Events.METRICS_LOGGED)(lambda engine, event: losses.append(event.payload.metrics["train/loss"]))
    return made, losses


@pytest.mark.parametrize("functional", [False, True])
def test_a_resumed_run_has_the_reference_that_it_started_with(tmp_path, functional):
    whole, losses = run(tmp_path / "whole", Adapted(trained=True), 4, functional)
    whole.train()
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0] - 1e-3
    run(tmp_path / "run", Adapted(trained=True), 2, functional)[0].train()
    again, later = run(tmp_path / "run", Adapted(trained=True), 4, functional)
    again.train(resume="latest")
    assert later == losses[2:]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)
    assert not torch.equal(again.model.lora_B.weight, Adapted(trained=True).lora_B.weight)


@pytest.mark.parametrize("start", [{"trained": False}, {"trained": True, "seed": 1}], ids=["new", "trained otherwise"])
def test_a_run_over_a_trained_adapter_resumes_with_no_other(tmp_path, start):
    run(tmp_path, Adapted(trained=True), 2)[0].train()
    with pytest.raises(CheckpointError, match=r": DPOStrategy: the reference model has other weights than the one"):
        run(tmp_path, Adapted(**start), 4)[0].train(resume="latest")


def test_a_run_over_a_new_adapter_resumes_with_any_new_one_but_not_with_a_trained_one(tmp_path):
    run(tmp_path, Adapted(), 2)[0].train()
    again, later = run(tmp_path, Adapted(seed=5), 3)
    again.train(resume="latest")
    assert len(later) == 1
    with pytest.raises(CheckpointError, match=r": DPOStrategy: the reference model has other weights than the one"):
        run(tmp_path, Adapted(trained=True), 4)[0].train(resume="latest")
