"""Trainers of small Megatron models, for one process and for several that hold the layers together."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Every, MegatronBackend, MegatronGPT, PretrainStrategy
from pulsetrain.engine.backends import megatron_llama
from pulsetrain.engine.backends.megatron_models import without_advice
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.support.ranks import Ended, in_processes

__all__ = [
    "GPT",
    "LLAMA",
    "alone",
    "apart",
    "errors_of",
    "make",
    "needs_megatron",
    "resuming",
    "texts",
    "together",
    "whole",
]

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core: pip install 'pulsetrain[megatron]'"
)

_SIZES = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 64, "context": 16}
GPT: dict[str, Any] = {**_SIZES}
LLAMA: dict[str, Any] = {**_SIZES, "groups": 2, "feed_forward": 48}


def texts(rows: int = 24, length: int = 17, seed: int = 1) -> Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def make(
    kind: dict[str, Any],
    *handlers: Any,
    tensor: int = 1,
    dtype: str = "float32",
    strategy: Any = None,
    data: Any = None,
    val: Any = None,
    backend: Any = None,
    model: Any = None,
    **config: Any,
) -> Trainer:
    """By default two epochs of three batches of 8 rows, with AdamW and clipping."""
    described = MegatronGPT(**kind, dtype=dtype) if kind is GPT else megatron_llama(**kind, dtype=dtype)
    settings = {"max_epochs": 2, "optimizer": "adamw", "learning_rate": 1e-2, "clip_grad_norm": 1.0, "seed": 3}
    return Trainer(
        described if model is None else model,
        DataLoader(texts(), 8, shuffle=True) if data is None else data,
        [texts(8, seed=2)] if val is None else val,
        strategy=strategy or PretrainStrategy(),
        backend=backend or MegatronBackend("cpu", tensor=tensor),
        config=TrainingConfig(**{**settings, "log_every_n_steps": 1, "progress": False, **config}),
        handlers=list(handlers),
    )


def resuming(run: Path, kind: dict[str, Any], *handlers: Any, **options: Any) -> Trainer:
    """One that saves each second iteration and records."""
    saver = Checkpointer(run, every=Every(iterations=2), keep_last=20)
    return make(kind, saver, EventRecorder(run), *handlers, **options)


def errors_of(body: Any, world: int = 2) -> list[str]:
    """The tracebacks of the processes, which run the body of their rank."""
    return [each.error for each in _run(body, world)]


def _run(body: Any, world: int) -> list[Ended]:
    with without_advice():  # takes seconds, which each process would need by itself
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model  # noqa: F401
    return in_processes(body, world)


def together(body: Any, world: int = 2) -> list[Any]:
    """What the processes return, which run the body of their rank."""
    ended = _run(body, world)
    assert [each.error for each in ended] == [""] * world, next(each.error for each in ended if each.error)
    return [each.value for each in ended]


def alone(body: Any) -> Any:
    """What a process returns that runs the body by itself: Megatron's groups of this one would reach later tests."""

    def run(rank: int) -> Any:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        return body(rank)

    return together(run, 1)[0]


def whole(trainer: Trainer) -> dict[str, list[Any]]:
    """The weights, and those that are split as a whole; all processes call this."""
    gathered = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in trainer.model.state_dict().items()
    }
    return {name: each.tolist() for name, each in gathered.items()}


def apart(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> float:
    """The largest difference of two sets of weights."""
    assert a.keys() == b.keys()
    pairs = [(torch.tensor(a[name]).double(), torch.tensor(b[name]).double()) for name in a]
    return max(float((one - other).abs().max()) for one, other in pairs)
