"""Supervised learning from mappings, and from the outputs of models of transformers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch import nn

from pulsetrain.engine import ConfigurationError, SupervisedStrategy, TrainingBatch

IMAGES, CLASSES = torch.ones(4, 3), torch.tensor([0, 1, 2, 1])


class Output(dict):
    """As transformers returns them."""

    def to_tuple(self):
        return tuple(self.values())


@pytest.mark.parametrize("name", ["labels", "label"])
def test_the_labels_of_a_mapping_are_the_targets_and_the_rest_are_inputs_by_name(name):
    batch = SupervisedStrategy().prepare_batch({"pixel_values": IMAGES, name: CLASSES, "size": 3})
    assert batch.targets is CLASSES
    assert batch.inputs == {"pixel_values": IMAGES, "size": 3}
    assert (batch.samples, batch.size) == (4, 4)


def test_labels_of_tokens_that_are_ignored_do_not_count():
    labels = torch.tensor([[1, -100], [0, 2]])
    batch = SupervisedStrategy().prepare_batch({"input_ids": torch.zeros(2, 2), "labels": labels})
    assert (batch.samples, int(batch.size)) == (2, 3)


def test_the_targets_may_have_any_name():
    batch = SupervisedStrategy("mse", target="y").prepare_batch({"x": IMAGES, "y": IMAGES, "labels": CLASSES})
    assert batch.targets is IMAGES
    assert list(batch.inputs) == ["x", "labels"]


@pytest.mark.parametrize(
    ("target", "batch", "words"),
    [
        (
            None,
            {"x": IMAGES},
            r"a batch with x has no field 'labels' or 'label' for the targets; let the loader .*pairs",
        ),
        (
            None,
            {"x": IMAGES, "y": CLASSES},
            r"a batch with x, y has no field 'labels' or 'label' for the targets; name the field that holds them, as "
            r"SupervisedStrategy\(target='y'\); the other fields are keywords of the model",
        ),
        ("lable", {"label": CLASSES, "x": IMAGES}, r"has no field 'lable' for the .*\(target='label'\)"),
        (None, {}, "a batch with no field has no field 'labels'"),
        (None, {"labels": CLASSES}, "a batch with labels has targets and no inputs; let the loader return these too"),
        (
            None,
            {"x": IMAGES, "labels": CLASSES, "label": CLASSES},
            r"both labels and label may be the targets; name one",
        ),
        ("y", {"x": IMAGES, "labels": CLASSES}, "a batch with x, labels has no field 'y' for the targets"),
        (None, {"x": IMAGES.numpy(), "labels": CLASSES}, r"SupervisedStrategy\(x=numpy.ndarray"),
        (None, {"x": IMAGES, "labels": CLASSES.numpy()}, r"SupervisedStrategy\(labels=numpy.ndarray"),
    ],
)
def test_a_mapping_without_targets_or_inputs_is_refused(target, batch, words):
    with pytest.raises(TypeError, match=words):
        SupervisedStrategy(target=target).prepare_batch(batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "cross_entrop"}, "(loss='cross_entrop'): unknown; choose one of "),
        ({"loss": nn.MSELoss}, "(loss=MSELoss): needs an instance, not the class; pass MSELoss()"),
        ({"loss": 3}, "(loss=3): needs a function"),
        ({"loss": "mse", "loss_options": {"label_smoothing": 1}}, "(loss_options={'label_smoothing': 1}): unknown to "),
        ({"loss_options": {"label_smoothing": 2.0}}, "(loss_options={'label_smoothing': 2.0}): "),
        (
            {"loss": nn.MSELoss(), "loss_options": {"a": 1, "b": 2}},
            "(loss_options={'a': 1, 'b': 2}): only a loss given",
        ),
    ],
)
def test_a_loss_that_does_not_exist_is_named_as_the_argument_that_it_is(arguments, message):
    with pytest.raises(ConfigurationError) as caught:
        SupervisedStrategy(**arguments)
    assert str(caught.value).startswith(f"SupervisedStrategy{message}")


def test_a_name_of_the_targets_is_text():
    with pytest.raises(TypeError, match=r"SupervisedStrategy\(target=3\): needs the name of a field"):
        SupervisedStrategy(target=3)


class Weighted(nn.CrossEntropyLoss):
    """A loss derived from torch's."""


@pytest.mark.parametrize(
    "loss",
    ["cross_entropy", nn.CrossEntropyLoss(), F.cross_entropy, partial(F.cross_entropy, reduction="mean"), Weighted()],
)
@pytest.mark.parametrize("check", [False, True])
def test_losses_by_name_and_of_torch_get_the_logits(loss, check):
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    found = SupervisedStrategy(loss).compute_loss(
        Output(logits=logits, hidden=IMAGES), TrainingBatch(None, CLASSES, 4), check=check
    )
    torch.testing.assert_close(found, F.cross_entropy(logits, CLASSES))


def test_labels_outside_the_classes_of_the_logits_are_refused():
    with pytest.raises(ValueError, match=r"cross_entropy\(targets\[2\]=2\)"):
        SupervisedStrategy().compute_loss(Output(logits=torch.zeros(4, 2)), TrainingBatch(None, CLASSES, 4), check=True)


def test_any_other_callable_gets_the_outputs_as_they_are():
    outputs = Output(logits=torch.ones(4), hidden=torch.full((4,), 3.0))
    found = SupervisedStrategy(lambda outputs, targets: outputs["hidden"].mean()).compute_loss(
        outputs, TrainingBatch(None, CLASSES, 4)
    )
    assert found.item() == 3.0


def test_a_callable_may_return_the_parts_of_its_loss():
    def loss(outputs, targets):
        square, size = (outputs - targets).square().mean(), outputs.abs().mean()
        return square + size, {"square": square, "size": size}

    batch = TrainingBatch(None, torch.zeros(2), 2)
    for check in (False, True):
        found, parts = SupervisedStrategy(loss).compute_loss(torch.full((2,), 2.0), batch, check=check)
        assert (found.item(), {name: each.item() for name, each in parts.items()}) == (
            6.0,
            {"square": 4.0, "size": 2.0},
        )
    for wrong in (lambda o, t: (o, {"size": o.mean()}), lambda o, t: (1.0, {})):
        with pytest.raises(TypeError, match="needs a tensor of shape"):
            SupervisedStrategy(wrong).compute_loss(torch.ones(2), batch)
    with pytest.raises(TypeError, match=r"as 'size'; needs one number"):
        SupervisedStrategy(lambda o, t: (o.mean(), {"size": o})).compute_loss(torch.ones(2), batch)


def test_a_loss_with_parameters_that_nothing_updates_is_warned_of():
    loss = nn.BCEWithLogitsLoss()
    loss.scale = nn.Parameter(torch.ones(3))
    with capture_logs() as logs:
        SupervisedStrategy(loss)
    (said,) = logs
    assert "the loss has parameters, and the optimizer updates those of the model only" in said["event"]
    assert said["parameters"] == 3
    with capture_logs() as logs:
        SupervisedStrategy(loss.requires_grad_(False))
        SupervisedStrategy(nn.CrossEntropyLoss(weight=torch.ones(3)))
    assert logs == []
