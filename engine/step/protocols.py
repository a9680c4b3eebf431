"""What a training step takes and returns, and what a strategy has to offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from pulsetrain.engine.arrays import Array, describe_array, is_array
from pulsetrain.engine.step.memory_settings import ActivationCheckpointing, ActivationOffload, OptimizerOffload

__all__ = [
    "AlternatingStrategy",
    "BackendSettings",
    "BindsModel",
    "DerivesMetrics",
    "GradientInfo",
    "ModelState",
    "Number",
    "Optimizer",
    "Strategy",
    "TrainingBatch",
    "TrainingResult",
    "TrainingStrategy",
    "Tree",
    "describe",
]

Number = TypeVar("Number", float, Tensor)

Tree = Any
"""A pytree of arrays: dicts, lists, tuples and named tuples, whose structure the model or the optimizer decides."""


@dataclass(frozen=True, init=False)
class TrainingBatch:
    """One batch as the model and the loss want it.

    `inputs` goes to the model: a tensor as its only argument, a tuple as positional, a mapping as keyword arguments.

    >>> batch = TrainingBatch(torch.ones(8, 4), torch.zeros(8), samples=8)
    >>> batch.size, TrainingBatch(batch.inputs, batch.targets, samples=8, tokens=96).size
    (8, 96)
    """

    inputs: Tree
    targets: Tree
    samples: int  # rows of the batch, a host number
    tokens: int = 0  # predicted tokens, a host number; 0 where there are none
    # what the loss is a mean over, if neither; may have shape () on the device, where nothing waits for it
    weight: int | Tensor | None = None

    # every step makes one, and this takes a third of the time of a frozen dataclass's own constructor
    def __init__(
        self, inputs: Tree, targets: Tree, samples: int, tokens: int = 0, weight: int | Tensor | None = None
    ) -> None:
        fields = self.__dict__
        fields["inputs"], fields["targets"], fields["samples"] = inputs, targets, samples
        fields["tokens"], fields["weight"] = tokens, weight

    @property
    def size(self) -> int | Tensor:
        """What the batch's loss is a mean over: its weight, else its tokens, else its samples."""
        return self.weight if self.weight is not None else self.tokens or self.samples


@dataclass(frozen=True, slots=True)
class ModelState:
    """Everything that a training step changes: weights and optimizer state.

    As values, `weights` holds two pytrees: "parameters", which learn, and "buffers", which a forward pass may change;
    `optimizer` is what `Optimizer.init` made of the parameters. In place (TorchBackend by default) they are the module
    and the torch optimizer themselves.

    States that are values are pytrees of torch, whose leaves are their tensors. Numbers that the members of an ensemble
    share, such as "step", are not leaves: `tree_map(lambda *each: torch.stack(each), *states)` stacks states for
    `torch.vmap`.

    >>> from pulsetrain.engine import SupervisedStrategy, TorchBackend, TrainerCore
    >>> core = TrainerCore(TorchBackend("cpu", functional=True), SupervisedStrategy("mse"))
    >>> state = core.init(nn.Linear(2, 1), "sgd", learning_rate=0.1)
    >>> list(state.weights), list(state.weights["parameters"]), state.metadata["learning_rate"]
    (['parameters', 'buffers'], ['weight', 'bias'], 0.1)
    """

    weights: Tree
    optimizer: Tree
    # "step": updates made; "learning_rate": of the next update, unless there is a "schedule" with `get_lr(step)`; None
    # for the one in the optimizer's state
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GradientInfo:
    """The result of a forward and a backward pass, or of several whose gradients were added up."""

    loss: Array  # of the last batch, shape (), detached
    gradients: Tree = None  # like the parameters; None in place, where each parameter holds its own
    buffers: Tree = None  # as the forward passes left them; None in place
    grad_norm: Array = None  # total L2 norm, shape (); None if it was not measured
    batches: int = 1  # how many were added up


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """The settings of a TrainingConfig that concern its backend, under the same names."""

    device: str | torch.device = "auto"
    precision: str = "fp32"
    compile: bool = False
    activation_checkpointing: str | ActivationCheckpointing | None = None
    activation_offload: ActivationOffload | None = None
    optimizer_offload: OptimizerOffload | None = None
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    log_strategy_metrics: bool = False
    seed: int = 0


