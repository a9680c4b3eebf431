"""Models of transformers draw with their cache what they draw without it, row by row."""

import pytest
import torch

from pulsetrain.engine import Events, GRPOStrategy, PPOStrategy
from pulsetrain.engine.rollouts import Sampling, TextRollouts
from pulsetrain.engine.rollouts.sampling import sampler_of
from pulsetrain.engine.strategies import WithValueHead
from pulsetrain.engine.strategies.language import logits_of
from pulsetrain.handlers import SampleText
from tests.support.engines import make_engine
from tests.support.models import trainer
from tests.support.models_hugging_face import ATTENTION, CONTEXT, FAMILIES, model_of, with_adapters

pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")

# peft uses attributes of transformers models that are deprecated
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

PROMPTS = [[5, 9, 11, 2, 40, 7], [8], [33, 12, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


class Plain:
    """A model that is nothing but a function of tokens, so that no cache is used."""

    def __init__(self, model):
        self.model = model

    def __call__(self, tokens):
        return logits_of(self.model(input_ids=tokens, use_cache=False))


class Watched:
    """The shapes of the tokens that the model reads."""

    def __init__(self, model):
        self.shapes = []
        model.get_input_embeddings().register_forward_pre_hook(self._look)

    def _look(self, embedding, inputs):
        self.shapes.append(tuple(inputs[0].shape))


def drawn(model, prompts=PROMPTS, **options):
    given = {"end_token": [3, 5, 11, 17], "seeds": [1, 2, 3, 4], **options}
    with torch.no_grad():
        return sampler_of(model, lambda tokens: tokens)(prompts, CONTEXT - 9, **given)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPTS[0]] * 4], ids=["padded", "of one length"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_does_not_change_the_texts(family, prompts, attention):
    model = model_of(family, attention, spread=3.0)
    expected = drawn(Plain(model), prompts)
    assert len({len(each) for each in expected}) > 1
    watched = Watched(model)
    assert drawn(model, prompts) == expected
    running = [sum(len(each) > step for each in expected) for step in range(CONTEXT)]
    assert watched.shapes == [(4, max(map(len, prompts))), *((rows, 1) for rows in running[1:] if rows)]


@pytest.mark.parametrize("wrapped", ["value head", "adapters"])
def test_a_wrapped_model_uses_its_cache(wrapped):
    model = model_of("llama", spread=3.0)
    watched = Watched(model)
    if wrapped == "adapters":
        pytest.importorskip("peft", reason="peft is not there: pip install peft")
        model = with_adapters(model).eval()
        found, expected = drawn(model), drawn(Plain(model))
    else:
        found, expected = drawn(WithValueHead(model)), drawn(Plain(model))
    assert found == expected
    assert [length for _, length in watched.shapes[: max(map(len, found))]] == [9] + [1] * (max(map(len, found)) - 1)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": Sampling(top_p=0.7, repetition_penalty=1.3)},
        {"sampling": Sampling(stop=[[3], "11 ", "7"], decode=lambda tokens: " ".join(map(str, tokens)))},
        {"temperature": 0.0},
        {"temperature": 2.0, "end_token": None},
    ],
    ids=["top_p", "stop", "greedy", "hot"],
)
def test_options_mean_the_same_with_a_cache(options):
    model = model_of("qwen2", spread=3.0)
    assert drawn(model, **options) == drawn(Plain(model), **options)


@pytest.mark.parametrize("place", range(4))
def test_a_text_does_not_depend_on_the_others(place):
    model = model_of("gpt2", spread=3.0)
    with torch.no_grad():
        alone = sampler_of(model, lambda tokens: tokens)(
            [PROMPTS[place]], CONTEXT - 9, end_token=[3, 5, 11, 17], seeds=[place + 1]
        )
    assert alone == [drawn(model)[place]]


@pytest.mark.parametrize("strategy", [GRPOStrategy(4), PPOStrategy(0.0, gamma=1.0)])
def test_a_rollout_reads_each_token_once(strategy):
    model = model_of("llama", spread=2.0)
    watched = Watched(model)
    rollouts = TextRollouts(PROMPTS, lambda p, c: [float(len(each)) for each in c], max_new_tokens=6, end_token=[3, 5])
    learner = WithValueHead(model) if isinstance(strategy, PPOStrategy) else model
    run = trainer({"max_updates": 1}, model=learner, train_loader=rollouts, strategy=strategy)
    run.on(Events.REWARDS_COMPUTED)(lambda: watched.shapes.append("drawn"))
    run.train()
    drawn = watched.shapes[: watched.shapes.index("drawn")]
    assert drawn[0] == (run.train_loader.rows, 9)
    rows = [rows for rows, length in drawn if length == 1]
    assert 1 <= len(rows) <= 5
    assert rows == sorted(rows, reverse=True)


def test_sample_text_ends_with_each_of_the_models_end_tokens():
    model = model_of("llama", spread=4.0)

    def written(ends):
        model.generation_config.eos_token_id = ends
        engine = make_engine()
        engine.model = model
        sample = SampleText(
            "ab", every=None, length=12, encode=lambda text: [ord(each) - 90 for each in text],
            decode=lambda tokens: "".join(chr(90 + token) for token in tokens),
        ).attach(engine)  # fmt: skip
        engine.run([0])
        return [ord(each) - 90 for each in sample.texts[0][2:]]

    whole = written(None)
    assert len(whole) == 12
    unused = next(token for token in range(64) if token not in whole)
    for ends, first in (([unused, whole[4]], whole[4]), ([whole[7], whole[9]], None), (whole[3], whole[3])):
        listed = [ends] if isinstance(ends, int) else ends
        place = min(whole.index(each) for each in listed if each in whole)
        assert written(ends) == whole[: place + 1]
        assert first is None or whole[place] == first


_WIDTHS = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": CONTEXT,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
HYBRIDS = {
    "Gemma3TextConfig": {"head_dim": 8, "sliding_window": 4},
    "Lfm2Config": {"full_attn_idxs": [1, 3]},
    "Qwen3NextConfig": {
        "head_dim": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **_LINEAR, **_EXPERTS,
    },
    "FalconH1Config": {"head_dim": 8, "mamba_d_ssm": 32, **_MAMBA},
    "BambaConfig": {"attn_layer_indices": [1], **_MAMBA},
}  # fmt: skip


@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPTS[0]] * 4], ids=["padded", "of one length"])
@pytest.mark.parametrize("config", HYBRIDS)
def test_caches_of_windows_and_recurrent_layers_do_not_change_the_texts(config, prompts):
    import transformers

    torch.manual_seed(0)
    described = getattr(transformers, config)(**_WIDTHS, **HYBRIDS[config])
    model = transformers.AutoModelForCausalLM.from_config(described).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    expected = drawn(Plain(model), prompts)
    assert len({len(each) for each in expected}) > 1, "rows leave the batch at different times"
    watched = Watched(model)
    assert drawn(model, prompts) == expected
    assert all(length == 1 for _, length in watched.shapes[1:])


def test_a_model_that_keeps_its_cache_to_itself_is_named():
    import transformers

    described = transformers.RecurrentGemmaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        attention_window_size=4,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(described).eval()
    with pytest.raises(
        TypeError, match=r"RecurrentGemmaForCausalLM returned no past_key_values, .*; pass TextRollouts"
    ):
        drawn(model)
