"""One set of names over torch, jax and numpy: which module, what mixes, and the functions that the standard lacks."""

import math
import re

import numpy
import pytest
import torch

from pulsetrain.engine import arrays
from pulsetrain.engine.arrays import (
    at_least_float32,
    describe_array,
    has_values,
    is_array,
    is_floating,
    log_sigmoid,
    log_softmax,
    logsumexp,
    masked_mean,
    namespace,
    on_host,
    require_tensor,
    stop_gradient,
    take_last,
)
from tests.support.losses import converted, needs_jax

LIBRARIES = ["torch", "numpy", pytest.param("jax", marks=needs_jax)]


def of(library, *tensors):
    return tensors if library == "torch" else converted(library, *tensors)


# --------------------------------------------------------------------------------------------- which it is


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_namespace_computes_with_the_arrays_that_it_was_asked_for(library):
    x, y = of(library, torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0]))
    xp = namespace(x, y, 3.0, None)
    found = xp.sum(xp.where(x > 0, x, y), axis=-1)
    assert (type(xp.abs(x)), float(found)) == (type(x), 6.0)
    assert type(x + namespace(y).astype(y, xp.float32)) is type(x)


def test_a_number_of_numpy_mixes_with_all_and_is_an_array_by_itself():
    number = numpy.float32(3.0)
    assert namespace(torch.ones(2), number) is namespace(torch.ones(1))
    assert namespace(number) is namespace(numpy.ones(2), number)


@needs_jax
def test_numpy_beside_jax_is_jax():
    import jax.numpy

    assert namespace(numpy.ones(2), jax.numpy.ones(2)) is jax.numpy


@needs_jax
def test_torch_beside_jax_names_both_kinds_and_the_remedy():
    (theirs,) = converted("jax", torch.zeros(3))
    message = (
        "dpo_loss(torch.Tensor float32 (2, 3), jax.Array float32 (3,)): needs arrays of one library; "
        "pass torch.from_dlpack(array), or jax.numpy.from_dlpack(tensor)"
    )
    for given in ((torch.zeros(2, 3), theirs), (theirs, torch.zeros(2, 3))):
        with pytest.raises(TypeError, match=re.escape(message)):
            namespace(*given, place="dpo_loss")


def test_torch_beside_numpy_names_both_kinds_and_the_remedy():
    rule = (
        "(torch.Tensor int64 (), numpy.ndarray float64 (3,)): needs arrays of one library; pass torch.from_numpy(array)"
    )
    with pytest.raises(TypeError, match=re.escape(rule)):
        namespace(numpy.zeros(3), torch.tensor(0))


def test_what_is_not_an_array_has_no_namespace():
    for given in ((), ([1.0],), ("text",)):
        with pytest.raises(TypeError):
            namespace(*given)


@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_and_their_dtypes_are_known(library):
    x, labels = of(library, torch.ones(2, 3), torch.ones(2, dtype=torch.int32))
    assert (is_array(x), is_array([1.0]), is_array(1.0), is_array(None)) == (True, False, False, False)
    assert (is_floating(x), is_floating(labels)) == (True, False)
    assert (has_values(x), on_host(x)) == (True, True)
    assert describe_array(x).partition(".")[2].split(" ", 1)[1] == "float32 (2, 3)"


def test_a_tensor_on_the_meta_device_has_no_values():
    nothing = torch.ones(2, device="meta")
    assert (has_values(nothing), on_host(nothing)) == (False, False)


@needs_jax
def test_inside_jit_grad_and_vmap_there_are_no_values_but_arrays_all_the_same():
    import jax

    def look(x):
        seen.append((is_array(x), has_values(x), on_host(x), is_floating(x), namespace(x), describe_array(x)))
        return x.sum()

    seen = []
    (x,) = converted("jax", torch.ones(2, 3))
    for transformed in (jax.jit(look), jax.grad(look), jax.jit(jax.grad(look)), jax.vmap(look)):
        transformed(x)
    assert {(each[:4], each[4]) for each in seen} == {((True, False, False, True), jax.numpy)}
    assert seen[0][5] == "jax.Array float32 (2, 3)"


@pytest.mark.parametrize("value", [torch.ones(2), None, "text", {"x": numpy.ones(2)}, 3.0])
def test_only_arrays_of_another_library_are_refused_where_a_tensor_is_needed(value):
    assert require_tensor("Strategy", "inputs", value) is None


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_an_array_where_a_tensor_is_needed_is_named_with_the_remedy(library):
    kind, remedy = {"numpy": ("numpy.ndarray", "from_numpy"), "jax": ("jax.Array", "from_dlpack")}[library]
    message = rf"Strategy\(inputs={kind} float32 \(2,\)\): needs torch tensors; let .* torch.{remedy}.* a JaxBackend"
    with pytest.raises(TypeError, match=message):
        require_tensor("Strategy", "inputs", *of(library, torch.ones(2)))


