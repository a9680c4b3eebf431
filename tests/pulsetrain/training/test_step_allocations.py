"""The in-place step creates no tensor that a hand-written loop does not create."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events

MakeOptimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}
STEPS = 6


class Made(TorchDispatchMode):
    """Notes every tensor with memory of its own, by the operation that made it and its size in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.tensors[str(func), leaf.untyped_storage().nbytes()] += 1
        return made


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 4, generator=generator), torch.arange(5) % 3) for _ in range(STEPS)]


@pytest.fixture(params=sorted(OPTIMIZERS))
def optimizer(request: pytest.FixtureRequest) -> MakeOptimizer:
    return OPTIMIZERS[request.param]


def made_by_hand(optimizer: MakeOptimizer, max_norm: float | None) -> Counter[tuple[str, int]]:
    """Over the last three steps: the first ones create the optimizer's state."""
    module = model().train()
    steps = optimizer(module.parameters())
    watch = Made()
    for number, (inputs, targets) in enumerate(batches()):
        with watch if number >= STEPS - 3 else torch.enable_grad():
            loss = F.cross_entropy(module(inputs), targets)
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            steps.step()
            steps.zero_grad()
    return watch.tensors


def made_by_trainer(optimizer: MakeOptimizer, max_norm: float | None) -> Counter[tuple[str, int]]:
    module = model()
    config = TrainingConfig(max_epochs=1, schedule=None, device="cpu", clip_grad_norm=max_norm)
    trainer = Trainer(module, batches(), optimizer=optimizer(module.parameters()), config=config)
    watch = Made()
    watching = ExitStack()

    @trainer.on(Events.ITERATION_STARTED)
    def begin() -> None:
        if trainer.state.iteration > STEPS - 3:
            watching.enter_context(watch)

    trainer.add_event_handler(Events.ITERATION_COMPLETED, watching.close)
    trainer.train()
    return watch.tensors


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_step_makes_the_tensors_of_the_loop_written_by_hand_and_no_other(
    optimizer: MakeOptimizer, max_norm: float | None
) -> None:
    by_hand = made_by_hand(optimizer, max_norm)
    assert sum(by_hand.values()) > 20
    assert made_by_trainer(optimizer, max_norm) - by_hand == Counter()


def test_the_monitor_sees_a_tensor_that_is_made_in_a_step() -> None:
    with Made() as watch:
        first = torch.ones(3)
        _ = first.detach(), first.view(1, 3)
        _ = first + 1
    assert sum(watch.tensors.values()) == 2
