"""What the strategies make of batches and outputs."""

from __future__ import annotations

import math

import pytest
import torch

from pulsetrain.engine import ConfigurationError, PretrainStrategy, SupervisedStrategy
from pulsetrain.engine.step.protocols import TrainingBatch


def test_a_pair_is_inputs_and_targets_and_counts_its_rows():
    batch = SupervisedStrategy("mse").prepare_batch([torch.ones(5, 2), torch.ones(5, 1)])
    assert (batch.samples, batch.tokens, batch.size) == (5, 0, 5)


def test_rows_are_counted_even_if_targets_are_not_a_tensor():
    batch = SupervisedStrategy(lambda outputs, targets: outputs.sum()).prepare_batch(({"x": torch.ones(3, 2)}, ["a"]))
    assert batch.samples == 3


@pytest.mark.parametrize("strategy", [SupervisedStrategy(), PretrainStrategy()])
def test_a_prepared_batch_passes_through(strategy: SupervisedStrategy):
    batch = TrainingBatch(1, 2, 3)
    assert strategy.prepare_batch(batch) is batch


@pytest.mark.parametrize("batch", [torch.ones(3), (1, 2, 3), {"x": 1}])
def test_a_batch_that_is_not_a_pair_is_refused(batch: object):
    with pytest.raises(TypeError, match="pairs"):
        SupervisedStrategy().prepare_batch(batch)


def test_a_loss_may_be_a_callable_but_gives_a_scalar_tensor():
    batch = TrainingBatch(None, torch.zeros(2), 2)
    assert SupervisedStrategy(lambda o, t: (o - t).abs().sum()).compute_loss(torch.ones(2), batch).item() == 2.0
    with pytest.raises(TypeError, match=r"float32 \(2,\)"):
        SupervisedStrategy(lambda o, t: o - t).compute_loss(torch.ones(2), batch)
    with pytest.raises(TypeError, match="float"):
        SupervisedStrategy(lambda o, t: 1.0).compute_loss(torch.ones(2), batch)


def test_an_unknown_loss_lists_the_choices():
    with pytest.raises(ConfigurationError, match="cross_entropy"):
        SupervisedStrategy("crossentropy")


def test_the_next_token_is_the_target():
    tokens = torch.arange(12).reshape(2, 6)
    for given in (tokens, [tokens], {"input_ids": tokens}):
        batch = PretrainStrategy().prepare_batch(given)
        assert batch.inputs.tolist() == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]]
        assert batch.targets.tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]
        assert (batch.samples, batch.tokens, batch.size) == (2, 10, 10)


@pytest.mark.parametrize("batch", [torch.ones(3), torch.ones(2, 1), "text", (torch.ones(2, 2), 1)])
def test_what_is_not_a_batch_of_tokens_is_refused(batch: object):
    with pytest.raises(TypeError, match=r"shape \(batch, length \+ 1\)"):
        PretrainStrategy().prepare_batch(batch)


def test_uniform_predictions_have_the_loss_log_of_the_vocabulary():
    strategy = PretrainStrategy(unit="byte")
    batch = strategy.prepare_batch(torch.zeros(2, 5, dtype=torch.long))
    loss = strategy.compute_loss(torch.zeros(2, 4, 256), batch).item()
    assert loss == pytest.approx(math.log(256))
    assert strategy.derive_metrics(loss) == pytest.approx({"perplexity": 256.0, "bits_per_byte": 8.0}, rel=1e-5)


def test_a_perplexity_beyond_all_numbers_is_not_a_crash():
    assert PretrainStrategy().derive_metrics(5000.0)["perplexity"] == math.inf


def test_an_unknown_unit_is_refused():
    with pytest.raises(ConfigurationError, match="'token' or 'byte'"):
        PretrainStrategy(unit="word")
