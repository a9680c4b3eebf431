"""Hugging Face models and their adapters learn by every strategy unchanged, and generate as requested."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch

from pulsetrain.engine import Every
from pulsetrain.engine.data.sequences import pack, pad_examples
from pulsetrain.engine.rollouts.sampling import sampler_of
from pulsetrain.engine.strategies import DPOStrategy, SFTStrategy, WithValueHead
from pulsetrain.engine.strategies.language import logits_of
from pulsetrain.handlers import Checkpointer
from tests.support.models_hugging_face import (
    ATTENTION,
    FAMILIES,
    STRATEGIES,
    VOCABULARY,
    documents,
    model_of,
    trainer_of,
    with_adapters,
)

pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")

# peft uses attributes of transformers models that are deprecated
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def changed(before, model):
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_learns_unchanged(family, attention, strategy):
    model = model_of(family, attention)
    before = weights_of(model)
    run = trainer_of(strategy, model)
    history = run.train()
    assert run.state.update == 2
    assert all(math.isfinite(value) for value in history["train/loss"])
    # the bias of the key projection has gradient 0: a constant added to all scores of a row changes nothing
    still = {name for name in before if name not in changed(before, model)}
    assert len(still) <= len(before) // 4
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_in_a_packed_row_has_the_logits_that_it_has_by_itself(family, attention):
    model, strategy = model_of(family, attention, spread=4.0), SFTStrategy()
    strategy.bind(model)
    (row,) = pack(documents(3), 18)
    batch = pad_examples([row])
    with torch.no_grad():
        packed = logits_of(model(**strategy.prepare_batch(batch).inputs))[0]
        alone = [logits_of(model(each["input_ids"][None]))[0] for each in documents(3)]
        mixed = logits_of(model(batch["input_ids"][:, :-1]))[0]
    expected = torch.cat(alone)[: len(packed)]
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-5)
    assert (mixed - expected).abs().max() > 1e-2, "had they seen each other, it would show"


# ---------------------------------------------------------------------------------------------------------- adapters


@pytest.fixture
def adapted():
    pytest.importorskip("peft", reason="peft is not there: pip install peft")
    return with_adapters(model_of("llama", spread=3.0))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_alone_learn(adapted, strategy):
    before = weights_of(adapted)
    run = trainer_of(strategy, adapted)
    run.train()
    assert changed(before, adapted) == {name for name in before if "lora_" in name}
    learning = {name for name, each in adapted.named_parameters() if each.requires_grad}
    assert learning == {name for name, _ in adapted.named_parameters() if "lora_" in name}
    if strategy == "ppo":
        assert run.model.value.weight.any()
    if strategy in ("dpo", "ppo", "grpo"):
        assert run.strategy._reference._model is run.model, "the reference is not a copy"


def move(model):
    """As if the weights that learn had learnt."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))


def test_the_reference_of_new_adapters_is_the_model_without_them():
    pytest.importorskip("peft", reason="peft is not there: pip install peft")
    new = with_adapters(model_of("llama", spread=3.0), trained=False)
    batch = trainer_of("dpo", model_of("llama")).train_loader[0]
    shared, apart = DPOStrategy(), DPOStrategy(reference=model_of("llama", spread=3.0))
    for strategy in (shared, apart):
        strategy.bind(new)
    assert shared._reference._initial is None, "it takes no memory"
    move(new)
    found, expected = (each.prepare_batch(batch).targets["reference"] for each in (shared, apart))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    copied = DPOStrategy(reference=copy.deepcopy(new))
    copied.bind(new)
    assert not torch.allclose(copied.prepare_batch(batch).targets["reference"], found, atol=1e-2)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["lm_head"]}],
    ids=["lora", "dora", "pissa", "saved modules"],
)
def test_the_reference_of_trained_adapters_is_the_model_with_them_as_they_were(options):
    pytest.importorskip("peft", reason="peft is not there: pip install peft")
    model = with_adapters(model_of("llama", spread=3.0), trained=options == {}, **options)
    batch = trainer_of("dpo", model_of("llama")).train_loader[0]
    shared, apart = DPOStrategy(), DPOStrategy(reference=copy.deepcopy(model).requires_grad_(False))
    for strategy in (shared, apart):
        strategy.bind(model)
    prepared = shared.prepare_batch(batch)
    assert shared.compute_loss(model(**prepared.inputs), prepared).item() == pytest.approx(math.log(2), abs=1e-6)
    move(model)
    before = weights_of(model)
    found, expected = (each.prepare_batch(batch).targets["reference"] for each in (shared, apart))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not changed(before, model)
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("strategy", ["dpo", "grpo", "ppo"])
def test_adapters_learn_as_beside_a_frozen_model_of_their_own(strategy, trained):
    pytest.importorskip("peft", reason="peft is not there: pip install peft")
    adapted, other, frozen = (with_adapters(model_of("llama", spread=3.0), trained=trained) for _ in range(3))
    shared, apart = trainer_of(strategy, adapted), trainer_of(strategy, other)
    kept = apart.strategy._reference
    kept.given = kept._model = frozen.requires_grad_(False)
    kept._as_it_was = nullcontext
    losses = [run.train()["train/loss"] for run in (shared, apart)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for name, value in adapted.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- writing


def greedy(model, prompt, count):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(logits_of(model(torch.tensor([tokens])))[0, -1].argmax()))
    return tokens[len(prompt) :]


