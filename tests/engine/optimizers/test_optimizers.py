"""Optimizers by name, their keywords, and rejected arguments; for names of optional packages too."""

import functools
import math
import sys

import pytest
import schedulefree
import torch
from torch import nn

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers import NamedOptimizers, create_optimizer, describe_optimizer, resolve_optimizer

TORCHS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
}


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


# ------------------------------------------------------------------------------------------------ by name


@pytest.mark.parametrize("name", TORCHS)
def test_each_name_gives_the_numbers_of_torchs_own_optimizer(name):
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    ours, theirs = small(), small()
    optimizer = create_optimizer(ours, name, 0.01, 0.1)
    assert type(optimizer) is TORCHS[name]
    reference = TORCHS[name](theirs.parameters(), lr=0.01, weight_decay=0.1, **momentum)
    torch.testing.assert_close(train(ours, optimizer), train(theirs, reference), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", TORCHS)
def test_without_fused_kernels_the_numbers_are_torchs_bit_for_bit(name):
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    fused = {"fused": False} if name in ("adamw", "adam", "sgd", "adagrad") else {}
    ours, theirs = small(), small()
    optimizer = create_optimizer(ours, name, 0.01, **fused)
    reference = TORCHS[name](theirs.parameters(), lr=0.01, weight_decay=0.0, **momentum, **fused)
    assert torch.equal(train(ours, optimizer, steps=50), train(theirs, reference, steps=50))


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


@pytest.mark.parametrize("name", [*TORCHS, "lion", "muon"])
def test_a_parameter_may_get_its_first_gradient_later_than_the_others(name: str):
    trained, failures = [], []
    for options in ({}, {"fused": False} if name in ("adamw", "adam", "sgd", "adagrad") else {}):
        model = small()
        optimizer = create_optimizer(model, name, 0.01, **options)
        model[0].requires_grad_(False)
        train(model, optimizer, steps=2)
        model[0].requires_grad_(True)
        try:
            trained.append(train(model, optimizer, steps=3))
        except TypeError as error:
            failures.append(f"{name}: {error}")
    assert failures == []
    torch.testing.assert_close(*trained)


def test_the_momentum_of_a_parameter_that_comes_late_begins_with_its_first_gradient():
    model = small()
    optimizer = create_optimizer(model, "sgd", 0.1)
    model[0].requires_grad_(False)
    train(model, optimizer, steps=1)
    assert len(optimizer.state) == 2  # the others have no momentum before
    model[0].requires_grad_(True)
    train(model, optimizer, steps=1)
    assert all(torch.equal(optimizer.state[each]["momentum_buffer"], each.grad) for each in model[0].parameters())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # torch's Adagrad
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_sparse_gradients_still_work(name):
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = create_optimizer(model, name, 0.1)
    before = model.weight.detach().clone()
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert (model.weight != before).any(dim=1).tolist() == [False, True, True] + [False] * 7


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
        (
            "adamw",
            {"adam_beta1": 0.9, "betas": (0.9, 0.9)},
            r"adam_beta1=0.9, betas=\(0.9, 0.9\)\): pass only one",
        ),
        (
            "adamw",
            {"momentum": 0.9},
            r"create_optimizer\(momentum=0.9\): unknown to 'adamw'; it takes adam_beta1, .*eps",
        ),
        ("sgd", {"adam_beta1": 0.9}, r"create_optimizer\(adam_beta1=0.9\): unknown to 'sgd'; .*momentum, nesterov"),
        ("sgd", {"momentum": -1.0}, r"create_optimizer\(momentum=-1.0\): needs a number from 0 up to"),
        ("sgd", {"momentum": float("nan")}, r"create_optimizer\(momentum=nan\): needs a number from 0 up to"),
        ("sgd", {"dampening": 1.5}, r"create_optimizer\(dampening=1.5\): needs a number from 0 to 1"),
        ("sgd", {"nesterov": "false"}, r"create_optimizer\(nesterov='false'\): needs to be True or False"),
        ("sgd", {"nesterov": True, "momentum": 0.0}, r"name='sgd', nesterov=True, momentum=0.0.*Nesterov momentum req"),
        ("adam", {"fused": 1}, r"create_optimizer\(fused=1\): needs to be True or False"),
        ("rmsprop", {"momentum": 1.0}, r"create_optimizer\(momentum=1.0\): needs a number from 0 up to"),
        ("rmsprop", {"alpha": 1.1}, r"create_optimizer\(alpha=1.1\): needs a number from 0 up to"),
        ("adadelta", {"rho": 1.0}, r"create_optimizer\(rho=1.0\): needs a number from 0 up to"),
        ("adagrad", {"lr_decay": float("inf")}, r"create_optimizer\(lr_decay=inf\): needs a number that is not neg"),
        ("adagrad", {"eps": True}, r"create_optimizer\(eps=True\): needs a number that is not negative"),
        ("nadam", {"momentum_decay": -1}, r"create_optimizer\(momentum_decay=-1\): needs a number that is not neg"),
        ("muon", {"momentum": 1.0}, r"create_optimizer\(momentum=1.0\): needs a number from 0 up to"),
        ("muon", {"ns_steps": 0}, r"create_optimizer\(ns_steps=0\): needs a whole number from 1 to 99"),
        ("muon", {"adjust_lr_fn": "none"}, r"create_optimizer\(name='muon', adjust_lr_fn='none'\): .*not supported"),
        ("muon", {"maximize": True}, r"create_optimizer\(maximize=True\): unknown to 'muon'; .*muon_rule, nesterov"),
        ("lion", {"adam_epsilon": 1e-8}, r"create_optimizer\(adam_epsilon=1e-08\): unknown to 'lion'; it takes adam_"),
        ("schedule_free_sgd", {"momentum": 0.0}, r"create_optimizer\(momentum=0.0\): needs a number between 0 and 1"),
        ("schedule_free_adamw", {"adam_beta1": 0.0}, r"create_optimizer\(adam_beta1=0.0\): needs a number between 0"),
        ("schedule_free_adamw", {"warmup_steps": -1}, r"create_optimizer\(warmup_steps=-1\): needs a whole number, 0"),
        ("adamw", {"no_decay": "norms"}, r"create_optimizer\(no_decay='norms'\): needs \"auto\", None, or a rule"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(name, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        create_optimizer(small(), name, **{"learning_rate": 0.1, **arguments})


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigurationError, match=r"create_optimizer\(model=Tanh\): has no parameters"):
        create_optimizer(nn.Tanh(), "sgd", 0.1)
    with pytest.raises(ConfigurationError, match=r"no trainable parameter \(4 frozen ones\)"):
        create_optimizer(small().requires_grad_(False), "sgd", 0.1)


def test_parameters_without_a_shape_yet_are_refused():
    with pytest.raises(ConfigurationError, match=r"'weight' has no shape yet; run the model on one batch first"):
        create_optimizer(nn.LazyLinear(3), "sgd", 0.1)


# ------------------------------------------------------------------------------------------- optional packages


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("lion", "lion_pytorch", "lion"),
        ("schedule_free_adamw", "schedulefree", "schedule-free"),
        ("schedule_free_sgd", "schedulefree", "schedule-free"),
    ],
)
def test_a_missing_package_names_the_extra_that_installs_it(monkeypatch, name, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "pulsetrain.engine.optimizers.lion", raising=False)
    with pytest.raises(
        ConfigurationError, match=rf"create_optimizer\(name='{name}'\): needs .*; pip install 'pulsetrain\[{extra}\]'"
    ):
        create_optimizer(small(), name, 0.1)


