"""What holds for every optimizer that has a name."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optimizers import create_optimizer
from pulsetrain.engine.optimizers.registry import NAMES
from pulsetrain.engine.schedules import Cosine
from pulsetrain.engine.step.precision import Precision
from pulsetrain.handlers import LRScheduler

RATES = {
    "adamw": 0.01,
    "adam": 0.01,
    "sgd": 0.05,
    "rmsprop": 0.01,
    "adagrad": 0.1,
    "adadelta": 1.0,
    "nadam": 0.01,
    "radam": 0.05,
    "muon": 0.02,
    "lion": 0.005,
    "schedule_free_adamw": 0.02,
    "schedule_free_sgd": 0.2,
}
TAKE_BETAS = [name for name in NAMES if name not in ("sgd", "rmsprop", "adagrad", "adadelta", "schedule_free_sgd")]

INPUTS = torch.linspace(-1, 1, 64).reshape(16, 4).roll(3)
TARGETS = INPUTS.square().sum(1, keepdim=True) - 0.5


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Shared(nn.Module):
    """A frozen layer, two layers with one weight between them, and an ordinary one."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.last(self.second(self.first(self.frozen(inputs)).tanh()))


def loss_of(model):
    return (model(INPUTS) - TARGETS).square().mean()


def train(model, optimizer, steps, before_step=None):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        if before_step is not None:
            before_step(step)
        optimizer.step()


def made(name, model=None, **options):
    """The model and its optimizer, at a rate that suits it."""
    model = model or network()
    return model, create_optimizer(model, name, RATES[name], **options)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def group_of(optimizer, parameter):
    (group,) = [each for each in optimizer.param_groups if any(parameter is other for other in each["params"])]
    return group


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_every_name_is_under_this_contract():
    assert set(RATES) == set(NAMES)


def test_it_lowers_the_loss(name):
    model, optimizer = made(name)
    before = loss_of(model).item()
    train(model, optimizer, steps=60)
    assert loss_of(model).item() < 0.7 * before


def test_a_saved_state_continues_bit_for_bit_in_a_fresh_optimizer(name):
    model, optimizer = made(name, no_decay="auto", layer_rates={"2": 0.3 * RATES[name]}, weight_decay=0.01)
    train(model, optimizer, steps=5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, steps=5)

    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed, fresh = made(
        name, network(seed=1), no_decay="auto", layer_rates={"2": 0.3 * RATES[name]}, weight_decay=0.01
    )
    resumed.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    train(resumed, fresh, steps=5)
    assert torch.equal(weights(resumed), weights(model))
    ours, theirs = fresh.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)


def test_without_weight_decay_zero_gradients_change_nothing(name):
    model, optimizer = made(name)
    before = weights(model).clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
    assert torch.equal(weights(model), before)


def test_weight_decay_moves_every_parameter_towards_zero(name):
    model, optimizer = made(name, weight_decay=0.1)
    before = weights(model).clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert ((weights(model) - before) * before < 0).all()


def test_spared_parameters_are_in_groups_without_decay(name):
    model, optimizer = made(name, weight_decay=0.1, no_decay="auto")
    decays = {key: group_of(optimizer, parameter)["weight_decay"] for key, parameter in model.named_parameters()}
    assert decays == {"0.weight": 0.1, "0.bias": 0.0, "2.weight": 0.1, "2.bias": 0.0}


def test_a_layer_with_a_rate_of_its_own_moves_by_that_rate_and_the_others_as_before(name):
    ours, optimizer = made(name, layer_rates={"2": 0.1 * RATES[name]})
    plain, reference = made(name)
    start = network()
    rates = {key: group_of(optimizer, parameter)["lr"] for key, parameter in ours.named_parameters()}
    assert rates == {"0.weight": RATES[name], "0.bias": RATES[name], "2.weight": 0.1 * RATES[name]} | {
        "2.bias": 0.1 * RATES[name]
    }
    train(ours, optimizer, steps=1)
    train(plain, reference, steps=1)
    assert torch.equal(ours[0].weight, plain[0].weight)
    for mine, other, begun in zip(ours[2].parameters(), plain[2].parameters(), start[2].parameters(), strict=True):
        torch.testing.assert_close(mine - begun, 0.1 * (other - begun), rtol=1e-3, atol=1e-7)


def test_groups_hold_nothing_but_what_the_optimizer_itself_puts_there(name):
    _, plain = made(name)
    _, optimizer = made(name, weight_decay=0.1, no_decay="auto", layer_rates={"2": 1e-3})
    expected = {frozenset(group) for group in plain.param_groups}
    assert {frozenset(group) for group in optimizer.param_groups} == expected
    assert all(group["params"] for group in optimizer.param_groups)


def test_the_first_step_is_in_proportion_to_the_rate_written_into_the_groups(name):
    moves = []
    for factor in (1, 2):
        model, optimizer = made(name)
        for group in optimizer.param_groups:
            group["lr"] = factor * 1e-3
        train(model, optimizer, steps=1)
        moves.append(weights(model) - weights(network()))
    assert moves[0].abs().min() > 0
    torch.testing.assert_close(moves[1], 2 * moves[0], rtol=1e-3, atol=1e-6)


