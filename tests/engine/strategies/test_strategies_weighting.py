"""What a batch weighs: the gradient of batches that share an update is that of all their rows at once."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pulsetrain.engine import (
    DPOStrategy,
    GRPOStrategy,
    KTOStrategy,
    PPOStrategy,
    PretrainStrategy,
    RewardModelStrategy,
    SFTStrategy,
    SimPOStrategy,
    SupervisedStrategy,
)
from pulsetrain.engine.data.preferences import pad_unpaired
from pulsetrain.engine.data.sequences import pack, pad_examples
from tests.support import formulas
from tests.support.formulas import IGNORED, VOCABULARY
from tests.support.models import trainer
from tests.support.models_language import Attending, documents


class Acting(torch.nn.Module):
    """Logits and values of each token from itself."""

    def __init__(self):
        super().__init__()
        self.table, self.worth = torch.nn.Embedding(VOCABULARY, VOCABULARY), torch.nn.Embedding(VOCABULARY, 1)

    def forward(self, tokens):
        return self.table(tokens), self.worth(tokens).squeeze(-1)


def update_by(make_model, strategy, batches):
    """The parameters' change in one update over these batches by plain gradient descent."""
    torch.manual_seed(0)
    model = make_model().double()
    before = [each.detach().clone() for each in model.parameters()]
    config = {"learning_rate": 1.0, "max_updates": 1, "accumulate": len(batches)}
    run = trainer(config, model=model, train_loader=batches, strategy=strategy)
    run.train()
    assert run.state.update == 1
    return torch.cat([(new - old).flatten() for new, old in zip(model.parameters(), before, strict=True)])


def assert_weighs(make_model, make_strategy, batches, whole):
    """Each of the batches by what it holds, and not as much as any other."""
    apart, together = (update_by(make_model, make_strategy(), each) for each in (batches, [whole]))
    one_by_one = torch.stack([update_by(make_model, make_strategy(), [each]) for each in batches])
    assert together.abs().max() > 1e-3
    torch.testing.assert_close(apart, together, rtol=0, atol=1e-6)
    assert (one_by_one.mean(0) - together).abs().max() > 1e-3


CLASS_WEIGHTS = torch.tensor([1.0, 10.0, 5.0], dtype=torch.float64)
OVER_CLASSES = {
    "module": lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS),
    "smoothed": lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=2, label_smoothing=0.2),
    "function": lambda: partial(F.cross_entropy, weight=CLASS_WEIGHTS),
    "log-probabilities": lambda: nn.NLLLoss(CLASS_WEIGHTS),
    "ignoring": lambda: partial(F.cross_entropy, ignore_index=1),
    "ignoring log-probabilities": lambda: partial(F.nll_loss, ignore_index=1),
}


class Classifying(nn.Sequential):
    """Logits of three classes."""

    def __init__(self):
        super().__init__(nn.Linear(2, 3))


def classified(labels=(0, 0, 2, 1, 0, 1, 1, 0)):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(labels), 2, dtype=torch.float64, generator=generator), torch.tensor(labels)


@pytest.mark.parametrize("make_loss", OVER_CLASSES.values(), ids=OVER_CLASSES)
def test_labels_weigh_by_what_torch_divides_their_loss_by(make_loss):
    inputs, labels = classified()
    batches = [(inputs[:3], labels[:3]), (inputs[3:], labels[3:])]
    assert_weighs(Classifying, lambda: SupervisedStrategy(make_loss()), batches, (inputs, labels))


@pytest.mark.parametrize("make_loss", OVER_CLASSES.values(), ids=OVER_CLASSES)
def test_the_validation_loss_does_not_depend_on_the_batch_size(make_loss):
    data = torch.utils.data.TensorDataset(*classified())
    losses = []
    for size in (3, 8):
        torch.manual_seed(0)
        loader = torch.utils.data.DataLoader(data, size)
        run = trainer({"max_epochs": 1, "learning_rate": 1e-12}, model=Classifying().double(), train_loader=loader,
                      val_loader=loader, strategy=SupervisedStrategy(make_loss()))  # fmt: skip
        losses.append(run.train()["val/loss"])
    assert losses[0] == pytest.approx(losses[1])


def test_the_scale_of_class_weights_does_not_matter():
    """As that of the loss does not: small sizes would scale gradients down, which fp16 rounds to 0."""
    sizes = [SupervisedStrategy(nn.CrossEntropyLoss(CLASS_WEIGHTS * scale)).prepare_batch(classified()).size
             for scale in (1e-6, 1.0)]  # fmt: skip
    assert sizes == pytest.approx([39 / (16 / 3)] * 2)