def test_a_torch_without_muon_says_which_has_it(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigurationError, match=r"create_optimizer\(name='muon'\): torch .* no torch.optim.Muon"):
        create_optimizer(small(), "muon", 0.1)


def test_lions_triton_kernel_is_refused_where_triton_is_missing(monkeypatch):
    monkeypatch.setattr("pulsetrain.engine.optimizers.options.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"create_optimizer\(use_triton=True\): needs the package triton"):
        create_optimizer(small(), "lion", 0.1, use_triton=True)


def test_lion_steps_by_the_sign_of_momentum_and_gradient_mixed():
    # Chen et al. 2023, algorithm 2, with a gradient that depends on the weights
    weight = nn.Parameter(torch.tensor([0.5, -2.0, 0.1], dtype=torch.float64))
    model = nn.ParameterList([weight])
    optimizer = create_optimizer(model, "lion", 0.1, 0.2, betas=(0.9, 0.99))
    expected, momentum = [0.5, -2.0, 0.1], [0.0, 0.0, 0.0]
    for _ in range(10):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
        for i, value in enumerate(expected):
            gradient = 2 * value
            mixed = 0.9 * momentum[i] + 0.1 * gradient
            expected[i] = value * (1 - 0.1 * 0.2) - 0.1 * math.copysign(1.0, mixed)
            momentum[i] = 0.99 * momentum[i] + 0.01 * gradient
        torch.testing.assert_close(weight.tolist(), expected, rtol=1e-12, atol=1e-12)


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
    with pytest.raises(ConfigurationError, match=r"lacks 4 trainable parameters of the model, '0.weight' first"):
        resolve_optimizer(other, small(), 0.1)


def test_an_instance_over_a_part_is_accepted_once_the_rest_is_frozen():
    model = small()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"lacks 2 trainable parameters.*requires_grad_\(False\)"):
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
    with pytest.raises(ConfigurationError, match=r"resolve_optimizer\(optimizer=list\): returned list; needs a name"):
        resolve_optimizer(list, small(), 0.1)


