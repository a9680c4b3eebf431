"""Training steps in JAX: one compiled program per update, which reuses the memory of the state it is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.backends.functional import FunctionalBackend, no_rate
from pulsetrain.engine.backends.jax_arrays import JaxArrays, find_jax_device, find_mesh_devices
from pulsetrain.engine.backends.jax_mesh import DeviceMesh, OneDevice
from pulsetrain.engine.backends.jax_models import JaxModel, read_model
from pulsetrain.engine.backends.jax_sharding import ShardingRules
from pulsetrain.engine.backends.optax import create_optax, jax_and_optax, learning_rate_of, with_learning_rate
from pulsetrain.engine.backends.torch_computation import given
from pulsetrain.engine.backends.value_states import next_state, rate_of, step_of
from pulsetrain.engine.environment import version_of
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.first_batch import FirstBatch
from pulsetrain.engine.step.log_point import LogPoint, measured, split_loss
from pulsetrain.engine.step.protocols import (
    BackendSettings,
    GradientInfo,
    ModelState,
    Optimizer,
    TrainingBatch,
    TrainingResult,
    TrainingStrategy,
    Tree,
)

__all__ = ["JaxBackend"]


class JaxBackend(JaxArrays, FunctionalBackend):
    """Plain functions, flax nnx and linen modules, and optax, on one device or on several of one process.

    A program is compiled once for each shape of a batch, for training and for evaluation. `samples` and `tokens` of a
    TrainingBatch count as its shape, so a number that varies from batch to batch belongs in `weight`. Batches may hold
    torch, numpy or jax arrays; a strategy's `prepare_batch` gets torch tensors on the host, its `compute_loss` jax
    arrays.

    Args:
        device: "auto", "cpu", "cuda" ("gpu"), "tpu", also with a number, as "cuda:1"; None leaves it to the
            configuration.
        mesh: the sizes of the axes of a mesh of devices: "data", over which each batch is split, and "model". A batch
            whose rows do not divide by "data" is computed by all devices, unless it is the first.
        sharding: of a mesh, how parameters and their optimizer state are split over it: "replicated", "fsdp" (each is
            split over "data"), or a mapping of patterns of paths, such as {"blocks/*/kernel": [None, "model"]}; see
            `ShardingRules`. Flax's own metadata counts where no pattern matches.

    Raises:
        ConfigurationError: jax or optax is not installed, there are no such devices, or the mesh and the sharding do
            not fit each other.

    >>> import jax.numpy as jnp
    >>> from pulsetrain.engine import SupervisedStrategy, TrainerCore
    >>> core = TrainerCore(JaxBackend("cpu"), SupervisedStrategy("mse"))
    >>> model = (lambda weights, inputs: inputs @ weights["kernel"]), {"kernel": jnp.ones((2, 1))}
    >>> state = core.init(model, "sgd", learning_rate=0.1, momentum=0.0)
    >>> result = core.train_step((torch.ones(4, 2), torch.zeros(4, 1)), state)
    >>> float(result.metrics["loss"]), result.state.weights["parameters"]["kernel"].shape
    (4.0, (2, 1))
    """

    compiled: dict[str, int]

    def __init__(
        self,
        device: str | None = None,
        *,
        mesh: Mapping[str, int] | None = None,
        sharding: str | Mapping[str, Any] = "replicated",
    ) -> None:
        super().__init__()
        self._jax, _ = jax_and_optax()
        if mesh is None and sharding != "replicated":
            raise ConfigurationError("needs a mesh, such as mesh={'data': 2}", "JaxBackend", sharding=sharding)
        self._rules = None if mesh is None else ShardingRules(mesh, sharding)
        self.requested_device = device
        self.compiled = {"train": 0, "evaluate": 0, "gradients": 0, "finish": 0, "apply": 0}  # programs so far
        self._programs: dict[object, Callable[..., Tree]] = {}
        self._shapes: Any = None  # of the model's outputs: what is traced without being compiled
        self._use(self._placement_on(device or "auto"))

    def _placement_on(self, device: str) -> OneDevice:
        if self._jax.process_count() > 1:
            raise ConfigurationError(
                f"JaxBackend: jax.distributed has joined {self._jax.process_count()} processes, and this backend uses "
                "the devices of one; leave jax.distributed.initialize() out"
            )
        if self._rules is None:
            return OneDevice(self._jax, find_jax_device(self._jax, device))
        return DeviceMesh(self._jax, find_mesh_devices(self._jax, device, self._rules.axes), self._rules)

    def configure(self, settings: BackendSettings) -> None:
        super().configure(settings)
        self._programs.clear()  # they clip by the earlier settings
        device = settings.device if self.requested_device is None else self.requested_device
        self._use(self._placement_on(str(device)))

    # ------------------------------------------------------------------------------------------ models and arrays

    def split(self, model: object) -> dict[str, Tree]:
        """The weights of a flax module, or of a pair of code and weights, copied to the device or the mesh."""
        self.model: JaxModel = read_model(model)
        self._programs.clear()  # they compute with the previous model
        self._shapes = None
        weights = {"parameters": self.model.parameters, "buffers": self.model.buffers}
        for path, leaf in self.paths(weights).items():
            if isinstance(leaf, Tensor):
                raise TypeError(
                    f"JaxBackend: weights[{path!r}] is a torch tensor; pass jax.numpy.from_dlpack(tensor), or train "
                    "the module with TorchBackend()"
                )
        for path, leaf in self.paths(weights["parameters"]).items():
            if not self._jax.numpy.issubdtype(self._jax.numpy.result_type(leaf), self._jax.numpy.inexact):
                raise TypeError(
                    f"JaxBackend: weights['parameters/{path}'] of {self._jax.numpy.result_type(leaf)} has no gradient; "
                    "keep integers out of the weights, in the function itself"
                )
        # copies: the first step may reuse the memory of what it is given
        return self.placement.put_weights(self.map(self.copy_of, weights), self.model.annotated)  # type: ignore[no-any-return]

    def init(self, model: object, optimizer: Optimizer, learning_rate: float | Tensor | None = None) -> ModelState:
        state = super().init(model, optimizer, learning_rate)
        # on the device, as the next state will be: else the second step would be compiled again
        return replace(state, optimizer=self.placement.put_optimizer(state.optimizer))

    def create_optimizer(
        self, model: object, name: str, learning_rate: float | Tensor, weight_decay: float, **options: object
    ) -> Optimizer:
        """sgd, adam, adamw or rmsprop of optax, with torch's numbers.

        no_decay="auto" spares arrays of fewer than two dimensions, and embeddings, which it knows by their name.
        """
        rule = options.pop("no_decay", None)

        def spares(path: str, leaf: Tree) -> bool:
            return bool(rule(path, leaf) if callable(rule) else leaf.ndim < 2 or "embed" in path.lower())

        def mask(parameters: Tree) -> Tree:
            return self.rebuilt(parameters, [not spares(*each) for each in self.paths(parameters).items()])

        return create_optax(name, learning_rate, weight_decay, decay_mask=None if rule is None else mask, **options)

    def publish(self, weights: Mapping[str, Tree]) -> None:
        """Copy the trained weights into an nnx module; functions and linen modules hold none."""
        if self.model.publish is not None:
            self.model.publish(self.map(self.copy_of, weights))

    def environment(self) -> dict[str, Tree]:
        config = self._jax.config
        return {
            **{name: version_of(name) for name in ("jax", "jaxlib", "optax", "flax")},
            "jax_device": self.jax_device.device_kind,
            "jax_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "jax_x64": config.jax_enable_x64,
            "jax_matmul": config.jax_default_matmul_precision,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            **self.placement.describe(),
        }

    def learning_rate(self, opt_state: Tree) -> float | None:
        found = learning_rate_of(opt_state)
        return None if found is None else float(found)

    def with_learning_rate(self, opt_state: Tree, rate: Array) -> Tree:
        if learning_rate_of(opt_state) is None:
            raise no_rate("JaxBackend", "make it by optax.inject_hyperparams(optax.adam)(learning_rate=...)")
        return with_learning_rate(opt_state, rate)

    # ---------------------------------------------------------------------------------------------------- a batch

    def _checked(self, weights: Tree, batch: TrainingBatch, strategy: TrainingStrategy) -> TrainingStrategy:
        """The strategy to compile; a first batch is checked before, since a compiled program cannot check values."""
        if not isinstance(strategy, FirstBatch):
            return strategy
        plain: TrainingStrategy = strategy.strategy
        check = getattr(plain, "check_batch", None)
        if check is not None:
            first = replace(batch, inputs=self.to_torch(batch.inputs), targets=self.to_torch(batch.targets))
            try:
                outputs = self._output_shapes(weights, batch.inputs)
            except Exception as error:
                error.add_note(given(first))
                raise
            check(self.map(_without_values, outputs), first)
        return plain

    def _output_shapes(self, weights: Tree, inputs: Tree) -> Tree:
        """Shapes and dtypes of the outputs, traced once: each validation checks its first batch."""
        if self._shapes is None:
            self._shapes = self._jax.jit(self._outputs)
        return self._shapes.eval_shape(weights, inputs)

    # ---------------------------------------------------------------------------------------- what is computed

    def _outputs(self, weights: Tree, inputs: Tree) -> Tree:
        """In evaluation."""
        return self.model.apply(weights["parameters"], weights["buffers"], inputs, False, None)[0]

    def loss_and_gradients(
        self, weights: Mapping[str, Tree], batch: TrainingBatch, strategy: TrainingStrategy, draw: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """Loss, gradients and buffers, traced."""
        jax = self._jax
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.settings.seed % 2**32), draw[0]), draw[1])
        point = strategy if isinstance(strategy, _TracedPoint) else None
        plain = strategy if point is None else point.strategy

        def compute(parameters: Tree) -> tuple[Tree, Tree]:
            outputs, buffers = self.model.apply(parameters, weights["buffers"], batch.inputs, True, key)
            loss, parts = split_loss(plain.compute_loss(outputs, batch), plain)
            return loss, (buffers, None if point is None else (outputs, parts))

        (loss, (buffers, seen)), gradients = jax.value_and_grad(compute, has_aux=True)(weights["parameters"])
        if point is not None:
            point.measure(jax, batch, *seen)
        gradients = self.placement.like_parameters(gradients)
        # what follows is computed as a separate program would: a receiver of GRADIENTS_READY changes no bit
        return jax.lax.optimization_barrier((loss, gradients, buffers))  # type: ignore[no-any-return]

    def norm(self, gradients: Tree) -> Tree:
        jnp = self._jax.numpy
        plain = super().norm
        # A loop's body is compiled separately. Fused with the gradients, XLA would add their squares up in a different
        # order, which a barrier does not prevent on a CPU: with clipping, a receiver of gradients would change bits.
        smallest = min((leaf for leaf in self._jax.tree.leaves(gradients) if leaf.size), key=lambda leaf: leaf.size)
        # 1, but the compiler does not know: it would unroll
        rounds = 1 + jnp.isinf(smallest.ravel()[0] * 0).astype(int)
        first = jnp.zeros((), self._jax.eval_shape(plain, gradients).dtype)
        return self._jax.lax.fori_loop(0, rounds, lambda _, norm: plain(gradients), first)

    def _program(
        self, kind: str, owner: object, function: Callable[..., Tree], **options: object
    ) -> Callable[..., Tree]:
        key = (kind, id(owner), self.settings.seed, *options.items())
        if key not in self._programs:

            def counted(*args: Tree) -> Tree:
                self.compiled[kind] += 1  # while it is traced: a compiled program does not run this line
                return function(*args)

            self._programs[key] = self._jax.jit(counted, **options, **self.placement.pinned(kind))
        return self._programs[key]

    def train_step(
        self, state: ModelState, batch: TrainingBatch, strategy: TrainingStrategy, donate: bool = False
    ) -> TrainingResult:
        rate, draw = rate_of(state), (step_of(state), 0)
        values = state.weights, batch, strategy, state.optimizer, rate, draw
        weights, optimizer, loss, norm = self._run("train", self._trained, *values, donate=donate, first=draw == (0, 0))
        return TrainingResult({"loss": loss, "grad_norm": norm}, next_state(state, weights, optimizer, rate))

    def _trained(
        self, weights: Tree, batch: TrainingBatch, strategy: TrainingStrategy, opt_state: Tree, rate: Array, draw: Array
    ) -> Tree:
        """Weights, optimizer state, loss and norm after an update, traced."""
        loss, gradients, buffers = self.loss_and_gradients(weights, batch, strategy, draw)
        gradients, norm = self._jax.lax.optimization_barrier((gradients, self.norm(gradients)))
        new, opt_state = self.updated(weights["parameters"], opt_state, gradients, norm, rate)
        return {"parameters": new, "buffers": buffers}, opt_state, loss, norm

    def added_gradients(
        self, weights: Tree, batch: TrainingBatch, strategy: TrainingStrategy, draw: Tree, factor: Array, added: Tree
    ) -> Tree:
        values = weights, batch, strategy, draw, factor, added
        return self._run("gradients", super().added_gradients, *values, first=draw == (0, 0))

    def finished(self, gradients: Tree, factor: Array, measure: bool) -> tuple[Tree, Array]:
        if factor is None and not measure:
            return gradients, None
        found, norm = self._program("finish", None, partial(super().finished, measure=True))(gradients, factor)
        return found, norm if measure else None

    def apply_gradients(
        self, state: ModelState, gradients: GradientInfo, skip: Tensor | None = None, donate: bool = False
    ) -> ModelState:
        if skip is not None and skip.device.type == "cpu" and self.device.type == "cpu":  # there is nothing to wait for
            if skip:
                return next_state(state, state.weights, state.optimizer, rate_of(state))
            skip = None

        def apply(parameters: Tree, opt_state: Tree, found: Array, norm: Array, rate: Array, skip: Array) -> Tree:
            new = self.updated(parameters, opt_state, found, norm, rate)
            if skip is None:
                return new
            return self.map(partial(self._jax.numpy.where, skip), (parameters, opt_state), new)

        rate = rate_of(state)
        program = self._program("apply", None, apply, donate_argnums=(0, 1) if donate else ())
        parameters, optimizer = program(
            state.weights["parameters"], state.optimizer, gradients.gradients, gradients.grad_norm, rate,
            self.to_arguments(skip),
        )  # fmt: skip
        return next_state(state, {**state.weights, "parameters": parameters}, optimizer, rate)

    def evaluate(self, weights: Tree, batch: TrainingBatch, strategy: TrainingStrategy) -> tuple[Tree, Array]:
        outputs = self._outputs(weights, batch.inputs)
        return outputs, strategy.compute_loss(outputs, batch)

    def evaluated(self, weights: Tree, batch: TrainingBatch, strategy: TrainingStrategy) -> Tree:
        return self._run("evaluate", super().evaluated, weights, batch, strategy)

    def outputs(self, weights: Mapping[str, Tree], inputs: Tree) -> Tree:
        program = self._program("evaluate", self, self._outputs)
        return self.to_torch(program(weights, self.placement.put_batch(self.to_arguments(inputs))))

    def _run(
        self,
        kind: str,
        function: Callable[..., Tree],
        weights: Tree,
        batch: TrainingBatch,
        strategy: TrainingStrategy,
        *others: Tree,
        donate: bool = False,
        first: bool = False,
    ) -> Tree:
        """Call a function with these arguments, compiled; an error carries a note of what the batch held.

        Args:
            donate: the memory of the weights and of the next argument may be reused.
            first: whether the batch is the first that is trained.
        """
        point = strategy if isinstance(strategy, LogPoint) else None
        plain = self._checked(weights, batch, strategy if point is None else point.strategy)
        trains = kind != "evaluate"
        # an argument, so that the steps before log points are the same program as the others, with the same bits
        due = np.bool_(point is not None) if trains and self.settings.log_strategy_metrics else None

        def compute(counts: tuple[int, int], arrays: tuple[Tree, ...], weights: Tree, *others: Tree) -> Tree:
            inputs, targets, weight, due = arrays
            traced = plain if due is None else _TracedPoint(plain, due)
            found = function(weights, TrainingBatch(inputs, targets, *counts, weight), traced, *others)
            return (*found, traced.metrics if isinstance(traced, _TracedPoint) else {}) if trains else found

        program = self._program(kind, plain, compute, static_argnums=0, donate_argnums=(2, 3) if donate else ())
        inputs, targets = self.placement.put_batch((batch.inputs, batch.targets), first)
        arrays = inputs, targets, self.to_arguments(batch.weight), due
        try:
            found = program((batch.samples, batch.tokens), arrays, weights, *others)
        except Exception as error:
            error.add_note(given(batch))
            raise
        if not trains:
            return found
        *found, metrics = found
        if point is not None:
            point.keep(metrics, batch)
        return tuple(found)


class _TracedPoint(LogPoint):
    """A log point while a step is traced: its metrics are computed in the steps where `due`, of shape (), is true."""

    def __init__(self, strategy: TrainingStrategy, due: Array) -> None:
        super().__init__(strategy)
        self.due = due

    def measure(self, jax: ModuleType, batch: TrainingBatch, outputs: Tree, parts: Mapping[str, Array]) -> None:
        """Compute the metrics of the outputs if they are due; else they are 0."""

        def compute(outputs: Tree, parts: Mapping[str, Array]) -> Tree:
            return jax.tree.map(jax.numpy.asarray, measured(self.strategy, outputs, batch, parts))

        shapes = jax.eval_shape(compute, outputs, parts)
        zeros = partial(jax.tree.map, lambda each: jax.numpy.zeros(each.shape, each.dtype), shapes)
        if shapes:
            self.keep(jax.lax.cond(self.due, compute, lambda *_: zeros(), outputs, parts), batch)


def _without_values(shape: Array) -> Tensor:
    """A torch tensor without values, of an output's shape and dtype."""
    name = str(shape.dtype)
    return torch.empty(shape.shape, dtype=getattr(torch, name, torch.float32), device="meta")
