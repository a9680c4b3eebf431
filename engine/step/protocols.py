"""What a training step takes and gives, and what a strategy and a backend have to offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from pulsetrain.engine.arrays import describe_array, is_array

__all__ = [
    "AlternatingStrategy",
    "Backend",
    "BackendSettings",
    "GradientInfo",
    "ModelState",
    "Optimizer",
    "TrainingBatch",
    "TrainingResult",
    "TrainingStrategy",
    "bind_strategy",
    "describe",
]


@dataclass(frozen=True, init=False)
class TrainingBatch:
    """One batch as the model and the loss want it.

    `inputs` goes to the model: a tensor as its only argument, a tuple as positional, a mapping as keyword arguments.
    """

    inputs: Any
    targets: Any
    samples: int  # rows of the batch, a host number
    tokens: int = 0  # predicted tokens, a host number; 0 where there are none
    # what the loss is a mean over, where that is neither; perhaps of shape () on the device, and then not waited for
    weight: int | Tensor | None = None

    # one is made in every step: this takes a third of what the constructor of a frozen dataclass takes
    def __init__(
        self, inputs: Any, targets: Any, samples: int, tokens: int = 0, weight: int | Tensor | None = None
    ) -> None:
        fields = self.__dict__
        fields["inputs"], fields["targets"], fields["samples"] = inputs, targets, samples
        fields["tokens"], fields["weight"] = tokens, weight

    @property
    def size(self) -> int | Tensor:
        """What the batch's mean loss is a mean over: its weight, else its tokens, else its samples."""
        return self.weight if self.weight is not None else self.tokens or self.samples


@dataclass(frozen=True, slots=True)
class ModelState:
    """Everything that a training step changes: weights, optimizer state, and what they belong to.

    As values, `weights` holds two pytrees of arrays: "parameters", which learn, and "buffers", which a forward pass
    may change besides; `optimizer` is what an `Optimizer` made of the parameters. In place (TorchBackend by default)
    they are the module and the torch optimizer themselves.
    """

    weights: Any
    optimizer: Any
    # "step": updates made; "learning_rate": of the next one, unless "schedule" says another, by `get_lr(step)`
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GradientInfo:
    """What a forward and a backward pass found, or several whose gradients were added up."""

    loss: Any  # of the last of them, shape (), detached
    gradients: Any = None  # a pytree like the parameters; None in place, where each parameter holds its own
    buffers: Any = None  # as the forward passes left them; None in place
    grad_norm: Any = None  # their total L2 norm, shape (); None where it was not asked for
    batches: int = 1  # that were added up


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """What a trainer's configuration says to its backend; the names are those of TrainingConfig."""

    device: Any = "auto"
    precision: str = "fp32"
    compile: bool = False
    activation_checkpointing: str | None = None
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    seed: int = 0


