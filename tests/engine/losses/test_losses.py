"""Losses against formulas written out, and shapes that would broadcast to something else."""

import functools
import math
import re

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import (
    bce_with_logits,
    class_weights,
    cross_entropy,
    focal_loss,
    get_loss,
    huber,
    ignored_label,
    l1,
    mse,
)

# ------------------------------------------------------------------------------------------- cross entropy


def test_cross_entropy_is_the_mean_negative_log_probability_of_the_target():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 3.0, 0.0]])
    targets = torch.tensor([0, 2])
    by_hand = -((2.0 - math.log(math.exp(2) + 1 + math.exp(-1))) + (0.0 - math.log(1 + math.exp(3) + 1))) / 2
    assert cross_entropy(logits, targets).item() == pytest.approx(by_hand, rel=1e-6)


def test_uniform_logits_have_the_loss_log_of_the_number_of_classes():
    assert cross_entropy(torch.zeros(5, 7), torch.arange(5)).item() == pytest.approx(math.log(7), rel=1e-6)


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 4), (0,)])
def test_any_number_of_leading_dimensions_gives_the_same_mean(shape):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, 5, generator=generator, requires_grad=True)
    targets = torch.randint(5, shape, generator=generator)
    flat = F.cross_entropy(logits.reshape(-1, 5), targets.reshape(-1))
    loss = cross_entropy(logits, targets)
    assert loss.shape == ()
    torch.testing.assert_close(loss, flat, rtol=0, atol=0, equal_nan=True)


def test_ignored_targets_count_neither_for_the_sum_nor_for_the_mean():
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([1, -100, 2, -100, 3, -100])
    assert torch.equal(cross_entropy(logits, targets), cross_entropy(logits[::2], targets[::2]))
    padded = torch.tensor([1, 0, 2, 0, 3, 0])
    assert torch.equal(cross_entropy(logits, padded, ignore_index=0), cross_entropy(logits[::2], targets[::2]))


def test_label_smoothing_mixes_in_the_mean_over_all_classes():
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    log_probabilities = logits.log_softmax(-1)[0]
    by_hand = -(0.7 * log_probabilities[1] + 0.3 * log_probabilities.mean())
    torch.testing.assert_close(cross_entropy(logits, torch.tensor([1]), label_smoothing=0.3), by_hand)


def test_z_loss_adds_the_mean_squared_logarithm_of_the_partition_function_over_counted_targets():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 2], [4, 0, -100]])
    counted = logits.logsumexp(-1)[targets != -100]
    by_hand = cross_entropy(logits, targets) + 0.1 * counted.square().mean()
    torch.testing.assert_close(cross_entropy(logits, targets, z_loss=0.1), by_hand)


def test_z_loss_of_float64_logits_is_computed_in_float64():
    logits = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    squares = numpy.log(numpy.exp(logits.numpy()).sum(-1)) ** 2
    added = cross_entropy(logits, torch.arange(4), z_loss=0.5) - cross_entropy(logits, torch.arange(4))
    assert added.item() == pytest.approx(0.5 * squares.mean(), rel=1e-13)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("label_smoothing", -0.1, "needs a number from 0 to 1"),
        ("label_smoothing", 1.5, "needs a number from 0 to 1"),
        ("label_smoothing", math.nan, "needs a number from 0 to 1"),
        ("z_loss", -1e-4, "needs a finite number of at least 0"),
        ("z_loss", math.inf, "needs a finite number of at least 0"),
        ("z_loss", math.nan, "needs a finite number of at least 0"),
        ("chunk_size", 0, "needs a whole number of classes"),
        ("chunk_size", 2.0, "needs a whole number of classes"),
        ("chunk_size", True, "needs a whole number of classes"),
        ("label_smoothing", "a", "needs a number from 0 to 1"),
        ("label_smoothing", None, "needs a number from 0 to 1"),
        ("label_smoothing", (0.1, 0.2), "needs a number from 0 to 1"),
        ("z_loss", "a", "needs a finite number of at least 0"),
        ("z_loss", None, "needs a finite number of at least 0"),
        ("ignore_index", None, "needs a whole number, such as -100"),
        ("ignore_index", 1.5, "needs a whole number, such as -100"),
        ("ignore_index", True, "needs a whole number, such as -100"),
    ],
)
@pytest.mark.parametrize("others", [{}, {"chunk_size": 2}, {"z_loss": 0.1}], ids=str)
def test_an_option_out_of_range_is_named(option, value, rule, others):
    for logits, targets in ((torch.zeros(2, 3), torch.tensor([0, 1])), (torch.zeros(1, 2, 3), torch.tensor([[0, 1]]))):
        with pytest.raises(ConfigurationError, match=re.escape(f"cross_entropy({option}={value!r}): {rule}")):
            cross_entropy(logits, targets, **{**others, option: value})