def test_a_schedule_free_optimizer_from_a_factory_is_ready_to_train():
    model = small()
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    optimizer = resolve_optimizer(functools.partial(schedulefree.SGDScheduleFree, lr=0.1), model, 0.3)
    assert not torch.equal(train(model, optimizer), before)


def test_keywords_without_a_name_are_refused():
    with pytest.raises(ConfigurationError, match=r"resolve_optimizer\(momentum=0.9\): only an optimizer given by name"):
        resolve_optimizer(torch.optim.SGD, small(), 0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("model", "given"), [(None, "None"), ([torch.zeros(1)], "list"), (iter([torch.zeros(1)]), "list_iterator")]
)
def test_what_is_not_a_module_is_refused_with_a_remedy(model, given):
    rule = rf"optimizer\(model={given}\): needs a torch.nn.Module, .*; for bare parameters use torch.optim"
    with pytest.raises(TypeError, match=f"create_{rule}"):
        create_optimizer(model, "sgd", 0.1)
    for optimizer in ("sgd", torch.optim.SGD([torch.zeros(1)], lr=0.1), functools.partial(torch.optim.SGD, lr=0.1)):
        with pytest.raises(TypeError, match=f"resolve_{rule}"):
            resolve_optimizer(optimizer, model, 0.1)


def test_a_factory_gets_the_rate_and_decay_that_it_accepts_and_does_not_hold():
    def made_with(factory, *given):
        group = resolve_optimizer(factory, small(), *given).param_groups[0]
        return group["lr"], group["weight_decay"]

    class Demanding(torch.optim.SGD):
        def __init__(self, params, lr, **others):
            super().__init__(params, lr=lr, **others)

    adamw = torch.optim.AdamW
    assert made_with(adamw, 0.3, 0.2) == (0.3, 0.2)
    assert made_with(functools.partial(adamw, lr=0.5), 0.3, 0.2) == (0.5, 0.2)
    assert made_with(lambda params, lr=0.5: adamw(params, lr=lr, weight_decay=0.7), 0.3, 0.2) == (0.3, 0.7)
    assert made_with(lambda params: adamw(params, lr=0.5, weight_decay=0.7), 0.3, 0.2) == (0.5, 0.7)
    assert made_with(lambda params, **others: adamw(params, **others), 0.3, 0.2) == (0.3, 0.2)
    assert made_with(adamw) == (0.001, 0.01)  # torch's own
    assert made_with(Demanding) == (0.001, 0)
    assert made_with("adamw") == (0.001, 0.0)


def test_an_optimizer_is_described_by_its_rates_momentum_and_decay():
    model = small()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    adam = torch.optim.Adam(groups, lr=torch.tensor(0.1), weight_decay=0.25)
    assert describe_optimizer(adam) == "Adam(lr=0.5 or 0.1, betas=(0.9, 0.999), weight_decay=0.25)"
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1, gamma=0.5)
    adam.step()
    scheduler.step()
    assert describe_optimizer(adam).startswith("Adam(lr=0.5 or 0.1,")
    several = NamedOptimizers({"actor": create_optimizer(small(), "sgd", 0.3), "critic": adam})
    assert (
        describe_optimizer(several)
        == f"actor: SGD(lr=0.3, momentum=0.9, weight_decay=0); critic: {describe_optimizer(adam)}"
    )