@dataclass(frozen=True, init=False, eq=False)
class TrainingResult(Mapping[str, Tensor]):
    """What a step found out: `metrics` holds device scalars, "loss" at least; `state` is new on the pure path.

    It is a mapping of its metrics, which is how pytorch-ignite's handlers read it.
    """

    metrics: Mapping[str, Tensor]
    state: ModelState | None = None
    diagnostics: Mapping[str, Any] | None = None

    def __init__(  # as that of TrainingBatch
        self,
        metrics: Mapping[str, Tensor],
        state: ModelState | None = None,
        diagnostics: Mapping[str, Any] | None = None,
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
    """What is optimised.

    A strategy may have more: `derive_metrics(loss)`, what follows from a mean loss (a float, or a tensor that stays on
    its device); a flag `check_values`, which a trainer sets until its first update has been made, so that batches may
    be looked at closely without waiting for the device ever after; `check_batch(outputs, batch)`, which does so where
    the loss is compiled: the batch is still of torch tensors then, and the outputs have shape and dtype alone;
    `bind(model, backend)`, which is called once before training with the model as a torch module, so that the strategy
    may learn its limits, or keep a copy; and `state_dict()` with `load_state_dict(state)`, which checkpoints keep.
    """

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        """What the loader gave, in torch tensors (on the device already, if torch computes), as inputs and targets."""
        ...

    def compute_loss(self, outputs: Any, batch: TrainingBatch) -> Any:
        """The loss to differentiate, of the backend's arrays: shape (), a mean over `batch.size`."""
        ...

    def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> Mapping[str, Any]:
        """Further means over `batch.size` that validation reports, each of shape ()."""
        ...


@runtime_checkable
class AlternatingStrategy(Protocol):
    """What is optimised where several modules learn in turns, each by an optimizer of its own: a GAN, actor and critic.

    It may have the further parts of a TrainingStrategy, too.
    """

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        """What the loader gave, on the device already, as the losses want it."""
        ...

    def compute_losses(self, model: Any, batch: TrainingBatch) -> Iterable[tuple[str, Tensor]]:
        """Pairs of an optimizer's name and the loss for it, shape (); a generator, most simply.

        Each is differentiated with respect to that optimizer's parameters alone, and its update made, before the next
        pair is asked for: a later loss sees the weights that an earlier one has changed.
        """
        ...


@runtime_checkable
class Optimizer(Protocol):
    """An optimizer as a pure function, as optax has them: nothing that it is given changes."""

    def init(self, params: Any) -> Any:
        """The state that goes with such parameters."""
        ...

    def update(self, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """What is to be added to the parameters, and the new state."""
        ...


class Backend(Protocol):
    """What computes gradients and applies them, from a state to the next.

    Whoever passes a state to `train_step` or `apply_gradients` goes on with the one that comes back: in place it is the
    same. Where states are values (`in_place` is False) the one that was given stays what it is; but with `donate` its
    memory may be used for the new one. Those have more for a trainer (to take states apart and show
    them): begin with `engine.FunctionalBackend`, which has all of it.
    """

    in_place: bool
    """Whether states are the objects that hold the weights; else they are values."""

    skips_updates: bool
    """Whether an update may be left out on the device (fp16 that overflowed), so that there is something to ask for."""

    @property
    def device(self) -> Any:
        """Where the tensors of `to_torch` lie, a torch.device."""
        ...

    def configure(self, settings: BackendSettings) -> None:
        """Take over a trainer's settings, before anything else is asked of the backend."""
        ...

    def place(self, model: Any) -> Any:
        """In place: the module, where the backend computes, before its optimizer is made."""
        ...

    def init(self, model: Any, optimizer: Any) -> ModelState:
        """The state of a model before its first update."""
        ...

    def prepare_batch(self, batch: Any, strategy: Any) -> TrainingBatch:
        """The loader's batch as the strategy wants it, where the backend computes."""
        ...

    def forward_backward(
        self,
        state: ModelState,
        batch: TrainingBatch,
        strategy: TrainingStrategy,
        scale: Any = 1.0,
        waiting: GradientInfo | None = None,
    ) -> GradientInfo:
        """The loss, and `scale` times its gradients, added to those that wait for the same update."""
        ...

    def all_reduce_gradients(self, gradients: GradientInfo) -> GradientInfo:
        """The gradients' mean over all processes; on one device they are it."""
        ...

    def finish_gradients(
        self, state: ModelState, gradients: GradientInfo, correction: Any = 1.0, measure: bool = True
    ) -> GradientInfo:
        """The gradients in their true size, times `correction`, and with `measure` their norm."""
        ...

    def apply_gradients(
        self, state: ModelState, gradients: GradientInfo, skip: Any = None, donate: bool = False
    ) -> ModelState:
        """Clip, and make one update, left out on the device where `skip` is true; the gradients are gone afterwards."""
        ...

    def train_step(
        self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy, donate: bool = False
    ) -> TrainingResult:
        """All of it in one, for a batch that makes an update by itself; `state` of the result is the next."""
        ...

    def eval_step(self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy) -> tuple[Any, Any]:
        """The model's outputs, and the loss and the strategy's metrics by name, without gradients."""
        ...

    def discard_gradients(self, state: ModelState) -> None:
        """No update: a batch failed. The gradients are gone afterwards."""
        ...

    def to_torch(self, value: Any) -> Any:
        """Every array in it as a torch tensor, without a copy where that is possible."""
        ...

    def environment(self) -> dict[str, Any]:
        """What the bits of its results depend on beside torch: versions and switches, as plain values."""
        ...

    def begin_run(self) -> None:
        """A run begins from its start: what counts updates begins at 0."""
        ...

    def skipped_updates(self) -> int:
        """How many updates were left out; it may wait for the device."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on beside the state, such as a gradient scale."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        ...


def bind_strategy(strategy: Any, model: Any, backend: Any) -> None:
    """Let a strategy see the model, if it asks for that."""
    bind = getattr(strategy, "bind", None)
    if callable(bind):
        bind(model, backend)


def describe(value: Any, *, ranges: bool = False) -> str:
    """Dtype and shape of every tensor in it, for messages: `float32 (8, 4)`.

    Args:
        ranges: also between which values whole numbers on the host lie; other devices are not asked, for one that has
            failed answers nothing any more.
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
