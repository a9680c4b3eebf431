"""Training steps whose every effect is taken back, and batches that are not missing afterwards."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import KeyedLoader, can_be_keyed, can_be_read_once, key_order
from pulsetrain.engine.data.workers import workers_begin
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["copy_of_loader", "endless", "taken_back"]


@contextmanager
def taken_back(trainer: Any) -> Iterator[None]:
    """What is trained inside leaves no trace in model, optimizer, backend, strategy, gradients and generators.

    Tensors are copied to the host and back in place, so whoever holds one holds it still. Of what a module, the
    optimizer or the strategy keeps in attributes, numbers, tensors and containers of those come back.

    Args:
        trainer: has `model`, `optimizer`, `backend`, `held` and `strategy`.
    """
    held = trainer.held
    with rng.preserve_rng():
        kept = _Kept()
        kept.keep(trainer.strategy)
        kept.keep(getattr(trainer.strategy, "__dict__", None))
        state, rate, gradients = None, 0.0, []
        if held.in_place:
            kept.keep(trainer.model)
            kept.keep(getattr(trainer.optimizer, "__dict__", None))
            gradients = [(parameter, parameter.grad) for parameter in trainer.model.parameters()]
        else:
            state, rate = held.copy(), held.optimizer.param_groups[0]["lr"]
        waiting, held.waiting = held.waiting, None
        backend = copy.deepcopy(trainer.backend.state_dict())
        for parameter, _ in gradients:
            parameter.grad = None  # those of an update under way wait untouched
        try:
            yield
        finally:
            held.discard()
            kept.put_back()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            if state is not None:
                held.optimizer.param_groups[0]["lr"] = rate
                held.take(state)
            held.waiting = waiting
            trainer.backend.load_state_dict(backend)


class _Kept:
    """Modules, containers and tensors as they were, to be put back in place."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # the objects themselves, too: a number is only theirs as long as they live

    def keep(self, value: Any) -> None:
        """Note what the value holds, and what that holds."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, nn.Module):
            self.keep(vars(value))
        elif isinstance(value, dict):
            self._keep_items(value, dict(value), value.update)
            for item in list(value.values()):
                self.keep(item)
        elif isinstance(value, (list, deque)):
            self._keep_items(value, list(value), value.extend)
            for item in list(value):
                self.keep(item)
        elif isinstance(value, set):
            self._keep_items(value, set(value), value.update)
        elif isinstance(value, tuple):
            for item in value:
                self.keep(item)

    def put_back(self) -> None:
        """Make everything that was noted what it was."""
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def _keep_items(self, container: Any, items: Any, fill: Callable[[Any], None]) -> None:
        def undo() -> None:
            container.clear()
            fill(items)

        self._undo.append(undo)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if any(stride == 0 and size > 1 for stride, size in zip(_strides(tensor), tensor.shape, strict=False)):
            return  # several of its elements are one, so nobody can write into it
        before = tensor.detach().to("cpu", copy=True)

        def undo() -> None:
            tensor.detach().copy_(before)

        self._undo.append(undo)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def copy_of_loader(loader: Any) -> Any:
    """A loader that gives what this one gives, and leaves this one where it is.

    The dataset that a DataLoader asks by index is shared, as is a list of batches; anything else is copied whole.

    Raises:
        ConfigurationError: it can be read once, or cannot be copied.
    """
    if type(loader) in (list, tuple):
        return loader
    remedy = "and what is read of it now would be missing in training; pass loader="
    if can_be_read_once(loader):
        raise ConfigurationError(f"train_loader={type(loader).__name__}: it can be read once, {remedy}")
    try:
        if not isinstance(loader, DataLoader):
            return copy.deepcopy(loader)
        copied = copy.copy(loader)
        vars(copied)["_iterator"] = None  # the workers of a pass under way
        shared: dict[int, Any] = {id(loader.dataset): loader.dataset} if can_be_keyed(loader) else {}
        vars(copied).update(copy.deepcopy(vars(copied), shared))
        return copied
    except Exception as error:  # a file, a socket, a lock ...
        raise ConfigurationError(
            f"train_loader={type(loader).__name__}: it cannot be copied ({error}), {remedy}"
        ) from error


def endless(loader: Any, seed: int) -> Iterator[Any]:
    """Its batches, again and again from the beginning, in the order of a run's passes where the seed decides it.

    Raises:
        ConfigurationError: it gives none.
    """
    keyed = KeyedLoader(loader, seed) if can_be_keyed(loader) else None
    for number in itertools.count(1):
        given = False
        for batch in keyed.begin(number) if keyed is not None else _a_pass(loader, rng.derive(seed, number)):
            given = True
            yield batch
        if not given:
            raise ConfigurationError(f"train_loader={type(loader).__name__}: gives no batch; give it data")


def _a_pass(loader: Iterable[Any], seed: int) -> Iterator[Any]:
    if type(loader) in (list, tuple):
        return iter(loader)
    key_order(loader, seed)
    with workers_begin(loader):
        return rng.Draws(seed).around(loader)
