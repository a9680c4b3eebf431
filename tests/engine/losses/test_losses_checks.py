"""Targets whose values a loss cannot mean: found in the first batch, or where torch fails on them."""

import functools
import math
import re

import pytest
import structlog
import torch
import torch.nn.functional as F
from torch import nn

from pulsetrain.engine.losses import (
    bce_with_logits,
    check_first_batch,
    check_first_loss,
    cross_entropy,
    focal_loss,
    mse,
)


class Ordinal(nn.CrossEntropyLoss):
    """Its labels are thresholds, one more than there are outputs."""

    def forward(self, input, target):
        return input.mean() + target.float().mean()


@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            [0, 12, 3, -3],
            "(targets[1]=12): needs class indices from 0 to 9, as the logits have 10 classes, and 2 of 4 targets are "
            "outside; use -100 for targets to ignore, and number the classes from 0",
        ),
        ([0, 4, 10, 11], "2 of 4 targets are outside; give the model 12 outputs, or number the classes from 0"),
        ([1, 4, 10, -100], "1 of 4 targets are outside; these labels start at 1: pass targets - 1"),
        ([[0, 1], [9, -1]], "(targets[1, 1]=-1): needs class indices from 0 to 9"),
        (10, "(targets=10): needs class indices from 0 to 9"),
    ],
)
def test_a_label_that_is_not_a_class_is_named_with_its_place_and_a_remedy(loss, targets, message):
    targets = torch.tensor(targets)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_first_batch(loss, torch.zeros(*targets.shape, 10), targets)


def test_labels_of_an_unsigned_type_are_checked_too():
    with pytest.raises(ValueError, match=r"cross_entropy\(targets\[1\]=255\): .* give the model 256 outputs"):
        check_first_batch("cross_entropy", torch.zeros(2, 10), torch.tensor([0, 255], dtype=torch.uint8))


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_targets_that_are_not_finite_are_counted_and_the_first_is_named(loss, value):
    targets = torch.zeros(3, 2)
    targets[1, 1] = targets[2, 0] = value
    message = f"{loss}(targets[1, 1]={value}): needs finite numbers, and 2 of 6 targets are not; leave such samples out"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_first_batch(loss, torch.zeros(3, 2), targets)


@pytest.mark.parametrize("value", [-0.5, 2.0, math.nan])
def test_bce_targets_that_are_not_probabilities_are_named(value):
    message = f"bce_with_logits(targets[2]={value}): needs probabilities from 0 to 1, and 1 of 3 targets are not; pass"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_first_batch("bce_with_logits", torch.zeros(3), torch.tensor([0.0, 1.0, value]))


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        ("cross_entropy", torch.zeros(4, 10), torch.tensor([0, 9, -100, 5])),
        (functools.partial(cross_entropy, ignore_index=255), torch.zeros(2, 10), torch.tensor([255, 9])),
        ("cross_entropy", torch.zeros(4, 0), torch.full((4,), -100)),
        ("cross_entropy", torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64)),
        ("mse", torch.zeros(2), torch.tensor([-1e30, 1e30])),
        ("bce_with_logits", torch.zeros(3), torch.tensor([0.0, 0.5, 1.0])),
        (F.cross_entropy, torch.zeros(2, 10, 3), torch.full((2, 3), 9)),  # another layout: classes come second
        (nn.CrossEntropyLoss(), torch.zeros(2, 10, 3), torch.full((2, 3), 9)),
        (nn.CrossEntropyLoss(ignore_index=77), torch.zeros(2, 10), torch.tensor([0, 77])),
        (functools.partial(F.cross_entropy, ignore_index=77), torch.zeros(2, 10), torch.tensor([0, 77])),
        (nn.CrossEntropyLoss(), torch.zeros(2, 3), torch.tensor([[0.0, 2.0, 9.0], [1.0, 1.0, 1.0]])),  # weights
        (Ordinal(), torch.zeros(2, 10), torch.tensor([0, 10])),
        (lambda outputs, targets: 0, torch.zeros(2), torch.tensor([1.0, math.nan])),  # NaN may be a sign of its own
        # values that the loss rejects, or that are not tensors
        ("cross_entropy", torch.zeros(4, 10), torch.full((5,), 77)),
        ("cross_entropy", torch.zeros(4, 10), torch.full((4,), math.nan)),
        ("cross_entropy", {"logits": torch.zeros(4, 10)}, torch.full((4,), 77)),
        ("mse", torch.zeros(2), torch.tensor([1, 2])),
        (lambda outputs, targets: 0, torch.zeros(2), {"boxes": torch.full((2,), math.nan)}),
    ],
)
def test_targets_that_the_loss_can_mean_or_refuses_itself_pass(loss, outputs, targets):
    assert check_first_batch(loss, outputs, targets) is None


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "name"),
    [
        (cross_entropy, torch.zeros(1, 3), torch.tensor([3]), "cross_entropy"),
        (functools.partial(cross_entropy, label_smoothing=0.1), torch.zeros(1, 3), torch.tensor([3]), "cross_entropy"),
        (focal_loss, torch.zeros(1, 3), torch.tensor([3]), "focal_loss"),
        (bce_with_logits, torch.zeros(1), torch.tensor([2.0]), "bce_with_logits"),
        (mse, torch.zeros(1), torch.tensor([math.inf]), "mse"),
        (F.cross_entropy, torch.zeros(1, 3), torch.tensor([3]), "cross_entropy"),
        (nn.CrossEntropyLoss(), torch.zeros(1, 3), torch.tensor([3]), "CrossEntropyLoss"),
        (nn.CrossEntropyLoss(ignore_index=7), torch.zeros(1, 3), torch.tensor([-100]), "CrossEntropyLoss"),
    ],
)
def test_our_losses_and_torchs_cross_entropy_are_known_as_functions_too(loss, outputs, targets, name):
    with pytest.raises(ValueError, match=rf"^{name}\(targets\[0\]="):
        check_first_batch(loss, outputs, targets)


