"""Norms of gradients and bounds on them."""

import math

import pytest
import torch
from torch import nn

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.gradients import clip_grad_norm, clip_grad_value, grad_norm, scale_grads


def parameters_with(*gradients, device="cpu"):
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(len(gradient or [0.0]), device=device))
        parameter.grad = None if gradient is None else torch.tensor(gradient, device=device)
        parameters.append(parameter)
    return parameters


def gradients_of(parameters):
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]


def test_the_norm_is_that_of_all_gradients_as_one_vector():
    norm = grad_norm(parameters_with([3.0, 0.0], None, [4.0]))
    assert norm.shape == ()
    assert norm.item() == 5.0


def test_the_norm_changes_nothing_and_takes_an_iterator_or_one_tensor():
    parameters = parameters_with([3.0, 4.0])
    assert grad_norm(iter(parameters)).item() == 5.0
    assert grad_norm(parameters[0]).item() == 5.0
    assert gradients_of(parameters) == [[3.0, 4.0]]


def test_without_any_gradient_the_norm_is_zero():
    assert grad_norm(parameters_with(None)).item() == 0.0
    assert grad_norm([]).item() == 0.0
    assert clip_grad_norm(parameters_with(None), 1.0).item() == 0.0


def test_gradients_of_several_types_make_one_norm():
    half, single = parameters_with([3.0], [4.0])
    half.data, half.grad = half.data.bfloat16(), None
    half.grad = torch.tensor([3.0], dtype=torch.bfloat16)
    assert grad_norm([single, half]).item() == 5.0


def test_clipping_returns_the_norm_before_and_leaves_the_bound():
    parameters = parameters_with([3.0], None, [4.0])
    assert clip_grad_norm(iter(parameters), 1.0).item() == 5.0
    assert grad_norm(parameters).item() == pytest.approx(1.0, abs=1e-6)
    first, _, last = gradients_of(parameters)
    assert (first[0], last[0]) == pytest.approx((0.6, 0.8), abs=1e-6)


def test_a_norm_that_is_known_already_is_not_measured_again():
    parameters = parameters_with([3.0, 4.0])
    known = torch.tensor(10.0)
    assert clip_grad_norm(parameters, 1.0, known) is known
    assert gradients_of(parameters)[0] == pytest.approx([0.3, 0.4], abs=1e-6)


def test_gradients_within_the_bound_stay_as_they_are():
    parameters = parameters_with([3.0, 4.0])
    assert clip_grad_norm(parameters, 5.5).item() == 5.0
    assert gradients_of(parameters) == [[3.0, 4.0]]


def test_clipping_gives_torchs_own_bits():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(50)) for _ in range(3)] for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn(50, generator=generator)
        b.grad = a.grad.clone()
    assert torch.equal(clip_grad_norm(ours, 0.5), torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    parameters = parameters_with([1.0, math.nan])
    assert math.isnan(clip_grad_norm(parameters, 1.0).item())
    assert clip_grad_norm(parameters_with([math.inf]), 1.0).item() == math.inf


def test_values_are_clamped_on_both_sides():
    parameters = parameters_with([-3.0, 0.5, 2.0], None)
    clip_grad_value(iter(parameters), 1.0)
    assert gradients_of(parameters) == [[-1.0, 0.5, 1.0], None]


def test_nothing_looks_at_a_value():
    # a meta tensor has no values: whatever would wait for a device fails on it
    parameters = parameters_with([1.0, 2.0], [3.0], device="meta")
    assert grad_norm(parameters).shape == ()
    assert clip_grad_norm(parameters, 1.0).shape == ()
    clip_grad_value(parameters, 1.0)


@pytest.mark.parametrize("bound", [0, -1.0, math.nan])
def test_a_bound_that_is_not_positive_is_refused(bound):
    with pytest.raises(ConfigurationError, match=r"clip_grad_norm\(max_norm=.*\): needs a positive number"):
        clip_grad_norm([], bound)
    with pytest.raises(ConfigurationError, match=r"clip_grad_value\(max_value=.*\): needs a positive number"):
        clip_grad_value([], bound)


@pytest.mark.parametrize("dtypes", [[torch.float32] * 2, [torch.float64] * 2, [torch.float32, torch.float64]], ids=str)
def test_a_factor_in_float64_leaves_gradients_in_their_own_type(dtypes):
    parameters = [nn.Parameter(torch.zeros(shape, dtype=each)) for shape, each in zip([(), (2,)], dtypes, strict=True)]
    for each in parameters:
        each.grad = torch.full_like(each, 3.0)
    scale_grads(parameters, torch.tensor(1 / 7, dtype=torch.float64))
    assert [each.grad.dtype for each in parameters] == dtypes
    for each in parameters:
        torch.testing.assert_close(
            each.grad, torch.full_like(each, 3 / 7), rtol=4 * torch.finfo(each.dtype).eps, atol=0
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_the_product_and_not_the_factor(dtype):
    parameter = nn.Parameter(torch.zeros(200, dtype=dtype))
    parameter.grad = torch.linspace(1, 2, 200).to(dtype)
    factor = torch.tensor(1 + 3 * torch.finfo(dtype).eps / 8, dtype=torch.float64)  # which is 1 in this type
    expected = (parameter.grad.double() * factor).to(dtype)
    assert not torch.equal(expected, parameter.grad)
    scale_grads([parameter], factor)
    assert torch.equal(parameter.grad, expected)


def test_a_factor_beyond_the_range_of_half_precision_keeps_its_value():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 2.0**-14)
    scale_grads([parameter], torch.tensor(2.0**20, dtype=torch.float64))
    assert parameter.grad.tolist() == [64.0, 64.0]
