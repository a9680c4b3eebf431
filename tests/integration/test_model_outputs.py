"""Classifiers and language models of transformers, from batches as their collators make them."""

import math

import ignite.metrics
import pytest
import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import PretrainStrategy, SupervisedStrategy
from pulsetrain.engine.metrics import Accuracy

transformers = pytest.importorskip("transformers")
torchmetrics = pytest.importorskip("torchmetrics")

WIDTHS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(kind, **more):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=16, **WIDTHS, **NO_DROPOUT, **more)
    return getattr(transformers, f"BertFor{kind}")(config)


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **WIDTHS, **NO_DROPOUT)
    return transformers.ViTForImageClassification(config)


def sentences(count=6):
    """Of 4 to 8 tokens, padded; the class is that of the first token."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        tokens = torch.randint(1, 20, (4, 8), generator=draw)
        mask = (torch.arange(8) < 4 + (torch.arange(4)[:, None] + number) % 5).long()
        types = (torch.arange(8) >= 3).long().expand(4, -1)
        found.append({
            "input_ids": tokens * mask, "attention_mask": mask, "token_type_ids": types, "labels": tokens[:, 0] % 3,
        })  # fmt: skip
    return found


def images(count=6):
    pixels = torch.randn(count, 4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": each, "labels": each.flatten(1)[:, :3].argmax(-1)} for each in pixels]


def learn(model, data, metrics, strategy=None, epochs=20):
    config = TrainingConfig(
        max_epochs=epochs, learning_rate=1e-2, seed=0, device="cpu", progress=False, validate_every=None
    )
    return Trainer(model, data, data, strategy=strategy or SupervisedStrategy(), config=config, metrics=metrics)


def by_hand(model, data):
    """The mean loss that the model itself computes, and its logits, over all batches."""
    model.eval()
    with torch.no_grad():
        outputs = [model(**batch) for batch in data]
    return sum(each.loss.item() for each in outputs) / len(outputs), torch.cat([each.logits for each in outputs])


@pytest.mark.parametrize(
    ("make", "batches"),
    [(lambda: bert("SequenceClassification", num_labels=3), sentences), (vit, images)],
    ids=["bert", "vit"],
)
def test_a_classifier_learns_from_mappings_and_is_judged_by_its_logits(make, batches):
    model, data = make(), batches()
    metrics = {
        "own": Accuracy(),
        "ignite": ignite.metrics.Accuracy(),
        "torchmetrics": torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro"),
    }
    history = learn(model, data, metrics).train()
    loss, logits = by_hand(model, data)
    assert history["val/loss"][-1] == pytest.approx(loss, abs=1e-5)
    expected = (logits.argmax(-1) == torch.cat([each["labels"] for each in data])).float().mean().item()
    assert expected > 0.8
    for name in metrics:
        assert history[f"val/{name}"][-1] == pytest.approx(expected), name


def test_a_pair_of_images_and_labels_is_enough_for_a_model_of_transformers():
    data = [(each["pixel_values"], each["labels"]) for each in images()]
    history = learn(vit(), data, {"accuracy": Accuracy()}, SupervisedStrategy(torch.nn.CrossEntropyLoss())).train()
    assert history["val/accuracy"][-1] > 0.8


def test_labels_of_tokens_are_learned_where_they_are_not_ignored():
    data = [{**each, "labels": torch.where(each["input_ids"] > 0, each["input_ids"] % 3, -100)} for each in sentences()]
    model = bert("TokenClassification", num_labels=3)
    history = learn(model, data, {"accuracy": Accuracy(ignore_index=-100)}).train()
    assert history["val/accuracy"][-1] > 0.8
    trained = [int((each["labels"] != -100).sum()) for each in data]
    model.eval()
    with torch.no_grad():  # the model's own loss is a mean over the labels that are not ignored, too
        total = sum(model(**each).loss.item() * count for each, count in zip(data, trained, strict=True))
    assert history["val/loss"][-1] == pytest.approx(total / sum(trained), abs=1e-5)


def test_the_perplexity_of_torchmetrics_is_that_of_a_language_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=20, num_key_value_heads=1, max_position_embeddings=16, **WIDTHS)
    model, data = transformers.LlamaForCausalLM(config), sentences()
    batches = [{name: each[name] for name in ("input_ids", "attention_mask")} for each in data]
    perplexity = torchmetrics.text.Perplexity(ignore_index=-100)
    run = learn(model, batches, {"theirs": perplexity}, PretrainStrategy(), epochs=2)
    history = run.train()
    assert history["val/theirs"][-1] == pytest.approx(history["val/perplexity"][-1], rel=1e-4)
    assert history["val/theirs"][-1] == pytest.approx(math.exp(history["val/loss"][-1]), rel=1e-4)
