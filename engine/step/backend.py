"""What a backend and its model store have to offer, so that a training run needs to know nothing else of them.

A backend computes: gradients from a batch, and the next state from gradients. A model store holds the state that a run
trains, shows it as a torch module and a torch optimizer, and takes and puts back copies of it. The backend makes the
store, in place or by value; its callers do not see the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.distributed.ranks import DataRank, VirtualRanks, ranks
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import (
    AlternatingStrategy,
    BackendSettings,
    GradientInfo,
    ModelState,
    Optimizer,
    Strategy,
    TrainingBatch,
    TrainingResult,
    TrainingStrategy,
    Tree,
)

__all__ = ["Backend", "InPlaceBackend", "ModelStore", "OptimizerRequest", "ValueBackend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRequest:
    """The optimizer that a run asks for. Backends that compute in place use `build`, the others the rest."""

    build: Callable[[nn.Module], torch.optim.Optimizer]
    chosen: object = "adamw"  # a name, or an `Optimizer`
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    options: Mapping[str, object] = field(default_factory=dict)


class Backend(Protocol):
    """Computes gradients and applies them, from one state to the next; the methods with a body are a default.

    Callers of `train_step` and `apply_gradients` continue with the state that is returned. A backend in place returns
    the state it was given. Others leave it unchanged, except that with `donate` they may reuse its memory.
    """

    skips_updates: bool = False
    """Whether an update may be skipped on the device (an fp16 overflow), so that `skipped_updates` has to be asked."""

    builds_model: bool = False
    """Whether the model is a description, of which `make_store` makes what each process holds."""

    device: torch.device
    """The device of the tensors that `to_torch` returns."""

    @property
    def data_rank(self) -> DataRank:
        """Which share of each global batch this process computes; by default, each process has one."""
        return DataRank(*ranks())

    @property
    def virtual_ranks(self) -> VirtualRanks | None:
        """Whose shares of each global batch this process computes, where virtual ranks share it; see `Topology`."""
        return None

    @property
    def batch_device(self) -> torch.device:
        """The device of the tensors that a strategy's `prepare_batch` is given."""

    def configure(self, settings: BackendSettings) -> None:
        """Adopt a trainer's settings; called before everything else."""

    def release(self) -> None:
        """Undo `configure`: the trainer could not be made, and another one may use the backend."""

    def make_store(self, model: object, optimizer: OptimizerRequest, strategy: Strategy) -> ModelStore:
        """The store of a model before its first update."""

    def prepare_batch(self, batch: object, strategy: Strategy) -> TrainingBatch:
        """The loader's batch as the strategy wants it, on the device that computes."""

    def forward_backward(
        self,
        state: ModelState,
        batch: TrainingBatch,
        strategy: TrainingStrategy,
        scale: Array = 1.0,
        waiting: GradientInfo | None = None,
    ) -> GradientInfo:
        """The loss and `scale` times its gradients, added to those that wait for the same update."""

    def all_reduce_gradients(self, gradients: GradientInfo) -> GradientInfo:
        """The mean of the gradients over all processes; on one device, the gradients themselves."""
        return gradients

    def finish_gradients(
        self, state: ModelState, gradients: GradientInfo, correction: Array = 1.0, measure: bool = True
    ) -> GradientInfo:
        """The unscaled gradients times `correction` and, with `measure`, their norm."""

    def apply_gradients(
        self, state: ModelState, gradients: GradientInfo, skip: Tensor | None = None, donate: bool = False
    ) -> ModelState:
        """Clip and make one update, skipped on the device where `skip` is true; consumes the gradients."""

    def train_step(
        self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy, donate: bool = False
    ) -> TrainingResult:
        """All of the above for a batch that makes an update by itself; the result's `state` is the next state."""

    def eval_step(
        self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy
    ) -> tuple[object, Mapping[str, Array]]:
        """The model's outputs, and the loss and the strategy's metrics by name, without gradients."""

    def discard_gradients(self, state: ModelState) -> None:
        """Drop the gradients of a batch that failed."""
        return

    def to_torch(self, value: Tree) -> Tree:
        """The value with every array as a torch tensor, without a copy where possible."""

    def environment(self) -> dict[str, object]:
        """What its results depend on besides torch: versions and switches, as plain values."""
        return {}

    def begin_run(self) -> None:
        """Start counting skipped updates from 0."""
        return

    def skipped_updates(self) -> int:
        """How many updates were skipped; may wait for the device."""
        return 0

    def state_dict(self) -> dict[str, object]:
        """What the next step depends on besides the model's state, such as a gradient scale."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned."""


