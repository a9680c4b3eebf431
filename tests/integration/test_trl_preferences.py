"""Losses and gradients of preference learning by our strategies and by TRL's trainers, for one model and one batch."""

from types import SimpleNamespace

import pytest
import torch

from pulsetrain.engine import (
    CPOStrategy,
    DPOStrategy,
    KTOStrategy,
    ORPOStrategy,
    RewardModelStrategy,
    SimPOStrategy,
)
from pulsetrain.engine.data.preferences import pad_unpaired
from pulsetrain.engine.data.sequences import IGNORED
from tests.integration.test_trl_strategies import PROMPT, answers, assert_alike, labelled, prepared_by_trl
from tests.support import trl_trainers
from tests.support.models_hugging_face import VOCABULARY, model_of

pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")
pytest.importorskip("trl", reason="trl is not there: pip install trl")

# trl uses attributes of transformers models that are deprecated
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture
def model():
    return model_of("llama", spread=3.0).train()


def pairs():
    sides = (("chosen", labelled(1)), ("rejected", labelled(2)))
    return {f"{side}_{name}": value for side, fields in sides for name, value in fields.items()}


@pytest.mark.parametrize(
    ("loss_type", "weights", "smoothing"),
    [
        ("robust", None, 0.1),
        ("exo_pair", None, 0.01),
        ("sigmoid_norm", None, 0.0),
        ("aot", None, 0.0),
        ("aot_unpaired", None, 0.1),
        (["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0], 0.0),
        (["apo_zero", "ipo", "sigmoid_norm"], None, 0.0),
    ],
)
def test_dpo_of_any_type_or_of_several_matches_trl(model, loss_type, weights, smoothing):
    from trl.trainer.dpo_trainer import DPOTrainer

    reference = model_of("llama", seed=1, spread=3.0)
    theirs, their_reference = prepared_by_trl(model), prepared_by_trl(reference).eval()
    (chosen, of_chosen), (rejected, of_rejected) = answers(1), answers(2)
    trainer = trl_trainers.dpo_trainer(theirs, their_reference, 0.3, loss_type, smoothing, weights)
    tokens, mask = torch.cat([chosen, rejected]), torch.cat([of_chosen, of_rejected])
    inputs = {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "completion_mask": mask.long()}
    loss = DPOTrainer._compute_loss(trainer, theirs, inputs, return_outputs=False)
    strategy = DPOStrategy(0.3, loss_type, smoothing, loss_weights=weights, reference=reference)
    strategy.bind(model)
    assert_alike(strategy, model, pairs(), loss, theirs)
    prepared = strategy.prepare_batch(pairs())
    metrics = strategy.compute_metrics(model(**prepared.inputs), prepared)
    if loss_type != "sigmoid_norm":  # whose rewards TRL computes from sums
        logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        assert metrics["reward_accuracy"].item() == pytest.approx(logged["rewards/accuracies"])
        assert metrics["reward_margin"].item() == pytest.approx(logged["rewards/margins"], rel=1e-4)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "simpo", "orpo"])