@dataclass(frozen=True, init=False, eq=False)
class TrainingResult(Mapping[str, Tensor]):
    """The result of a step: `metrics` holds device scalars, at least "loss"; `state` is the next state.

    It is a mapping of its metrics, which is how pytorch-ignite's handlers read it.

    >>> result = TrainingResult({"loss": torch.tensor(0.5)})
    >>> dict(result), result.loss.item()
    ({'loss': tensor(0.5000)}, 0.5)
    """

    metrics: Mapping[str, Tensor]
    state: ModelState | None = None
    diagnostics: Mapping[str, int | None] | None = None

    def __init__(  # fast, as that of TrainingBatch
        self,
        metrics: Mapping[str, Tensor],
        state: ModelState | None = None,
        diagnostics: Mapping[str, int | None] | None = None,
    ) -> None:
        fields = self.__dict__
        fields["metrics"], fields["state"], fields["diagnostics"] = metrics, state, diagnostics

    def __getitem__(self, name: str) -> Tensor:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    @property
    def loss(self) -> Tensor:
        """The loss, shape (), detached, on the device."""
        return self.metrics["loss"]


@runtime_checkable
class TrainingStrategy(Protocol):
    """What is optimised. A strategy is constant: a step does not change it.

    A strategy may have more:

    - `derive_metrics(loss)`: see `DerivesMetrics`.
    - a keyword `check` of `prepare_batch` and of `compute_loss`: true for the first batches of a run and for the first
      batch of a validation set, when values may be checked wherever they are. Checking waits for the device.
    - `check_batch(outputs, batch)`: the same for backends that compile the loss. The batch has torch tensors, the
      outputs only shape and dtype.
    - `bind(model, backend)`: see `BindsModel`.
    - `needs_gradients`: true where `compute_loss` or `compute_metrics` differentiates, as with respect to the inputs:
      PyTorch then records the operations of an evaluation, too, which is otherwise computed without gradients. At log
      points, `compute_metrics` comes before the backward pass of the loss, and has to keep the graph for it.
    - `state_dict()` and `load_state_dict(state)`: saved in checkpoints.
    """

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        """The loader's batch, in torch tensors (on the device if torch computes), as inputs and targets."""

    def compute_loss(self, outputs: Any, batch: TrainingBatch) -> Array:
        """The loss to differentiate, of the backend's arrays: shape (), a mean over `batch.size`.

        It may also return a pair of the loss and a mapping with its parts by name, such as a "kl", each of shape ().
        Training and validation report them as "train/kl" and "val/kl"; the loss alone is differentiated.
        """

    def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> Mapping[str, Array]:
        """Further means over `batch.size`, each of shape ().

        Validation reports them over its set, training those of the batches at its log points, from the outputs that the
        loss is computed from.
        """


@runtime_checkable
class AlternatingStrategy(Protocol):
    """What is optimised where several modules learn in turn, each with its own optimizer: a GAN, actor and critic.

    It may have the optional parts of a TrainingStrategy, too.
    """

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        """The loader's batch, on the device, as the losses want it."""

    def compute_losses(self, model: nn.ModuleDict, batch: TrainingBatch) -> Iterable[tuple[str, Tensor]]:
        """Pairs of an optimizer's name and its loss, shape (); most simply a generator.

        Each loss is differentiated with respect to that optimizer's parameters, and its update is made, before the next
        pair is asked for: a later loss sees the weights that an earlier one has changed.
        """


Strategy = TrainingStrategy | AlternatingStrategy


@runtime_checkable
class BindsModel(Protocol):
    """A strategy that is shown the model.

    It is refused for a model of which each process holds a part, unless it has an attribute `takes_shards` that is
    true: then it calls the model as a whole, in all processes alike. For a pipeline, the attribute is
    `takes_pipelines`: the strategy calls the model without gradients alone, and makes no copy of it.
    """

    def bind(self, model: nn.Module, backend: object) -> None:
        """Called once before training, with the model as a torch module."""


@runtime_checkable
class DerivesMetrics(Protocol):
    """A strategy with metrics that follow from its loss."""

    def derive_metrics(self, loss: Number) -> Mapping[str, Number]:
        """What follows from a mean loss: a float, or a tensor that stays on its device."""


@runtime_checkable
class Optimizer(Protocol):
    """An optimizer as a pure function, as in optax: it does not change its arguments."""

    def init(self, params: Tree) -> Tree:
        """The optimizer's state for these parameters."""

    def update(self, grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """What is to be added to the parameters, and the next state."""


def describe(value: object, *, ranges: bool = False) -> str:
    """Dtype and shape of every tensor in the value, for messages.

    Args:
        ranges: also the smallest and the largest integer. Only on the host: a device that has failed does not answer.

    >>> describe({"x": torch.ones(8, 4), "y": (torch.arange(3), "text")}, ranges=True)
    '{x: float32 (8, 4), y: (int64 (3,) from 0 to 2, str)}'
    """
    if isinstance(value, Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        whole = not value.dtype.is_floating_point and not value.dtype.is_complex
        if ranges and whole and value.device.type == "cpu" and value.numel():
            text += f" from {value.min().item()} to {value.max().item()}"
        return text
    if is_array(value):
        return describe_array(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item, ranges=ranges)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)) and len(value) <= 8:
        return f"({', '.join(describe(item, ranges=ranges) for item in value)})"
    return type(value).__name__
