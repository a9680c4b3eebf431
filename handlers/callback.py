"""Callbacks: hooks as methods of a class, an alternative to handlers."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeAlias

from torch import Tensor

from pulsetrain.engine import Engine, Event, Events, Phase
from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.events.names import EventType
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.metric_values.step_values import scalars

__all__ = ["Callback", "CallbackList"]

Run: TypeAlias = Any  # a Trainer or any Engine; a callback annotates the one that it needs


class Callback:
    """Base class of callbacks. Override the hooks that you need; the others cost nothing.

    A class is refused with a ConfigurationError if one of its methods begins with `on_` or resembles a hook, as
    `onEpochEnd`, `epoch_end` and `after_epoch` do, but is not a hook.

    >>> class Printer(Callback):
    ...     def on_step_end(self, trainer, loss):
    ...         print(trainer.state.iteration, loss)
    >>> engine = Engine(lambda engine, batch: 1 / batch)
    >>> callbacks = CallbackList([Printer()]).attach(engine)
    >>> state = engine.run([1, 2])
    1 1.0
    2 0.5
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name, value in vars(cls).items():
            if hasattr(Callback, name) or not (callable(value) or isinstance(value, classmethod | staticmethod)):
                continue
            meant = _hook_name(name)
            if meant in hooks:
                raise ConfigurationError(f"is not called; the hook's name is {meant!r}", cls.__name__, hook=name)
            if name.startswith("on_"):
                raise unknown_name(cls.__name__, "hook", name, hooks)

    def on_train_begin(self, trainer: Run) -> None:
        """The run starts."""

    def on_train_end(self, trainer: Run) -> None:
        """The run has ended, at its full length or earlier; not called after an exception."""

    def on_epoch_begin(self, trainer: Run) -> None:
        """An epoch starts; `trainer.state.epoch` is its number, from 1."""

    def on_epoch_end(self, trainer: Run) -> None:
        """An epoch has ended, and its validation, if there was one."""

    def on_step_begin(self, trainer: Run) -> None:
        """A batch has been loaded, as `trainer.state.batch`."""

    def on_step_end(self, trainer: Run, loss: Tensor | float | None) -> None:
        """A training step has ended.

        Args:
            trainer: the engine.
            loss: detached, shape (), on the device: `loss.item()` waits for the device. None if a custom step returns
                no loss.
        """

    def on_validation_begin(self, trainer: Run) -> None:
        """A round of validation starts."""

    def on_validation_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """A round of validation has ended; metrics have their full names, such as "val/loss"."""

    def on_rollout_begin(self, trainer: Run) -> None:
        """A rollout starts: the policy is about to act."""

    def on_rollout_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """A rollout has ended; metrics have their full names, such as "rollout/return"."""


_WORDS = {
    "start": "begin",
    "started": "begin",
    "ended": "end",
    "completed": "end",
    "batch": "step",
    "iteration": "step",
    "val": "validation",
}
_MOMENTS = {"before": "begin", "after": "end"}


