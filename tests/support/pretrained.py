"""Folders with small models of transformers, and trainers that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Topology, TorchBackend, pretrained
from pulsetrain.engine.strategies import PretrainStrategy

VOCABULARY = 32
TOPOLOGIES = {
    "one": None,
    "copies": Topology(),
    "shards": Topology(shard=2),
    "offloaded": Topology(shard=2, offload=True),
    "tensor": Topology(tensor=2),
    "shards of tensor": Topology(shard=2, tensor=2),
    "copies of shards": Topology(replicate=2, shard=2),
}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A model with random weights, as save_pretrained writes it, in files of at most 6 KB."""
    import transformers

    made: dict[str, Any] = {
        "llama": lambda: transformers.LlamaConfig(**_SIZES),
        "tied": lambda: transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY, n_layer=2, n_head=4, n_embd=16, n_positions=8, bos_token_id=0, eos_token_id=1,
            attn_pdrop=0, resid_pdrop=0, embd_pdrop=0,
        ),
        "renamed": lambda: transformers.GPTNeoXConfig(**_SIZES),  # whose files have another name for the head
        "scaled": lambda: transformers.Gemma2Config(**_SIZES, head_dim=4),  # by a buffer that is not saved
    }  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(made[family](), dtype=dtype)
    for name, each in model.named_parameters():
        if "bias" in name:  # else they are 0, as what has not been read may be
            torch.nn.init.normal_(each, std=0.1)
    model.save_pretrained(folder, max_shard_size="6KB")
    return folder


def tensors(model: Any) -> dict[str, Tensor]:
    """Of a model: parameters and buffers, by all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def backend_of(layout: str) -> TorchBackend:
    made: TorchBackend = TorchBackend("cpu", topology=TOPOLOGIES[layout])
    return made


def trainer_of(folder: Path, layout: str, *handlers: Any, model: Any = None, **config: Any) -> Trainer:
    rows = torch.randint(2, VOCABULARY, (12, 8), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(rows), 4, shuffle=True)
    settings = {"optimizer": "sgd", "learning_rate": 0.1, "max_epochs": 2, "seed": 3, **config}
    return Trainer(
        pretrained(folder) if model is None else model,
        loader,
        strategy=PretrainStrategy(),
        backend=backend_of(layout),
        config=TrainingConfig(**settings),
        handlers=handlers,
    )