def test_a_schedule_gives_what_writing_the_rates_by_hand_gives(name):
    schedule = Cosine(RATES[name], total_steps=6)
    ours, optimizer = made(name, layer_rates={"2": 0.5 * RATES[name]})
    by_hand, reference = made(name, layer_rates={"2": 0.5 * RATES[name]})
    constant, unscheduled = made(name, layer_rates={"2": 0.5 * RATES[name]})
    scheduler = LRScheduler(schedule, optimizer)
    ratios = [group["lr"] / RATES[name] for group in reference.param_groups]

    def write(step):
        for group, ratio in zip(reference.param_groups, ratios, strict=True):
            group["lr"] = schedule.get_lr(step) * ratio

    train(by_hand, reference, 6, write)
    train(ours, optimizer, 6, lambda step: step and scheduler.step())
    train(constant, unscheduled, 6)
    assert set(ratios) == {1.0, 0.5}
    assert torch.equal(weights(ours), weights(by_hand))
    assert not torch.equal(weights(ours), weights(constant))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0.0}, r"create_optimizer\(learning_rate=0.0\): needs a positive number"),
        ({"learning_rate": -1.0}, r"create_optimizer\(learning_rate=-1.0\)"),
        ({"learning_rate": float("inf")}, r"create_optimizer\(learning_rate=inf\)"),
        ({"weight_decay": -0.1}, r"create_optimizer\(weight_decay=-0.1\): needs a number that is not negative"),
        ({"layer_rates": {"2": 0}}, r"create_optimizer\(layer_rates\['2'\]=0\): needs a positive number"),
        ({"unknown": 1}, r"create_optimizer\(unknown=1\): unknown to '\w+'; it takes "),
    ],
)
def test_bad_arguments_are_refused_by_name_and_value(name, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        create_optimizer(network(), name, **{"learning_rate": 0.1, **arguments})


@pytest.mark.parametrize("name", TAKE_BETAS)
def test_betas_out_of_range_are_refused(name):
    with pytest.raises(ConfigurationError, match=r"create_optimizer\(betas\[1\]=1.0\): needs a number from 0 up to"):
        made(name, betas=(0.9, 1.0))
    with pytest.raises(ConfigurationError, match=r"create_optimizer\(adam_beta1=-0.1\)"):
        made(name, adam_beta1=-0.1)


@pytest.mark.parametrize("name", TAKE_BETAS)
def test_betas_are_given_by_either_spelling(name):
    _, optimizer = made(name, adam_beta1=0.8, adam_beta2=0.95)
    _, other = made(name, betas=[0.8, 0.95])
    for group in (optimizer.param_groups[-1], other.param_groups[-1]):
        assert group["betas"] == (0.8, 0.95)


def test_frozen_parameters_are_left_out_and_shared_ones_come_once(name):
    torch.manual_seed(0)
    model = Shared()
    frozen = model.frozen.weight.clone()
    _, optimizer = made(name, model)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    expected = [parameter for key, parameter in model.named_parameters() if not key.startswith("frozen")]
    assert sorted(held) == sorted(map(id, expected))
    train(model, optimizer, steps=2)
    assert torch.equal(model.frozen.weight, frozen)


def test_a_step_skipped_for_overflow_leaves_no_trace(name):
    def run(overflows):
        model, optimizer = made(name)
        precision = Precision("fp16", "cpu", gradient_scale=2.0**10)
        scaler = precision.scaler
        history = [weights(model)]
        for overflow in overflows:
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            if overflow:
                model[0].weight.grad[0, 0] = float("inf")
            precision.unscale(optimizer)
            precision.step(optimizer)
            history.append(weights(model))
        return history, scaler.get_scale()

    skipping, scale = run([True, False, False, True, False])
    plain, _ = run([False, False, False])
    assert scale == 2.0**8
    assert torch.equal(skipping[1], skipping[0])
    assert torch.equal(skipping[4], skipping[3])
    assert torch.equal(skipping[-1], plain[-1])
    assert not torch.equal(plain[1], plain[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_continues_like_the_original_and_independently(name, duplicate):
    model, optimizer = made(name, weight_decay=0.01, no_decay="auto")
    train(model, optimizer, steps=3)
    before = weights(model)
    copied, copied_optimizer = duplicate((model, optimizer))
    train(copied, copied_optimizer, steps=3)
    assert torch.equal(weights(model), before)
    train(model, optimizer, steps=3)
    assert torch.equal(weights(model), weights(copied))


def test_its_repr_names_the_class_and_the_rate(name):
    _, optimizer = made(name)
    assert repr(optimizer).startswith(type(optimizer).__name__)
    assert f"lr: {RATES[name]}" in repr(optimizer)


def test_a_closure_is_evaluated_once_and_its_loss_returned(name):
    model, optimizer = made(name)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == losses[0]
    assert len(losses) == 1
    assert loss_of(model).item() != losses[0]
