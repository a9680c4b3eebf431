"""The same small run on each backend."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Every, JaxBackend, SupervisedStrategy, TorchBackend
from pulsetrain.handlers import EMA, Checkpointer, EarlyStopping, EventRecorder
from tests.faults.everything import bits, leaves
from tests.plugins.numpy_backend import Linear, NumpyBackend
from tests.support.models import loader, regression_model

# An epoch has 10 batches, an update 2: a save after 5 is inside an update, after 10 at an epoch's end.
SETTINGS = {
    "max_epochs": 4,
    "learning_rate": 0.05,
    "accumulate": 2,
    "clip_grad_norm": 1.0,
    "schedule": "cosine",
    "warmup_steps": 3,
    "log_every_n_steps": 3,
    "seed": 7,
    "device": "cpu",
}
# no validation is enough better than the first: the third epoch is the last, on every backend
PATIENCE = {"patience": 2, "min_delta": 1000.0}

needs_jax = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("jax", "optax", "flax")), reason="jax, optax or flax is not installed"
)


@dataclass(frozen=True)
class On:
    """A backend and a model for it, of 4 features; where there are layers, with batch norm and dropout."""

    name: str
    backend: Callable[[], Any]
    model: Callable[[], Any]
    optimizer: str = "adamw"


def _torch_model() -> nn.Module:
    return regression_model(dropout=0.3)


def nnx_model() -> Any:
    """The same in JAX."""
    from flax import nnx

    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.first, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.dropout, self.last = nnx.Dropout(0.3, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, inputs: Any) -> Any:
            return self.last(self.dropout(nnx.relu(self.norm(self.first(inputs)))))

    return Net(nnx.Rngs(0))


def function_model() -> tuple[Any, dict[str, Any]]:
    """A function in JAX that draws from the key of each step."""

    def net(weights: Any, inputs: Any, train: bool, key: Any) -> Any:
        import jax

        hidden = jax.nn.relu(inputs @ weights["first"])
        if train:
            hidden = hidden * jax.random.bernoulli(key, 0.7, hidden.shape) / 0.7
        return hidden @ weights["last"]

    return net, {"first": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8), "last": np.full((8, 1), 0.1, "f4")}


def _linear_model() -> Linear:
    return Linear(np.full((1, 4), 0.1, np.float32), np.zeros(1, np.float32))


TORCH = On("torch", TorchBackend, _torch_model)
FUNCTIONAL = On("torch-functional", lambda: TorchBackend(functional=True), _torch_model)
NUMPY = On("numpy", NumpyBackend, _linear_model, optimizer="sgd")
JAX = On("jax", JaxBackend, nnx_model)
JAX_FUNCTION = On("jax-function", JaxBackend, function_model, optimizer="sgd")

BACKENDS = [
    *(pytest.param(on, id=on.name) for on in (TORCH, FUNCTIONAL, NUMPY)),
    pytest.param(JAX, id=JAX.name, marks=needs_jax),
]


def make(
    on: On,
    folder: Path,
    *handlers: Any,
    every: Every | None = None,
    background: bool = False,
    **settings: Any,
) -> Trainer:
    """Always the same run on one backend.

    Args:
        folder: of its log and its checkpoints.
        handlers: in front of those that it has in any case.
        every: when to save; by default every 5 iterations.
        background: save beside the training.
        settings: other ones than in `SETTINGS`.
    """
    return Trainer(
        on.model(),
        loader(),
        loader(12, shuffle=False),
        strategy=SupervisedStrategy("mse"),
        backend=on.backend(),
        config=TrainingConfig(**{**SETTINGS, "optimizer": on.optimizer, **settings}),
        handlers=[
            *handlers,
            EMA(decay=0.9),
            EarlyStopping(**PATIENCE),
            EventRecorder(folder),
            Checkpointer(
                folder, every=every or Every(iterations=5), background=background, keep_last=100, metric="val/loss"
            ),
        ],
    )


def saved(folder: Path, iteration: int) -> Path:
    """The checkpoint of an iteration."""
    return folder / "checkpoints" / f"{iteration:09d}-checkpoint"


def whole_state(trainer: Trainer) -> dict[str, Any]:
    """Everything that a checkpoint would contain, by path and as bits."""
    return comparable(trainer.checkpoint_state())


def comparable(state: Any) -> dict[str, Any]:
    """A checkpoint's state, by path and as bits; without the log's run, its resumes, and how many events these fire."""
    own = tuple(f"EventRecorder/state/{name}" for name in ("seq", "run", "seams", "starts"))
    return {path: bits(value) for path, value in leaves(state) if not path.endswith(own)}


@contextmanager
def programs_kept() -> Iterator[None]:
    """One thread for torch, and XLA programs compiled once for all trainers, which saves seconds each.

    Without JAX, only the former.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _kept_in(_folder()) if find_spec("jax") is not None else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)


@cache
def _folder() -> str:
    """A cache for all tests of this process."""
    folder = tempfile.mkdtemp(prefix="pulsetrain-xla-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def _kept_in(folder: str) -> Iterator[None]:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    wanted = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # it reads its folder only once
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
