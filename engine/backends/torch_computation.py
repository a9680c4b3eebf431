"""What the two torch backends share: the device, precision and settings, batches, and the loss of a model."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pulsetrain.engine.arrays import is_array
from pulsetrain.engine.backends.virtual_shares import prepare_shares
from pulsetrain.engine.data.virtual_loader import Shares
from pulsetrain.engine.distributed.plans import TensorPlan
from pulsetrain.engine.distributed.pretrained import fill, move
from pulsetrain.engine.distributed.ranks import DataRank, VirtualRanks, ranks
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.memory.activation_offload import offload_activations
from pulsetrain.engine.memory.activations import recompute_activations
from pulsetrain.engine.step.memory_settings import ActivationCheckpointing
from pulsetrain.engine.step.model_call import call
from pulsetrain.engine.step.precision import Precision
from pulsetrain.engine.step.protocols import BackendSettings, Strategy, TrainingBatch, TrainingStrategy, Tree, describe

if TYPE_CHECKING:
    from pulsetrain.engine.step.memory_settings import ActivationOffload, OptimizerOffload
    from pulsetrain.engine.step.precision import Scaler

__all__ = ["TorchComputation", "explain", "find_device", "given", "moved", "no_gradient", "not_empty"]


def find_device(device: str | torch.device = "auto") -> torch.device:
    """The device of that name; "auto" is the accelerator if there is one, else the CPU.

    Raises:
        ConfigurationError: there is no such device here; the message lists those that there are.

    >>> find_device("cpu")
    device(type='cpu')
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device == "auto":
        return accelerator or torch.device("cpu")
    present = ["cpu"]
    if accelerator is not None:
        present += [accelerator.type, *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))]
    try:
        found = torch.device(device)
    except RuntimeError:
        rule = f"no such device; choose one of {', '.join(present)}, or 'auto' for the accelerator if there is one"
        raise ConfigurationError(rule, device=device) from None
    if str(found) not in present and found.type != "meta":
        rule = f"is not on this machine; choose one of {', '.join(present)}, or 'auto'"
        raise ConfigurationError(rule, device=str(device))
    return found


class TorchComputation:
    """nn.Module on one device; its arguments are those of `TorchBackend`."""

    topology: Topology
    tensor_plan: TensorPlan | None
    precision: Precision
    scaler: Scaler | None
    compile: bool
    activation_checkpointing: str | ActivationCheckpointing | None
    clip_norm: float | None
    clip_value: float | None
    activation_offload: ActivationOffload | None
    optimizer_offload: OptimizerOffload | None
    settings: BackendSettings

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        precision: str | None = None,
        gradient_scale: float = 65536.0,
        compile: bool = False,
        activation_checkpointing: str | ActivationCheckpointing | None = None,
        topology: Topology | None = None,
        tensor_plan: TensorPlan | None = None,
        functional: bool = False,
    ) -> None:
        self.topology, self.tensor_plan = topology or Topology(), tensor_plan
        if tensor_plan is not None and self.topology.tensor == 1:
            raise ConfigurationError(
                "says how layers are split, and no process computes a part of one; set topology=Topology(tensor=2), or "
                "leave it out",
                "TorchBackend",
                tensor_plan=tensor_plan,
            )
        self.requested_device = device
        self.requested_precision = precision
        self.gradient_scale = gradient_scale
        self.requested_compile = compile
        self.requested_checkpointing = activation_checkpointing
        self._serves = False
        self._configure(BackendSettings())

    def configure(self, settings: BackendSettings) -> None:
        """Adopt what a trainer's configuration says and the constructor left open.

        Raises:
            ConfigurationError: the backend serves another trainer already, whose precision would change.
        """
        if self._serves:
            raise ConfigurationError(
                "TorchBackend: serves another trainer already; give each Trainer a backend of its own"
            )
        self._serves = True
        self._configure(settings)

    def _configure(self, settings: BackendSettings) -> None:
        self.device: torch.device = find_device(
            settings.device if self.requested_device is None else self.requested_device
        )
        name: Any = self.requested_precision or settings.precision
        self.precision = Precision(name, self.device, self.gradient_scale)
        self._autocast, self.scaler = self.precision.autocast, self.precision.scaler
        self.compile = self.requested_compile or settings.compile
        self.activation_checkpointing = self.requested_checkpointing or settings.activation_checkpointing
        self.clip_norm, self.clip_value = settings.clip_grad_norm, settings.clip_grad_value
        self.activation_offload, self.optimizer_offload = settings.activation_offload, settings.optimizer_offload
        if self.compile and self.activation_offload is not None:
            raise ConfigurationError(
                "torch.compile decides itself what is kept for the backward pass; leave one of the two out",
                "TrainingConfig",
                activation_offload=self.activation_offload,
                compile=True,
            )
        self._plain = (
            self.precision.dtype is None and self.activation_offload is None
        )  # the forward pass has no context
        self.settings = replace(
            settings,
            device=self.device,
            precision=self.precision.name,
            compile=self.compile,
            activation_checkpointing=self.activation_checkpointing,
        )
        self._moves = self.device.type != "cpu"

    def release(self) -> None:
        """Undo `configure`: the trainer could not be made."""
        self._serves = False

    @property
    def data_rank(self) -> DataRank:
        """Which share of each global batch this process computes: processes of one layer compute the same."""
        return self.topology.data_rank(ranks())

    @property
    def virtual_ranks(self) -> VirtualRanks | None:
        """Whose shares of each global batch this process computes, where virtual ranks share it."""
        return self.topology.virtual_ranks(ranks())

    @property
    def batch_device(self) -> torch.device:
        """The device itself: batches are moved before they are prepared."""
        return self.device

    def module_to_device(self, model: object) -> nn.Module:
        """The model on the device, compiled and with its activations recomputed if asked for."""
        module = self.prepare_module(model)
        fill(module, self.device)
        return module

    def prepare_module(self, model: object) -> nn.Module:
        """The same, but for parameters that have no values yet, see `pretrained`."""
        module = self.checked_module(model)
        move(module, self.device)
        if self.compile:
            module.compile()
        return module

    def checked_module(self, model: object) -> nn.Module:
        """The model where it is, with its activations recomputed if asked for."""
        if not isinstance(model, nn.Module):
            if isinstance(model, type) and issubclass(model, nn.Module):
                raise ArgumentTypeError(f"needs an object, such as {model.__name__}(...)", "TorchBackend", model=model)
            raise ArgumentTypeError("needs a torch.nn.Module", "TorchBackend", model=type(model))
        if self.scaler is not None and any(p.dtype is torch.float16 for p in model.parameters()):
            raise ConfigurationError(
                f"{type(model).__name__} has weights in float16, whose gradients cannot be scaled; leave the weights "
                "in float32, autocast computes in float16",
                "TorchBackend",
                precision="fp16",
            )
        if self.activation_checkpointing is not None:
            recompute_activations(model, self.activation_checkpointing)
        return model

    def to_device(self, batch: Tree) -> Tree:
        """The batch with every tensor on the device; copies from pinned memory do not wait."""
        return moved(batch, self.device) if self._moves else batch

    def prepare_batch(self, batch: Tree, strategy: Strategy) -> TrainingBatch:
        """The strategy's batch, on the device.

        Raises:
            ValueError: it has no samples, so its mean loss would be nan.
        """
        if type(batch) is Shares:
            return prepare_shares(batch, lambda share: self.prepare_batch(share, strategy), self.device)
        return not_empty(strategy.prepare_batch(moved(batch, self.device) if self._moves else batch))

    @contextmanager
    def computing(self, model: Tree) -> Iterator[None]:
        """Around the forward pass and the loss: autocast, and activations are moved if asked for."""
        if self.activation_offload is None:
            with self._autocast():
                yield
            return
        with self._autocast(), offload_activations(model, self.activation_offload):
            yield

    def forward(self, model: Tree, batch: TrainingBatch) -> Tree:
        """The model's outputs for the batch."""
        return call(model, batch.inputs)

    def outputs_and_loss(self, model: Tree, batch: TrainingBatch, strategy: TrainingStrategy) -> tuple[Tree, Any]:
        """The model's outputs, and what `compute_loss` returned; an error carries a note of what the batch holds."""
        try:
            if self._plain:
                outputs = self.forward(model, batch)
                return outputs, strategy.compute_loss(outputs, batch)
            with self.computing(model):
                outputs = self.forward(model, batch)
                return outputs, strategy.compute_loss(outputs, batch)
        except Exception as error:
            explain(error, batch, model)
            raise

    def to_torch(self, value: Tree) -> Tree:
        """The value itself."""
        return value


