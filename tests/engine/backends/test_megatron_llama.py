"""Megatron models with the weights of transformers' Llama: the same logits, on one process and on two."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, MegatronBackend, MegatronGPT
from pulsetrain.engine.backends.megatron_weights import describe_llama, from_llama, load_llama, to_llama
from tests.support.runs_of_megatron import GPT, alone, needs_megatron, texts, together

transformers = pytest.importorskip("transformers")
pytestmark = needs_megatron


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
            "tie_word_embeddings": False, **options,
        }
    )  # fmt: skip
    torch.manual_seed(5)
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # norms of ones would hide that they are exchanged
        for name, each in made.named_parameters():
            if "norm" in name:
                each.uniform_(0.5, 1.5)
    return made


VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "all heads": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "another base": {"rope_theta": 500000.0, "rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_gives_the_logits_of_llama(variant: str, processes: int):
    theirs = llama(**VARIANTS[variant])
    tokens = texts(4, 16)
    with torch.no_grad():
        expected = theirs(tokens).logits

    def run(rank: int) -> Any:
        model = MegatronBackend("cpu", tensor=processes).build(describe_llama(theirs.config))
        load_llama(model, theirs.state_dict())
        with torch.no_grad():
            found = model(tokens)
        found = getattr(found, "logits", found)
        saved = to_llama(model.state_dict(), model.config)
        return found.tolist(), {name: each.tolist() for name, each in saved.items()}

    for logits, saved in together(run) if processes == 2 else [alone(run)]:
        assert (torch.tensor(logits) - expected).abs().max() < 1e-5
        assert saved == {name: each.tolist() for name, each in theirs.state_dict().items()}


def test_llama_computes_the_logits_of_a_model_that_was_trained_here():
    def run(rank: int) -> Any:
        model = MegatronBackend("cpu", tensor=2).build(describe_llama(theirs.config))
        with torch.no_grad():
            logits = model(texts(4, 16)).logits
        return logits.tolist(), {
            name: each.tolist() for name, each in to_llama(model.state_dict(), model.config).items()
        }

    theirs = llama()
    for logits, state in together(run):
        theirs.load_state_dict({name: torch.tensor(each) for name, each in state.items()})
        with torch.no_grad():
            assert (theirs(texts(4, 16)).logits - torch.tensor(logits)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='linear'"),
    ],
)
def test_another_architecture_is_refused(options: Mapping[str, Any], names: str):
    with pytest.raises(ConfigurationError, match="not supported") as refused:
        describe_llama(llama(**options).config)
    assert names in str(refused.value)


def test_weights_that_are_missing_are_named():
    theirs = llama()
    state = {name: each for name, each in theirs.state_dict().items() if "layers.1.mlp" not in name}
    with pytest.raises(ConfigurationError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        from_llama(state, describe_llama(theirs.config))
    with pytest.raises(ConfigurationError, match="not Llama's architecture"):
        from_llama(theirs.state_dict(), MegatronGPT(**GPT))
    more = {**theirs.state_dict(), "model.layers.0.self_attn.q_proj.bias": torch.zeros(1)}
    with pytest.raises(ConfigurationError, match=r"no place for model\.layers\.0\.self_attn\.q_proj\.bias"):
        from_llama(more, describe_llama(theirs.config))


def test_the_python_of_the_guide_trains_and_converts():
    guide = (Path(__file__).parents[3] / "docs" / "model_parallel.md").read_text()
    section = guide.split("## Megatron")[1].split("\n## ")[0]
    training, converting = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    theirs = llama()

    def run(rank: int) -> Any:
        loader = DataLoader(texts(16), 8)
        names: dict[str, Any] = {"Trainer": Trainer, "MegatronGPT": MegatronGPT, "MegatronBackend": MegatronBackend}
        names |= {"loader": loader, "llama": theirs}
        exec(training, names)
        names["backend"] = MegatronBackend(tensor=2)
        exec(converting, names)
        equal = all(torch.equal(each, names["saved"][name]) for name, each in theirs.state_dict().items())
        settings = TrainingConfig(max_epochs=1, progress=False)
        tuned = Trainer(names["model"], loader, strategy="pretrain", backend=names["backend"], config=settings)
        return equal, len(tuned.train()["train/loss"])

    assert together(run) == [(True, 1)] * 2
