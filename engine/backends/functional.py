"""The base class of backends whose states are values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pulsetrain.engine.arrays import Array, at_least_float32, is_array, namespace
from pulsetrain.engine.backends.model_store import ValueStore
from pulsetrain.engine.backends.module_view import ArraysView
from pulsetrain.engine.backends.state_check import StateCheck
from pulsetrain.engine.backends.torch_computation import not_empty
from pulsetrain.engine.backends.trees import Trees
from pulsetrain.engine.backends.value_states import next_state, rate_of, step_of, with_buffers
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.step.backend import ModelStore, ModuleView, OptimizerRequest, ValueBackend
from pulsetrain.engine.step.log_point import split_loss
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

__all__ = ["FunctionalBackend", "no_rate"]


class FunctionalBackend(Trees, ValueBackend):
    """A `Backend` over values; a subclass says how to take weights from a model and how to compute gradients.

    It writes `split`, `loss_and_gradients` and `evaluate`. If its arrays are neither torch tensors nor numpy arrays, it
    also writes `owns`, `from_torch` and `tensor_of`. Trees are torch's pytrees: dicts, lists, tuples, named tuples.

    >>> import numpy as np
    >>> class Descent:
    ...     def init(self, parameters):
    ...         return {"learning_rate": 0.1}
    ...     def update(self, gradients, opt_state, parameters):
    ...         return {"slope": -opt_state["learning_rate"] * gradients["slope"]}, opt_state
    >>> class LeastSquares(FunctionalBackend):
    ...     def split(self, model):
    ...         return {"parameters": {"slope": np.array(model)}, "buffers": {}}
    ...     def loss_and_gradients(self, weights, batch, strategy, draw):
    ...         error = weights["parameters"]["slope"] * batch.inputs - batch.targets
    ...         return np.mean(error**2), {"slope": np.mean(2 * error * batch.inputs)}, weights["buffers"]
    >>> backend, batch = LeastSquares(), TrainingBatch(np.array([1.0, 3.0]), np.array([2.0, 6.0]), samples=2)
    >>> state = backend.init(0.0, Descent())
    >>> result = backend.train_step(state, batch, strategy=None)
    >>> [float(each.weights["parameters"]["slope"]) for each in (state, result.state)]
    [0.0, 2.0]
    """

    settings: BackendSettings

    def __init__(self) -> None:
        self.settings = BackendSettings()
        self._serves = False
        self._is_numpy = False  # whether the weights are numpy arrays
        self._states = StateCheck(self)

    # ------------------------------------------------------------------------------------ what a subclass writes

    def split(self, model: object) -> dict[str, Tree]:
        """The model's weights: {"parameters": a pytree of arrays that learn, "buffers": one of those that do not}."""
        raise NotImplementedError

    def loss_and_gradients(
        self, weights: Mapping[str, Tree], batch: TrainingBatch, strategy: TrainingStrategy, draw: tuple[int, int]
    ) -> tuple[Array, Tree, Tree]:
        """The loss, shape (); its gradients, a pytree like the parameters; and the buffers afterwards.

        `split_loss` of `pulsetrain.engine.step.log_point` separates the loss that a strategy returns from its parts.

        Args:
            draw: the numbers of the update and of the batch within it, which key the random draws.
        """
        raise NotImplementedError

    def evaluate(
        self, weights: Mapping[str, Tree], batch: TrainingBatch, strategy: TrainingStrategy
    ) -> tuple[Tree, Array]:
        """The model's outputs and what `compute_loss` returned, without gradients, as in evaluation."""
        raise NotImplementedError

    def owns(self, leaf: object) -> bool:
        """Whether the leaf is an array that this backend computes with: of numpy, if those of `split` are."""
        return isinstance(leaf, (np.ndarray, np.generic)) if self._is_numpy else super().owns(leaf)

    def from_torch(self, tensor: Tensor) -> Array:
        """One torch tensor as an array of this backend, which shares its memory."""
        return tensor.numpy() if self._is_numpy else tensor

    # --------------------------------------------------------------------------------------- the parts of a step

    def configure(self, settings: BackendSettings) -> None:
        """Adopt a trainer's settings.

        Raises:
            ConfigurationError: the backend serves another trainer already, or cannot do what a setting asks for.
        """
        name = type(self).__name__
        if self._serves:
            raise ConfigurationError(f"{name}: serves another trainer already; give each Trainer a backend of its own")
        for setting in ("compile", "activation_checkpointing", "activation_offload", "optimizer_offload"):
            if value := getattr(settings, setting):
                raise ConfigurationError(f"not with {name}; leave it out", "TrainingConfig", **{setting: value})
        if settings.precision != "fp32":
            raise ConfigurationError(
                f"{name} computes in the precision of the weights "
                "and the model; leave fp32, and give the model's layers their dtype",
                "TrainingConfig",
                precision=settings.precision,
            )
        self._serves = True
        self.settings = settings

    def reseed(self, seed: int) -> None:
        """Draw from the seed of the run that starts or resumes; the process's generators are seeded already."""
        self.settings = replace(self.settings, seed=seed)

    def release(self) -> None:
        """Undo `configure`: the trainer could not be made."""
        self._serves = False

    def make_store(self, model: object, optimizer: OptimizerRequest, strategy: Strategy) -> ModelStore:
        """The store of a model before its first update.

        Raises:
            ConfigurationError: the strategy trains several modules, the optimizer works in place, or its learning rate
                is a tensor.
        """
        if isinstance(strategy, AlternatingStrategy):
            raise ConfigurationError(
                f"{type(strategy).__name__} trains several modules in turn, which works in place; use TorchBackend()",
                "Trainer",
                backend=type(self),
            )
        chosen, rate, decay = optimizer.chosen, optimizer.learning_rate, optimizer.weight_decay
        state = self.begin("Trainer", model, chosen, rate, decay, **optimizer.options)
        if isinstance(self.learning_rate(state.optimizer), Tensor):
            raise ConfigurationError(
                "its learning rate is a tensor, and nothing differentiates the updates of a run; give it a number, or "
                "differentiate TrainerCore.train_step",
                "Trainer",
                optimizer=type(chosen),
            )
        return ValueStore(self, model, state)

    def begin(
        self, place: str, model: object, optimizer: object, rate: float | Tensor, weight_decay: float, **options: object
    ) -> ModelState:
        """The state before the first update, with an optimizer or the name of one.

        Args:
            place: the start of an error message.

        Raises:
            ConfigurationError: the optimizer works in place, or there is none of that name.
        """
        if isinstance(optimizer, str):
            made = self.create_optimizer(model, optimizer, rate, weight_decay, **options)
            return self.init(model, made, rate)
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"{type(self).__name__} computes with values, and needs a name or an "
                "object with init(params) and update(grads, opt_state, params)",
                place,
                optimizer=type(optimizer),
            )
        return self.init(model, optimizer)

    def init(self, model: object, optimizer: Optimizer, learning_rate: float | Tensor | None = None) -> ModelState:
        """The model's weights as values, and the optimizer's state for them.

        Args:
            learning_rate: of the first update; by default what the optimizer's state holds, perhaps in float32.

        Raises:
            ConfigurationError: no parameter learns.
            TypeError: an array is neither a torch tensor nor one of numpy, and the backend cannot convert it.
        """
        self.optimizer = optimizer
        weights = self.split(model)
        leaves = self.paths(weights)
        self._is_numpy = _are_numpy(leaves)
        if not self.paths(weights["parameters"]):
            raise ConfigurationError(f"{type(self).__name__}: model={type(model).__name__}: has no parameter to learn")
        self._states.begin(leaves)
        state = optimizer.init(weights["parameters"])
        rate = self.learning_rate(state) if learning_rate is None else learning_rate
        if isinstance(rate, Tensor):  # perhaps with a gradient: the optimizer's state alone has it
            rate = None
        return ModelState(weights, state, {"step": 0, "learning_rate": rate, "schedule": None})

    def copied(self, state: ModelState) -> ModelState:
        """The same state in memory of its own."""
        weights, optimizer = self.map(self.copy_of, (state.weights, state.optimizer))
        return replace(state, weights=weights, optimizer=optimizer)

    def prepare_batch(self, batch: Tree, strategy: Strategy) -> TrainingBatch:
        """The strategy's batch: prepared in torch tensors on the host, then moved to the device that computes.

        Raises:
            ValueError: it has no samples, so its mean loss would be nan.
        """
        prepared = not_empty(strategy.prepare_batch(self.to_host(batch)))
        inputs, targets = self.to_arguments((prepared.inputs, prepared.targets))
        # not the weight: accumulation and means are computed by torch
        return TrainingBatch(inputs, targets, prepared.samples, prepared.tokens, prepared.weight)

    def to_arguments(self, value: Tree) -> Tree:
        """The value with every torch tensor as an argument of this backend's computations."""
        return self.to_native(value)

    def to_host(self, batch: Tree) -> Tree:
        """The loader's batch in torch tensors."""
        return self.to_torch(batch)

    def forward_backward(
        self,
        state: ModelState,
        batch: TrainingBatch,
        strategy: TrainingStrategy,
        scale: Array = 1.0,
        waiting: GradientInfo | None = None,
    ) -> GradientInfo:
        """The loss and `scale` times its gradients, added to those that wait."""
        batches, added = (0, None) if waiting is None else (waiting.batches, waiting.gradients)
        draw = step_of(state), batches
        found = self.added_gradients(state.weights, batch, strategy, draw, self.factor(scale), added)
        return GradientInfo(*found, batches=batches + 1)

    def added_gradients(
        self, weights: Tree, batch: TrainingBatch, strategy: TrainingStrategy, draw: Tree, factor: Array, added: Tree
    ) -> tuple[Array, Tree, Tree]:
        """What `loss_and_gradients` returns, the gradients times a factor and added to others; None for neither."""
        loss, gradients, buffers = self.loss_and_gradients(weights, batch, strategy, draw)
        if factor is not None:
            gradients = self.scaled(gradients, factor)
        if added is not None:
            gradients = self.map(lambda each, other: each + other, added, gradients)
        return loss, gradients, buffers

    def finish_gradients(
        self, state: ModelState, gradients: GradientInfo, correction: Array = 1.0, measure: bool = True
    ) -> GradientInfo:
        """The gradients times `correction`, and their norm."""
        found, norm = self.finished(gradients.gradients, self.factor(correction), measure)
        return replace(gradients, gradients=found, grad_norm=norm)

    def finished(self, gradients: Tree, factor: Array, measure: bool) -> tuple[Tree, Array]:
        """The gradients times a factor, None for 1, and their norm."""
        if factor is not None:
            gradients = self.scaled(gradients, factor)
        return gradients, self.norm(gradients) if measure else None

    def scaled(self, gradients: Tree, factor: Array) -> Tree:
        """The gradients times a factor, each in its own dtype, which an array of another one might change."""
        if not is_array(factor):
            return self.map(lambda each: each * factor, gradients)
        xp = namespace(factor)

        def times(each: Array) -> Array:
            wide = at_least_float32(each)  # half precision would round the factor
            return xp.astype(wide * xp.astype(factor, wide.dtype), each.dtype, copy=False)

        return self.map(times, gradients)

    def factor(self, value: Array) -> Array:
        """A factor as an array of this backend; None for 1."""
        return None if type(value) is float and value == 1.0 else self.to_arguments(value)

    def apply_gradients(
        self, state: ModelState, gradients: GradientInfo, skip: Tensor | None = None, donate: bool = False
    ) -> ModelState:
        """Clip and make one update; if `skip` is true, weights and optimizer keep their values."""
        rate, parameters = rate_of(state), state.weights["parameters"]
        if skip is not None and skip.device.type == "cpu":  # there is nothing to wait for
            if skip:
                return next_state(state, state.weights, state.optimizer, rate)
            skip = None
        new, optimizer = self.updated(parameters, state.optimizer, gradients.gradients, gradients.grad_norm, rate)
        if isinstance(rate, Tensor):  # the metadata keep it: in both places, it would be two rates
            optimizer = self.with_learning_rate(optimizer, self.learning_rate(state.optimizer))
        if skip is not None:
            skipped = self.to_native(skip)
            new = self.map(lambda old, each: namespace(each).where(skipped, old, each), parameters, new)
            optimizer = self.map(lambda old, each: self.chosen(skipped, old, each), state.optimizer, optimizer)
        return next_state(state, {**state.weights, "parameters": new}, optimizer, rate)

    def train_step(
        self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy, donate: bool = False
    ) -> TrainingResult:
        """One update over one batch; the metrics have the gradients' norm before clipping."""
        gradients = self.all_reduce_gradients(self.forward_backward(state, batch, strategy))
        gradients = self.finish_gradients(state, gradients)
        metrics = {"loss": gradients.loss, "grad_norm": gradients.grad_norm}
        return TrainingResult(metrics, self.apply_gradients(with_buffers(state, gradients), gradients))

    def eval_step(
        self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy
    ) -> tuple[Tree, dict[str, Array]]:
        """The model's outputs, and the loss and the strategy's metrics by name."""
        return self.evaluated(state.weights, batch, strategy)

    def evaluated(
        self, weights: Mapping[str, Tree], batch: TrainingBatch, strategy: TrainingStrategy
    ) -> tuple[Tree, dict[str, Array]]:
        """What `eval_step` returns."""
        outputs, found = self.evaluate(weights, batch, strategy)
        loss, parts = split_loss(found, strategy)
        return outputs, {"loss": loss, **parts, **strategy.compute_metrics(outputs, batch)}

    # ------------------------------------------------------------------------------------------- what they need

    def norm(self, gradients: Tree) -> Array:
        """L2 norm over all of them as if they were one vector, shape ()."""
        leaves = [at_least_float32(each) for each in pytree.tree_leaves(gradients)]
        xp = namespace(*leaves)
        return xp.sqrt(sum(xp.sum(each * each) for each in leaves))

    def updated(
        self, parameters: Tree, opt_state: Tree, gradients: Tree, norm: Array, rate: Array
    ) -> tuple[Tree, Tree]:
        """The parameters and the optimizer's state after one update with clipped gradients."""
        most, value = self.settings.clip_grad_norm, self.settings.clip_grad_value
        if most is not None:
            norm = self.norm(gradients) if norm is None else norm
            xp = namespace(norm)
            share = xp.minimum(xp.ones_like(norm), most / (norm + 1e-6))
            gradients = self.scaled(gradients, share)
        if value is not None:
            gradients = self.map(lambda each: namespace(each).clip(each, -value, value), gradients)
        if rate is not None:
            opt_state = self.with_learning_rate(opt_state, rate)
        updates, opt_state = self.optimizer.update(gradients, opt_state, parameters)
        return self.map(lambda old, change: old + change, parameters, updates), opt_state

    def chosen(self, skip: Array, old: Array, new: Array) -> Array:
        """`old` where the condition holds; numbers on the host, such as a count of steps, advance in any case."""
        return namespace(new).where(skip, old, new) if hasattr(new, "shape") else new

    def learning_rate(self, opt_state: Tree) -> float | Tensor | None:
        """The rate that the optimizer's state holds; None where it holds none."""
        rate = opt_state.get("learning_rate") if isinstance(opt_state, Mapping) else None
        return rate if rate is None or isinstance(rate, Tensor) else float(rate)

    def with_learning_rate(self, opt_state: Tree, rate: Array) -> Tree:
        """The optimizer's state with another rate.

        Raises:
            ConfigurationError: it holds none.
        """
        if not isinstance(opt_state, Mapping) or "learning_rate" not in opt_state:
            raise no_rate(type(self).__name__, "let init() put it into the state, under 'learning_rate'")
        return {**opt_state, "learning_rate": rate}

    # ----------------------------------------------------------------------------------------- what others ask for

    @property
    def batch_device(self) -> torch.device:
        """The host: strategies prepare batches there."""
        return torch.device("cpu")

    def check(self, state: ModelState) -> None:
        """Raise if a step could not be computed from the state.

        Raises:
            TypeError: an array is of another backend.
            ConfigurationError: the optimizer's state is not of these weights.
        """
        self._states.check(state)

    def module_view(self, model: object, weights: Tree) -> ModuleView:
        """A torch module that shows the weights."""
        return ArraysView(self, weights)

    def state_dict(self) -> dict[str, object]:
        """Its name: another backend computes other numbers."""
        return {"name": type(self).__name__}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raise if the state is of another backend.

        Raises:
            CheckpointError: it is one.
        """
        if state.get("name") != type(self).__name__:
            raise CheckpointError(
                f"{type(self).__name__}: the checkpoint was made by {state.get('name')!r}; resume with that backend, "
                "or start a new run from its weights"
            )


def no_rate(place: str, remedy: str) -> ConfigurationError:
    """The error for a learning rate that was set although the optimizer's state holds none."""
    return ConfigurationError(
        f"{place}: a schedule or a handler sets the learning rate, and the optimizer's state holds none; {remedy}, or "
        "name the optimizer, as 'adamw'"
    )


def _are_numpy(leaves: Mapping[str, Array]) -> bool:
    return bool(leaves) and all(isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves.values())
