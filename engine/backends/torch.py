"""Training steps in PyTorch, in place."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pulsetrain.engine.backends.micro_batches import MicroBatches, split
from pulsetrain.engine.backends.model_store import InPlaceStore
from pulsetrain.engine.backends.pipeline import Pipeline
from pulsetrain.engine.backends.torch_computation import (
    TorchComputation,
    explain,
    find_device,
    moved,
    no_gradient,
    not_empty,
)
from pulsetrain.engine.backends.torch_functional import FunctionalTorchBackend
from pulsetrain.engine.backends.virtual_shares import GlobalBatch, check_virtual_model, reduce_shares
from pulsetrain.engine.distributed.parallelize import start_alike
from pulsetrain.engine.distributed.plans import TensorPlan
from pulsetrain.engine.distributed.pretrained import fill
from pulsetrain.engine.distributed.ranks import is_sharded, ranks
from pulsetrain.engine.distributed.shards import point_at, shard_module
from pulsetrain.engine.distributed.shared_batches import check_batches
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.memory.optimizer_state import ELEMENTWISE, offload_optimizer
from pulsetrain.engine.step.backend import InPlaceBackend, ModelStore, OptimizerRequest
from pulsetrain.engine.step.gradients import clip_grad_norm, clip_grad_value, grad_norm, scale_grads
from pulsetrain.engine.step.log_point import split_loss
from pulsetrain.engine.step.memory_settings import ActivationCheckpointing
from pulsetrain.engine.step.model_call import evaluating
from pulsetrain.engine.step.protocols import (
    AlternatingStrategy,
    BackendSettings,
    BindsModel,
    GradientInfo,
    ModelState,
    Strategy,
    TrainingBatch,
    TrainingResult,
    TrainingStrategy,
    Tree,
)

__all__ = ["TorchBackend", "find_device"]


class TorchBackend(TorchComputation, InPlaceBackend):
    """nn.Module and torch.optim on one device.

    A state's weights are the module and its optimizer torch's, and a step makes no tensor that a hand-written loop
    would not make. With `functional=True` this returns a `FunctionalTorchBackend`, whose states are values.

    Args:
        device: "auto", "cpu", "cuda", "cuda:1", "mps" ...
        precision: "fp32", "bf16" or "fp16" (autocast; fp16 with a gradient scale); None leaves it to the configuration.
        gradient_scale: the first factor by which fp16 multiplies gradients, so that small ones do not vanish.
        compile: run the model through torch.compile.
        activation_checkpointing: names of the modules whose activations are computed again in the backward pass instead
            of kept, as "blocks.*", or an ActivationCheckpointing; None leaves it to the configuration.
        topology: how several processes share the model out; by default each has a copy of it.
        tensor_plan: which layers `Topology(tensor=2)` splits, and how; by default the model's own plan.
        functional: compute with values, by torch.func.

    Raises:
        ConfigurationError: the device is not there, or cannot compute in this precision.

    >>> from pulsetrain.engine import SupervisedStrategy
    >>> backend, model = TorchBackend("cpu"), nn.Linear(2, 1)
    >>> state = backend.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> strategy = SupervisedStrategy("mse")
    >>> batch = backend.prepare_batch((torch.ones(4, 2), torch.zeros(4, 1)), strategy)
    >>> losses = [backend.train_step(state, batch, strategy).loss for _ in range(2)]
    >>> bool(losses[1] < losses[0])
    True
    """

    def __new__(  # the arguments of the constructor, which jsonargparse reads here
        cls,
        device: str | torch.device | None = None,
        *,
        precision: str | None = None,
        gradient_scale: float = 65536.0,
        compile: bool = False,
        activation_checkpointing: str | ActivationCheckpointing | None = None,
        topology: Topology | None = None,
        tensor_plan: TensorPlan | None = None,
        functional: bool = False,
    ) -> Any:
        if not functional or cls is not TorchBackend:
            return super().__new__(cls)
        return FunctionalTorchBackend(
            device,
            precision=precision,
            gradient_scale=gradient_scale,
            compile=compile,
            activation_checkpointing=activation_checkpointing,
            topology=topology,
            tensor_plan=tensor_plan,
        )

    pipeline: Pipeline | None = None
    """Computes the model where several processes have some of its layers each."""

    def _configure(self, settings: BackendSettings) -> None:
        super()._configure(settings)
        self.skips_updates: bool = self.scaler is not None
        self._frozen: nn.Module | None = None  # of the model before it is split
        self._unchecked: ProcessGroup | None = None  # with which to compare the first batch and its gradients
        # one pass over one model, here, whose first gradients are not compared
        whole = self.topology.pipeline == self.topology.tensor == 1 and not self.topology.virtual
        self._bare = self._plain and self.clip_norm is None and self.clip_value is None and whole

    def environment(self) -> dict[str, object]:
        """How many processes train together, if there are several, or the virtual ranks that they share."""
        if self.topology.virtual is not None:
            return {"virtual": self.topology.virtual, "reduction": self.topology.reduction}
        count = ranks().world_size
        return {"processes": count} if count > 1 else {}

    def make_store(self, model: object, optimizer: OptimizerRequest, strategy: Strategy) -> ModelStore:
        """The module on the device, and the optimizer over its parameters."""
        count = ranks().world_size
        if self.topology.pipeline > 1:
            return self._make_pipeline(model, optimizer, strategy)
        module = self.prepare_module(model)
        if self.topology.tensor > 1 and is_sharded(module):
            raise ConfigurationError(
                "splits the layers of a plain model, and this one is sharded already; pass it as it was before",
                "Topology",
                tensor=self.topology.tensor,
            )
        if self.topology.is_sharded(count) and not is_sharded(module):
            copies = getattr(strategy, "copies_model", None)
            if callable(copies) and copies(module):
                self._frozen = copy.deepcopy(module).requires_grad_(False)  # a module that is split cannot be copied
            self._shard(module, optimizer)
        self._fill(module)
        if self.topology.virtual is not None:
            check_virtual_model(module, strategy, compiled=self.compile)
            start_alike(module)
        made = optimizer.build(module)
        if is_sharded(module):
            self.check_sharded(strategy, made)
        if self.optimizer_offload is not None:
            offload_optimizer(made, self.optimizer_offload)
        return InPlaceStore(self, module, made, wraps=self.topology.virtual is None)

    def _make_pipeline(self, model: object, optimizer: OptimizerRequest, strategy: Strategy) -> ModelStore:
        """The store of a model of which this process keeps some of the layers."""
        self.check_sharded(strategy)
        module = self.checked_module(model)  # where it is: the whole may not fit on the device
        self.pipeline = Pipeline(module, self.topology, self.device, self._autocast)
        if isinstance(optimizer.chosen, torch.optim.Optimizer):
            kept: dict[Tensor, Tensor] = {each: each for each in module.parameters()}
            point_at(optimizer.chosen, {**kept, **self.pipeline.replaced})
        made = optimizer.build(module)
        self.check_sharded(strategy, made)
        return InPlaceStore(self, module, made)

    def frozen_copy(self, module: nn.Module) -> nn.Module:
        """A copy of a module that does not learn, split over the processes as the module is."""
        copied, self._frozen = self._frozen, None
        if copied is None:
            return copy.deepcopy(module).requires_grad_(False)
        shard_module(copied, self.topology, self.device, self.tensor_plan)
        self._fill(copied)
        return copied

    def _fill(self, module: nn.Module) -> None:
        """Give values to parameters that have none yet, see `pretrained`."""
        offloaded = is_sharded(module) and self.topology.offload
        fill(module, torch.device("cpu") if offloaded else self.device)

    def check_sharded(
        self, strategy: Strategy, optimizer: torch.optim.Optimizer | None = None, *, pipelines: bool | None = None
    ) -> None:
        """Refuse what does not work, or is not known to work, with a sharded model.

        Args:
            strategy: trains it.
            optimizer: updates it; None if it has not been made.
            pipelines: whether each process has some of the layers; None: as the topology says.

        Raises:
            ConfigurationError: the message names all of it.
        """
        refused: dict[str, object] = {}
        if self.scaler is not None:
            refused["precision"] = "fp16"  # each process would see the overflows of its own shard
        if self.compile:
            refused["compile"] = True
        pipelines = self.topology.pipeline > 1 if pipelines is None else pipelines
        declared = "takes_pipelines" if pipelines else "takes_shards"
        binds = isinstance(strategy, BindsModel) and not getattr(strategy, declared, False)
        differentiates = self.topology.pipeline > 1 and getattr(strategy, "needs_gradients", False)
        if binds or differentiates or isinstance(strategy, AlternatingStrategy):
            refused["strategy"] = type(strategy)  # it may call parts of the model
        if optimizer is not None and type(optimizer) not in ELEMENTWISE:
            refused["optimizer"] = type(optimizer)
        if self.optimizer_offload is not None:
            refused["optimizer_offload"] = self.optimizer_offload
        if self.activation_offload is not None:
            refused["activation_offload"] = self.activation_offload  # it would keep gathered weights, too
        if refused:
            raise ConfigurationError(
                "is not known to work with a sharded model; choose another, or give each process the whole model",
                "TorchBackend",
                **refused,
            )

    def _shard(self, module: nn.Module, optimizer: OptimizerRequest) -> None:
        """Split the module over the processes, and point optimizers at the shards that the user has made before."""
        whole = dict(module.named_parameters(remove_duplicate=False))
        shard_module(module, self.topology, self.device, self.tensor_plan)
        if self.topology.tensor > 1:
            from pulsetrain.engine.distributed.tensor_parallel import group_of  # imports torch's tensor parallelism

            self._unchecked = group_of(module)
        shards = dict(module.named_parameters(remove_duplicate=False))
        if isinstance(optimizer.chosen, torch.optim.Optimizer):
            point_at(optimizer.chosen, {each: shards[name] for name, each in whole.items()})

    def prepare_batch(self, batch: Tree, strategy: Strategy) -> TrainingBatch:
        """The strategy's batch, on the device; with a pipeline, its parts are prepared one by one.

        Raises:
            ValueError: it has no samples, so its mean loss would be nan.
        """
        if self.topology.pipeline == 1:
            return super().prepare_batch(batch, strategy)
        parts = split(moved(batch, self.device), self.topology.parts_of_batch)
        return not_empty(MicroBatches([strategy.prepare_batch(each) for each in parts]))

    def init(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> ModelState:
        """The module and its optimizer themselves."""
        return ModelState(model, optimizer)

    def forward_backward(
        self,
        state: ModelState,
        batch: TrainingBatch,
        strategy: TrainingStrategy,
        scale: float | Tensor = 1.0,
        waiting: GradientInfo | None = None,
    ) -> GradientInfo:
        """Add `scale` times the loss's gradients to the parameters'."""
        if self.pipeline is not None:
            try:
                return GradientInfo(self.pipeline.train(cast(MicroBatches, batch), strategy, scale))
            except Exception as error:
                explain(error, batch)
                raise
        if type(batch) is GlobalBatch:

            def compute(part: TrainingBatch, weight: float) -> Tensor:
                loss: Tensor = self.forward_backward(state, part, strategy, scale * weight).loss
                return loss

            return GradientInfo(reduce_shares(state.weights, batch, compute))
        if self._unchecked is not None:
            return self._checked_gradients(self._unchecked, state, batch, strategy, scale)
        loss = self.outputs_and_loss(state.weights, batch, strategy)[1]  # without the outputs in the backward pass
        if type(loss) is not Tensor:
            loss = split_loss(loss, strategy)[0]
        return GradientInfo(self.backward(loss, scale))

    def _checked_gradients(
        self,
        group: ProcessGroup,
        state: ModelState,
        batch: TrainingBatch,
        strategy: TrainingStrategy,
        scale: float | Tensor,
    ) -> GradientInfo:
        """The first gradients: the processes that compute each layer together need the same batch, and gradients."""
        from pulsetrain.engine.distributed.tensor_parallel import check_gradients, explain_whole_use

        self._unchecked = None
        check_batches((batch.inputs, batch.targets), group, "tensor")
        try:
            found = self.forward_backward(state, batch, strategy, scale)
        except RuntimeError as error:
            explain_whole_use(error, state.weights)
            raise
        check_gradients(state.weights, group)
        return found

    def backward(
        self, loss: Tensor, scale: float | Tensor = 1.0, optimizer: torch.optim.Optimizer | None = None
    ) -> Tensor:
        """Add `scale` times the loss's gradients to all parameters, or one optimizer's; returns the loss, detached."""
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
        """The strategy's losses and the names of their optimizers, each computed when it is asked for."""
        losses = iter(strategy.compute_losses(state.weights, batch))
        while True:
            try:
                with self.computing(state.weights):  # not around the yield: the caller computes outside of it
                    found = next(losses, None)
            except Exception as error:
                explain(error, batch)
                raise
            if found is None:
                return
            yield found

    def finish_gradients(
        self, state: ModelState, gradients: GradientInfo, correction: float | Tensor = 1.0, measure: bool = True
    ) -> GradientInfo:
        """Unscale the gradients, multiply them by `correction` and measure their norm."""
        self.precision.unscale(state.optimizer)
        if type(correction) is not float or correction != 1.0:
            scale_grads(_learning(state.optimizer), correction)
        if not measure:
            return gradients
        norm = grad_norm(_learning(state.optimizer))
        return replace(gradients, grad_norm=norm if self.pipeline is None else self.pipeline.norm(norm))

    def apply_gradients(
        self, state: ModelState, gradients: GradientInfo, skip: Tensor | None = None, donate: bool = False
    ) -> ModelState:
        """One optimizer step, skipped if fp16 has overflowed or `skip` is true; consumes the gradients.

        `skip`, of shape (), is not waited for if the optimizer's kernel can skip a step on the device.
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
        """The same with nothing between forward, backward and update: each call costs here."""
        optimizer, inputs = state.optimizer, batch.inputs
        try:
            outputs = state.weights(inputs) if isinstance(inputs, Tensor) else self.forward(state.weights, batch)
            loss = strategy.compute_loss(outputs, batch)
        except Exception as error:
            explain(error, batch, state.weights)
            raise
        try:
            learns = loss.requires_grad
        except AttributeError:  # a pair with the loss's parts: checking each loss for one would cost
            loss, _ = split_loss(loss, strategy)
            learns = loss.requires_grad
        if not learns:
            raise no_gradient()
        del outputs  # a language model's logits are large, and autograd keeps what it needs
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return TrainingResult({"loss": loss.detach()}, state)

    def discard_gradients(self, state: ModelState) -> None:
        """Drop the gradients of a batch that failed."""
        state.optimizer.zero_grad(set_to_none=True)
        self.precision.discard()

    def begin_run(self) -> None:
        """Start counting skipped updates from 0."""
        self.precision.begin_run()

    def skipped_updates(self) -> int:
        """How many updates were skipped because fp16 overflowed; for fp16 it waits for the device."""
        return self.precision.skipped_updates()

    def eval_step(
        self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy
    ) -> tuple[Any, dict[str, Tensor]]:
        """The model's outputs, and the loss and the strategy's metrics by name."""
        with evaluating(strategy):
            outputs, found = self.outputs_and_loss(state.weights, batch, strategy)
            loss, parts = split_loss(found, strategy)
            return outputs, {"loss": loss, **parts, **strategy.compute_metrics(outputs, batch)}

    def state_dict(self) -> dict[str, object]:
        """The gradient scale and the count of skipped updates, for fp16."""
        return self.precision.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.precision.load_state_dict(dict(state))


def _learning(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
