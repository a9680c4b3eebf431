"""What the memory of small runs depends on: the example GPT, a Llama and a convolutional network."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from examples.byte_lm.model import ByteGPT
from pulsetrain.engine import PretrainStrategy, SupervisedStrategy, TorchBackend
from pulsetrain.engine.memory.setup import Setup
from pulsetrain.engine.optimizers import create_optimizer
from pulsetrain.engine.step.protocols import BackendSettings

MODELS = ("gpt", "llama", "convolutions")  # and "small gpt"
_ADAPTED = {
    "small gpt": ["queries_keys_values", "mix"],
    "gpt": ["queries_keys_values", "mix"],
    "llama": ["q_proj", "v_proj"],
    "convolutions": ["0", "3", "7"],
}


def setup_of(
    model: nn.Module | str = "gpt",
    optimizer: str = "adamw",
    *,
    batch: Any = None,
    strategy: Any = None,
    lora: bool = False,
    accumulate: int = 1,
    options: dict[str, Any] | None = None,
    device: str = "cpu",
    **settings: Any,
) -> Setup:
    """As a Trainer would make it.

    Args:
        model: one of MODELS, or a module, which needs a batch and a strategy.
        options: of the optimizer.
        settings: of the backend.
    """
    torch.manual_seed(0)
    name = model if isinstance(model, str) else ""
    if isinstance(model, str):
        model, batch, strategy = _named(model)
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=_ADAPTED[name]))
    backend = TorchBackend()
    backend.configure(BackendSettings(device=device, **settings))
    model = backend.module_to_device(model.train())
    if hasattr(strategy, "bind"):
        strategy.bind(model, backend)
    made = create_optimizer(model, optimizer, 1e-3, **(options or {}))
    return Setup(model=model, optimizer=made, strategy=strategy, backend=backend, batch=batch, accumulate=accumulate)


def _named(name: str) -> tuple[nn.Module, Any, Any]:
    if name == "gpt":
        return ByteGPT(), torch.randint(0, 256, (8, 129)), PretrainStrategy(unit="byte")
    if name == "small gpt":
        return ByteGPT(layers=2, width=64, context=64), torch.randint(0, 256, (4, 65)), PretrainStrategy(unit="byte")
    if name == "llama":
        import transformers

        sizes = transformers.LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=1000, max_position_embeddings=256,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(sizes), torch.randint(0, 1000, (4, 129)), PretrainStrategy()
    images = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
    return convolutions(), images, SupervisedStrategy("cross_entropy")


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def linear(width: int = 256, bias: bool = False, optimizer: str = "adamw", rows: int = 8, **arguments: Any) -> Setup:
    """One layer, whose sizes are easy to count."""
    batch = torch.ones(rows, width), torch.zeros(rows, width)
    model = nn.Linear(width, width, bias=bias)
    return setup_of(model, optimizer, batch=batch, strategy=SupervisedStrategy("mse"), **arguments)
