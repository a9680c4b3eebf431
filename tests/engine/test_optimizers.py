"""Optimizers by name, their decay groups, and what is refused."""

import functools

import pytest
import torch
from torch import nn

from engine.errors import ConfigurationError
from engine.optimizers import create_optimizer, resolve_optimizer

NAMES = ["adamw", "adam", "sgd", "rmsprop", "adagrad", "adadelta", "nadam", "radam"]


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
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def train(model, optimizer, steps=5):
    data = torch.linspace(-1, 1, 32).reshape(8, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def names_in(model, group):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


# ------------------------------------------------------------------------------------------------ by name


@pytest.mark.parametrize("name", NAMES)
def test_each_name_gives_the_numbers_of_torchs_own_optimizer(name):
    theirs_class = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if isinstance(kind, type)}[name]
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    ours, theirs = small(), small()
    optimizer = create_optimizer(ours, name, 0.01, 0.1)
    assert type(optimizer) is theirs_class
    reference = theirs_class(theirs.parameters(), lr=0.01, weight_decay=0.1, **momentum)
    torch.testing.assert_close(train(ours, optimizer), train(theirs, reference), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_without_fused_kernels_the_numbers_are_torchs_bit_for_bit(name):
    theirs_class = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if isinstance(kind, type)}[name]
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    ours, theirs = small(), small()
    optimizer = create_optimizer(ours, name, 0.01, foreach=False)
    reference = theirs_class(theirs.parameters(), lr=0.01, weight_decay=0.0, foreach=False, **momentum)
    assert torch.equal(train(ours, optimizer), train(theirs, reference))


def test_the_defaults_are_torchs_but_for_sgds_momentum_and_the_absent_decay():
    assert create_optimizer(small(), "sgd", 0.1).defaults["momentum"] == 0.9
    assert create_optimizer(small(), "sgd", 0.1, momentum=0.0).defaults["momentum"] == 0.0
    adamw = create_optimizer(small(), "adamw", 0.1)
    assert (adamw.defaults["betas"], adamw.defaults["eps"]) == ((0.9, 0.999), 1e-8)
    assert adamw.defaults["weight_decay"] == 0.0


def test_familiar_adam_keywords_are_understood():
    optimizer = create_optimizer(small(), "adamw", 0.1, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.95), 1e-6)
    assert create_optimizer(small(), "nadam", 0.1, adam_beta2=0.9).defaults["betas"] == (0.9, 0.9)
    assert create_optimizer(small(), "radam", 0.1, betas=[0.5, 0.6]).defaults["betas"] == (0.5, 0.6)


def test_fused_kernels_are_taken_where_they_pay():
    assert create_optimizer(small(), "adamw", 0.1).defaults["fused"] is True
    assert create_optimizer(small(), "sgd", 0.1).defaults["fused"] is True
    assert create_optimizer(small(), "sgd", 0.1, momentum=0.0).defaults["fused"] is None
    assert create_optimizer(small(), "adamw", 0.1, fused=False).defaults["fused"] is False
    assert create_optimizer(small(), "adamw", 0.1, foreach=True).defaults["fused"] is None


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # torch's Adagrad
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_sparse_gradients_still_work(name):
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = create_optimizer(model, name, 0.1)
    before = model.weight.detach().clone()
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert (model.weight != before).any(dim=1).tolist() == [False, True, True] + [False] * 7