PROMPTS = [[5, 9, 11, 2, 40, 7], [8], [33, 12, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_different_lengths_are_answered_as_each_is_alone(family, attention):
    model = model_of(family, attention, spread=4.0)
    found = sampler_of(model, lambda tokens: tokens)(PROMPTS, 6, temperature=1e-5)
    assert found == [greedy(model, prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize("wrapped", ["plain", "value head", "adapters"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_model_samples_from_its_own_distribution_whatever_its_settings(wrapped, temperature):
    model = model_of("llama", spread=4.0)
    given = model.generation_config
    given.top_k, given.top_p, given.min_p, given.repetition_penalty, given.temperature = 5, 0.5, 0.2, 3.0, 0.3
    given.eos_token_id, given.suppress_tokens = 2, [7, 8]
    if wrapped == "adapters":
        pytest.importorskip("peft", reason="peft is not there: pip install peft")
        model = with_adapters(model).eval()
    elif wrapped == "value head":
        model = WithValueHead(model)
    prompt, count = [9, 2, 30], 6000
    torch.manual_seed(0)
    found = sampler_of(model, lambda tokens: tokens)([prompt] * count, 2, temperature=temperature)
    assert {len(each) for each in found} == {2}, "no token ends a text unless one is named"
    with torch.no_grad():
        expected = (logits_of(model(torch.tensor([prompt])))[0, -1] / temperature).softmax(-1)
    counts = torch.bincount(torch.tensor([first for first, _ in found]), minlength=VOCABULARY)
    statistic = ((counts - count * expected) ** 2 / (count * expected)).sum().item()
    freedom = VOCABULARY - 1  # of which the statistic has the mean, and twice it as its variance
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)
    assert given.top_k == 5, "its settings stay"


def test_a_text_ends_with_the_token_that_ends_it():
    model = model_of("gpt2", spread=4.0)
    torch.manual_seed(0)
    found = sampler_of(model, lambda tokens: tokens, pad_token=3)([[9, 2, 30]] * 300, 20, end_token=3)
    assert all(3 not in each[:-1] for each in found)
    assert {len(each) for each in found if each[-1] != 3} == {20}
    assert len({len(each) for each in found if each[-1] == 3}) > 3


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", ["tied", "adapters"])
@pytest.mark.parametrize(
    ("strategy", "form"),
    [("sft", "torch"), ("sft", "safetensors"), ("dpo", "torch"), ("ppo", "safetensors"), ("grpo", "torch")],
)
def test_a_run_resumes_bit_for_bit(tmp_path, kind, form, strategy):
    def make():
        if kind == "tied":
            model = model_of("gpt2")
            assert model.lm_head.weight is model.transformer.wte.weight
            return model
        pytest.importorskip("peft", reason="peft is not there: pip install peft")
        return with_adapters(model_of("llama"))

    whole = trainer_of(strategy, make(), updates=5)
    history = whole.train()

    def saving():
        return [Checkpointer(tmp_path, Every(iterations=3), form=form)]

    trainer_of(strategy, make(), updates=3, handlers=saving()).train()
    run = trainer_of(strategy, make(), updates=5, handlers=saving())
    again = run.train(resume="latest")
    assert run.state.iteration == 5
    assert again == history
    assert not changed(weights_of(whole.model), run.model)
    if kind == "tied":
        inner = run.model.model if strategy == "ppo" else run.model
        assert inner.lm_head.weight is inner.transformer.wte.weight
