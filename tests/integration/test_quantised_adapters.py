"""Adapters learn over a quantised model: its weights stay, and checkpoints hold the adapters alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Every
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.handlers import Checkpointer

transformers = pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")
peft = pytest.importorskip("peft", reason="peft is not there: pip install peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what the packages say of each other
]


def settings(kind: str) -> Any:
    """How the weights are quantised; skips the test where the package for it is missing."""
    package = "torchao" if kind == "torchao" else "bitsandbytes"
    pytest.importorskip(package, reason=f"{package} is not there: pip install {package} accelerate")
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return transformers.TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "8 bits":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


ROWS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))


def trainer_of(folder: Path, kind: str, count: int, *handlers: Any) -> Trainer:
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings(kind), device_map="cpu"
    )
    torch.manual_seed(1)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, adapters)
    config = TrainingConfig(max_epochs=count, learning_rate=0.02, optimizer="adamw", seed=0)
    return Trainer(model, [{"input_ids": ROWS}], strategy="pretrain", config=config, handlers=handlers)


@torch.no_grad()
def of_base(trainer: Trainer) -> Any:
    with trainer.model.disable_adapter():  # type: ignore[operator]  # of a model with adapters
        return trainer.model(ROWS).logits


@pytest.mark.parametrize("kind", ["torchao", "8 bits", "4 bits"])
def test_adapters_learn_over_a_quantised_model(kind: str, tmp_path: Path) -> None:
    settings(kind)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    whole = trainer_of(tmp_path / "model", kind, 12)
    types = {f"{type(each).__name__} {each.dtype}" for each in whole.model.parameters()}
    assert any("int8" in each.lower() for each in types), types
    # of another one: on the CPU, bitsandbytes packs weights of 4 bits for inference, and computes no gradients then
    before = of_base(trainer_of(tmp_path / "model", kind, 12))
    losses = whole.train()["train/loss"]
    assert losses[-1] < losses[0] - 0.05
    torch.testing.assert_close(of_base(whole), before, rtol=0, atol=1e-5)

    saver = lambda: Checkpointer(tmp_path / "run", Every(epochs=4))  # noqa: E731
    trainer_of(tmp_path / "model", kind, 8, saver()).train()
    (*_, newest) = CheckpointManager(tmp_path / "run" / "checkpoints").valid()
    saved = load_checkpoint(newest)["model"]
    assert len(saved) == 2 * 2 * 2
    assert all("lora_" in name for name in saved)
    resumed = trainer_of(tmp_path / "model", kind, 12, saver())
    assert resumed.train(resume="latest")["train/loss"] == losses
    for name, each in resumed.model.state_dict().items():
        assert torch.equal(each, whole.model.state_dict()[name]), name
