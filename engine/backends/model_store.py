"""The two model stores: of a module that is trained in place, and of a state that is a value.

Handlers, checkpoints and users find an nn.Module and a torch optimizer in both.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.backends.module_view import version_of
from pulsetrain.engine.backends.value_states import rate_of, with_buffers
from pulsetrain.engine.checkpoint.pieces import StoredTensor
from pulsetrain.engine.checkpoint.weights import compare_weights
from pulsetrain.engine.distributed.parallelize import DataParallelModule, without_wrapper
from pulsetrain.engine.distributed.saved_shards import sharded_like
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.optimizers import parts_of
from pulsetrain.engine.step.backend import InPlaceBackend, ModelStore, ModuleView, ValueBackend
from pulsetrain.engine.step.protocols import GradientInfo, ModelState, Tree
from pulsetrain.engine.step.undo import Undo

__all__ = ["InPlaceStore", "OptimizerView", "ValueStore", "check_optimizer_state", "optimizer_type"]


class InPlaceStore(ModelStore):
    """A state in place: the module and the optimizer themselves, so that there is nothing to commit or to publish.

    Args:
        backend: computes with them.
        module: on its device. If several processes train it, steps call a wrapper that averages its gradients.
        optimizer: over its parameters.
        wraps: whether there is such a wrapper; not if the backend adds the gradients up itself.
    """

    waiting: GradientInfo | None = None  # gradients wait in the parameters
    backend: InPlaceBackend
    module: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(
        self, backend: InPlaceBackend, module: nn.Module, optimizer: torch.optim.Optimizer, *, wraps: bool = True
    ) -> None:
        self.backend, self.module, self.optimizer = backend, module, optimizer
        self._parallel = DataParallelModule(module, wraps=wraps)
        self.state: ModelState = backend.init(self._parallel.called, optimizer)
        self._evaluated = backend.init(without_wrapper(module), optimizer)
        self._parts = {name: backend.init(module, part) for name, part in parts_of(optimizer).items()}

    def part(self, name: str) -> ModelState:
        return self._parts[name] if name else self.state

    @property
    def eval_state(self) -> ModelState:
        return self._evaluated

    def refresh(self) -> None:
        if self._parallel.refresh():
            self.state = self.backend.init(self._parallel.called, self.optimizer)

    def discard(self) -> None:
        self.backend.discard_gradients(self.state)

    def gradients(self) -> dict[str, Tensor]:
        return {name: each.grad for name, each in self.module.named_parameters() if each.grad is not None}

    def load_gradients(self, saved: Mapping[str, Tensor], batches: int) -> Callable[[], None]:
        def put_back() -> None:
            for name, parameter in self.module.named_parameters():
                here = name in saved and not parameter.is_meta
                found = sharded_like(saved[name], parameter) if here else None
                parameter.grad = None if found is None else found.to(parameter.device)

        return put_back

    def snapshot(self) -> ModelState:
        """Copies of the state dicts of the module and the optimizer."""
        return ModelState(copy.deepcopy(self.module.state_dict()), copy.deepcopy(self.optimizer.state_dict()))

    def restore(self, state: ModelState) -> None:
        weights, saved = getattr(state, "weights", state), getattr(state, "optimizer", None)
        if not isinstance(weights, Mapping) or not isinstance(saved, Mapping) or "param_groups" not in saved:
            raise TypeError(
                f"Trainer.train_epoch(model_state of {type(weights).__name__}): needs a state that train_epoch or "
                "model_state of a trainer in place returned"
            )
        problems = compare_weights(self.module.state_dict(), weights)
        if problems:
            raise ConfigurationError(f"Trainer.train_epoch(model_state): its weights do not fit the model: {problems}")
        mine, theirs = (list(each["param_groups"][0]) for each in (self.optimizer.state_dict(), saved))
        if mine != theirs:
            raise ConfigurationError(
                f"Trainer.train_epoch(model_state): its optimizer has {', '.join(theirs)}, the trainer's "
                f"{type(self.optimizer).__name__} {', '.join(mine)}; pass a state of the same optimizer"
            )
        check_optimizer_state(self.optimizer, saved)
        self.module.load_state_dict(copy.copy(weights))  # not a plain dict: the versions are in attributes
        self.optimizer.load_state_dict(copy.deepcopy(dict(saved)))

    @contextmanager
    def rollback(self, *others: object) -> Iterator[None]:
        undo = Undo(self.module, getattr(self.optimizer, "__dict__", None), *map(_contents, others))
        backend = copy.deepcopy(self.backend.state_dict())
        gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            self.discard()
            undo.put_back()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self.backend.load_state_dict(backend)


class ValueStore(ModelStore):
    """A state that is a value, with a view of it as a module and an optimizer.

    Args:
        backend: computed the state.
        model: what the state was made from.
        state: the first one.
    """

    backend: ValueBackend
    module: nn.Module
    optimizer: OptimizerView

    def __init__(self, backend: ValueBackend, model: object, state: ModelState) -> None:
        self.backend, self._state = backend, state
        self.waiting: GradientInfo | None = None
        self._view: ModuleView = backend.module_view(model, state.weights)
        self.module = self._view.module
        self.optimizer = OptimizerView(self, state.metadata["learning_rate"])

    @property
    def state(self) -> ModelState:
        """The newest state, with what was written into the module and with the learning rate of the group."""
        state, weights = self._state, self._view.seen(self._state.weights)
        if state.metadata.get("schedule") is not None:  # of a state that brought one
            self.optimizer.param_groups[0]["lr"] = rate_of(state)
        metadata, rate = state.metadata, _known(self.optimizer.param_groups[0]["lr"])
        if weights is not state.weights or rate != metadata["learning_rate"]:
            self._state = state = replace(state, weights=weights, metadata={**metadata, "learning_rate": rate})
        return state

    @state.setter
    def state(self, state: ModelState) -> None:
        self._state = state
        self._view.show(state.weights)

    def part(self, name: str) -> ModelState:
        return self.state

    def commit(self, state: ModelState) -> None:
        self.waiting = None
        self.state = state

    def hold(self, gradients: GradientInfo) -> None:
        self.waiting = gradients
        self.state = with_buffers(self._state, gradients)

    def discard(self) -> None:
        self.waiting = None

    def show_gradients(self, gradients: GradientInfo, receive: Callable[[], object]) -> GradientInfo:
        parameters, shown = self.optimizer.learning, self.backend.tensors(gradients.gradients)
        for parameter, gradient in zip(parameters, shown, strict=True):
            parameter.grad = gradient
        before = [(id(each), version_of(each)) for each in shown]
        try:
            receive()
            after = [parameter.grad for parameter in parameters]
        finally:
            for parameter in parameters:
                parameter.grad = None
        if [(id(each), None if each is None else version_of(each)) for each in after] == before:
            return gradients
        paths = self.backend.flat(gradients.gradients)
        edited = {
            path: torch.zeros_like(old) if new is None else new
            for path, old, new in zip(paths, shown, after, strict=True)
        }
        return replace(gradients, gradients=self.backend.unflat(gradients.gradients, edited, "edited gradients"))

    def publish(self) -> None:
        self.backend.publish(self.state.weights)

    def reset(self) -> None:
        self._state = replace(self._state, metadata={**self._state.metadata, "step": 0})

    def gradients(self) -> dict[str, Tensor]:
        return {} if self.waiting is None else self.backend.flat(self.waiting.gradients)

    def load_gradients(self, saved: Mapping[str, Tensor], batches: int) -> Callable[[], None]:
        waiting: GradientInfo | None = None
        if saved:
            tree = self.backend.unflat(self.state.weights["parameters"], saved, "accumulated gradients")
            waiting = GradientInfo(None, tree, batches=batches)

        def put_back() -> None:
            self.waiting = waiting

        return put_back

    def snapshot(self) -> ModelState:
        return self.backend.copied(self.state)

    def restore(self, state: ModelState) -> None:
        self.backend.check(state)
        metadata = {"step": 0, "learning_rate": None, "schedule": None, **state.metadata}
        self.optimizer.param_groups[0]["lr"] = _shown(metadata["learning_rate"])
        self.state = replace(self.backend.copied(state), metadata=metadata)

    @contextmanager
    def rollback(self, *others: object) -> Iterator[None]:
        undo, state, rate = Undo(*map(_contents, others)), self.snapshot(), self.optimizer.param_groups[0]["lr"]
        backend, waiting = copy.deepcopy(self.backend.state_dict()), self.waiting
        self.waiting = None
        try:
            yield
        finally:
            undo.put_back()
            self.optimizer.param_groups[0]["lr"] = rate
            self.state = state
            self.waiting = waiting
            self.backend.load_state_dict(backend)


class OptimizerView(torch.optim.Optimizer):
    """Shows the state of a functional optimizer as torch's optimizers do: one group, whose rate may be written.

    The rate is nan if the state holds none, as that of optax.adam(1e-3). The backend makes the steps.
    """

    store: ValueStore
    kind: str

    def __init__(self, store: ValueStore, rate: float | None) -> None:
        # The group has the module's own parameters, so that it can be searched for them. A view would be up to date
        # from now on if they were read through its own method.
        self.learning: list[nn.Parameter] = [
            each for _, each in nn.Module.named_parameters(store.module) if each.requires_grad
        ]
        super().__init__(self.learning, {"lr": _shown(rate)})
        self.param_groups[0]["params"] = _UpToDate(store.module, self.learning)
        self.store, self.kind = store, type(store.backend.optimizer).__name__
        self._opt_called = True  # else torch's schedules warn that step() was never called

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Refused: the backend makes the steps."""
        raise RuntimeError(f"{type(self.store.backend).__name__} makes the updates itself; call Trainer.train()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait for an update."""
        self.store.discard()

    def state_dict(self) -> dict[str, Any]:
        """The leaves of the optimizer's state by their paths, and the group's rate."""
        state = self.store.state
        group = {"lr": self.param_groups[0]["lr"], "params": list(range(len(self.param_groups[0]["params"])))}
        leaves = self.store.backend.flat(state.optimizer)
        return {"state": leaves, "param_groups": [group], "step": state.metadata["step"]}

    def check_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Check that a state fits, and change nothing.

        Raises:
            CheckpointError: it is of a different optimizer or of other weights; the message names the first difference.
        """
        self._read(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        optimizer = self._read(state_dict)
        store, rate = self.store, _known(state_dict["param_groups"][0]["lr"])
        self.param_groups[0]["lr"] = _shown(rate)
        metadata = {**store.state.metadata, "step": state_dict["step"], "learning_rate": rate}
        store.state = replace(store.state, optimizer=optimizer, metadata=metadata)

    def _read(self, state_dict: Mapping[str, Any]) -> Tree:
        if "step" not in state_dict:
            raise CheckpointError(
                f"the optimizer's state is one of torch.optim, and {type(self.store.backend).__name__} computes with "
                "values; resume with the backend that the checkpoint was made with"
            )
        return self.store.backend.unflat(self.store.state.optimizer, state_dict["state"], "the optimizer's state")


class _UpToDate(list[nn.Parameter]):
    """A module's parameters, brought up to date when they are read."""

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._module = module

    def __iter__(self) -> Iterator[nn.Parameter]:
        next(self._module.parameters(), None)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:  # one of them, or a list for a slice
        next(self._module.parameters(), None)
        return super().__getitem__(index)


def optimizer_type(optimizer: torch.optim.Optimizer) -> str:
    """What a checkpoint calls an optimizer: the name of its class, and that of the backend if the backend made it.

    >>> optimizer_type(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    'SGD'
    """
    if not isinstance(optimizer, OptimizerView):
        return type(optimizer).__name__
    backend = optimizer.store.backend
    return f"{type(backend.optimizer).__name__} of {type(backend).__name__}"


def check_optimizer_state(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Check that a state dict fits an optimizer, and change nothing.

    Args:
        param_groups: those that the optimizer will have when the state is loaded; by default those that it has.

    Raises:
        CheckpointError: it is of other parameters; the message names the first difference.
    """
    param_groups = optimizer.param_groups if param_groups is None else param_groups
    groups = [len(group["params"]) for group in param_groups]
    others = [len(group["params"]) for group in saved["param_groups"]]
    if groups != others:
        raise CheckpointError(
            f"the optimizer's state does not fit: {others} parameters a group in the checkpoint, {groups} here; "
            "give the optimizer the groups that it had when the checkpoint was made"
        )
    check = getattr(optimizer, "check_state_dict", None)  # of those that are several in one
    if check is not None:
        check(saved)
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, value in saved["state"].get(index, {}).items():
            if isinstance(value, (Tensor, StoredTensor)) and len(value.shape) and value.shape != parameter.shape:
                raise CheckpointError(
                    f"the optimizer's state does not fit: {name} of parameter {index} is {tuple(value.shape)} in the "
                    f"checkpoint, the parameter is {tuple(parameter.shape)} here"
                )


def _contents(value: object) -> object:
    """What `Undo` can put back of an object: the object itself, if it is a container, and its attributes."""
    return (value, getattr(value, "__dict__", None))


def _shown(rate: float | None) -> float:
    """A rate as an optimizer's group has it: nan for none."""
    return math.nan if rate is None else rate  # always the same nan: it equals itself in a tuple of rates


def _known(rate: float | Tensor) -> float | None:
    """A group's rate as a number: torch's schedules may write tensors."""
    rate = float(rate)
    return None if math.isnan(rate) else rate
