"""What a training step needs: estimated without allocating it, and measured in two ways, in MB.

    python examples/memory.py                  # about two minutes on 2 CPU cores; needs transformers and peft
    python examples/memory.py "gpt adamw"      # one row, which needs neither
Each row is measured in a process of its own, whose heap returns pages at once: by the count of torch's allocator, and
by how much the resident memory of the process grows. `pulsetrain memory CONFIG --measure` does the first two for a run.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pulsetrain.engine import PretrainStrategy, SupervisedStrategy, TorchBackend
from pulsetrain.engine.memory.estimate import estimate, measure
from pulsetrain.engine.memory.setup import Setup
from pulsetrain.engine.optimizers import create_optimizer

ROWS = [f"{model} {training}" for model in ("gpt", "llama", "convolutions") for training in ("adamw", "sgd", "lora")]
ADAPTED = {"gpt": ["queries_keys_values", "mix"], "llama": ["q_proj", "v_proj"], "convolutions": ["3", "7"]}


def network(name: str) -> Any:
    if name == "gpt":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from examples.byte_lm.model import ByteGPT

        return ByteGPT(layers=8, width=512, heads=8, context=256)
    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "vocab_size": 8000}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1, stride=2), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def setup(row: str) -> Setup:
    name, training = row.split()
    model = network(name)
    if training == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=ADAPTED[name]))
    optimizer = create_optimizer(model.train(), "sgd" if training == "sgd" else "adamw", 1e-3)
    if name == "convolutions":
        parts: Any = SupervisedStrategy("cross_entropy"), (torch.randn(32, 3, 96, 96), torch.randint(0, 10, (32,)))
    else:
        parts = PretrainStrategy(), torch.randint(0, 256, (8, 257))
        parts[0].bind(model)
    return Setup(model=model, optimizer=optimizer, strategy=parts[0], backend=TorchBackend("cpu"), batch=parts[1])


def kilobytes(name: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])


def measured_here(row: str) -> str:
    estimated, before = estimate(setup(row)).peak, kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    allocated, resident = measure(setup(row)).peak, (kilobytes("VmHWM") - before) * 1024
    return f"{row:<22}{estimated / 1e6:>12.1f}{allocated / 1e6:>12.1f}{resident / 1e6:>12.1f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        print(measured_here(sys.argv[2]))
        sys.exit()
    print(f"{'MB':<22}{'estimated':>12}{'allocator':>12}{'resident':>12}", flush=True)
    alone = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "KINETO_LOG_LEVEL": "99"}
    for row in sys.argv[1:] or ROWS:
        subprocess.run([sys.executable, __file__, "--here", row], env={**os.environ, **alone}, check=True)
