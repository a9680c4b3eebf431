"""Losses and gradients by our strategies and by TRL's trainers, each from the batch in its own format."""

import copy
from types import SimpleNamespace

import pytest
import torch

from pulsetrain.engine import DPOStrategy, GRPOStrategy, SFTStrategy
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.step.model_call import call
from tests.support import trl_trainers
from tests.support.models_hugging_face import VOCABULARY, model_of

pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")
pytest.importorskip("trl", reason="trl is not there: pip install trl")

# trl uses attributes of transformers models that are deprecated
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

PROMPT = 3


def prepared_by_trl(model, temperature=1.0):
    """A model as TRL's trainers make it: it gives log-probabilities in place of logits where they are asked for."""
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this trl has no add_fused_lm_head: pip install 'trl>=1.16'")
    found = copy.deepcopy(model).train()
    utils.add_fused_lm_head(found, temperature=temperature, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return found


def answers(seed, rows=4, length=9):
    """Prompts of one length and answers of several, padded with 0, and the mask that shows the answers."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    ends = torch.randint(PROMPT + 1, length + 1, (rows, 1), generator=generator)
    places = torch.arange(length)
    return torch.where(places < ends, tokens, 0), (places >= PROMPT) & (places < ends)


def labelled(seed):
    tokens, mask = answers(seed)
    return {"input_ids": tokens, "labels": torch.where(mask, tokens, IGNORED)}


def gradients_of(loss, model):
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_alike(strategy, model, batch, theirs, their_model):
    """One loss, and one gradient for every parameter."""
    prepared = strategy.prepare_batch(batch)
    ours = strategy.compute_loss(call(model, prepared.inputs), prepared)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-6)
    found, expected = gradients_of(ours, model), gradients_of(theirs, their_model)
    assert set(found) == set(expected)
    largest = max(each.abs().max() for each in expected.values())
    assert largest > 1e-3
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5 * float(largest), msg=name)


@pytest.fixture
def model():
    return model_of("llama", spread=3.0).train()


def test_fine_tuning_matches_trl(model):
    from trl.trainer.sft_trainer import SFTTrainer

    theirs, batch = prepared_by_trl(model), labelled(0)
    trainer = SimpleNamespace(
        model=theirs, accelerator=trl_trainers.OneProcess(),
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False), aux_loss_enabled=False,
        compute_loss_func=None, label_smoother=None, _metrics=trl_trainers.metrics(), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    trainer.accelerator.parallelism_config = None
    loss = SFTTrainer.compute_loss(trainer, theirs, {**batch, "attention_mask": (batch["input_ids"] > 0).long()})
    strategy = SFTStrategy()
    strategy.bind(model)
    assert_alike(strategy, model, batch, loss, theirs)
    prepared = strategy.prepare_batch(batch)
    accuracy = strategy.compute_metrics(model(**prepared.inputs), prepared)["token_accuracy"].item()
    assert accuracy == pytest.approx(trainer._metrics["train"]["mean_token_accuracy"][0])


@pytest.mark.parametrize(
    ("loss_type", "beta", "smoothing"), [("sigmoid", 0.1, 0.0), ("hinge", 0.4, 0.0), ("ipo", 0.3, 0.0)]
)
def test_preference_learning_matches_trl(model, loss_type, beta, smoothing):
    from trl.trainer.dpo_trainer import DPOTrainer

    reference = model_of("llama", seed=1, spread=3.0)
    theirs, their_reference = prepared_by_trl(model), prepared_by_trl(reference).eval()
    (chosen, of_chosen), (rejected, of_rejected) = answers(1), answers(2)
    trainer = trl_trainers.dpo_trainer(theirs, their_reference, beta, loss_type, smoothing)
    tokens, mask = torch.cat([chosen, rejected]), torch.cat([of_chosen, of_rejected])
    inputs = {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "completion_mask": mask.long()}
    loss = DPOTrainer._compute_loss(trainer, theirs, inputs, return_outputs=False)
    strategy = DPOStrategy(beta, loss_type, smoothing, reference=reference)
    strategy.bind(model)
    batch = {f"{side}_{name}": v for side, s in (("chosen", 1), ("rejected", 2)) for name, v in labelled(s).items()}
    assert_alike(strategy, model, batch, loss, theirs)


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("grpo", {"temperature": 1.0}),
        ("grpo", {"temperature": 0.7, "kl_coef": 0.2}),
        ("bnpo", {"temperature": 1.0, "normalization": "token_mean"}),
        ("dr_grpo", {"temperature": 1.3, "normalization": "dr_grpo", "max_length": 6, "clip_range_high": 0.4}),
        ("grpo", {"temperature": 0.9, "ratio": "sequence", "kl_coef": 0.1, "clip_range": 0.05, "clip_range_high": 0.1}),
        ("cispo", {"temperature": 1.0, "objective": "cispo", "normalization": "token_mean", "clip_range_high": 0.1}),
    ],
)
def test_group_relative_learning_matches_trl(model, loss_type, options):
    temperature, kl_coef = options["temperature"], options.get("kl_coef", 0.0)
    tokens, mask = answers(3)
    acted, reference = (prepared_by_trl(model_of("llama", seed=s, spread=3.0), temperature) for s in (0, 1))
    with torch.no_grad():  # ratios about 1, and some of them clipped
        for parameter in acted.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    theirs = prepared_by_trl(model, temperature)
    labels = torch.where(mask, tokens, IGNORED)

    def log_probs(which):
        """Of what follows the prompt."""
        found = which(input_ids=tokens, attention_mask=(tokens > 0).long(), labels=labels, fused_lm_head=True)
        return found.log_probs[:, PROMPT - 1 :]

    with torch.no_grad():
        old, of_reference = log_probs(acted), log_probs(reference)
    strategy = GRPOStrategy(2, **options)
    strategy.bind(model)
    rewards = torch.tensor([1.0, 2.0, 0.0, 0.5])
    before = torch.zeros(4, PROMPT - 1)
    rows = {
        "input_ids": tokens,
        "completion_mask": mask,
        "rewards": rewards,
        "log_probs": torch.cat([before, old], 1),
        "reference_log_probs": torch.cat([before, of_reference], 1),
    }
    batch = strategy.learn_from(rows, kl_coef)
    loss, _ = trl_trainers.grpo_loss(
        log_probs(theirs), old, trl_trainers.grpo_advantages(rewards, 2, "group"), mask[:, PROMPT:], loss_type,
        low=options.get("clip_range", 0.2), level=options.get("ratio", "token"),
        high=options.get("clip_range_high", 0.2) + (loss_type == "cispo"),  # its bound is that of the ratio itself
        beta=kl_coef, reference=of_reference, max_length=6,
    )  # fmt: skip
    assert_alike(strategy, model, batch, loss, theirs)
