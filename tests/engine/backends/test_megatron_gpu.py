"""Megatron's models on a GPU learn what they learn on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pulsetrain.engine import MegatronBackend
from tests.support.runs_of_megatron import GPT, LLAMA, apart, make, needs_megatron, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    needs_megatron,
]


@pytest.mark.parametrize("kind", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_model_learns_on_a_gpu_what_it_learns_on_the_cpu(kind: dict[str, Any]):
    found = []
    for device in ("cpu", "cuda"):
        trainer = make(kind, backend=MegatronBackend(device), max_epochs=3, learning_rate=1e-3)
        trainer.train()
        found.append(whole(trainer))
    assert apart(*found) < 1e-3
