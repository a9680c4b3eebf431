"""Running means, and the metrics of language models that are made of a mean loss."""

import math

import pytest
import torch
from torch import nn
from torchmetrics.functional.text import perplexity as torchmetrics_perplexity

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.metrics import RunningMean, bits_per_byte, perplexity
from tests.support.metrics import PADDED, SCORES, Reads


def test_numbers_and_tensors_are_averaged_together():
    mean = RunningMean()
    mean.update(1.0)
    mean.update(torch.tensor([4.0]), 2)
    mean.update(torch.tensor(7), torch.tensor(3))
    assert mean.compute() == (1.0 + 4.0 * 2 + 7.0 * 3) / 6
    assert (mean.mean().shape, mean.mean().dtype) == ((), torch.float64)


def test_the_mean_can_be_had_without_reading_it():
    mean = RunningMean()
    mean.update(torch.tensor(3.0))
    with Reads() as reads:
        value = mean.mean()
    assert (reads.count, value.item()) == (0, 3.0)


def test_a_million_small_values_beside_a_large_one_are_not_lost():
    mean = RunningMean()
    mean.update(torch.tensor(2.0**24))
    mean.update(torch.tensor(1.0), 2**24)  # each of which float32 would round away
    assert mean.compute() == 2 * 2**24 / (2**24 + 1)


def test_a_tensor_that_changes_later_does_not_change_the_mean():
    mean, value, weight = RunningMean(), torch.tensor(3.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    mean.update(value, weight)
    value.zero_(), weight.zero_()
    assert mean.compute() == 3.0


@pytest.mark.parametrize("value", [2.0, torch.tensor(2.0)])
def test_a_mean_without_any_weight_is_nan(value):
    mean = RunningMean()
    mean.update(value, 0)
    assert math.isnan(mean.compute())


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_a_weight_that_cannot_be_one_is_named(weight):
    with pytest.raises(
        ValueError, match=rf"RunningMean.update\(weight={weight}\): needs a finite number of at least 0"
    ):
        RunningMean().update(1.0, weight)


def test_more_than_one_value_is_refused_with_what_to_pass_instead():
    with pytest.raises(
        ValueError, match=r"RunningMean.update\(value of shape \(3,\)\): needs one number; pass value.mean"
    ):
        RunningMean().update(torch.ones(3))
    with pytest.raises(ValueError, match=r"RunningMean.update\(weight of shape \(3,\)\)"):
        RunningMean().update(1.0, torch.ones(3))


# ------------------------------------------------------------------------------------------- of language models


def test_perplexity_is_that_of_torchmetrics():
    losses = nn.functional.cross_entropy(SCORES.flatten(0, 1), PADDED.flatten())
    reference = torchmetrics_perplexity(SCORES, PADDED, ignore_index=-100)
    assert perplexity(losses.item()) == pytest.approx(reference.item(), rel=1e-6)


def test_perplexity_beyond_all_numbers_is_infinite_and_of_nan_nan():
    assert perplexity(math.log(50_257)) == pytest.approx(50_257)
    assert perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_uniform_bytes_cost_eight_bits_and_tokens_share_their_bits_among_their_bytes():
    assert bits_per_byte(math.log(256)) == pytest.approx(8.0)
    assert bits_per_byte(math.log(50_257), bytes_per_token=4.0) == pytest.approx(math.log2(50_257) / 4)


@pytest.mark.parametrize("length", [0, -1.0, math.nan, math.inf])
def test_bytes_per_token_has_to_be_positive(length):
    with pytest.raises(
        ConfigurationError, match=rf"bits_per_byte\(bytes_per_token={length}\): needs a positive number"
    ):
        bits_per_byte(1.0, length)
