"""Schedule-free optimizers: their formulas, and the averaged weights that they lend."""

import pytest
import schedulefree
import torch
from torch import nn

from pulsetrain.engine.optimizers import averaged_weights, create_optimizer

NAMES = ["schedule_free_adamw", "schedule_free_sgd"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(model, optimizer, steps):
    data = torch.linspace(-1, 1, 32).reshape(8, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(data) - 1).square().mean().backward()
        optimizer.step()


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(params=NAMES)
def trained(request):
    model = network()
    optimizer = create_optimizer(model, request.param, 0.05)
    train(model, optimizer, steps=7)
    return model, optimizer


# ------------------------------------------------------------------------------------------------- formulas


def one_weight():
    """A weight in float64 under the loss w^4 / 4 - w, whose gradient is w^3 - 1."""
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    return weight, nn.ParameterList([weight])


def follow(weight, optimizer, expected):
    """Step along, comparing the trained weight and the averaged one with those expected."""
    for y, x in expected:
        optimizer.zero_grad()
        (weight**4 / 4 - weight).sum().backward()
        optimizer.step()
        assert weight.item() == pytest.approx(y, rel=1e-11)
        with averaged_weights(optimizer):
            assert weight.item() == pytest.approx(x, rel=1e-11)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_follows_the_papers_equations(decay):
    # Defazio et al. 2024: gradients at y = (1 - beta) z + beta x, steps of z, x the mean of all z
    rate, beta = 0.05, 0.9
    x = z = y = 2.0
    expected = []
    for step in range(12):
        z = z - rate * (y**3 - 1 + decay * y)
        x = x + (z - x) / (step + 1)
        y = (1 - beta) * z + beta * x
        expected.append((y, x))
    weight, model = one_weight()
    follow(weight, create_optimizer(model, "schedule_free_sgd", rate, decay, momentum=beta), expected)


def test_adamw_follows_the_papers_algorithm_with_its_warm_up():
    # Defazio et al. 2024, algorithm 1; under a warm-up the mean weighs each z by its rate squared
    beta1, beta2, decay, warmup = 0.9, 0.99, 0.1, 4
    x = z = y = 2.0
    second = total = 0.0
    expected = []
    for step in range(12):
        rate = 0.05 * min(1.0, (step + 1) / warmup)
        gradient = y**3 - 1
        second = beta2 * second + (1 - beta2) * gradient**2
        scaled = gradient / ((second / (1 - beta2 ** (step + 1))) ** 0.5 + 1e-8)
        z = z - rate * (scaled + decay * y)
        total += rate**2
        x = x + rate**2 / total * (z - x)
        y = (1 - beta1) * z + beta1 * x
        expected.append((y, x))
    weight, model = one_weight()
    optimizer = create_optimizer(
        model, "schedule_free_adamw", 0.05, decay, adam_beta1=beta1, adam_beta2=beta2, warmup_steps=warmup
    )
    follow(weight, optimizer, expected)


def test_the_names_create_the_packages_classes_in_train_mode():
    for name, kind in zip(NAMES, (schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree), strict=True):
        optimizer = create_optimizer(network(), name, 0.1)
        assert type(optimizer) is kind
        assert [group["train_mode"] for group in optimizer.param_groups] == [True]
        assert optimizer.param_groups[0]["foreach"] is kind([torch.zeros(1)], lr=0.1).defaults["foreach"]


# ------------------------------------------------------------------------------------------- averaged weights


def test_inside_are_the_averaged_weights_and_after_the_trained_ones_bit_for_bit(trained):
    model, optimizer = trained
    before = weights(model)
    with averaged_weights(optimizer):
        inside = weights(model)
    assert torch.equal(weights(model), before)
    assert not torch.allclose(inside, before)
    optimizer.eval()
    assert torch.equal(inside, weights(model))


def test_training_continues_as_if_nothing_had_been_lent(trained):
    model, optimizer = trained
    other = network()
    plain = create_optimizer(other, "schedule_free_sgd", 0.05)
    if type(plain) is not type(optimizer):
        plain = create_optimizer(other, "schedule_free_adamw", 0.05)
    train(other, plain, steps=7)
    for _ in range(3):
        with averaged_weights(optimizer):
            pass
        train(model, optimizer, steps=1)
        train(other, plain, steps=1)
    assert torch.equal(weights(model), weights(other))


def test_an_exception_inside_restores_too(trained):
    model, optimizer = trained
    before = weights(model)
    with pytest.raises(KeyError), averaged_weights(optimizer):
        raise KeyError
    assert torch.equal(weights(model), before)
    assert optimizer.param_groups[0]["train_mode"] is True


def test_inside_itself_it_does_nothing(trained):
    model, optimizer = trained
    before = weights(model)
    with averaged_weights(optimizer):
        outer = weights(model)
        with averaged_weights(optimizer):
            assert torch.equal(weights(model), outer)
        assert torch.equal(weights(model), outer)
    assert torch.equal(weights(model), before)


def test_weights_that_were_never_trained_are_their_own_average(trained):
    _, optimizer = trained
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late]})
    with averaged_weights(optimizer):
        assert late.tolist() == [1.0, 1.0, 1.0]
    assert [group["train_mode"] for group in optimizer.param_groups] == [True, True]


def test_a_group_added_later_is_averaged_too():
    model, late = network(), network()
    optimizer = create_optimizer(model, "schedule_free_sgd", 0.05)
    optimizer.add_param_group({"params": list(late.parameters())})
    train(nn.Sequential(model, nn.Linear(1, 4).requires_grad_(False), late), optimizer, steps=5)
    before = weights(late)
    with averaged_weights(optimizer):
        assert not torch.equal(weights(late), before)
    assert torch.equal(weights(late), before)


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "lion"])
def test_weights_under_any_other_optimizer_stay_unchanged(name):
    model = network()
    optimizer = create_optimizer(model, name, 0.05)
    train(model, optimizer, steps=2)
    before = weights(model)
    versions = [parameter._version for parameter in model.parameters()]
    with averaged_weights(optimizer):
        assert torch.equal(weights(model), before)
    assert [parameter._version for parameter in model.parameters()] == versions
