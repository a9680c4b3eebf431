"""Which parameters are trained, which decay, and which have a learning rate of their own."""

import pytest
import torch
from torch import nn

from pulsetrain import TrainingConfig
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers import create_optimizer, resolve_optimizer
from pulsetrain.engine.schedules import Step
from pulsetrain.handlers import LRScheduler


class Llama2RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class TiedModel(nn.Module):
    """Embedding, attention, recurrence, norms, and an output layer that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.recurrent = nn.GRU(4, 4)
        self.norm = nn.LayerNorm(4)
        self.own_norm = Llama2RMSNorm()
        self.scale = nn.Parameter(torch.ones(()))
        self.output = nn.Linear(4, 10)
        self.output.weight = self.embedding.weight


def small():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def names_in(model, group):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


# ------------------------------------------------------------------------------------------- weight decay


def test_shared_parameters_come_once_and_frozen_ones_not_at_all():
    model = TiedModel()
    model.recurrent.requires_grad_(False)
    (group,) = create_optimizer(model, "adamw", 0.1).param_groups
    expected = {name for name, _ in model.named_parameters() if not name.startswith("recurrent")}
    assert names_in(model, group) == expected
    assert len(group["params"]) == len(expected)
    assert "output.weight" not in expected


def test_decay_applies_to_every_parameter_by_default():
    (group,) = create_optimizer(TiedModel(), "adamw", 0.1, 0.2).param_groups
    assert group["weight_decay"] == 0.2


def test_auto_spares_biases_norms_and_embeddings():
    model = TiedModel()
    decayed, spared = create_optimizer(model, "adamw", 0.1, 0.2, no_decay="auto").param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.2, 0.0)
    assert names_in(model, decayed) == {
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "recurrent.weight_ih_l0",
        "recurrent.weight_hh_l0",
        "scale",
    }
    assert names_in(model, spared) == {
        "embedding.weight",
        "attention.in_proj_bias",
        "attention.out_proj.bias",
        "recurrent.bias_ih_l0",
        "recurrent.bias_hh_l0",
        "norm.weight",
        "norm.bias",
        "own_norm.weight",
        "output.bias",
    }


def test_a_rule_decides_which_parameters_are_spared():
    model = small()
    decayed, spared = create_optimizer(
        model, "sgd", 0.1, 0.2, no_decay=lambda name, parameter: name.startswith("0.") or parameter.ndim < 2
    ).param_groups
    assert names_in(model, decayed) == {"2.weight"}
    assert names_in(model, spared) == {"0.weight", "0.bias", "2.bias"}


def test_a_rule_that_spares_everything_leaves_one_group():
    (group,) = create_optimizer(small(), "sgd", 0.1, 0.2, no_decay=lambda name, parameter: True).param_groups
    assert group["weight_decay"] == 0.0


def test_the_groups_are_the_same_without_any_decay_so_that_states_fit_again():
    with_decay = create_optimizer(small(), "adamw", 0.1, 0.2, no_decay="auto")
    without = create_optimizer(small(), "adamw", 0.1, 0.0, no_decay="auto")
    assert [len(group["params"]) for group in without.param_groups] == [2, 2]
    without.load_state_dict(with_decay.state_dict())


# ---------------------------------------------------------------------------------------------- learning rates


class Blocks(nn.Module):
    """Twelve blocks, so that one number is the prefix of another, between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(12))
        self.head = nn.Linear(4, 10)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def rates_of(model, optimizer):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}


def with_rates(layer_rates, model=None, **options):
    model = model or Blocks()
    return model, create_optimizer(model, "sgd", 0.1, layer_rates=layer_rates, **options)


def test_a_prefix_matches_at_dots_and_the_longest_match_wins():
    model, optimizer = with_rates({"blocks": 0.01, "blocks.1": 0.02, "blocks.1.0.bias": 0.03, "head.weight": 0.04})
    rates = rates_of(model, optimizer)
    assert rates["blocks.0.0.weight"] == rates["blocks.10.0.weight"] == 0.01
    assert rates["blocks.1.0.weight"] == rates["blocks.1.1.bias"] == 0.02
    assert rates["blocks.1.0.bias"] == 0.03
    assert (rates["head.weight"], rates["head.bias"], rates["embedding.weight"]) == (0.04, 0.1, 0.1)


