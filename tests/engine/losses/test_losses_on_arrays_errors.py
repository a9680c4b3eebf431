"""Losses of jax and numpy arrays: the errors of the same losses of torch tensors, and what can be seen inside jit."""

import functools
import math
import re

import pytest
import torch

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import (
    bce_with_logits,
    check_first_batch,
    check_first_loss,
    cross_entropy,
    focal_loss,
    huber,
    l1,
    mse,
)
from tests.support.losses import ALL, LIBRARIES, batch_of, converted, name_of, needs_jax


def message_of(loss, *arguments, **options):
    with pytest.raises((ValueError, TypeError)) as caught:
        loss(*arguments, **options)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("loss", [cross_entropy, focal_loss])
@pytest.mark.parametrize(("logits", "targets"), [((4, 3), (5,)), ((4, 3), (4, 1)), ((4, 3), (4, 3)), ((), ())])
def test_shapes_of_labels_that_do_not_fit_give_torchs_error(library, loss, logits, targets):
    tensors = torch.zeros(logits), torch.zeros(targets, dtype=torch.int64)
    assert message_of(loss, *converted(library, *tensors)) == message_of(loss, *tensors)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("loss", [mse, l1, huber, bce_with_logits])
@pytest.mark.parametrize("shapes", [((4, 1), (4,)), ((4,), (4, 1)), ((2, 3), (3, 2))])
def test_shapes_that_would_broadcast_give_torchs_error(library, loss, shapes):
    tensors = [torch.zeros(shape) for shape in shapes]
    assert message_of(loss, *converted(library, *tensors)) == message_of(loss, *tensors)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("loss", [mse, l1, huber, bce_with_logits])
def test_whole_number_targets_are_refused(library, loss):
    arrays = converted(library, torch.zeros(4), torch.zeros(4, dtype=torch.int32))
    message = rf"{loss.__name__}\(targets of int32\): needs floating point numbers; pass targets.astype\('float32'\)"
    with pytest.raises(TypeError, match=message):
        loss(*arrays)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("loss", [cross_entropy, focal_loss])
def test_what_is_neither_a_class_index_nor_a_logit_is_refused(library, loss):
    for dtype in (torch.float32, torch.bool):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(TypeError, match=rf"\(targets of {name}\): needs class indices; pass targets.astype\('int"):
            loss(*converted(library, torch.zeros(4, 3), torch.zeros(4, dtype=dtype)))
    with pytest.raises(TypeError, match=r"\(logits of int32\): needs floating point numbers"):
        loss(*converted(library, torch.zeros(4, 3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (cross_entropy, {"label_smoothing": 1.5}),
        (cross_entropy, {"label_smoothing": "a"}),
        (cross_entropy, {"z_loss": math.inf}),
        (cross_entropy, {"ignore_index": 1.5}),
        (cross_entropy, {"ignore_index": None}),
        (cross_entropy, {"chunk_size": 0}),
        (focal_loss, {"gamma": -1}),
        (focal_loss, {"alpha": 1.5}),
        (focal_loss, {"alpha": "a"}),
        (focal_loss, {"ignore_index": True}),
        (huber, {"delta": 0}),
        (huber, {"delta": None}),
    ],
    ids=name_of,
)
def test_an_option_out_of_range_gives_torchs_error(library, loss, options):
    tensors = torch.zeros(3, 7), torch.zeros(3, 7) if loss is huber else torch.zeros(3, dtype=torch.int64)
    error = message_of(loss, *converted(library, *tensors), **options)
    assert error == message_of(loss, *tensors, **options)
    assert error[0] is ConfigurationError


@pytest.mark.parametrize("library", LIBRARIES)
def test_weights_that_are_not_one_for_each_class_are_refused(library):
    logits, targets, weights = converted(library, torch.zeros(2, 5), torch.tensor([0, 1]), torch.ones(4))
    with pytest.raises(ConfigurationError, match=r"focal_loss\(alpha of shape \(4,\)\): .* each of the 5 classes"):
        focal_loss(logits, targets, alpha=weights)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_chunk_size_works_only_with_torch(library):
    arrays = converted(library, *batch_of(cross_entropy, dtype=torch.float32))
    with pytest.raises(
        ConfigurationError, match=r"cross_entropy\(chunk_size=4\): only works for torch tensors; leave it"
    ):
        cross_entropy(*arrays, chunk_size=4)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("loss", "options"), ALL, ids=name_of)