def not_empty(batch: TrainingBatch) -> TrainingBatch:
    """The batch itself, if it has samples.

    Raises:
        ValueError: it has none, so its mean loss would be nan.
    """
    if not batch.samples:
        raise ValueError(
            f"a batch of 0 samples, inputs {describe(batch.inputs)}: its mean loss would be nan; "
            "let the loader leave empty batches out"
        )
    return batch


def no_gradient() -> RuntimeError:
    """The error for a loss that nothing can learn from."""
    return RuntimeError(
        "the loss has no gradient: no parameter that requires one took part in it; "
        "check requires_grad and torch.no_grad() in the model and the loss"
    )


def explain(error: Exception, batch: TrainingBatch, model: object = None) -> None:
    """Add notes to an error: what the batch held, and the remedy for arrays of other libraries or another dtype."""
    if isinstance(model, nn.Module) and (where := _module_of(error, model)):
        error.add_note(f"in the module {where}")
    error.add_note(given(batch))
    if any(is_array(leaf) and not isinstance(leaf, Tensor) for leaf in tree_leaves((batch.inputs, batch.targets))):
        error.add_note(
            "TorchBackend computes with torch tensors: let the loader give torch.from_numpy(array), or "
            "torch.from_dlpack(array), or train with JaxBackend(), which takes all of them"
        )
    if isinstance(error, RuntimeError) and "type" in str(error) and isinstance(model, nn.Module):
        weights = next((each.dtype for each in model.parameters()), None)
        inputs = next((each.dtype for each in tree_leaves(batch.inputs) if isinstance(each, Tensor)), weights)
        if inputs != weights:
            error.add_note(f"the weights are {weights}: let the dataset return inputs.to({weights})")


def _module_of(error: Exception, model: nn.Module) -> str:
    """The innermost named module of the model in which the error was raised; "" if it was in none."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module) and id(module) in names:
            details = module.extra_repr() if not list(module.children()) else ""
            found = f"{names[id(module)]!r}, {type(module).__name__}{f'({details})' if details else ''}"
    return found


def given(batch: TrainingBatch) -> str:
    """What a model and a loss were given, for a note on an error.

    >>> given(TrainingBatch(torch.ones(2, 3), torch.tensor([0, 4]), samples=2))
    'given inputs float32 (2, 3), targets int64 (2,) from 0 to 4'
    """
    targets = "" if batch.targets is None else f", targets {describe(batch.targets, ranges=True)}"
    return f"given inputs {describe(batch.inputs, ranges=True)}{targets}"


def moved(value: Tree, device: torch.device) -> Tree:
    """The value with each tensor on the device; every mapping becomes a dict."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    return value
