"""Losses of jax and numpy arrays: the values and gradients of the same losses of torch tensors."""

import functools
import math

import numpy
import pytest
import torch

from pulsetrain.engine.losses import cross_entropy, focal_loss, get_loss, huber, ignored_label, l1, mse
from tests.support.losses import (
    ALL,
    LIBRARIES,
    OF_LABELS,
    OF_NUMBERS,
    WEIGHTS,
    batch_of,
    converted,
    name_of,
    needs_jax,
    with_options,
)


def torchs(loss, options, outputs, targets):
    """Value and gradient by torch."""
    outputs = outputs.clone().requires_grad_()
    value = with_options(loss, options)(outputs, targets)
    value.backward()
    return value.detach().numpy(), outputs.grad.numpy()


def jaxs(loss, options, outputs, targets, jit):
    """Value and gradient by jax."""
    import jax

    step = jax.value_and_grad(with_options(loss, options, "jax"))
    value, gradient = (jax.jit(step) if jit else step)(*converted("jax", outputs, targets))
    return numpy.asarray(value), numpy.asarray(gradient)


# ------------------------------------------------------------------------------------ the numbers of torch


def compiled_for(every, once):
    """All losses with all options in one dtype, each loss once in another: a program is compiled for each."""
    return [*((*each, every) for each in ALL), *((*each, once) for each in ONE_OF_EACH)]


ONE_OF_EACH = [OF_LABELS[3], OF_LABELS[-1], *(OF_NUMBERS[number] for number in (0, 1, 3, 4))]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@needs_jax
@pytest.mark.parametrize(("loss", "options", "dtype"), compiled_for(torch.float64, torch.float32), ids=name_of)
def test_jax_gives_torchs_loss_and_gradient(loss, options, dtype):
    import jax

    tolerance = TOLERANCE[dtype]
    with jax.enable_x64(dtype is torch.float64):
        step = jax.jit(jax.value_and_grad(with_options(loss, options, "jax")))
        for scale in (1.0, 1e4):
            outputs, targets = batch_of(loss, scale=scale, dtype=dtype)
            value, gradient = torchs(loss, options, outputs, targets)
            found, its_gradient = step(*converted("jax", outputs, targets))
            assert (found.shape, found.dtype, its_gradient.dtype) == ((), value.dtype, gradient.dtype)
            numpy.testing.assert_allclose(found, value, rtol=tolerance)
            numpy.testing.assert_allclose(its_gradient, gradient, rtol=0, atol=tolerance * abs(gradient).max())


@needs_jax
@pytest.mark.parametrize(("loss", "options"), [OF_LABELS[1], OF_LABELS[-1], OF_NUMBERS[2]], ids=name_of)
def test_jax_gives_the_same_without_jit(loss, options):
    outputs, targets = batch_of(loss, dtype=torch.float32)
    value, gradient = torchs(loss, options, outputs, targets)
    found, its_gradient = jaxs(loss, options, outputs, targets, jit=False)
    numpy.testing.assert_allclose(found, value, rtol=1e-6)
    numpy.testing.assert_allclose(its_gradient, gradient, rtol=0, atol=1e-6 * abs(gradient).max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize(("loss", "options"), ALL, ids=name_of)
def test_numpy_gives_torchs_loss(loss, options, dtype, tolerance):
    for shape in ((), (5,), (2, 3, 4)):
        outputs, targets = batch_of(loss, shape, dtype=dtype)
        value = with_options(loss, options)(outputs, targets).numpy()
        found = with_options(loss, options, "numpy")(*converted("numpy", outputs, targets))
        assert (found.shape, found.dtype) == ((), value.dtype)
        numpy.testing.assert_allclose(found, value, rtol=tolerance)


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize(("loss", "options", "dtype"), compiled_for(torch.float16, torch.bfloat16), ids=name_of)
def test_half_precision_gives_torchs_dtype_and_its_value_as_exactly_as_that_dtype_can(loss, options, dtype):
    import jax.numpy

    outputs, targets = batch_of(loss, dtype=dtype)
    whole = outputs.float(), targets.float() if targets.is_floating_point() else targets
    value = with_options(loss, options)(*whole).item()
    theirs = with_options(loss, options)(outputs, targets)
    half = str(dtype).removeprefix("torch.")
    arrays = [
        jax.numpy.asarray(each.numpy()).astype(half) if each.dtype is torch.float32 else jax.numpy.asarray(each.numpy())
        for each in whole
    ]
    found = jax.jit(with_options(loss, options, "jax"))(*arrays)
    assert str(found.dtype) == str(theirs.dtype).removeprefix("torch.")
    assert float(found) == pytest.approx(value, rel=torch.finfo(dtype).eps)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_sum_beyond_half_precision_is_averaged_all_the_same(library):
    predictions, targets = converted(library, torch.full((50_000,), 20.0).half(), torch.zeros(50_000).half())
    assert float(mse(predictions, targets)) == 400.0
    logits = torch.zeros(50_000, 2).half()
    logits[:, 0] = 20.0
    assert float(cross_entropy(*converted(library, logits, torch.ones(50_000, dtype=torch.int64)))) == 20.0


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=str)
def test_where_every_target_is_ignored_or_there_is_none_the_loss_is_nan(library, options):
    for shape in ((4,), (0,)):
        logits, targets = converted(library, torch.randn(*shape, 5), torch.full(shape, -100))
        assert math.isnan(cross_entropy(logits, targets, **options))
        assert math.isnan(focal_loss(logits, targets))


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize("loss", [cross_entropy, functools.partial(cross_entropy, z_loss=0.1), focal_loss])
def test_where_every_target_is_ignored_the_gradient_is_zero(loss):
    import jax

    logits, targets = converted("jax", torch.randn(4, 5), torch.full((4,), -100))
    assert not jax.jit(jax.grad(loss))(logits, targets).any()