# ------------------------------------------------------------------------------- what the standard lacks

ROWS = torch.tensor([[1.0, 2.0, -3.0], [1e4, 1e4 - 2, -1e4], [0.0, -math.inf, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("library", LIBRARIES)
def test_logarithms_of_sums_equal_torchs_for_numbers_of_any_size(library):
    (rows,) = of(library, ROWS.float())
    numpy.testing.assert_allclose(log_softmax(rows), ROWS.log_softmax(-1), rtol=1e-6)
    numpy.testing.assert_allclose(logsumexp(rows), ROWS.logsumexp(-1), rtol=1e-6)
    numpy.testing.assert_allclose(log_sigmoid(rows), torch.nn.functional.logsigmoid(ROWS), rtol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.filterwarnings(
    "ignore:divide by zero encountered in log:RuntimeWarning"
)  # numpy's, of what is wanted here
def test_the_sum_of_a_row_that_has_nothing_is_nothing(library):
    (rows,) = of(library, torch.tensor([[-math.inf, -math.inf], [-math.inf, 2.0], [math.inf, 0.0]]))
    assert logsumexp(rows).tolist() == [-math.inf, 2.0, math.inf]


@needs_jax
@pytest.mark.parametrize("function", [log_softmax, logsumexp, log_sigmoid])
def test_their_gradients_equal_torchs(function):
    import jax

    rows = torch.tensor([[1.0, 2.0, -3.0], [1e4, 1e4 - 2, -1e4], [0.0, 0.0, 0.0]])
    weights = torch.tensor([0.3, -0.2, 0.7])
    wide = rows.double().requires_grad_()  # in float32 torch itself keeps 4 digits of the second row's
    (gradient,) = torch.autograd.grad((function(wide) * weights).sum(), wide)
    x, w = converted("jax", rows, weights)
    found = jax.jit(jax.grad(lambda x: (function(x) * w).sum()))(x)
    numpy.testing.assert_allclose(found, gradient, atol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_of_each_row_is_taken(library):
    rows, index = of(library, torch.arange(12.0).reshape(2, 2, 3), torch.tensor([[0, 2], [1, 1]]))
    assert take_last(rows, index).tolist() == [[0.0, 5.0], [7.0, 10.0]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_masked_mean_is_over_what_the_mask_leaves(library):
    values, mask = of(library, torch.tensor([1.0, math.nan, 3.0]), torch.tensor([True, False, True]))
    assert float(masked_mean(values, mask)) == 2.0
    assert math.isnan(masked_mean(values, mask & ~mask))


@needs_jax
def test_a_masked_mean_over_nothing_has_a_gradient_of_zero_and_one_over_something_passes_nan_by():
    import jax

    values, mask = converted("jax", torch.tensor([1.0, math.nan, 3.0]), torch.tensor([True, False, True]))
    gradient = jax.jit(jax.grad(lambda values, mask: masked_mean(values**2, mask)))
    assert gradient(values, mask)[0] == 1.0
    assert jax.grad(masked_mean)(values, mask).tolist() == [0.5, 0.0, 0.5]
    assert jax.grad(masked_mean)(values, mask & ~mask).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_dtype_is_widened_to_float32_and_no_further(library):
    wide = {"int32": "float32", "float16": "float32", "float32": "float32"}
    if library != "jax":  # which has no float64 by default
        wide["float64"] = "float64"
    for dtype, expected in wide.items():
        (given,) = of(library, torch.ones(2).to(getattr(torch, dtype)))
        found = str(at_least_float32(given).dtype).removeprefix("torch.")
        assert found == (expected if (library, dtype) != ("numpy", "int32") else "float64"), dtype


def test_nothing_flows_through_a_stopped_gradient_of_torch():
    x = torch.ones(2, requires_grad=True)
    (x * stop_gradient(x)).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


@needs_jax
def test_nothing_flows_through_a_stopped_gradient_of_jax():
    import jax

    (x,) = converted("jax", torch.ones(2))
    assert jax.grad(lambda x: (x * stop_gradient(x)).sum())(x).tolist() == [1.0, 1.0]


def test_every_public_name_is_there():
    assert all(hasattr(arrays, name) for name in arrays.__all__)
