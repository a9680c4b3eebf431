"""Strategies beside a backend whose arrays are not torch's: batches are torch's, losses are computed with any."""

import math

import numpy
import pytest
import torch

from pulsetrain.engine import PretrainStrategy, SupervisedStrategy
from pulsetrain.engine.step.protocols import TrainingBatch
from tests.support.losses import LIBRARIES, converted, needs_jax


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_array_in_a_batch_is_refused_with_its_type_and_the_remedy(library):
    kind, remedy = {"numpy": ("numpy.ndarray", "from_numpy"), "jax": ("jax.Array", "from_dlpack")}[library]
    (array,) = converted(library, torch.ones(4, 2))
    rule = (
        rf"{kind} float32 \(4, 2\)\): needs torch tensors; let the loader return torch.{remedy}\(...\), or train with"
    )
    for name, pair in (("inputs", (array, torch.ones(4, 2))), ("targets", (torch.ones(4, 2), array))):
        with pytest.raises(TypeError, match=rf"SupervisedStrategy\({name}={rule}"):
            SupervisedStrategy("mse").prepare_batch(pair)
    for batch in (array, [array], {"input_ids": array}):
        with pytest.raises(TypeError, match=rf"PretrainStrategy\(tokens={rule}"):
            PretrainStrategy().prepare_batch(batch)


def test_arrays_inside_of_what_a_model_takes_apart_itself_pass():
    inputs = {"x": torch.ones(4, 2), "names": numpy.array(["a", "b", "c", "d"])}
    assert SupervisedStrategy().prepare_batch((inputs, torch.zeros(4, dtype=torch.int64))).inputs is inputs


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize("checked", [True, False])
def test_a_loss_is_computed_inside_jit_and_grad(checked):
    import jax

    outputs, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, -100])
    for strategy in (SupervisedStrategy(loss_options={"label_smoothing": 0.1}), PretrainStrategy()):
        x, y = converted("jax", outputs, labels)

        def loss(x, y, strategy=strategy):
            return strategy.compute_loss(x, TrainingBatch(None, y, 4), check=checked)

        value, gradient = jax.jit(jax.value_and_grad(loss))(x, y)
        assert value.item() == pytest.approx(strategy.compute_loss(outputs, TrainingBatch(None, labels, 4)).item())
        assert gradient.shape == x.shape


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_custom_loss_may_return_any_librarys_scalar_array(library):
    outputs, targets = converted(library, torch.ones(2), torch.zeros(2))
    batch = TrainingBatch(None, targets, 2)
    assert float(SupervisedStrategy(lambda o, t: abs(o - t).sum()).compute_loss(outputs, batch)) == 2.0
    for wrong in (lambda o, t: o - t, lambda o, t: 1.0):
        with pytest.raises(TypeError, match="needs a tensor of shape"):
            SupervisedStrategy(wrong).compute_loss(outputs, batch)


@pytest.mark.parametrize("targets", [torch.zeros(2), ["a", "b"]], ids=["tensor", "list"])
def test_a_numpy_number_is_not_a_loss_because_it_has_no_gradient(targets):
    strategy = SupervisedStrategy(lambda outputs, targets: numpy.float64(outputs.sum().item()))
    with pytest.raises(TypeError, match=r"float64.*; needs a tensor of shape"):
        strategy.compute_loss(torch.ones(2), TrainingBatch(None, targets, 2))


@pytest.mark.parametrize("strategy", [SupervisedStrategy(), PretrainStrategy()])
def test_a_batch_is_checked_by_itself_beside_outputs_that_have_only_a_shape(strategy):
    batch = TrainingBatch(None, torch.tensor([[0, 10]]), 1)
    with pytest.raises(ValueError, match=r"cross_entropy\(targets\[0, 1\]=10\): needs class indices from 0 to 9"):
        strategy.check_batch(torch.empty(1, 2, 10, device="meta"), batch)
    assert strategy.check_batch(torch.empty(1, 2, 11, device="meta"), batch) is None


@needs_jax
@pytest.mark.parametrize("strategy", [SupervisedStrategy(), PretrainStrategy()])
def test_a_batch_of_jax_is_checked_too(strategy):
    import jax

    batch = TrainingBatch(None, *converted("jax", torch.tensor([[0, 10]])), 1)
    with pytest.raises(ValueError, match=r"cross_entropy\(targets\[0, 1\]=10\): needs class indices from 0 to 9"):
        strategy.check_batch(jax.ShapeDtypeStruct((1, 2, 10), "float32"), batch)


@pytest.mark.parametrize("library", LIBRARIES)
def test_targets_that_are_not_finite_are_named_where_the_loss_can_be_looked_at(library):
    outputs, targets = converted(library, torch.zeros(2), torch.tensor([0.0, math.nan]))
    strategy = SupervisedStrategy(lambda o, t: ((o - t) ** 2).mean())
    with pytest.raises(ValueError, match=r"targets\[1\]=nan\): needs finite numbers"):
        strategy.compute_loss(outputs, TrainingBatch(None, targets, 2), check=True)