@runtime_checkable
class InPlaceBackend(Backend, Protocol):
    """A backend whose states are a torch module and its optimizer themselves."""

    def init(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> ModelState:
        """The state of a module and one of its optimizers."""

    def to_device(self, batch: Tree) -> Tree:
        """The batch with every tensor on the device."""

    def losses(
        self, state: ModelState, batch: TrainingBatch, strategy: AlternatingStrategy
    ) -> Iterator[tuple[str, Tensor]]:
        """The strategy's losses and the names of their optimizers, each computed when it is asked for."""

    def backward(
        self, loss: Tensor, scale: float | Tensor = 1.0, optimizer: torch.optim.Optimizer | None = None
    ) -> Tensor:
        """Add `scale` times the loss's gradients to the optimizer's parameters; returns the loss, detached."""


@runtime_checkable
class ValueBackend(Backend, Protocol):
    """A backend whose states are values: pytrees of arrays that a step leaves unchanged."""

    optimizer: Optimizer
    """The optimizer of the last `init`."""

    def init(self, model: object, optimizer: Optimizer, learning_rate: float | Tensor | None = None) -> ModelState:
        """The model's weights, copied, and the optimizer's state for them."""

    def create_optimizer(
        self, model: object, name: str, learning_rate: float | Tensor, weight_decay: float, **options: object
    ) -> Optimizer:
        """The optimizer of that name for this backend's arrays."""
        raise ConfigurationError(
            f"{type(self).__name__}: makes no optimizer from a name ({name!r}); pass one with init(params) and "
            "update(grads, opt_state, params)"
        )

    def check(self, state: ModelState) -> None:
        """Raise where a step could not be computed from the state."""

    def copied(self, state: ModelState) -> ModelState:
        """The same state in memory of its own."""

    def memory(self) -> int | None:
        """Bytes that the device holds; None if it does not report them."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None

    def module_view(self, model: object, weights: Tree) -> ModuleView:
        """A torch module that shows the weights."""

    def outputs(self, weights: Tree, inputs: Tree) -> Tree:
        """The model's outputs for torch tensors, as in evaluation.

        Args:
            inputs: a tuple of positional arguments, or a mapping by name.
        """
        raise ConfigurationError(f"{type(self).__name__}: its model cannot be called as a torch module; call it itself")

    def publish(self, weights: Tree) -> None:
        """Put the weights into the user's own model, if that holds any."""
        return

    def flat(self, tree: Tree) -> dict[str, Tensor]:
        """The leaves by their paths, "blocks/0/weight", arrays as torch tensors."""

    def tensors(self, tree: Tree) -> list[Tensor]:
        """The values of `flat`."""
        return list(self.flat(tree).values())

    def unflat(self, like: Tree, saved: Mapping[str, object], place: str) -> Tree:
        """The inverse of `flat`, with the structure of `like`; raises CheckpointError at other paths or shapes."""


class ModuleView(Protocol):
    """Shows weights that are values as a torch module."""

    @property
    def module(self) -> nn.Module:
        """The module."""

    def show(self, weights: Tree) -> None:
        """Show new weights."""

    def seen(self, weights: Tree) -> Tree:
        """The weights with whatever was written into the module since they were shown."""


class ModelStore(Protocol):
    """The state that a run trains, as values and as a torch module with its optimizer.

    What is written into the module or the optimizer's groups takes effect in the next step.
    """

    module: nn.Module
    """The model, or a view of its weights."""

    optimizer: torch.optim.Optimizer
    """The optimizer, or a view of its state."""

    state: ModelState
    """The newest state."""

    waiting: GradientInfo | None = None
    """Gradients held as values for the next update; None where the parameters hold them."""

    @property
    def eval_state(self) -> ModelState:
        """The newest state for forward passes without gradients, which need no other process."""
        return self.state

    def part(self, name: str) -> ModelState:
        """The state that one of several optimizers updates; "" is the whole."""

    def refresh(self) -> None:
        """Several processes train: take into account which parameters learn now, before each step."""
        return

    def commit(self, state: ModelState) -> None:
        """An update was made: continue from this state, which nobody else holds."""
        return

    def hold(self, gradients: GradientInfo) -> None:
        """Keep the gradients of a batch for the next update, and the buffers as its forward pass left them."""
        return

    def discard(self) -> None:
        """Drop the gradients held for the next update."""

    def show_gradients(self, gradients: GradientInfo, receive: Callable[[], object]) -> GradientInfo:
        """Call `receive` while the parameters hold these gradients; returns them as they are afterwards."""
        receive()
        return gradients

    def publish(self) -> None:
        """Training pauses: the user's own model gets the weights if it is a different object."""
        return

    def reset(self) -> None:
        """A run begins from iteration 0: random draws that depend on the number of the update start again."""
        return

    def gradients(self) -> dict[str, Tensor]:
        """The gradients held for the next update, by name, for a checkpoint."""

    def load_gradients(self, saved: Mapping[str, Tensor], batches: int) -> Callable[[], None]:
        """Check what `gradients` returned, of so many batches; the call that is returned puts them back.

        Raises:
            CheckpointError: they are not of these weights.
        """

    def snapshot(self) -> ModelState:
        """A copy of the state that further training does not change."""

    def restore(self, state: ModelState) -> None:
        """Continue from a snapshot, which stays unchanged. Nothing changes if it does not fit.

        Raises:
            TypeError: it is not a state of such a store.
            ConfigurationError, CheckpointError: it is of another model or another optimizer.
        """

    def rollback(self, *others: object) -> AbstractContextManager[None]:
        """Undo what happens inside the block to the model, its optimizer, the backend and waiting gradients.

        Tensors are restored in place. Inside, no gradients wait.

        Args:
            others: objects whose attributes are restored as well; see `Undo`.
        """