def test_numbers_of_numpy_are_options_too():
    logits, targets = torch.randn(3, 4), torch.tensor([0, 1, 3])
    for number in (numpy.float32(0.25), numpy.float64(0.25)):
        given = cross_entropy(logits, targets, label_smoothing=number, z_loss=number, ignore_index=numpy.int64(1))
        assert torch.equal(given, cross_entropy(logits, targets, label_smoothing=0.25, z_loss=0.25, ignore_index=1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_class_indices_of_any_whole_number_type_give_the_same_loss(dtype):
    logits, targets = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    assert torch.equal(cross_entropy(logits, targets.to(dtype)), cross_entropy(logits, targets))


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (
            (4, 3),
            (5,),
            r"cross_entropy\(logits of shape \(4, 3\), targets of shape \(5,\)\): needs logits \(\.\.\., cl",
        ),
        ((4, 3), (4, 1), r"targets of shape \(4, 1\).*pass targets.squeeze\(-1\)"),
        ((4, 3), (4, 3), r"targets of shape \(4, 3\).*; for binary targets, use .*targets.argmax\(-1\)"),
        ((2, 3, 8, 8), (2, 8, 8), r"logits of shape \(2, 3, 8, 8\).*classes come last: logits.movedim\(1, -1\)"),
        ((), (), r"logits of shape \(\), targets of shape \(\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named_on_both_sides(logits, targets, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(torch.zeros(logits), torch.zeros(targets, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_targets_that_are_not_class_indices_are_refused(dtype):
    with pytest.raises(TypeError, match=rf"cross_entropy\(targets of {dtype}\): needs class indices"):
        cross_entropy(torch.zeros(4, 3), torch.zeros(4, dtype=dtype))


# ------------------------------------------------------------------------------------- element by element


def test_regression_losses_by_hand():
    predictions, targets = torch.tensor([[0.0], [3.0]]), torch.tensor([[0.5], [1.0]])
    assert mse(predictions, targets).item() == (0.25 + 4.0) / 2
    assert l1(predictions, targets).item() == (0.5 + 2.0) / 2
    assert huber(predictions, targets).item() == (0.125 + 1.5) / 2
    assert huber(predictions, targets, delta=4.0).item() == mse(predictions, targets).item() / 2


def test_bce_with_logits_by_hand():
    logits, targets = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.25])
    sigmoid = 1 / (1 + math.exp(-2))
    by_hand = (math.log(2) - 0.25 * math.log(sigmoid) - 0.75 * math.log(1 - sigmoid)) / 2
    assert bce_with_logits(logits, targets).item() == pytest.approx(by_hand, rel=1e-6)


def test_bce_with_logits_stays_finite_where_the_sigmoid_is_one():
    assert bce_with_logits(torch.tensor([1000.0]), torch.tensor([0.0])).item() == 1000.0


ELEMENTWISE = [mse, l1, huber, bce_with_logits]


@pytest.mark.parametrize("loss", ELEMENTWISE)
def test_shapes_that_would_broadcast_are_refused(loss):
    with pytest.raises(
        ValueError, match=r"of shape \(4, 1\), targets of shape \(4,\)\): needs equal shapes; pass .*squ"
    ):
        loss(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(ValueError, match=r"of shape \(4,\), targets of shape \(4, 1\)\).*targets.squeeze\(-1\)"):
        loss(torch.zeros(4), torch.zeros(4, 1))


@pytest.mark.parametrize("loss", ELEMENTWISE)
def test_whole_number_targets_are_refused(loss):
    with pytest.raises(TypeError, match=rf"{loss.__name__}\(targets of torch.int64\): needs floating point"):
        loss(torch.zeros(4), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("delta", [0, -1.0, math.inf, math.nan, "a", None])
def test_huber_refuses_a_delta_that_is_not_positive(delta):
    with pytest.raises(ConfigurationError, match=re.escape(f"huber(delta={delta!r}): needs a positive number")):
        huber(torch.zeros(2), torch.zeros(2), delta=delta)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (cross_entropy, {"z_loss": 0.1, "label_smoothing": 0.1}),
        (cross_entropy, {"z_loss": 0.1, "label_smoothing": 0.1, "chunk_size": 2}),
        (focal_loss, {"alpha": torch.ones(3, device="meta")}),
        *((loss, {}) for loss in ELEMENTWISE),
    ],
)
def test_no_loss_looks_at_a_value(loss, options):
    # a meta tensor has no values: whatever would wait for a device fails on it
    outputs = torch.zeros(4, 3, device="meta", requires_grad=True)
    targets = outputs.detach() if loss in ELEMENTWISE else torch.zeros(4, dtype=torch.int64, device="meta")
    loss(outputs, targets, **options).backward()
    assert outputs.grad.shape == (4, 3)


# ----------------------------------------------------------------------------------------------- by name


def test_each_name_finds_its_loss():
    names = ("cross_entropy", "focal", "mse", "l1", "huber", "bce_with_logits", "bce")
    assert {name: get_loss(name) for name in names} == {
        "cross_entropy": cross_entropy,
        "focal": focal_loss,
        "mse": mse,
        "l1": l1,
        "huber": huber,
        "bce_with_logits": bce_with_logits,
        "bce": bce_with_logits,
    }


def test_a_module_or_a_function_passes_through():
    module = nn.SmoothL1Loss()
    assert get_loss(module) is module
    assert get_loss(F.nll_loss) is F.nll_loss


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(
        ConfigurationError, match=r"get_loss\(name='cross_entrop'\): unknown; .*huber, l1, mse; did you mean 'cross_ent"
    ):
        get_loss("cross_entrop")


def test_a_class_or_a_number_is_refused():
    with pytest.raises(ConfigurationError, match=r"get_loss\(name=MSELoss\): needs an instance.*pass MSELoss\(\)"):
        get_loss(nn.MSELoss)
    with pytest.raises(ConfigurationError, match=r"get_loss\(name=3\): needs a function"):
        get_loss(3)


def test_options_of_a_name_make_the_loss_with_these_options():
    logits, targets = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    for name, loss, options in (
        ("cross_entropy", cross_entropy, {"label_smoothing": 0.1, "z_loss": 1e-4, "ignore_index": 0, "chunk_size": 2}),
        ("focal", focal_loss, {"gamma": 1.0, "alpha": torch.tensor([0.2, 0.3, 0.5])}),
    ):
        assert torch.equal(get_loss(name, **options)(logits, targets), loss(logits, targets, **options))
    assert get_loss("huber", delta=3.0)(logits, logits + 2).item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "cross_entropy",
            {"smoothing": 0.1},
            "get_loss(smoothing=0.1): unknown to 'cross_entropy'; it takes chunk_size, ignore_index, label_smoothing, "
            "z_loss",
        ),
        ("mse", {"delta": 1.0}, "get_loss(delta=1.0): unknown to 'mse'; it takes no option"),
        ("cross_entropy", {"logits": 1}, "get_loss(logits=1): unknown to 'cross_entropy'"),
        ("cross_entropy", {"label_smoothing": 1.5}, "cross_entropy(label_smoothing=1.5): needs a number from 0 to 1"),
        ("cross_entropy", {"ignore_index": 1.5}, "cross_entropy(ignore_index=1.5): needs a whole number"),
        ("cross_entropy", {"chunk_size": 0}, "cross_entropy(chunk_size=0): needs a whole number"),
        ("focal", {"alpha": [0.5, 0.5]}, "focal_loss(alpha=[0.5, 0.5]): needs a number above 0"),
        ("focal", {"gamma": -1}, "focal_loss(gamma=-1): needs a finite number"),
        ("huber", {"delta": 0}, "huber(delta=0): needs a positive number"),
        (F.cross_entropy, {"ignore_index": 3}, "get_loss(ignore_index=3): only a loss given by name accepts options"),
    ],
)
def test_an_option_that_the_loss_cannot_take_is_refused_before_any_batch(name, options, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        get_loss(name, **options)


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        ("cross_entropy", -100),
        (focal_loss, -100),
        (get_loss("cross_entropy", ignore_index=0), 0),
        (functools.partial(focal_loss, gamma=1.0), -100),
        (nn.CrossEntropyLoss(ignore_index=7), 7),
        (nn.NLLLoss(), -100),
        (F.cross_entropy, -100),
        (functools.partial(F.cross_entropy, ignore_index=255), 255),
        (F.nll_loss, -100),
        ("mse", None),
        (nn.MSELoss(), None),
        (lambda outputs, targets: 0, None),
        (functools.partial(huber, delta=2.0), None),
    ],
)
def test_the_label_that_a_loss_ignores_is_known(loss, label):
    assert ignored_label(loss) == label


@pytest.mark.parametrize(
    ("loss", "is_weighted"),
    [
        (nn.CrossEntropyLoss(torch.ones(2)), True),
        (nn.NLLLoss(torch.ones(2)), True),
        (functools.partial(F.cross_entropy, weight=torch.ones(2)), True),
        (nn.CrossEntropyLoss(), False),
        (nn.CrossEntropyLoss(torch.ones(2), reduction="sum"), False),
        (nn.MultiMarginLoss(weight=torch.ones(2)), False),
        ("cross_entropy", False),
    ],
)
def test_the_class_weights_that_torch_divides_by_are_known(loss, is_weighted):
    assert (class_weights(loss) is not None) == is_weighted