def test_probabilities_weigh_by_their_number_whatever_the_weights_of_the_classes():
    inputs, labels = classified()
    targets = nn.functional.one_hot(labels, 3).double() * 0.7 + 0.1
    batches = [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]
    strategy = lambda: SupervisedStrategy(nn.CrossEntropyLoss(CLASS_WEIGHTS))  # noqa: E731
    assert_weighs(Classifying, strategy, batches, (inputs, targets))


def test_a_label_outside_the_weighted_classes_is_named_by_the_check():
    run = trainer({"max_epochs": 1}, model=Classifying().double(), train_loader=[classified((0, 3))],
                  strategy=SupervisedStrategy(nn.CrossEntropyLoss(CLASS_WEIGHTS)))  # fmt: skip
    with pytest.raises(ValueError, match=r"CrossEntropyLoss\(targets\[1\]=3\): needs class indices from 0 to 2"):
        run.train()


def test_answers_of_different_lengths_weigh_by_their_tokens():
    examples = documents()
    batches = [pad_examples(examples[:1]), pad_examples(examples[1:])]
    assert_weighs(Attending, SFTStrategy, batches, pad_examples(examples))


def test_packed_rows_weigh_as_padded_ones():
    examples = documents()
    batches = [pad_examples(pack(examples[2:4], 12)), pad_examples(pack([*examples[:2], examples[4]], 14))]
    assert len(batches[1]["input_ids"]) == 1
    assert_weighs(Attending, SFTStrategy, batches, pad_examples(examples))


def test_rows_weigh_by_the_tokens_that_do_not_begin_a_document():
    tokens = formulas.tokens_of(1, rows=4)
    strategy = lambda: PretrainStrategy(separator=2)  # noqa: E731
    assert_weighs(Attending, strategy, [tokens[:1], tokens[1:]], tokens)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [(Attending, DPOStrategy), (Attending, SimPOStrategy), (Acting, lambda: RewardModelStrategy(0.1))],
    ids=["dpo", "simpo", "reward model"],
)
def test_preferences_weigh_by_their_pairs(model, strategy):
    examples = documents()[:4]
    worse = [{**each, "input_ids": (each["input_ids"] + 1) % VOCABULARY} for each in examples]
    for each in worse:
        each["labels"] = torch.where(each["labels"] == IGNORED, IGNORED, each["input_ids"])

    def pairs(first, last):
        sides = {"chosen": pad_examples(examples[first:last]), "rejected": pad_examples(worse[first:last])}
        return {f"{side}_{name}": value for side, fields in sides.items() for name, value in fields.items()}

    assert_weighs(model, strategy, [pairs(0, 1), pairs(1, 4)], pairs(0, 4))


def test_single_answers_weigh_alike():
    examples = [{**each, "desirable": number % 2 == 0} for number, each in enumerate(documents()[:4])]
    batches = [pad_unpaired(examples[:1]), pad_unpaired(examples[1:])]
    strategy = lambda: KTOStrategy(loss_type="apo_zero_unpaired")  # noqa: E731  # "kto" estimates a number a batch
    assert_weighs(Attending, strategy, batches, pad_unpaired(examples))


@pytest.mark.parametrize(
    "make",
    [
        lambda: GRPOStrategy(2, normalization="token_mean"),
        lambda: GRPOStrategy(2, normalization="sequence_mean"),
        lambda: GRPOStrategy(2, normalization="dr_grpo", max_length=9),
        lambda: PPOStrategy(kl_coef=0.0, entropy_coef=0.1),
    ],
    ids=["token_mean", "sequence_mean", "dr_grpo", "ppo"],
)
def test_texts_weigh_by_what_their_loss_is_a_mean_over(make):
    generator = torch.Generator().manual_seed(0)
    tokens, mask = formulas.tokens_of(3, rows=4), formulas.answers_of(0, rows=4)
    shape = tokens[:, 1:].shape
    numbers = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name in ("log_probs", "values", "returns")
    }
    numbers["log_probs"] = numbers["log_probs"] / 10 - 1.6
    per_row = isinstance(make(), GRPOStrategy)
    advantages = torch.randn(shape[:1] if per_row else shape, generator=generator, dtype=torch.float64)
    rows = {"input_ids": tokens, "completion_mask": mask, **numbers, "advantages": advantages}

    def part(first, last):
        return {name: value[first:last] for name, value in rows.items()}

    assert_weighs(Acting, make, [part(0, 1), part(1, 4)], part(0, 4))
