"""One suite for every metric that counts batches, and tests specific to the accuracies."""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from ignite.metrics import Accuracy as IgniteAccuracy
from sklearn.metrics import accuracy_score, top_k_accuracy_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from pulsetrain.engine import SupervisedStrategy
from pulsetrain.engine.errors import ConfigurationError, MetricNotFoundError
from pulsetrain.engine.metrics import Accuracy, RunningMean, TokenAccuracy, TopKAccuracy
from tests.support.metrics import CLASSES, LABELS, PADDED, ROWS, SCORES, VALUES, WEIGHTS, Reads
from tests.support.models import trainer


@dataclass(frozen=True)
class Case:
    """A metric, how it is given some rows of the data, and what it says of all of them."""

    make: Callable[[], Any]
    feed: Callable[[Any, slice, torch.dtype], None]
    expected: float
    tolerance: float = 0.0


def feed_mean(metric, rows, dtype=torch.float32):
    values, weights = VALUES[rows].to(dtype).double(), WEIGHTS[rows].double()
    if len(values):
        metric.update((values * weights).sum() / weights.sum(), weights.sum())


def feed_samples(metric, rows, dtype=torch.float32):
    metric.update(SCORES[rows, 0].to(dtype), LABELS[rows, 0])


def feed_tokens(metric, rows, dtype=torch.float32):
    metric.update(SCORES[rows].to(dtype), PADDED[rows])


def token_accuracy():
    counted = PADDED != -100
    return accuracy_score(PADDED[counted].numpy(), SCORES.argmax(-1)[counted].numpy())


CASES = [
    Case(RunningMean, feed_mean, numpy.average(VALUES.double(), weights=WEIGHTS.double()), 1e-12),
    Case(Accuracy, feed_samples, accuracy_score(LABELS[:, 0].numpy(), SCORES[:, 0].argmax(-1).numpy())),
    Case(
        lambda: TopKAccuracy(k=3),
        feed_samples,
        top_k_accuracy_score(LABELS[:, 0].numpy(), SCORES[:, 0].numpy(), k=3, labels=range(CLASSES)),
    ),
    Case(TokenAccuracy, feed_tokens, token_accuracy()),
    Case(lambda: Accuracy(ignore_index=-100), feed_tokens, token_accuracy()),
]
each = pytest.mark.parametrize("case", CASES, ids=["mean", "accuracy", "top k", "tokens", "accuracy with ignored"])


def fed(case, *rows, metric=None):
    metric = metric or case.make()
    for part in rows:
        case.feed(metric, part, torch.float32)
    return metric


# ------------------------------------------------------------------------------------------- for all of them


@each
@pytest.mark.parametrize("size", [ROWS, 1, 5, 36])
def test_any_split_into_batches_gives_what_the_reference_gives_for_all_at_once(case, size):
    metric = fed(case, *(slice(start, start + size) for start in range(0, ROWS, size)))
    assert metric.compute() == pytest.approx(case.expected, rel=case.tolerance, abs=0)
    assert type(metric.compute()) is float


@each
def test_an_empty_batch_changes_nothing(case):
    metric = fed(case, slice(0, ROWS), slice(0, 0))
    assert metric.compute() == pytest.approx(case.expected, rel=case.tolerance, abs=0)


@each
def test_reset_forgets(case):
    metric = fed(case, slice(0, 9))
    metric.reset()
    with pytest.raises(MetricNotFoundError):
        metric.compute()
    assert fed(case, slice(9, 20), metric=metric).compute() == fed(case, slice(9, 20)).compute()


@each
def test_a_saved_state_continues_bit_for_bit(case):
    metric = fed(case, slice(0, 11), slice(11, 12))
    file = io.BytesIO()
    torch.save(metric.state_dict(), file)
    file.seek(0)
    other = case.make()
    other.load_state_dict(torch.load(file, weights_only=True))
    rest = slice(12, 30), slice(30, ROWS)
    assert fed(case, *rest, metric=other).compute() == fed(case, *rest, metric=metric).compute()


@each
def test_a_state_that_was_handed_out_does_not_change_with_later_updates(case):
    metric = fed(case, slice(0, 11))
    before, state = metric.compute(), metric.state_dict()
    fed(case, slice(11, ROWS), metric=metric)
    assert metric.compute() != before
    metric.load_state_dict(state)
    assert metric.compute() == before


