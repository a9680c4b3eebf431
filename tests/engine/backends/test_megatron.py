"""Megatron's GPT models: what two processes learn that hold the layers together is what one process learns."""

from __future__ import annotations

from typing import Any

import pytest

from pulsetrain.engine import Events
from tests.support.runs_of_megatron import GPT, LLAMA, alone, apart, make, needs_megatron, together, whole

pytestmark = needs_megatron

KINDS = {"gpt": GPT, "llama": LLAMA}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-6)])
def test_two_processes_learn_in_50_steps_what_one_learns(kind: str, dtype: str, bound: float):
    def run(rank: int, tensor: int) -> dict[str, Any]:
        trainer = make(KINDS[kind], tensor=tensor, dtype=dtype, max_epochs=None, max_iterations=50, learning_rate=1e-3)
        norms, losses = [], []
        trainer.on(Events.GRADIENTS_READY)(lambda engine, event: norms.append(float(event.payload.grad_norm)))
        trainer.on(Events.METRICS_LOGGED)(lambda engine, event: losses.append(event.payload.metrics["train/loss"]))
        history = trainer.train()
        state = trainer.state
        return {
            "weights": whole(trainer), "val": history["val/loss"], "norms": norms, "losses": losses,
            "counts": (state.samples, state.tokens, state.update),
        }  # fmt: skip

    one = alone(lambda rank: run(rank, 1))
    for each in together(lambda rank: run(rank, 2)):
        assert each["counts"] == one["counts"] == (400, 6400, 50)
        assert apart(each["weights"], one["weights"]) < bound
        for name in ("norms", "losses", "val"):
            assert max(abs(a - b) for a, b in zip(each[name], one[name], strict=True)) < bound
    assert one["losses"][-1] < one["losses"][0]
