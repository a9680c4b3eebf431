"""Sequence parallelism of Megatron, which needs CUDA: here its code runs on the CPU, which it takes for the device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pulsetrain.engine import Events, MegatronBackend, MegatronGPT
from pulsetrain.engine.backends import megatron
from tests.support.runs_of_megatron import (
    GPT,
    LLAMA,
    alone,
    apart,
    errors_of,
    make,
    needs_megatron,
    texts,
    together,
    whole,
)

pytestmark = [
    needs_megatron,
    # collectives that Megatron calls by their earlier names
    pytest.mark.filterwarnings(r"ignore:`torch\.distributed\.\w+` is deprecated:FutureWarning"),
]


def splitting() -> MegatronBackend:
    """In a process of its own: a backend whose Megatron takes the CPU for its device and draws nothing."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    megatron._SPLITS_SEQUENCES = ("cpu",)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    CudaRNGStatesTracker.add = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    return MegatronBackend("cpu", tensor=2, sequence_parallel=True)


@pytest.mark.parametrize("kind", [GPT, LLAMA], ids=["gpt", "llama"])
def test_two_processes_that_split_sequences_learn_what_one_learns(kind: dict[str, Any]):
    def run(rank: int, backend: MegatronBackend | None) -> Any:
        norms: list[float] = []
        trainer = make(kind, backend=backend, max_epochs=3, learning_rate=1e-3)
        trainer.on(Events.GRADIENTS_READY)(lambda engine, event: norms.append(float(event.payload.grad_norm)))
        return trainer.train(), norms, whole(trainer)

    history, norms, weights = alone(lambda rank: run(rank, None))
    for found in together(lambda rank: run(rank, splitting())):
        assert found[0]["val/loss"] == pytest.approx(history["val/loss"], abs=1e-5)
        assert found[1] == pytest.approx(norms, abs=1e-5)
        assert apart(found[2], weights) < 1e-4


def test_rows_that_cannot_be_split_and_dropout_are_refused():
    def run(rank: int, options: dict[str, Any]) -> None:
        make(GPT, backend=splitting(), **options).train()

    for error in errors_of(lambda rank: run(rank, {"data": [texts(4, 16)]})):
        assert "MegatronGPT: 15 positions cannot be split over 2 processes" in error
    for error in errors_of(lambda rank: run(rank, {"model": MegatronGPT(**{**GPT, "dropout": 0.1})})):
        assert "MegatronGPT(dropout=0.1): no checkpoint has the random state" in error
