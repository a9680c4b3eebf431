"""A function of arrays by torch and by jax, with its gradients; and gradients of a formula from differences alone."""

import functools

import numpy
import pytest
import torch

from tests.support.libraries import converted, needs_jax

RUNS = [
    pytest.param("torch", "float32", id="torch-float32"),
    pytest.param("torch", "float64", id="torch-float64"),
    pytest.param("jax", "float32", id="jax-float32", marks=needs_jax),
]
"""Libraries that have gradients, and dtypes; of jax's float64 `runs` has a case of each loss."""


def runs(cases, by_jax):
    """Parameters of a test: a library, a dtype, then those of a case.

    Args:
        cases: by torch, in both dtypes.
        by_jax: in float32, the first in float64 too. Few: a program is compiled for each, in a quarter of a second.
    """
    return [
        *(pytest.param("torch", dtype, *case) for dtype in ("float32", "float64") for case in cases),
        *(pytest.param("jax", "float32", *case, marks=needs_jax) for case in by_jax),
        pytest.param("jax", "float64", *by_jax[0], marks=needs_jax),
    ]


def arrays_of(library, *arrays):
    """NumPy arrays as those of the library; what is none stays as it is."""
    given = [each for each in arrays if isinstance(each, (numpy.ndarray, numpy.generic))]
    tensors = [torch.from_numpy(numpy.array(each)) for each in given]
    made = iter(tensors if library == "torch" else converted(library, *tensors))
    return [next(made) if isinstance(each, (numpy.ndarray, numpy.generic)) else each for each in arrays]


def rounded(dtype, *arrays):
    """The arrays as that dtype holds them."""
    return [numpy.asarray(each, dtype) for each in arrays]


def value_and_gradients(library, function, *arrays, wrt=(0,)):
    """What the function gives, and the gradients of the sum of it, as NumPy arrays; in jax inside `jit`."""
    if library == "torch":
        tensors = arrays_of("torch", *arrays)
        for index in wrt:
            tensors[index].requires_grad_()
        value = function(*tensors)
        if not value.requires_grad:
            return value.numpy(), [numpy.zeros(arrays[index].shape) for index in wrt]
        gradients = torch.autograd.grad(value.sum(), [tensors[index] for index in wrt], materialize_grads=True)
        return value.detach().numpy(), [gradient.numpy() for gradient in gradients]
    import jax

    with jax.enable_x64(any(getattr(each, "dtype", None) == "float64" for each in arrays)):
        given, fixed = arrays_of("jax", *arrays), [index for index, each in enumerate(arrays) if each is None]
        (_, value), gradients = _jitted(function, tuple(wrt), tuple(fixed))(*given)
    return numpy.asarray(value), [numpy.asarray(gradient) for gradient in gradients]


@functools.lru_cache(maxsize=8)
def _jitted(function, wrt, fixed):
    """Kept, so that arrays of the same shapes are given to the program that there is."""
    import jax

    def total(*given):
        value = function(*given)
        return value.sum(), value

    return jax.jit(jax.value_and_grad(total, argnums=wrt, has_aux=True), static_argnums=fixed)


def differences(formula, *arrays, wrt=0, step=1e-6):
    """The gradient of the sum of a formula in one of its arrays, by central differences in float64."""
    gradient = numpy.zeros(arrays[wrt].shape)
    for index in numpy.ndindex(*arrays[wrt].shape):
        sides = []
        for sign in (1, -1):
            moved = [numpy.array(each, "float64") if each is arrays[wrt] else each for each in arrays]
            moved[wrt][index] += sign * step
            sides.append(numpy.sum(formula(*moved)))
        gradient[index] = (sides[0] - sides[1]) / (2 * step)
    return gradient


def assert_near(found, expected, tolerance=1e-6):
    """Within the tolerance of the largest that is expected, or of 1 where all are smaller."""
    expected = numpy.asarray(expected)
    largest = max(1.0, float(abs(expected).max(initial=0.0)))
    numpy.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * largest)
