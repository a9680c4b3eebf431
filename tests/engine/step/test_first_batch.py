"""The first batches of a run are prepared and judged with `check=True`, by the methods that take it."""

import pytest
import torch

from pulsetrain.engine import PretrainStrategy, SupervisedStrategy, TrainingBatch
from pulsetrain.engine.step.first_batch import FirstBatch

BAD = TrainingBatch(None, torch.tensor([[0, 10]]), 1)
OUTPUTS = torch.zeros(1, 2, 10)


@pytest.mark.parametrize("strategy", [SupervisedStrategy(loss_options={"ignore_index": 10}), PretrainStrategy()])
def test_the_strategy_itself_stays_constant(strategy):
    before = dict(vars(strategy))
    first = FirstBatch(strategy)
    first.compute_loss(OUTPUTS, TrainingBatch(None, torch.tensor([[0, 1]]), 1))
    assert vars(strategy) == before


def test_labels_are_checked_before_the_loss_reads_them():
    seen = []

    class Watching(SupervisedStrategy):
        def check_batch(self, outputs, batch):
            seen.append("check")
            super().check_batch(outputs, batch)

    strategy = Watching()
    with pytest.raises(ValueError, match=r"cross_entropy\(targets\[0, 1\]=10\): needs class indices from 0 to 9"):
        FirstBatch(strategy).compute_loss(OUTPUTS, BAD)
    assert seen == ["check"]
    strategy.compute_loss(OUTPUTS, TrainingBatch(None, torch.tensor([[0, 1]]), 1))
    assert seen == ["check"]


def test_a_method_without_the_keyword_is_called_as_it_is():
    class Own(SupervisedStrategy):
        def prepare_batch(self, batch):
            return ("prepared", batch)

        def compute_loss(self, outputs, batch):
            return outputs, batch

    first = FirstBatch(Own())
    assert first.prepare_batch(1) == ("prepared", 1)
    assert first.compute_loss(2, 3) == (2, 3)


def test_other_attributes_are_the_strategys():
    strategy = SupervisedStrategy("mse")
    first = FirstBatch(strategy)
    assert first.loss_name == "mse"
    assert first.compute_metrics(OUTPUTS, BAD) == strategy.compute_metrics(OUTPUTS, BAD)
    with pytest.raises(AttributeError, match="nothing"):
        _ = first.nothing