def _hook_name(name: str) -> str:
    """The hook that a method's name resembles, if it does.

    >>> _hook_name("onEpochEnd"), _hook_name("batch_start"), _hook_name("after_epoch")
    ('on_epoch_end', 'on_step_begin', 'on_epoch_end')
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    if words[0] in _MOMENTS:
        words = [*words[1:], _MOMENTS[words[0]]]
    elif words[0] == "on":
        words = words[1:]
    return "_".join(["on", *(_WORDS.get(word, word) for word in words)])


def _with_engine(hook: Callable[..., None]) -> Callable[..., None]:
    return lambda engine: hook(engine)


def _with_loss(hook: Callable[..., None]) -> Callable[..., None]:
    def deliver(engine: Engine) -> None:
        output = engine.state.output
        loss = getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.requires_grad:
            loss = scalars(output).get("loss")
        hook(engine, loss)

    return deliver


def _with_metrics(hook: Callable[..., None]) -> Callable[..., None]:
    def deliver(engine: Engine, event: Event) -> None:
        hook(engine, event.payload.metrics)

    return deliver


_HOOKS: dict[str, tuple[EventType, Callable[..., Callable[..., None]]]] = {
    "on_train_begin": (Events.STARTED, _with_engine),
    "on_train_end": (Events.COMPLETED, _with_engine),
    "on_epoch_begin": (Events.EPOCH_STARTED, _with_engine),
    "on_epoch_end": (Events.EPOCH_COMPLETED, _with_engine),
    "on_step_begin": (Events.ITERATION_STARTED, _with_engine),
    "on_step_end": (Events.ITERATION_COMPLETED, _with_loss),
    "on_validation_begin": (Events.VALIDATION_STARTED, _with_engine),
    "on_validation_end": (Events.VALIDATION_COMPLETED, _with_metrics),
    "on_rollout_begin": (Events.ROLLOUT_STARTED, _with_engine),
    "on_rollout_end": (Events.ROLLOUT_COMPLETED, _with_metrics),
}


class CallbackList:
    """Subscribes the overridden hooks of callbacks, in the order of the list.

    >>> class Named(Callback):
    ...     def __init__(self, name):
    ...         self.name = name
    ...     def on_epoch_end(self, trainer):
    ...         print(self.name, trainer.state.epoch)
    >>> first, second = Named("first"), Named("second")
    >>> engine = Engine(lambda engine, batch: None)
    >>> callbacks = CallbackList([first, second]).attach(engine)
    >>> state = engine.run([0])
    first 1
    second 1
    >>> callbacks.remove(first)
    >>> state = engine.run([0], max_epochs=2)
    second 2

    Args:
        callbacks: the list, in order.

    Raises:
        TypeError: an item is not a Callback.
        ValueError: an item occurs twice.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._attachments: dict[Callback, Attachment] = {}
        self._trainer: weakref.ref[Engine] | None = None
        for callback in callbacks:
            self.add(callback)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._attachments)

    def __len__(self) -> int:
        return len(self._attachments)

    def attach(self, trainer: Engine) -> Self:
        """Subscribe every callback's hooks, in phase ACT."""
        if self._trainer is not None:
            raise RuntimeError("CallbackList.attach(): already attached; detach() first")
        try:
            for callback in self._attachments:
                self._subscribe(callback, trainer)
        except BaseException:
            self.detach()
            raise
        self._trainer = weakref.ref(trainer)
        return self

    def detach(self) -> None:
        """Unsubscribe every callback's hooks."""
        for attachment in self._attachments.values():
            attachment.cancel()
        self._trainer = None

    def add(self, callback: Callback) -> None:
        """Add a callback; if the list is attached, its hooks are called from now on."""
        if not isinstance(callback, Callback):
            raise TypeError(f"CallbackList.add({callback!r}): needs a Callback")
        if callback in self._attachments:
            raise ValueError(f"CallbackList.add({callback!r}): is already in the list")
        self._attachments[callback] = Attachment("CallbackList")
        trainer = self._trainer() if self._trainer is not None else None
        if trainer is not None:
            self._subscribe(callback, trainer)

    def remove(self, callback: Callback) -> None:
        """Remove a callback; its hooks are no longer called.

        Raises:
            ValueError: the callback is not in the list.
        """
        if callback not in self._attachments:
            raise ValueError(f"CallbackList.remove({callback!r}): is not in the list")
        self._attachments.pop(callback).cancel()

    def _subscribe(self, callback: Callback, trainer: Engine) -> None:
        with self._attachments[callback].to(trainer, whole_bus=False) as subscribe:
            for name, (event, shape) in _HOOKS.items():
                hook = getattr(callback, name)
                if getattr(hook, "__func__", hook) is not getattr(Callback, name):
                    subscribe(event, shape(hook), phase=Phase.ACT)
