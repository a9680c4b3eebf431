"""Mixed precision on the CPU: what computes in which type, and the scaler's state."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.optimizers import create_optimizer
from pulsetrain.engine.step.precision import Precision

CPU = torch.device("cpu")


def product_dtype():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_products_inside_the_context_have_its_type_and_float32_outside(name, dtype):
    precision = Precision(name, CPU)
    with precision.autocast():
        assert product_dtype() is dtype
    assert product_dtype() is torch.float32


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_the_context_may_be_entered_inside_itself(name):
    precision = Precision(name, CPU)
    with precision.autocast():
        with precision.autocast():
            pass
        inside = product_dtype()
    assert inside is (precision.dtype or torch.float32)
    assert product_dtype() is torch.float32


def test_full_precision_reuses_one_empty_context():
    precision = Precision("fp32", CPU)
    assert precision.autocast() is precision.autocast()


def test_only_fp16_has_a_scaler():
    assert Precision("fp32", CPU).scaler is None
    assert Precision("bf16", CPU).scaler is None
    assert Precision("fp16", "cpu").scaler.is_enabled()


def train(model, optimizer, precision, steps):
    data = torch.linspace(-1, 1, 64).reshape(16, 4)
    targets = torch.arange(16) * 3 // 16
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with precision.autocast():
            loss = F.cross_entropy(model(data), targets)
        if precision.scaler is None:
            loss.backward()
            optimizer.step()
        else:
            precision.scaler.scale(loss).backward()
            precision.scaler.step(optimizer)
            precision.scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])  # both fused, which unscale for themselves
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_training_on_the_cpu_follows_full_precision(name, optimizer_name):
    curves = {}
    for precision in (Precision("fp32", CPU), Precision(name, CPU)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        curves[precision.name] = train(model, create_optimizer(model, optimizer_name, 0.2), precision, steps=30)
    assert curves["fp32"][-1] < curves["fp32"][0] - 0.05
    assert curves[name] == pytest.approx(curves["fp32"], abs=0.03)


def test_the_scaler_continues_where_it_was_saved():
    precision = Precision("fp16", CPU)
    model = nn.Linear(4, 3)
    optimizer = create_optimizer(model, "sgd", 0.01)
    train(model, optimizer, precision, steps=3)
    model.weight.grad.fill_(float("inf"))
    precision.scaler.unscale_(optimizer)
    precision.scaler.step(optimizer)
    precision.scaler.update()
    assert precision.scaler.get_scale() == 2.0**15

    resumed = Precision("fp16", CPU)
    resumed.load_state_dict(copy.deepcopy(precision.state_dict()))
    assert resumed.state_dict() == precision.state_dict()
    assert resumed.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_without_a_scaler_the_state_is_the_name(name):
    precision = Precision(name, CPU)
    assert precision.state_dict() == {"name": name, "scaler": None, "skipped": 0}
    precision.load_state_dict(precision.state_dict())


def test_updates_that_overflow_are_left_out_counted_and_the_count_is_saved():
    precision = Precision("fp16", CPU)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for scale, skipped in ((1.0, 0), (float("inf"), 1), (1.0, 1), (float("nan"), 2)):
        before = weight.detach().clone()
        precision.scaler.scale((weight * scale).sum()).backward()
        precision.unscale(optimizer)
        precision.step(optimizer)
        optimizer.zero_grad()
        assert precision.skipped_updates() == skipped
        assert torch.equal(before, weight) == (scale != 1.0)
    assert precision.scaler.get_scale() == 2.0**14  # halved at each overflow
    resumed = Precision("fp16", CPU)
    resumed.load_state_dict(precision.state_dict())
    assert resumed.skipped_updates() == 2


def test_full_precision_skips_nothing():
    assert Precision("fp32", CPU).skipped_updates() == 0


def test_the_state_of_another_precision_is_refused_with_both_names():
    state = Precision("fp16", CPU).state_dict()
    with pytest.raises(CheckpointError, match=r"Precision.load_state_dict\(name='fp16'\): this run has 'bf16'"):
        Precision("bf16", CPU).load_state_dict(state)


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(
        ConfigurationError, match=r"Precision\(name='fp61'\): unknown; choose one of bf16, fp16, fp32; did"
    ):
        Precision("fp61", CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_device_that_is_not_there_is_refused_at_construction(name):
    with pytest.raises(ConfigurationError, match=rf"Precision\(name='{name}', device='cuda'\): not available here"):
        Precision(name, torch.device("cuda"))


def test_a_device_that_cannot_autocast_is_refused_at_construction():
    with pytest.raises(ConfigurationError, match=r"Precision\(name='bf16', device='meta'\): not available here"):
        Precision("bf16", torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_on_the_accelerator_have_the_type_of_the_context(name, dtype):
    with Precision(name, torch.device("cuda")).autocast():
        assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype is dtype