@each
def test_the_state_of_a_metric_without_values_is_one_without_values(case):
    metric = fed(case, slice(0, 9))
    metric.load_state_dict(case.make().state_dict())
    with pytest.raises(MetricNotFoundError):
        metric.compute()


@each
def test_only_compute_waits_for_the_device(case):
    metric = case.make()
    with Reads() as reads:
        fed(case, slice(0, 10), slice(10, 20), metric=metric)
        metric.state_dict()
    assert reads.count == 0
    with reads:
        metric.compute()
    assert 1 <= reads.count <= 2


@each
def test_a_read_before_the_first_update_says_so(case):
    metric = case.make()
    name = type(metric).__name__
    with pytest.raises(MetricNotFoundError, match=rf"^{name}.compute\(\): has no value before the first update\(\)"):
        metric.compute()


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_of_any_precision_are_counted_alike(case, dtype):
    metric, rounded = case.make(), VALUES.to(dtype).double()
    case.feed(metric, slice(0, ROWS), dtype)
    means = case.make is RunningMean
    expected = numpy.average(rounded, weights=WEIGHTS.double()) if means else case.expected
    assert metric.compute() == pytest.approx(expected, rel=case.tolerance, abs=0)


@each
def test_values_with_a_gradient_are_detached(case):
    metric = case.make()
    scores = SCORES.clone().requires_grad_()
    if case.make is RunningMean:
        metric.update(scores.sum() * 1.0, scores.mean())
    else:
        metric.update(scores[:, 0] * 1.0, LABELS[:, 0])
    assert not any(isinstance(each, torch.Tensor) and each.requires_grad for each in metric.state_dict().values())


# ------------------------------------------------------------------------------------------- in a trainer


def classes_loader():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(50, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(CLASSES, (50,), generator=generator)), batch_size=8)


class MeanScore(RunningMean):
    """A mean of what a trainer gives its metrics."""

    def update(self, y_pred, y):
        super().update(y_pred.double().mean(), len(y))


def validated(**metrics):
    torch.manual_seed(0)
    run = trainer(
        model=nn.Linear(4, CLASSES),
        train_loader=classes_loader(),
        val_loader=classes_loader(),
        strategy=SupervisedStrategy("cross_entropy"),
        metrics=metrics,
    )
    run.validate()  # a second round has to start from zero
    found = run.validate()
    inputs, targets = classes_loader().dataset.tensors
    return {name: found[f"val/{name}"] for name in metrics}, run.model(inputs).detach(), targets


def test_a_trainer_takes_each_of_them():
    found, scores, targets = validated(
        accuracy=Accuracy(), top=TopKAccuracy(k=2), tokens=TokenAccuracy(), mean=MeanScore()
    )
    right = accuracy_score(targets.numpy(), scores.argmax(-1).numpy())
    assert found == {
        "accuracy": right,
        "top": top_k_accuracy_score(targets.numpy(), scores.numpy(), k=2, labels=range(CLASSES)),
        "tokens": right,
        "mean": pytest.approx(scores.mean().item(), rel=1e-5),
    }


def test_ours_ignites_and_torchmetrics_accuracies_agree_in_one_trainer():
    found, scores, targets = validated(
        ours=Accuracy(), ignite=IgniteAccuracy(), torchmetrics=MulticlassAccuracy(CLASSES, average="micro")
    )
    assert found["ours"] == accuracy_score(targets.numpy(), scores.argmax(-1).numpy())
    assert found["ignite"] == pytest.approx(found["ours"], rel=1e-12)
    assert found["torchmetrics"] == pytest.approx(found["ours"], rel=1e-6)  # it divides in float32


# ------------------------------------------------------------------------------------------- accuracies


def test_predicted_classes_may_replace_scores():
    metric = Accuracy(ignore_index=-100)
    metric.update(SCORES.argmax(-1).int(), PADDED)
    assert metric.compute() == token_accuracy()


def test_the_accuracies_of_tokens_are_those_of_torchmetrics():
    reference = MulticlassAccuracy(CLASSES, average="micro", ignore_index=-100, top_k=2)
    reference.update(SCORES.movedim(-1, 1), PADDED)
    metric = TopKAccuracy(k=2, ignore_index=-100)
    metric.update(SCORES, PADDED)
    assert metric.compute() == pytest.approx(reference.compute().item(), rel=1e-6)