def test_a_rule_gives_rates_and_none_for_the_default():
    def decays_by_depth(name, parameter):
        parts = name.split(".")
        return 0.1 * 0.5 ** (11 - int(parts[1])) if parts[0] == "blocks" else None

    model, optimizer = with_rates(decays_by_depth)
    assert len(optimizer.param_groups) == 1 + 12
    rates = rates_of(model, optimizer)
    assert rates["blocks.11.0.weight"] == 0.1
    assert rates["blocks.9.1.bias"] == 0.025
    assert rates["head.weight"] == 0.1


def test_groups_come_in_the_order_of_the_model_whatever_the_order_of_the_mapping():
    model, optimizer = with_rates({"head": 0.04, "blocks.1": 0.02, "blocks": 0.01}, weight_decay=0.5, no_decay="auto")
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.1, 0.0),  # the embedding: all that has the default rate, and spared
        (0.01, 0.5),
        (0.01, 0.0),
        (0.02, 0.5),
        (0.02, 0.0),
        (0.04, 0.5),
        (0.04, 0.0),
    ]
    assert names_in(model, optimizer.param_groups[3]) == {"blocks.1.0.weight"}
    assert names_in(model, optimizer.param_groups[4]) == {"blocks.1.0.bias", "blocks.1.1.weight", "blocks.1.1.bias"}


def test_the_groups_stay_when_rates_become_equal_so_that_states_fit_again():
    _, apart = with_rates({"head": 0.04, "blocks": 0.02})
    _, equal = with_rates({"head": 0.1, "blocks": 0.1})
    equal.load_state_dict(apart.state_dict())
    assert [group["lr"] for group in equal.param_groups] == [0.1, 0.02, 0.04]


def test_a_schedule_keeps_the_ratios_of_the_rates():
    _, optimizer = with_rates({"head": 0.02, "embedding": 0.4})
    scheduler = LRScheduler(Step(0.1, step_size=1, gamma=0.5), optimizer)
    for factor in (0.5, 0.25):
        scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [0.1 * factor, 0.4 * factor, 0.02 * factor], rel=1e-12
        )


def test_rates_come_from_yaml_through_the_configuration():
    settings = load_yaml("{learning_rate: 0.1, optimizer: sgd, optimizer_options: {layer_rates: {head: 1e-3}}}")
    config = TrainingConfig(max_epochs=1, **settings)
    model = Blocks()
    optimizer = resolve_optimizer(config.optimizer, model, config.learning_rate, **config.optimizer_options)
    assert rates_of(model, optimizer)["head.bias"] == 1e-3


@pytest.mark.parametrize(
    ("layer_rates", "message"),
    [
        ({"haed": 0.1}, r"\(layer_rates\['haed'\]=0.1\): matches no parameter; similar names are 'head'"),
        (
            {"xyz": 0.1},
            r"\['xyz'\]=0.1\): matches no parameter; the model has 'embedding', 'blocks', 'head'",
        ),
        ({"block": 0.1}, r"\(layer_rates\['block'\]=0.1\): matches no parameter; similar names are 'blocks'"),
        ({"": 0.1}, r"\(layer_rates\[''\]=0.1\): matches no parameter"),
        ({"frozen": 0.1}, r"\(layer_rates\['frozen'\]=0.1\): all its parameters are frozen; call requires_grad_"),
        ({0: 0.1}, r"\(layer_rates\[0\]=0.1\): needs the path as text; write '0'"),
        ({"head": -0.1}, r"\(layer_rates\['head'\]=-0.1\): needs a positive number"),
        ({"head": float("nan")}, r"\(layer_rates\['head'\]=nan\): needs a positive number"),
        ({"head": "0.1"}, r"\(layer_rates\['head'\]='0.1'\): needs a positive number"),
        (0.1, r"\(layer_rates=0.1\): needs a mapping from a module path"),
        (lambda name, parameter: 0.0, r"\(layer_rates\('embedding.weight', ...\)=0.0\): needs a positive number"),
    ],
)
def test_rates_that_cannot_be_used_are_refused(layer_rates, message):
    with pytest.raises(ConfigurationError, match=message):
        with_rates(layer_rates)


def test_a_shared_parameter_goes_by_its_first_name():
    model = TiedModel()
    rates = rates_of(*with_rates({"embedding": 0.01}, model))
    assert rates["embedding.weight"] == 0.01
    model.output.bias.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"layer_rates\['output'\]=0.01\): .* shared; .* 'embedding.weight'"):
        with_rates({"output": 0.01}, model)
