"""Small models in PyTorch and JAX, their data, and a trainer for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import JaxBackend, SupervisedStrategy
from pulsetrain.engine.backends.core import TrainerCore
from pulsetrain.engine.step.protocols import BackendSettings, ModelState


def regression_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))


def pairs(rows: int = 40, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(rows, 1, generator=generator))


def loader(rows: int = 40, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(pairs(rows), batch_size=batch_size, **{"shuffle": True, **options})


class Keeping(nn.Linear):
    """It notes what it was given to load: a class, and the attributes of that object."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.given: list[Any] = []

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        state = super().state_dict(*arguments, **options)
        state.note = "own"
        return state

    def load_state_dict(self, state: Any, *arguments: Any, **options: Any) -> Any:
        self.given.append((type(state), sorted(vars(state)) if isinstance(state, OrderedDict) else None))
        return super().load_state_dict(state, *arguments, **options)


class Tied(nn.Module):
    """A weight with two names, and a buffer; inputs of shape (batch, 4), outputs (batch, 1)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
        self.layers[1].weight = self.layers[0].weight
        self.head = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers[1](self.layers[0](inputs))) * self.scale
        return output


class Tokens(nn.Module):
    """A language model of one table: logits of the next token from the present one."""

    def __init__(self, vocabulary: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def trainer(config: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    rate = {} if "optimizer" in arguments else {"learning_rate": 0.01}
    settings = {"optimizer": "sgd", **rate, "log_every_n_steps": 5, "seed": 0, **(config or {})}
    arguments.setdefault("strategy", SupervisedStrategy("mse"))
    model = arguments.pop("model", None) or regression_model()
    data = arguments.pop("train_loader", None)
    return Trainer(model, loader() if data is None else data, config=TrainingConfig(**settings), **arguments)


# -------------------------------------------------------------- the same model in pytorch and in each kind of jax model


IN, WIDE, OUT = 4, 8, 3


def torch_model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(IN, WIDE), nn.Tanh(), nn.Linear(WIDE, OUT))


def function_model(weights: Mapping[str, Tensor]) -> Any:
    """A function over a dict of arrays."""
    import jax.numpy as jnp

    def mlp(weights: Any, inputs: Any) -> Any:
        return jnp.tanh(inputs @ weights["0.weight"].T + weights["0.bias"]) @ weights["2.weight"].T + weights["2.bias"]

    return mlp, {name: tensor.numpy() for name, tensor in weights.items()}


def nnx_model(weights: Mapping[str, Tensor], dropout: float = 0.0, norm: bool = False) -> Any:
    from flax import nnx

    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.first, self.last = nnx.Linear(IN, WIDE, rngs=rngs), nnx.Linear(WIDE, OUT, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDE, momentum=0.9, rngs=rngs) if norm else None
            self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

        def __call__(self, inputs: Any) -> Any:
            hidden = self.first(inputs)
            hidden = nnx.tanh(hidden if self.norm is None else self.norm(hidden))
            return self.last(hidden if self.dropout is None else self.dropout(hidden))

    model = Net(nnx.Rngs(0))
    for name, layer in (("0", model.first), ("2", model.last)):
        layer.kernel[...] = weights[f"{name}.weight"].T.numpy()
        layer.bias[...] = weights[f"{name}.bias"].numpy()
    return model


def linen_model(weights: Mapping[str, Tensor], dropout: float = 0.0, norm: bool = False) -> Any:
    """A pair (module, variables)."""
    import jax
    from flax import linen

    class Net(linen.Module):  # type: ignore[misc]
        @linen.compact
        def __call__(self, inputs: Any, train: bool = False) -> Any:
            hidden = linen.Dense(WIDE)(inputs)
            if norm:
                hidden = linen.BatchNorm(use_running_average=not train, momentum=0.9)(hidden)
            hidden = linen.tanh(hidden)
            if dropout:
                hidden = linen.Dropout(dropout, deterministic=not train)(hidden)
            return linen.Dense(OUT)(hidden)

    module = Net()
    variables = module.init(jax.random.key(0), jax.numpy.zeros((1, IN)))
    dense = {
        f"Dense_{number}": {
            "kernel": jax.numpy.asarray(weights[f"{name}.weight"].T.numpy()),
            "bias": jax.numpy.asarray(weights[f"{name}.bias"].numpy()),
        }
        for number, name in enumerate(("0", "2"))
    }
    return module, {**variables, "params": {**variables["params"], **dense}}


KINDS = {"function": function_model, "nnx": nnx_model, "linen": linen_model}


def batches(count: int, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Pairs of inputs and their classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, rows, IN, generator=generator)
    return list(zip(inputs, (inputs @ torch.randn(IN, OUT, generator=generator)).argmax(-1), strict=True))


def core_of(strategy: Any = None, **settings: Any) -> TrainerCore:
    return TrainerCore(JaxBackend("cpu"), strategy or SupervisedStrategy(), BackendSettings(device="cpu", **settings))


def bits(backend: Any, state: Any) -> dict[str, Any]:
    """A state's leaves by their places and paths, arrays as bytes."""
    parts = {"weights": state.weights, "optimizer": state.optimizer} if isinstance(state, ModelState) else {"": state}
    return {
        f"{part}/{path}": leaf.numpy().tobytes() if isinstance(leaf, Tensor) else leaf
        for part, tree in parts.items()
        for path, leaf in backend.flat(tree).items()
    }
