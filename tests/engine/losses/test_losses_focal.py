"""Focal loss against its formula in numpy, and where it meets the cross entropy."""

import math

import numpy
import pytest
import torch

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import cross_entropy, focal_loss

WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)


def random_batch(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(shape))
    logits = 2 * torch.randn(*shape, 5, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(5, shape, generator=generator)


def by_hand(logits, targets, gamma, alpha):
    """Lin et al. 2017, eq. 5, a target at a time."""
    losses = []
    for row, target in zip(logits.reshape(-1, 5).double().numpy(), targets.reshape(-1).tolist(), strict=True):
        p = numpy.exp(row[target]) / numpy.exp(row).sum()
        weight = alpha[target].item() if isinstance(alpha, torch.Tensor) else alpha or 1.0
        losses.append(-weight * (1 - p) ** gamma * numpy.log(p))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("alpha", [None, 0.25, 1, WEIGHTS])
@pytest.mark.parametrize("gamma", [0, 0.5, 1.0, 2.0, 5.0])
def test_focal_loss_is_the_formula_of_its_paper(gamma, alpha):
    logits, targets = random_batch(3, 4)
    expected = by_hand(logits, targets, gamma, alpha)
    assert focal_loss(logits, targets, gamma=gamma, alpha=alpha).item() == pytest.approx(expected, rel=1e-12)


def test_two_equal_logits_have_a_quarter_of_the_loss_ln_2():
    assert focal_loss(torch.zeros(1, 2), torch.tensor([1])).item() == pytest.approx(0.25 * math.log(2), rel=1e-6)


@pytest.mark.parametrize("shape", [(), (6,), (2, 3, 4)])
def test_with_gamma_zero_it_is_the_cross_entropy(shape):
    logits, targets = random_batch(*shape)
    torch.testing.assert_close(focal_loss(logits, targets, gamma=0), cross_entropy(logits, targets), rtol=1e-14, atol=0)


@pytest.mark.parametrize("alpha", [None, 0.25, WEIGHTS])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_the_gradient_is_the_derivative_of_the_loss(gamma, alpha):
    logits, targets = random_batch(2, 3)
    targets[0, 0] = -100
    torch.autograd.gradcheck(
        lambda x: focal_loss(x, targets, gamma=gamma, alpha=alpha), logits.requires_grad_(), raise_exception=True
    )


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_a_prediction_that_is_surely_right_costs_nothing_and_has_a_finite_gradient(gamma):
    logits = torch.tensor([[200.0, 0.0]], requires_grad=True)
    loss = focal_loss(logits, torch.tensor([0]), gamma=gamma)
    loss.backward()
    assert (loss.item(), logits.grad.tolist()) == (0.0, [[0.0, 0.0]])


@pytest.mark.parametrize("alpha", [None, 0.25, WEIGHTS])
def test_ignored_targets_count_neither_for_the_sum_nor_for_the_mean(alpha):
    logits, targets = random_batch(6)
    kept = focal_loss(logits[::2], targets[::2], alpha=alpha)
    for ignore_index in (-100, 7):
        targets[1::2] = ignore_index
        torch.testing.assert_close(focal_loss(logits, targets, alpha=alpha, ignore_index=ignore_index), kept)
    assert focal_loss(logits, torch.full((6,), -100), alpha=alpha).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_averaged_in_float32(dtype):
    logits = torch.zeros(50_000, 2, dtype=dtype)
    logits[:, 0] = 20.0  # the sum of the losses, a million, is beyond fp16
    loss = focal_loss(logits, torch.ones(50_000, dtype=torch.int64))
    assert (loss.dtype, loss.item()) == (torch.float32, pytest.approx(20.0))


def test_float64_weights_leave_the_dtype_of_a_float32_loss():
    logits, targets = random_batch(4, dtype=torch.float32)
    assert focal_loss(logits, targets, alpha=WEIGHTS).dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": -1}, r"focal_loss\(gamma=-1\): needs a finite number of at least 0"),
        ({"gamma": math.nan}, r"focal_loss\(gamma=nan\)"),
        ({"alpha": 0}, r"focal_loss\(alpha=0\): needs a number above 0 and up to 1, or a tensor of shape \(classes,\)"),
        ({"alpha": 1.5}, r"focal_loss\(alpha=1.5\)"),
        ({"alpha": [0.5] * 5}, r"focal_loss\(alpha=\[0.5, .*\]\): needs a number above 0 and up to 1, or a tensor"),
        ({"alpha": "a"}, r"focal_loss\(alpha='a'\): needs a number above 0"),
        ({"gamma": "a"}, r"focal_loss\(gamma='a'\): needs a finite number of at least 0"),
        ({"gamma": None}, r"focal_loss\(gamma=None\): needs a finite number of at least 0"),
        ({"ignore_index": None}, r"focal_loss\(ignore_index=None\): needs a whole number, such as -100"),
        ({"ignore_index": 1.5}, r"focal_loss\(ignore_index=1.5\): needs a whole number"),
        ({"alpha": torch.ones(4)}, r"focal_loss\(alpha of shape \(4,\)\): .* each of the 5 classes, shape \(5,\)"),
    ],
)
def test_an_option_out_of_range_is_named(options, message):
    with pytest.raises(ConfigurationError, match=message):
        focal_loss(*random_batch(4), **options)


def test_shapes_and_types_that_do_not_fit_are_named_as_by_the_cross_entropy():
    with pytest.raises(ValueError, match=r"focal_loss\(logits of shape \(4, 5\), .*; pass targets.squeeze\(-1\)"):
        focal_loss(torch.zeros(4, 5), torch.zeros(4, 1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"focal_loss\(targets of torch.float32\): needs class indices"):
        focal_loss(torch.zeros(4, 5), torch.zeros(4))
