"""transformers models that let documents of one row attend to each other are rejected, whatever their forward takes."""

import pytest
import torch

from pulsetrain.engine import SFTStrategy
from pulsetrain.engine.data.sequences import pack, pad_examples
from pulsetrain.engine.errors import ConfigurationError
from tests.support.models import trainer
from tests.support.models_hugging_face import VOCABULARY, documents, model_of
from tests.support.models_language import assert_refused

transformers = pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")


def opt():
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def bloom():
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)
    )


def run_of(model):
    packed = pad_examples(pack(documents(), 16))
    return trainer({"max_updates": 1, "learning_rate": 0.1}, model=model, train_loader=[packed], strategy=SFTStrategy())


@pytest.mark.parametrize("make", [opt, bloom], ids=["opt", "bloom"])
def test_a_model_that_attends_to_the_whole_row_is_refused(make):
    torch.manual_seed(0)
    run = run_of(make())
    assert_refused(run, ConfigurationError, ["SFTStrategy: several documents share a row"])
    assert run.state.update == 0


def test_a_llama_learns_from_packed_rows():
    run = run_of(model_of("llama"))
    run.train()
    assert run.state.update == 1