def test_losses_without_a_reference_match_trl(model, kind):
    batch = pairs()
    if kind == "orpo":  # TRL also learns the prompt, which here is one token
        for side in ("chosen", "rejected"):
            tokens = batch[f"{side}_input_ids"]
            batch[f"{side}_labels"] = torch.where(tokens > 0, tokens, IGNORED)
            batch[f"{side}_labels"][:, 0] = IGNORED
    masks = {f"{side}_attention_mask": (batch[f"{side}_input_ids"] > 0).long() for side in ("chosen", "rejected")}
    theirs = model_of("llama", spread=3.0).train()
    if kind == "orpo":
        strategy = ORPOStrategy(0.2)
        loss, logged = trl_trainers.without_reference("orpo", theirs, {**batch, **masks}, beta=0.2)
    else:
        weight = {"sft_weight": 0.3}
        strategy = SimPOStrategy(2.0, 0.8, **weight) if kind == "simpo" else CPOStrategy(0.2, kind, **weight)
        loss, logged = trl_trainers.without_reference(
            "cpo", theirs, {**batch, **masks}, beta=strategy.beta, loss_type=kind, simpo_gamma=0.8, cpo_alpha=0.3,
            alpha=0.0, label_smoothing=0.0,
        )  # fmt: skip
    strategy.bind(model)
    assert_alike(strategy, model, batch, loss, theirs)
    prepared = strategy.prepare_batch(batch)
    metrics = strategy.compute_metrics(model(**prepared.inputs), prepared)
    names = {"reward_accuracy": "accuracies", "reward_margin": "margins"}
    names |= {"chosen_reward": "chosen", "rejected_reward": "rejected"}
    for ours, their_name in names.items():
        assert metrics[ours].item() == pytest.approx(logged[f"rewards/{their_name}"], rel=1e-4)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_learning_from_single_answers_matches_trl(model, loss_type):
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

    reference = model_of("llama", seed=1, spread=3.0)
    theirs, their_reference = prepared_by_trl(model), prepared_by_trl(reference).eval()
    tokens, mask = answers(1)
    ends = [int(row.nonzero()[-1]) + 1 for row in mask]
    desirable = [True, False, False, True]
    rows = [
        {"input_ids": row[:end].tolist(), "labels": [IGNORED] * PROMPT + row[PROMPT:end].tolist(), "desirable": good}
        for row, end, good in zip(tokens, ends, desirable, strict=True)
    ]
    completions = [row["input_ids"][PROMPT:] for row in rows]
    examples = [
        {"prompt_ids": row["input_ids"][:PROMPT], "completion_ids": own, "label": row["desirable"]}
        | ({"KL_completion_ids": other} if loss_type == "kto" else {})
        for row, own, other in zip(rows, completions, completions[-1:] + completions[:-1], strict=True)
    ]
    trainer = trl_trainers.kto_trainer(theirs, their_reference, 0.3, loss_type, (1.0, 1.4))
    batch = DataCollatorForUnpairedPreference(pad_token_id=0).torch_call(examples)
    loss = KTOTrainer._compute_loss(trainer, theirs, batch, return_outputs=False)
    strategy = KTOStrategy(0.3, loss_type, undesirable_weight=1.4, reference=reference)
    strategy.bind(model)
    ours = pad_unpaired(rows)
    assert_alike(strategy, model, ours, loss, theirs)
    if loss_type == "kto":
        assert ours["kl_input_ids"].tolist() == batch["KL_input_ids"].tolist()
        prepared = strategy.prepare_batch(ours)
        found = strategy.compute_metrics(model(**prepared.inputs), prepared)["kl"].item()
        assert found == pytest.approx(trainer._metrics["train"]["kl"][0], rel=1e-4, abs=1e-6)


def classifier(seed):
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForSequenceClassification(config).train()


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_a_reward_model_of_transformers_learns_as_trls(center):
    from trl.trainer.reward_trainer import DataCollatorForPreference, RewardTrainer

    ours, theirs, batch = classifier(0), classifier(0), pairs()
    rows = {side: [row[row > 0].tolist() for row in batch[f"{side}_input_ids"]] for side in ("chosen", "rejected")}
    margins = [0.1, 0.0, 0.5, 1.0]
    examples = [
        {"chosen_ids": one, "rejected_ids": other, "margin": margin}
        for one, other, margin in zip(rows["chosen"], rows["rejected"], margins, strict=True)
    ]
    trainer = SimpleNamespace(
        model=theirs, args=SimpleNamespace(center_rewards_coefficient=center or None), _total_train_tokens=0,
        accelerator=trl_trainers.OneProcess(), _metrics=trl_trainers.metrics(), _tp_size=1,
    )  # fmt: skip
    loss = RewardTrainer.compute_loss(trainer, theirs, DataCollatorForPreference(pad_token_id=0).torch_call(examples))
    strategy = RewardModelStrategy(center)
    strategy.bind(ours)
    batch["margin"] = torch.tensor(margins)
    assert_alike(strategy, ours, batch, loss, theirs)
    prepared = strategy.prepare_batch(batch)
    metrics = strategy.compute_metrics(ours(**prepared.inputs), prepared)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert metrics["reward_accuracy"].item() == pytest.approx(logged["accuracy"])
    assert metrics["reward_margin"].item() == pytest.approx(logged["margin"], rel=1e-4)


def test_a_classifier_reads_no_padding_whatever_it_is():
    model, strategy, batch = classifier(0), RewardModelStrategy(), pairs()
    strategy.bind(model)
    expected = strategy.prepare_batch(batch).inputs
    for side in ("chosen", "rejected"):
        tokens, labels = batch[f"{side}_input_ids"], batch[f"{side}_labels"]
        ends = labels.ne(IGNORED).long().cumsum(1).argmax(1)
        batch[f"{side}_input_ids"] = torch.where(torch.arange(tokens.shape[1]) > ends[:, None], 5, tokens)
    found = strategy.prepare_batch(batch).inputs
    assert (found["input_ids"] == 0).any()
    assert all(torch.equal(found[name], expected[name]) for name in ("input_ids", "attention_mask"))