def test_the_best_k_of_k_classes_always_hold_the_target():
    metric = TopKAccuracy(k=CLASSES)
    metric.update(SCORES, LABELS)
    assert metric.compute() == 1.0


def test_counts_stay_exact_where_float32_would_stop_counting():
    metric = TokenAccuracy()
    metric.load_state_dict({"right": torch.tensor(2**53), "counted": torch.tensor(2**53)})
    metric.update(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    state = metric.state_dict()
    assert (state["right"].item(), state["counted"].item()) == (2**53 + 1, 2**53 + 2)


def test_where_every_target_is_ignored_the_accuracy_is_nan():
    metric = TokenAccuracy()
    metric.update(torch.zeros(2, 3), torch.full((2,), -100))
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_class_indices_of_any_whole_number_type_count(dtype):
    metric = Accuracy()
    metric.update(SCORES, LABELS.to(dtype))
    assert metric.compute() == accuracy_score(LABELS.flatten().numpy(), SCORES.argmax(-1).flatten().numpy())


BINARY = r"for binary logits pass \(y_pred > 0\).long\(\) and y.long\(\)"


@pytest.mark.parametrize(
    ("y_pred", "y", "error", "message"),
    [
        (
            torch.zeros(4, 3),
            torch.zeros(5).long(),
            ValueError,
            r"y_pred of shape \(4, 3\), y of shape \(5,\)\): n",
        ),
        (torch.zeros(4, 3), torch.zeros(4, 1).long(), ValueError, r"; pass y.squeeze\(-1\)"),
        (torch.zeros(2, 3, 8), torch.zeros(2, 8).long(), ValueError, r"; classes come last: y_pred.movedim\(1, -1\)"),
        (torch.zeros(4), torch.zeros(4), ValueError, BINARY),
        (torch.zeros(4, 1), torch.zeros(4, 1), ValueError, BINARY),
        (
            torch.zeros(4, 3),
            torch.zeros(4, 3),
            ValueError,
            rf"{BINARY}, for rows of probabilities y.arg",
        ),
        (torch.tensor(0.0), torch.tensor(0), ValueError, r"y_pred of shape \(\), y of shape \(\)"),
        (torch.zeros(4, 3), torch.zeros(4), TypeError, r"\(y of torch.float32\): needs class indices; pass y.long\(\)"),
        (torch.zeros(4).long(), torch.zeros(4), TypeError, r"\(y of torch.float32\)"),
        (
            torch.zeros(4).bool(),
            torch.zeros(4).long(),
            TypeError,
            r"\(y_pred of torch.bool\): .*; pass y_pred.l",
        ),
        ({"logits": 1}, torch.zeros(4).long(), TypeError, r"\(y_pred=dict, y=Tensor\): needs two tensors"),
    ],
)
def test_what_does_not_fit_is_named_with_a_remedy_and_not_counted(y_pred, y, error, message):
    metric = Accuracy()
    with pytest.raises(error, match=rf"^Accuracy.update.*{message}"):
        metric.update(y_pred, y)
    with pytest.raises(MetricNotFoundError):
        metric.compute()


@pytest.mark.parametrize("metric", [TopKAccuracy(k=2), TokenAccuracy()])
def test_only_accuracy_takes_predicted_classes(metric):
    with pytest.raises(ValueError, match=r"needs y_pred \(\.\.\., classes\) and class indices y"):
        metric.update(torch.zeros(4).long(), torch.zeros(4).long())


def test_more_than_all_classes_cannot_be_the_best():
    with pytest.raises(
        ValueError, match=r"TopKAccuracy\(k=5\): y_pred of shape \(4, 3\) has only 3 classes; choose a sm"
    ):
        TopKAccuracy().update(torch.zeros(4, 3), torch.zeros(4).long())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopKAccuracy(k=0), r"TopKAccuracy\(k=0\): needs a whole number of at least 1"),
        (lambda: TopKAccuracy(k=2.0), r"TopKAccuracy\(k=2.0\)"),
        (lambda: Accuracy(ignore_index=1.5), r"Accuracy\(ignore_index=1.5\): needs a whole number; or None"),
        (lambda: TokenAccuracy(ignore_index="pad"), r"TokenAccuracy\(ignore_index='pad'\)"),
    ],
)
def test_an_argument_out_of_range_is_named(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
