"""Training steps in PyTorch, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pulsetrain.engine.arrays import is_array
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.activations import recompute_activations
from pulsetrain.engine.step.gradients import clip_grad_norm, clip_grad_value, grad_norm, scale_grads
from pulsetrain.engine.step.model_call import call
from pulsetrain.engine.step.precision import Precision
from pulsetrain.engine.step.protocols import (
    AlternatingStrategy,
    BackendSettings,
    GradientInfo,
    ModelState,
    TrainingBatch,
    TrainingResult,
    TrainingStrategy,
    describe,
)

__all__ = ["TorchBackend", "find_device"]


def find_device(device: str | torch.device = "auto") -> torch.device:
    """The device of that name; "auto" is the accelerator where there is one, else the CPU.

    Raises:
        ConfigurationError: there is no such device here; the message lists those that are.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device == "auto":
        return accelerator or torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"no such device; {str(error).splitlines()[0]}", device=device) from None
    present = ["cpu"]
    if accelerator is not None:
        present += [accelerator.type, *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))]
    if str(found) not in present and found.type != "meta":
        raise ConfigurationError(f"not on this machine, which has {', '.join(present)}; or 'auto'", device=str(device))
    return found


class TorchBackend:
    """nn.Module and torch.optim on one device.

    In place, where a state's weights are the module and its optimizer torch's, nothing is made anew in a step that the
    loop written by hand would not make. With `functional=True` it is a `FunctionalTorchBackend`, whose states are
    values.

    Args:
        device: "auto", "cpu", "cuda", "cuda:1", "mps" ...
        precision: "fp32", "bf16" or "fp16" (autocast; fp16 with a gradient scale); None leaves it to the configuration.
        gradient_scale: what fp16 multiplies gradients by at first, so that small ones do not vanish.
        compile: run the model through torch.compile.
        activation_checkpointing: names of the modules whose activations are not kept but computed again in the backward
            pass, as "blocks.*"; None leaves it to the configuration.
        functional: compute with values, by torch.func.

    Raises:
        ConfigurationError: the device is not there, or cannot compute in this precision.
    """

    in_place = True

    def __new__(  # the arguments of __init__, for whoever asks for the signature
        cls,
        device: str | torch.device | None = None,
        *,
        precision: str | None = None,
        gradient_scale: float = 65536.0,
        compile: bool = False,
        activation_checkpointing: str | None = None,
        functional: bool = False,
    ) -> TorchBackend:
        if functional and cls is TorchBackend:
            from pulsetrain.engine.backends.torch_functional import FunctionalTorchBackend

            cls = FunctionalTorchBackend
        return super().__new__(cls)

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        precision: str | None = None,
        gradient_scale: float = 65536.0,
        compile: bool = False,
        activation_checkpointing: str | None = None,
        functional: bool = False,
    ) -> None:
        self.requested_device = device
        self.requested_precision = precision
        self.gradient_scale = gradient_scale
        self.requested_compile = compile
        self.requested_checkpointing = activation_checkpointing
        self._serves = False
        self._configure(BackendSettings())

    def configure(self, settings: BackendSettings) -> None:
        """Take over what a trainer's configuration says and the constructor left open.

        Raises:
            ConfigurationError: the backend serves another trainer already; its precision would change under it.
        """
        if self._serves:
            raise ConfigurationError(
                "TorchBackend: serves another trainer already; give each Trainer a backend of its own"
            )
        self._serves = True
        self._configure(settings)

    def _configure(self, settings: BackendSettings) -> None:
        self.device = find_device(settings.device if self.requested_device is None else self.requested_device)
        name: Any = self.requested_precision or settings.precision
        self.precision = Precision(name, self.device, self.gradient_scale)
        self._autocast, self.scaler = self.precision.autocast, self.precision.scaler
        self.skips_updates = self.scaler is not None
        self.compile = self.requested_compile or settings.compile
        self.activation_checkpointing = self.requested_checkpointing or settings.activation_checkpointing
        self.clip_norm, self.clip_value = settings.clip_grad_norm, settings.clip_grad_value
        self._plain = self.precision.dtype is None  # nothing round the forward pass
        self._bare = self._plain and self.clip_norm is None and self.clip_value is None
        self._moves = self.device.type != "cpu"

    def release(self) -> None:
        """The trainer that configured it was not made: another one may."""
        self._serves = False

    def place(self, model: nn.Module) -> nn.Module:
        """The model on the device; its activations recomputed and itself compiled where asked for."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"TorchBackend: model={type(model).__name__}: needs a torch.nn.Module")
        if self.scaler is not None and any(p.dtype is torch.float16 for p in model.parameters()):
            raise ConfigurationError(
                f"{type(model).__name__} has weights in float16, whose gradients cannot be scaled; leave the weights "
                "in float32, autocast computes in float16",
                "TorchBackend",
                precision="fp16",
            )
        if self.activation_checkpointing is not None:
            recompute_activations(model, self.activation_checkpointing)
        model.to(self.device)
        if self.compile:
            model.compile()
        return model

    def init(self, model: Any, optimizer: Any) -> ModelState:
        """The module and its optimizer themselves."""
        return ModelState(model, optimizer)

    def to_device(self, batch: Any) -> Any:
        """Every tensor in the batch on the device; copies do not wait where the loader pins its memory."""
        return _move(batch, self.device) if self._moves else batch

    def prepare_batch(self, batch: Any, strategy: Any) -> TrainingBatch:
        """The strategy's batch, on the device.

        Raises:
            ValueError: it has no samples, so that its mean loss would be nan.
        """
        prepared: TrainingBatch = strategy.prepare_batch(_move(batch, self.device) if self._moves else batch)
        if not prepared.samples:
            raise ValueError(
                f"a batch of 0 samples, inputs {describe(prepared.inputs)}: its mean loss would be nan; "
                "let the loader leave empty batches out"
            )
        return prepared

    def forward(self, model: nn.Module, batch: TrainingBatch) -> Any:
        """What the model gives for the batch's inputs."""
        return call(model, batch.inputs)

    def _evaluate(self, model: Any, batch: TrainingBatch, strategy: TrainingStrategy) -> tuple[Any, Tensor]:
        try:
            if self._plain:
                outputs = self.forward(model, batch)
                return outputs, strategy.compute_loss(outputs, batch)
            with self._autocast():
                outputs = self.forward(model, batch)
                return outputs, strategy.compute_loss(outputs, batch)
        except Exception as error:
            _explain(error, batch)
            raise

    def forward_backward(
        self,
        state: ModelState,
        batch: TrainingBatch,
        strategy: TrainingStrategy,
        scale: float | Tensor = 1.0,
        waiting: GradientInfo | None = None,
    ) -> GradientInfo:
        """Add `scale` times the loss's gradients to the parameters'."""
        _, loss = self._evaluate(state.weights, batch, strategy)
        return GradientInfo(self.backward(loss, scale))

    def backward(self, loss: Tensor, scale: float | Tensor = 1.0, optimizer: Any = None) -> Tensor:
        """Add `scale` times the loss's gradients to all parameters', or one optimizer's; gives the loss, detached."""
        scaled = loss if type(scale) is float and scale == 1.0 else loss * scale
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        if not scaled.requires_grad:
            raise no_gradient()
        scaled.backward(inputs=None if optimizer is None else _learning(optimizer))
        return loss.detach()

    def losses(
        self, state: ModelState, batch: TrainingBatch, strategy: AlternatingStrategy
    ) -> Iterator[tuple[str, Tensor]]:
        """The strategy's losses with the names of their optimizers, each computed when it is asked for."""
        losses = iter(strategy.compute_losses(state.weights, batch))
        while True:
            try:
                with self._autocast():  # not round the yield: whoever takes the loss computes outside
                    found = next(losses, None)
            except Exception as error:
                _explain(error, batch)
                raise
            if found is None:
                return
            yield found

    def all_reduce_gradients(self, gradients: GradientInfo) -> GradientInfo:
        """As they are: there is one process."""
        return gradients

    def finish_gradients(
        self, state: ModelState, gradients: GradientInfo, correction: float | Tensor = 1.0, measure: bool = True
    ) -> GradientInfo:
        """Bring the gradients to their true size, times `correction`, and measure their norm."""
        self.precision.unscale(state.optimizer)
        if type(correction) is not float or correction != 1.0:
            scale_grads(_learning(state.optimizer), correction)
        return replace(gradients, grad_norm=grad_norm(_learning(state.optimizer))) if measure else gradients

    def apply_gradients(
        self, state: ModelState, gradients: GradientInfo, skip: Tensor | None = None, donate: bool = False
    ) -> ModelState:
        """One optimizer step, left out where fp16 has overflowed or `skip` is true; the gradients are gone afterwards.

        `skip`, of shape (), is not waited for where the optimizer's kernel can leave a step out on the device.
        """
        optimizer = state.optimizer
        if self.clip_norm is not None:
            clip_grad_norm(_learning(optimizer), self.clip_norm, gradients.grad_norm)
        if self.clip_value is not None:
            clip_grad_value(_learning(optimizer), self.clip_value)
        self.precision.step(optimizer, skip)
        optimizer.zero_grad(set_to_none=True)
        return state

    def train_step(
        self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy, donate: bool = False
    ) -> TrainingResult:
        """One update over one batch, in place."""
        if self._bare:
            return self._bare_step(state, batch, strategy)
        gradients = self.forward_backward(state, batch, strategy)
        metrics = {"loss": gradients.loss}
        if self.scaler is not None or self.clip_norm is not None:
            gradients = self.finish_gradients(state, gradients, measure=self.clip_norm is not None)
            if gradients.grad_norm is not None:
                metrics["grad_norm"] = gradients.grad_norm
        return TrainingResult(metrics, self.apply_gradients(state, gradients))

    def _bare_step(self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy) -> TrainingResult:
        """The same, where nothing stands between forward, backward and update: calls count here."""
        optimizer, inputs = state.optimizer, batch.inputs
        try:
            outputs = state.weights(inputs) if isinstance(inputs, Tensor) else self.forward(state.weights, batch)
            loss = strategy.compute_loss(outputs, batch)
        except Exception as error:
            _explain(error, batch)
            raise
        if not loss.requires_grad:
            raise no_gradient()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return TrainingResult({"loss": loss.detach()}, state)

    def discard_gradients(self, state: ModelState) -> None:
        """No optimizer step: a batch failed. The gradients are gone afterwards."""
        state.optimizer.zero_grad(set_to_none=True)
        self.precision.discard()

    def begin_run(self) -> None:
        """Count skipped updates from 0."""
        self.precision.begin_run()

    def skipped_updates(self) -> int:
        """How many updates were left out because fp16 overflowed; for fp16 it waits for the device."""
        return self.precision.skipped_updates()

    def eval_step(
        self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy
    ) -> tuple[Any, dict[str, Tensor]]:
        """The model's outputs, and the loss and the strategy's metrics by name, without gradients."""
        with torch.no_grad():
            outputs, loss = self._evaluate(state.weights, batch, strategy)
            return outputs, {"loss": loss, **strategy.compute_metrics(outputs, batch)}

    def to_torch(self, value: Any) -> Any:
        """The value itself."""
        return value

    def environment(self) -> dict[str, Any]:
        """Nothing beside what holds for torch itself."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The gradient scale and the count of skipped updates, for fp16."""
        return self.precision.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.precision.load_state_dict(dict(state))


def no_gradient() -> RuntimeError:
    """What is raised for a loss that nothing can learn from."""
    return RuntimeError(
        "the loss has no gradient: no parameter that requires one took part in it; "
        "check requires_grad and torch.no_grad() in the model and the loss"
    )


def _learning(optimizer: Any) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


def _explain(error: Exception, batch: TrainingBatch) -> None:
    error.add_note(given(batch))
    if any(is_array(leaf) and not isinstance(leaf, Tensor) for leaf in tree_leaves((batch.inputs, batch.targets))):
        error.add_note(
            "TorchBackend computes with torch tensors: let the loader give torch.from_numpy(array), or "
            "torch.from_dlpack(array), or train with JaxBackend(), which takes all of them"
        )


def given(batch: TrainingBatch) -> str:
    """What a model and a loss were given, for a note on what they raised."""
    return f"given inputs {describe(batch.inputs, ranges=True)}, targets {describe(batch.targets, ranges=True)}"


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _move(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_move(item, device) for item in value)
    return value
