"""Plans that say which layers several processes compute together."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from pulsetrain.engine import ConfigurationError
from pulsetrain.engine.distributed.plans import styles_of
from pulsetrain.engine.distributed.tensor_parallel import Colwise, Rowwise, SequencePlain, SequenceSplit
from tests.support.tensor_parallel import Attending


def scaled() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return layer


def test_a_models_own_plan():
    styles = styles_of(Attending(), None, 2)
    assert styles == {
        "qkv": Colwise(parts=3, units=4), "mix": Rowwise(), "up": Colwise(), "down": Rowwise(),
        "head": Colwise(gather=True),
    }  # fmt: skip


def test_where_the_sequence_is_split():
    styles = styles_of(Attending(), None, 2, sequence=True)
    assert styles["enter"] == SequenceSplit()
    assert [styles[f"norms.{index}"] for index in range(3)] == [SequencePlain()] * 3
    assert styles["qkv"] == Colwise(parts=3, units=4, sequence=True)
    assert styles["down"] == Rowwise(sequence=True)


def test_a_plan_that_is_given_comes_first_and_may_hold_styles_of_torch():
    style = ColwiseParallel()
    assert styles_of(Attending(), {"up": style, "down": "rowwise"}, 2) == {"up": style, "down": Rowwise()}


def test_a_layer_that_shares_its_weight_is_left_whole():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert list(styles_of(model, {"*": "colwise"}, 2)) == ["1"]


@pytest.mark.parametrize(
    ("model", "plan", "said"),
    [
        (nn.Sequential(nn.Linear(4, 4)), None, "Sequential has no plan.*tensor_plan=.*Its linear layers are 0"),
        (Attending(), {"out": "rowwise"}, "no module of Attending has such a name; there are enter, norms, norms.0"),
        (Attending(), {"up": "columns"}, "is not a way to split a layer"),
        (Attending(), {"up": {"style": "colwise", "heads": 2}}, "is not a way to split a layer"),
        (Attending(), {"up": {"style": "sequence", "parts": 2}}, "is not a way to split a layer"),
        (Attending(), {"norms.*": "colwise"}, "'norms.0' is a LayerNorm, and only linear layers"),
        (Attending(), {"up": {"style": "colwise", "parts": 0}}, "parts=0"),
        (Attending(), {"qkv": {"style": "colwise", "parts": 3, "units": 3}}, "'qkv' has 3 heads or other units"),
        (nn.Sequential(scaled()), {"0": "colwise"}, "'0' has a parameter 'scale'"),
    ],
)
def test_what_does_not_fit_is_refused(model: nn.Module, plan: Any, said: str):
    with pytest.raises(ConfigurationError, match=said):
        styles_of(model, plan, 2)


def test_a_plan_is_a_mapping():
    with pytest.raises(TypeError, match="a mapping from names of modules to styles"):
        styles_of(Attending(), ["up"], 2)  # type: ignore[arg-type]


def test_a_plan_has_to_say_where_the_sequence_is_split():
    with pytest.raises(ConfigurationError, match="does not say where the sequence is split"):
        styles_of(Attending(), {"up": "colwise", "down": "rowwise"}, 2, sequence=True)


def test_a_tied_embedding_is_not_split_along_the_sequence():
    model = Attending()
    model.head, model.enter = nn.Linear(8, 8), nn.Linear(8, 8)
    model.head.weight = model.enter.weight
    with pytest.raises(ConfigurationError, match="'enter' shares a parameter with another module"):
        styles_of(model, None, 2, sequence=True)


def test_a_plan_of_transformers_that_is_not_known_is_not_blamed_on_the_user():
    model = nn.Sequential(nn.Linear(4, 4))
    model._tp_plan = {"0": "moe_tp_experts"}
    with pytest.raises(ConfigurationError, match="the plan that transformers has for Sequential is not supported"):
        styles_of(model, None, 2)


def llama(**sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    given = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **sizes}
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, **given)
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made


def test_the_plan_of_transformers():
    styles = styles_of(llama(), None, 2)
    assert styles["model.layers.1.self_attn.q_proj"] == Colwise()
    assert styles["model.layers.1.mlp.down_proj"] == Rowwise()
    assert styles["lm_head"] == Colwise(gather=True)
    assert "lm_head" not in styles_of(llama(tie_word_embeddings=True), None, 2)


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads"])
def test_heads_that_cannot_be_split_are_named(name: str):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 1} if "key" in name else {"num_attention_heads": 2}
    with pytest.raises(ConfigurationError, match=re.escape(f"the model has {name}=")):
        styles_of(llama(**sizes), None, 2 if "key" in name else 4)


def test_gpt2_is_split_although_transformers_has_no_plan():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    styles = styles_of(model, None, 2)
    assert styles["transformer.h.1.attn.c_attn"] == Colwise(parts=3, units=4)
    assert len(styles) == 8
    assert model.transformer.h[0].attn.split_size == 16  # which parallelize changes


def test_the_meta_device_is_enough():
    with torch.device("meta"):
        assert len(styles_of(Attending(), None, 2)) == 5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_adapters_of_peft_are_refused_by_name():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    adapted = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    plans: list[dict[str, Any] | None] = [None, {"base_model.model.model.layers.*.self_attn.q_proj": "colwise"}]
    for plan in plans:
        with pytest.raises(ConfigurationError, match=f"'{first}' of PeftModel.* is a layer of peft .*shard=2 in place"):
            styles_of(adapted, plan, 2)
    others = {"base_model.model.model.layers.*.mlp.up_proj": "colwise"}
    assert len(styles_of(adapted, others, 2)) == 2, "layers without adapters"