@needs_jax
def test_an_error_that_is_infinite_has_the_gradient_that_torch_gives_it():
    outputs, targets = torch.tensor([math.inf, -math.inf, 1.0]), torch.zeros(3)
    for loss in (huber, l1):
        value, gradient = torchs(loss, {}, outputs, targets)
        found, its_gradient = jaxs(loss, {}, outputs, targets, jit=True)
        assert (value, found) == (math.inf, math.inf)
        assert its_gradient.tolist() == gradient.tolist()


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_a_prediction_that_is_surely_right_costs_nothing_and_has_a_finite_gradient(gamma):
    found, gradient = jaxs(focal_loss, {"gamma": gamma}, torch.tensor([[200.0, 0.0]]), torch.tensor([0]), jit=True)
    assert (found.item(), gradient.tolist()) == (0.0, [[0.0, 0.0]])


@needs_jax
def test_logits_of_minus_infinity_are_classes_that_cannot_be():
    logits = torch.tensor([[1.0, -math.inf, 2.0, -math.inf], [0.0, 1.0, -math.inf, -math.inf]])
    targets = torch.tensor([2, 0])
    value, gradient = torchs(cross_entropy, {"z_loss": 0.1}, logits, targets)
    found, its_gradient = jaxs(cross_entropy, {"z_loss": 0.1}, logits, targets, jit=True)
    numpy.testing.assert_allclose(found, value, rtol=1e-6)
    numpy.testing.assert_allclose(its_gradient, gradient, atol=1e-7)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_class_indices_of_any_whole_number_type_give_the_same_loss(library, dtype):
    logits, targets = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 77])
    (arrays,) = converted(library, logits)
    labels = targets.numpy().astype(dtype)
    expected = cross_entropy(logits, targets, ignore_index=77).item()
    assert float(cross_entropy(arrays, labels, ignore_index=77)) == pytest.approx(expected, rel=1e-6)
    # in an unsigned type no label is -100
    labels[4], targets[4] = 2, 2
    assert float(cross_entropy(arrays, labels)) == pytest.approx(cross_entropy(logits, targets).item(), rel=1e-6)


@needs_jax
def test_numpy_targets_beside_jax_outputs_are_taken():
    import jax

    outputs, targets = batch_of(cross_entropy, dtype=torch.float32)
    (logits,) = converted("jax", outputs)
    assert isinstance(cross_entropy(logits, targets.numpy()), jax.Array)
    assert isinstance(mse(logits, outputs.numpy()), jax.Array)
    assert float(mse(logits, outputs.numpy())) == 0.0


def test_numbers_of_numpy_are_options_that_leave_the_dtype():
    logits, targets = torch.randn(3, 4).numpy(), numpy.array([0, 1, 3])
    number = numpy.float64(0.25)
    assert cross_entropy(logits, targets, label_smoothing=number, z_loss=number).dtype == numpy.float32
    assert focal_loss(logits, targets, gamma=number, alpha=number).dtype == numpy.float32
    assert huber(logits, logits, delta=number).dtype == numpy.float32


# ------------------------------------------------------------------------------------------------ by name


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_name_gives_the_loss_for_every_library(library):
    outputs, targets = batch_of(cross_entropy, dtype=torch.float32)
    for name, options in (("cross_entropy", {"label_smoothing": 0.1, "z_loss": 1e-4}), ("focal", {"gamma": 1.0})):
        loss = get_loss(name, **options)
        assert float(loss(*converted(library, outputs, targets))) == pytest.approx(loss(outputs, targets).item())


@pytest.mark.parametrize("library", LIBRARIES)
def test_weights_of_classes_are_options_in_the_arrays_that_the_loss_is_for(library):
    outputs, targets = batch_of(focal_loss, dtype=torch.float32)
    weights = torch.tensor(WEIGHTS)
    *arrays, its_weights = converted(library, outputs, targets, weights)
    loss = get_loss("focal", alpha=its_weights)
    assert ignored_label(loss) == -100
    expected = focal_loss(outputs, targets, alpha=weights).item()
    assert float(loss(*arrays)) == pytest.approx(expected, rel=1e-6)
