"""Losses with options, batches for them, and the array libraries they run on."""

import functools
import importlib.util

import pytest
import torch

from pulsetrain.engine.losses import bce_with_logits, cross_entropy, focal_loss, huber, l1, mse

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not there: pip install 'pulsetrain[jax]'"
)
LIBRARIES = ["numpy", pytest.param("jax", marks=needs_jax)]
WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)

OF_LABELS = [
    (cross_entropy, {}),
    (cross_entropy, {"label_smoothing": 0.1}),
    (cross_entropy, {"z_loss": 0.01}),
    (cross_entropy, {"label_smoothing": 1.0, "z_loss": 0.1, "ignore_index": 3}),
    (focal_loss, {}),
    (focal_loss, {"gamma": 0}),
    (focal_loss, {"gamma": 0.5, "alpha": 0.25}),
    (focal_loss, {"gamma": 1.0, "alpha": WEIGHTS, "ignore_index": 3}),
]
OF_NUMBERS = [(mse, {}), (l1, {}), (huber, {}), (huber, {"delta": 2.5}), (bce_with_logits, {})]
ALL = OF_LABELS + OF_NUMBERS


def name_of(value):
    return getattr(value, "__name__", str(value))


def batch_of(loss, shape=(4, 6), scale=1.0, dtype=torch.float64):
    """Outputs of 7 classes and targets for the loss, a sixth of the labels ignored; from one seed."""
    generator = torch.Generator().manual_seed(len(shape))
    outputs = scale * torch.randn(*shape, 7, generator=generator, dtype=torch.float64)
    if loss in (cross_entropy, focal_loss):
        targets = torch.randint(7, shape, generator=generator)
        targets = targets.masked_fill(torch.rand(shape, generator=generator) < 1 / 6, -100)
        return outputs.to(dtype), targets
    targets = torch.rand(*shape, 7, generator=generator, dtype=torch.float64)
    return outputs.to(dtype), (targets if loss is bce_with_logits else scale * targets).to(dtype)


def converted(library, *tensors):
    arrays = [tensor.numpy() for tensor in tensors]
    if library == "jax":
        import jax.numpy

        arrays = [jax.numpy.asarray(array) for array in arrays]
    return arrays


def with_options(loss, options, library="torch"):
    """The loss with these options; class weights as an array of that library."""
    if isinstance(options.get("alpha"), tuple):
        weights = torch.tensor(options["alpha"], dtype=torch.float64)
        options = {**options, "alpha": weights if library == "torch" else converted(library, weights)[0]}
    if options.get("ignore_index") == 3:
        return lambda outputs, targets: loss(outputs, targets.clip(0), **options)
    return functools.partial(loss, **options)