def test_tensors_and_other_arrays_do_not_mix(library, loss, options):
    outputs, targets = batch_of(loss, dtype=torch.float32)
    kind = {"numpy": "numpy.ndarray", "jax": "jax.Array"}[library]
    remedy = {"numpy": "torch.from_numpy", "jax": "torch.from_dlpack"}[library]
    caller, rule = re.escape(f"{loss.__name__}(torch.Tensor "), rf"needs arrays of one library; pass {remedy}\(array\)"
    for ours, theirs in ((outputs, converted(library, targets)[0]), (converted(library, outputs)[0], targets)):
        with pytest.raises(TypeError, match=rf"^{caller}.*, {kind} .*\): {rule}, or jax.numpy.from_dlpack\(tensor\)"):
            loss(ours, theirs)
    if loss is cross_entropy:  # the case that is left to torch's own checks
        with pytest.raises(TypeError, match=rf"^{caller}int64 \(4,\), {kind} float32 \(4, 7\)\): {rule}"):
            loss(converted(library, outputs[:, 0])[0], targets[:, 0])


# ---------------------------------------------------------------------------------- the values of targets


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("loss", [cross_entropy, focal_loss])
@pytest.mark.parametrize("label", [10, -3])
def test_a_label_that_is_not_a_class_is_named_with_its_place(library, loss, label):
    logits, targets = converted(library, torch.zeros(2, 2, 10), torch.tensor([[0, 1], [label, 2]]))
    with pytest.raises(ValueError, match=rf"{loss.__name__}\(targets\[1, 0\]={label}\): needs class indices from 0 to"):
        loss(logits, targets)


@needs_jax
@pytest.mark.parametrize("label", [10, -1, -3])
@pytest.mark.parametrize("loss", [cross_entropy, functools.partial(cross_entropy, label_smoothing=0.1), focal_loss])
def test_inside_jit_a_label_that_is_not_a_class_makes_the_loss_nan_instead_of_another_class(loss, label):
    import jax

    logits, targets = converted("jax", torch.zeros(2, 10), torch.tensor([0, label]))
    assert math.isnan(jax.jit(loss)(logits, targets))


@pytest.mark.slow
@needs_jax
def test_ignored_labels_make_no_nan_on_the_way():
    import jax

    arrays = converted("jax", *batch_of(cross_entropy, dtype=torch.float32))
    with jax.debug_nans(True):  # which looks at every result, where there is no jit
        for loss in (functools.partial(cross_entropy, label_smoothing=0.1), focal_loss):
            assert jax.grad(loss)(*arrays).any()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        ("cross_entropy", torch.tensor([0, 10, 11]), "cross_entropy(targets[1]=10): needs class indices from 0 to 9"),
        ("focal", torch.tensor([1, 4, 10]), "these labels start at 1: pass targets - 1"),
        (
            "mse",
            torch.tensor([[0.0], [math.inf], [math.nan]]),
            "mse(targets[1, 0]=inf): needs finite numbers, and 2 of",
        ),
        ("bce_with_logits", torch.tensor([0.0, 2.0]), "bce_with_logits(targets[1]=2.0): needs probabilities from 0 to"),
    ],
)
def test_the_check_of_a_first_batch_names_what_the_loss_cannot_mean(library, loss, targets, message):
    shape = (*targets.shape, 10) if not targets.is_floating_point() else targets.shape
    outputs, targets = converted(library, torch.zeros(shape), targets)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_first_batch(loss, outputs, targets)


@needs_jax
def test_outputs_that_only_have_a_shape_are_enough_for_the_check_of_a_first_batch():
    import jax

    (targets,) = converted("jax", torch.tensor([0, 10]))
    outputs = jax.ShapeDtypeStruct((2, 10), "float32")
    with pytest.raises(ValueError, match=r"cross_entropy\(targets\[1\]=10\)"):
        check_first_batch("cross_entropy", outputs, targets)
    with pytest.raises(ValueError, match=r"cross_entropy\(targets\[1\]=10\)"):
        check_first_batch("cross_entropy", torch.empty(2, 10, device="meta"), torch.tensor([0, 10]))
    assert check_first_batch("cross_entropy", outputs, targets[:1]) is None


@needs_jax
def test_inside_jit_no_value_is_checked():
    import jax

    @jax.jit
    def step(outputs, targets):
        check_first_batch("mse", outputs, targets)
        loss = mse(outputs, targets)
        check_first_loss(loss, targets, "mse")
        return loss

    assert math.isnan(step(*converted("jax", torch.zeros(2), torch.tensor([0.0, math.nan]))))


@pytest.mark.parametrize("library", LIBRARIES)
def test_targets_are_named_where_the_loss_that_they_gave_is_not_finite(library):
    loss, targets = converted(library, torch.tensor(math.nan), torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match=re.escape("masked(targets[1]=nan): needs finite numbers, and 1 of 2 targets")):
        check_first_loss(loss, targets, "masked")
    assert check_first_loss(loss, targets[:1], "masked") is None