# ------------------------------------------------------------------------------------------- which parameters


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


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamww", {}, r"create_optimizer\(name='adamww'\): unknown; choose one of adadelta, .*did you mean 'adamw'\?"),
        ("adamw", {"learning_rate": 0}, r"create_optimizer\(learning_rate=0\): needs a positive number"),
        ("adamw", {"learning_rate": "1e-3"}, r"create_optimizer\(learning_rate='1e-3'\): needs a positive number"),
        ("adamw", {"learning_rate": float("nan")}, r"create_optimizer\(learning_rate=nan\)"),
        (
            "adamw",
            {"weight_decay": -0.1},
            r"create_optimizer\(weight_decay=-0.1\): needs a number that is not negative",
        ),
        ("adamw", {"betas": (0.9, 1.0)}, r"create_optimizer\(betas\[1\]=1.0\): needs a number from 0 up to"),
        ("adamw", {"betas": 0.9}, r"create_optimizer\(betas=0.9\): needs two numbers"),
        ("adamw", {"adam_beta1": -0.5}, r"create_optimizer\(adam_beta1=-0.5\)"),
        ("adamw", {"adam_epsilon": -1.0}, r"create_optimizer\(adam_epsilon=-1.0\)"),
        ("adamw", {"adam_beta1": 0.9, "betas": (0.9, 0.9)}, r"adam_beta1=0.9, betas=\(0.9, 0.9\)\): pass one of both"),
        (
            "adamw",
            {"momentum": 0.9},
            r"create_optimizer\(momentum=0.9\): unknown to 'adamw'; it takes adam_beta1, .*eps",
        ),
        ("sgd", {"adam_beta1": 0.9}, r"create_optimizer\(adam_beta1=0.9\): unknown to 'sgd'; .*momentum, nesterov"),
        ("sgd", {"momentum": -1.0}, r"create_optimizer\(name='sgd', momentum=-1.0.*Invalid momentum"),
        ("adamw", {"no_decay": "norms"}, r"create_optimizer\(no_decay='norms'\): needs \"auto\", None, or a rule"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(name, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        create_optimizer(small(), name, **{"learning_rate": 0.1, **arguments})


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigurationError, match=r"create_optimizer\(model=Tanh\): no trainable parameter \(0 frozen"):
        create_optimizer(nn.Tanh(), "sgd", 0.1)
    with pytest.raises(ConfigurationError, match=r"no trainable parameter \(4 frozen ones\)"):
        create_optimizer(small().requires_grad_(False), "sgd", 0.1)


def test_parameters_without_a_shape_yet_are_refused():
    with pytest.raises(ConfigurationError, match=r"'weight' has no shape yet; run the model on one batch first"):
        create_optimizer(nn.LazyLinear(3), "sgd", 0.1)


# ------------------------------------------------------------------------------------- name, instance, factory


def test_a_name_an_instance_and_a_factory_all_resolve():
    model = small()
    assert resolve_optimizer("sgd", model, 0.3, 0.1, momentum=0.5).param_groups[0]["lr"] == 0.3
    instance = torch.optim.SGD(model.parameters(), lr=0.7)
    assert resolve_optimizer(instance, model, 0.3, 0.1) is instance
    made = resolve_optimizer(functools.partial(torch.optim.RMSprop, lr=0.2), model, 0.3)
    assert isinstance(made, torch.optim.RMSprop)
    assert made.param_groups[0]["lr"] == 0.2


def test_an_instance_over_other_parameters_is_refused():
    other = torch.optim.SGD(small().parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"misses 4 trainable parameters of the model, '0.weight' first"):
        resolve_optimizer(other, small(), 0.1)


def test_an_instance_over_a_part_is_accepted_once_the_rest_is_frozen():
    model = small()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"misses 2 trainable parameters.*requires_grad_\(False\)"):
        resolve_optimizer(optimizer, model, 0.1)
    model[0].requires_grad_(False)
    assert resolve_optimizer(optimizer, model, 0.1) is optimizer


@pytest.mark.parametrize("wrong", [None, 0.1, {"name": "sgd"}])
def test_anything_else_is_refused_with_the_three_choices(wrong):
    with pytest.raises(
        ConfigurationError, match=r"needs a name \(adadelta, .*\), a torch.optim.Optimizer, or a function"
    ):
        resolve_optimizer(wrong, small(), 0.1)


def test_a_factory_that_returns_no_optimizer_is_refused():
    with pytest.raises(ConfigurationError, match=r"returned list: needs a name"):
        resolve_optimizer(list, small(), 0.1)


def test_keywords_without_a_name_are_refused():
    with pytest.raises(
        ConfigurationError, match=r"resolve_optimizer\(momentum=0.9\): only an optimizer given by its name"
    ):
        resolve_optimizer(torch.optim.SGD, small(), 0.1, momentum=0.9)