def test_targets_of_a_loss_that_is_not_ours_are_named_where_the_loss_is_not_finite():
    targets = torch.tensor([1.0, math.nan])
    message = re.escape("masked(targets[1]=nan): needs finite numbers, and 1 of 2 targets are not")
    with pytest.raises(ValueError, match=message):
        check_first_loss(torch.tensor(math.nan), targets, "masked")
    assert check_first_loss(torch.tensor(1.0), targets, "masked") is None
    assert check_first_loss(torch.tensor(math.nan), torch.tensor([1.0]), "masked") is None
    assert check_first_loss(torch.tensor(math.nan), {"boxes": targets}, "masked") is None


@pytest.mark.parametrize(
    "loss",
    [cross_entropy, focal_loss, functools.partial(cross_entropy, chunk_size=4)],
    ids=["whole", "focal", "chunked"],
)
@pytest.mark.parametrize("label", [10, -3])
def test_a_label_on_which_torch_fails_is_named_by_the_loss_itself(loss, label):
    with pytest.raises(ValueError, match=rf"\(targets\[1, 0\]={label}\): needs class indices from 0 to 9") as caught:
        loss(torch.zeros(2, 2, 10), torch.tensor([[0, 1], [label, 2]]))
    assert isinstance(caught.value.__context__, (IndexError, RuntimeError))


def test_another_failure_of_torch_stays_what_it_is():
    with pytest.raises(RuntimeError, match="device meta is not on the expected device cpu"):
        cross_entropy(torch.zeros(2, 3, device="meta"), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="not implemented"):
        cross_entropy(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 1]))


@pytest.mark.parametrize("temperature", [1.0, 100.0])
def test_a_softmax_before_cross_entropy_is_warned_of_in_training_only(temperature):
    logits = temperature * torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(8, dtype=torch.long)
    with structlog.testing.capture_logs() as logs:
        check_first_batch("cross_entropy", logits.requires_grad_(), targets)
        check_first_batch("cross_entropy", logits.log_softmax(-1), targets)
        check_first_batch("cross_entropy", logits.detach().softmax(-1), targets)
        assert not logs
        check_first_batch("cross_entropy", logits.softmax(-1), targets)
    assert "let the model return the logits" in logs[0]["event"]


@pytest.mark.parametrize("loss", ["bce_with_logits", F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()])
def test_a_sigmoid_before_bce_with_logits_is_warned_of_in_training_only(loss):
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(8, 4)
    with structlog.testing.capture_logs() as logs:
        check_first_batch(loss, logits.requires_grad_(), targets)
        check_first_batch(loss, logits.detach().sigmoid(), targets)
        check_first_batch(loss, torch.zeros(8, 4, requires_grad=True), targets)  # weights of 0
        check_first_batch(loss, logits[:2, :2].abs().sigmoid(), targets[:2, :2])  # may be by chance
        assert not logs
        check_first_batch(loss, logits.sigmoid(), targets)
    assert "as after a sigmoid" in logs[0]["event"]
