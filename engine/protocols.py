"""What a training step takes and gives, and what a strategy and a backend have to offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

__all__ = [
    "AlternatingStrategy",
    "Backend",
    "ModelState",
    "TrainingBatch",
    "TrainingResult",
    "TrainingStrategy",
    "describe",
]


@dataclass(frozen=True, slots=True)
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

    @property
    def size(self) -> int | Tensor:
        """What the batch's mean loss is a mean over: its weight, else its tokens, else its samples."""
        return self.weight if self.weight is not None else self.tokens or self.samples


@dataclass(frozen=True, slots=True)
class ModelState:
    """Everything that a training step changes: weights, optimizer state, and what they belong to."""

    weights: Mapping[str, Any]
    optimizer: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingResult(Mapping[str, Tensor]):
    """What a step found out: `metrics` holds device scalars, "loss" at least; `state` is new on the pure path.

    It is a mapping of its metrics, which is how pytorch-ignite's handlers read it.
    """

    metrics: Mapping[str, Tensor]
    state: ModelState | None = None
    diagnostics: Mapping[str, Any] | None = None

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
    its device); and a flag `check_values`, which a trainer sets until its first update has been made, so that batches
    may be looked at closely without waiting for the device ever after.
    """

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        """What the loader gave, on the device already, as model inputs and targets."""
        ...

    def compute_loss(self, outputs: Any, batch: TrainingBatch) -> Tensor:
        """The loss to differentiate: shape (), a mean over `batch.size`."""
        ...

    def compute_metrics(self, outputs: Any, batch: TrainingBatch) -> Mapping[str, Tensor]:
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


class Backend(Protocol):
    """What computes the gradients and applies them."""

    skips_updates: bool
    """Whether an update may be left out on the device (fp16 that overflowed), so that there is something to ask for."""

    def configure(
        self, device: Any, precision: str, compile: bool = False, activation_checkpointing: str | None = None
    ) -> None:
        """Take over a trainer's settings, before anything else is asked of the backend."""
        ...

    def place(self, model: Any) -> Any:
        """The model, where the backend computes."""
        ...

    def to_device(self, batch: Any) -> Any:
        """The loader's batch, where the backend computes."""
        ...

    def forward_backward(
        self, model: Any, batch: TrainingBatch, strategy: TrainingStrategy, scale: float | Tensor
    ) -> Tensor:
        """Add `scale` times the loss's gradients to the parameters'; returns the loss, shape (), detached."""
        ...

    def unscale_gradients(self, optimizer: Any) -> None:
        """Bring gradients to their true size, where `forward_backward` gave them another."""
        ...

    def backward(self, loss: Tensor, scale: float | Tensor = 1.0, parameters: Sequence[Tensor] | None = None) -> Tensor:
        """Add `scale` times the loss's gradients to the parameters', all or those given; returns the loss, detached."""
        ...

    def losses(self, model: Any, batch: TrainingBatch, strategy: AlternatingStrategy) -> Iterator[tuple[str, Tensor]]:
        """The strategy's losses with the names of their optimizers, each computed when it is asked for."""
        ...

    def apply_gradients(self, optimizer: Any, skip: Tensor | None = None) -> None:
        """One optimizer step, left out on the device where `skip` is true; the gradients are gone afterwards."""
        ...

    def discard_gradients(self, optimizer: Any) -> None:
        """No optimizer step: a batch failed. The gradients are gone afterwards."""
        ...

    def skipped_updates(self) -> int:
        """How many updates were left out; it may wait for the device."""
        ...

    def begin_run(self) -> None:
        """A run begins from its start: what counts updates begins at 0."""
        ...

    def eval_step(self, model: Any, batch: TrainingBatch, strategy: TrainingStrategy) -> tuple[Any, Tensor]:
        """The model's outputs and the loss, without gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on beside weights and optimizer, such as a gradient scale."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        ...


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
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item, ranges=ranges)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)) and len(value) <= 8:
        return f"({', '.join(describe(item, ranges=ranges) for item in value)})"
    return type(value).__name__
