"""Megatron's GPT models: what two processes learn that hold the layers together is what one process learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pulsetrain.engine import Events
from tests.support.runs_of_megatron import GPT, LLAMA, alone, apart, make, needs_megatron, texts, together, whole

pytestmark = needs_megatron

KINDS = {"gpt": GPT, "llama": LLAMA}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-6)])
@pytest.mark.slow
def test_two_processes_learn_in_50_steps_what_one_learns(kind: str, dtype: str, bound: float):
    compare(kind, dtype, bound, 50, tensor=2, processes=2)


def test_two_processes_learn_in_a_few_steps_what_one_learns():
    compare("llama", "float64", 1e-6, 6, tensor=2, processes=2)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_two_copies_share_the_batches_out(kind: str, accumulate: int):
    compare(kind, "float32", 1e-4, 8, tensor=1, processes=2, accumulate=accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_two_copies_of_two_processes_learn_what_one_learns(kind: str, accumulate: int):
    compare(kind, "float32", 1e-4, 8, tensor=2, processes=4, accumulate=accumulate)


def compare(kind: str, dtype: str, bound: float, steps: int, *, tensor: int, processes: int, **config: Any) -> None:
    def run(rank: int, tensor: int) -> dict[str, Any]:
        data = DataLoader(texts(20), 8, shuffle=True)  # the last batch has 4 rows
        settings = {"max_epochs": None, "max_iterations": steps, "learning_rate": 1e-3, **config}
        trainer = make(KINDS[kind], tensor=tensor, dtype=dtype, data=data, **settings)
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
    for each in together(lambda rank: run(rank, tensor), processes):
        assert each["counts"] == one["counts"]
        assert apart(each["weights"], one["weights"]) < bound
        for name in ("norms", "losses", "val"):
            assert max(abs(a - b) for a, b in zip(each[name], one[name], strict=True)) < bound
    assert one["losses"][-1] < one["losses"][0]


def test_weights_are_drawn_by_the_seed_of_the_configuration():
    def run(rank: int, tensor: int, seed: int) -> Any:
        torch.manual_seed(100 + 10 * tensor + rank)
        trainer = make(LLAMA, tensor=tensor, seed=seed)
        return whole(trainer), torch.rand(2).tolist()

    one, _ = alone(lambda rank: run(rank, 1, 7))
    other, _ = alone(lambda rank: run(rank, 1, 8))
    found = together(lambda rank: run(rank, 2, 7))
    assert [weights for weights, _ in found] == [one, one]
    assert apart(one, other) > 0.01
    assert found[0][1] != found[1][1]  # the process's own generator was left alone
