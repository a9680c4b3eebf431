"""The parts of a loss, and metrics of the outputs at hand: what is kept, what is left as it was, what is refused."""

import gc
import weakref

import numpy
import pytest
import torch

from pulsetrain.engine import SFTStrategy, SupervisedStrategy, TrainingBatch
from pulsetrain.engine.step.first_batch import FirstBatch
from pulsetrain.engine.step.log_point import LogPoint, measured, split_loss
from pulsetrain.engine.step.model_outputs import predictions_of

BATCH = TrainingBatch(None, torch.zeros(4), samples=4)


class Parted:
    """Its loss has two parts; it draws a random number for a metric."""

    def prepare_batch(self, batch, check=False):
        return batch

    def compute_loss(self, outputs, batch, check=False):
        square, mean = (outputs - batch.targets).square().mean(), outputs.mean()
        return square + mean, {"square": square, "mean": mean}

    def compute_metrics(self, outputs, batch):
        return {"noise": torch.rand(()), "largest": outputs.max()}


def test_the_loss_alone_is_returned_and_its_parts_and_the_metrics_are_kept_without_gradients():
    outputs = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    point = LogPoint(Parted())
    loss = point.compute_loss(outputs, BATCH)
    assert (loss.item(), loss.requires_grad) == (10.0, True)
    assert list(point.metrics) == ["square", "mean", "noise", "largest"]
    assert {name: each.item() for name, each in point.metrics.items() if name != "noise"} == {
        "square": 7.5, "mean": 2.5, "largest": 4.0,
    }  # fmt: skip
    assert not any(each.requires_grad for each in point.metrics.values())
    assert point.size == 4
    loss.backward()
    torch.testing.assert_close(outputs.grad, 2 * outputs.detach() / 4 + 0.25)


def test_the_outputs_are_not_kept():
    point, outputs = LogPoint(Parted()), torch.ones(4, requires_grad=True) * 2
    gone = weakref.ref(outputs)
    point.compute_loss(outputs, BATCH)
    del outputs
    gc.collect()
    assert gone() is None


def test_what_a_metric_draws_is_drawn_again_by_the_next_step():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    LogPoint(Parted()).compute_loss(torch.ones(4), BATCH)
    assert torch.equal(torch.rand(3), expected)


def test_a_first_batch_is_checked_inside():
    point = LogPoint(FirstBatch(SupervisedStrategy("mse")))
    with pytest.raises(ValueError, match=r"mse\(targets\[1\]=nan\)"):
        point.compute_loss(torch.ones(2), TrainingBatch(None, torch.tensor([0.0, float("nan")]), 2))
    assert point.loss_name == "mse"


def test_a_loss_alone_has_no_parts_whatever_library_it_is_of():
    for loss in (torch.tensor(1.0), numpy.float32(1.0), 1.0):
        assert split_loss(loss, Parted()) == (loss, {})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {"kl": torch.tensor(1.0)},
            r"Parted.compute_loss: returned \{kl: float32 \(\)\}; needs the loss, of shape \(\)",
        ),
        ((torch.tensor(1.0),), "a pair of the loss and a mapping"),
        ((torch.tensor(1.0), torch.tensor(2.0)), "a pair of the loss and a mapping"),
        ((torch.tensor(1.0), {}, {}), "a pair of the loss and a mapping"),
        ((torch.tensor(1.0), {"loss": torch.tensor(1.0)}), "names a part 'loss'"),
        ((torch.tensor(1.0), {3: torch.tensor(1.0)}), "names a part 3"),
        ((torch.tensor(1.0), {"kl": torch.ones(3)}), r"gave float32 \(3,\) as 'kl'; needs one number"),
        ((torch.tensor(1.0), {"kl": "2"}), "gave str as 'kl'"),
    ],
)
def test_other_pairs_are_refused(found, words):
    for strategy in (Parted(), FirstBatch(Parted()), LogPoint(Parted())):
        with pytest.raises(TypeError, match=words):
            split_loss(found, strategy)


def test_a_metric_that_fails_in_training_says_how_to_leave_it_out():
    class Failing(Parted):
        def compute_metrics(self, outputs, batch):
            return {"each": outputs}

    with pytest.raises(TypeError, match=r"Failing.compute_metrics: gave float32 \(4,\) as 'each'") as caught:
        measured(Failing(), torch.ones(4), BATCH, {})
    assert "log_strategy_metrics=False" in caught.value.__notes__[0]


def test_metrics_of_a_strategy_are_those_of_validation():
    strategy, logits = SFTStrategy(), torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    batch = TrainingBatch(None, torch.tensor([[1, 2, -100], [-100, 4, 0]]), 2)
    found, expected = measured(strategy, logits, batch, {}), strategy.compute_metrics(logits, batch)
    assert found.keys() == expected.keys() == {"token_accuracy", "entropy"}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_logits_of_a_model_of_transformers_are_its_predictions():
    outputs = pytest.importorskip("transformers").modeling_outputs
    logits = torch.ones(2, 3)
    assert predictions_of(outputs.SequenceClassifierOutput(logits=logits)) is logits
    for other in (outputs.BaseModelOutput(last_hidden_state=logits), {"logits": logits}, (logits,), logits):
        assert predictions_of(other) is other
