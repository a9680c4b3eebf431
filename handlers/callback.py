"""Hooks as methods, for those who prefer them to handlers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from torch import Tensor

from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.metric_values.step_values import scalars

__all__ = ["Callback", "CallbackList"]


class Callback:
    """Base of callbacks: override the hooks that you need; those you leave alone cost nothing."""

    def on_train_begin(self, trainer: Any) -> None:
        """The run starts."""

    def on_train_end(self, trainer: Any) -> None:
        """The run has ended, at its bound or before; after an exception it is not called."""

    def on_epoch_begin(self, trainer: Any) -> None:
        """An epoch starts; `trainer.state.epoch` is its number, from 1."""

    def on_epoch_end(self, trainer: Any) -> None:
        """An epoch has ended, and its validation, if there was one."""

    def on_step_begin(self, trainer: Any) -> None:
        """A batch is there; `trainer.state.batch` holds it."""

    def on_step_end(self, trainer: Any, loss: Any) -> None:
        """A batch was trained on.

        Args:
            trainer: the engine.
            loss: detached, shape (), on the device: `loss.item()` waits for the device. None where a custom step
                returns no loss.
        """

    def on_validation_begin(self, trainer: Any) -> None:
        """A round of validation starts."""

    def on_validation_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """A round of validation has ended; the metrics go by their full names, such as "val/loss"."""

    def on_rollout_begin(self, trainer: Any) -> None:
        """The policy is about to act."""

    def on_rollout_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """The policy has acted; the metrics go by their full names, such as "rollout/return"."""


def _bare(hook: Callable[..., None]) -> Callable[..., None]:
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


_HOOKS: dict[str, tuple[Events, Callable[..., Callable[..., None]]]] = {
    "on_train_begin": (Events.STARTED, _bare),
    "on_train_end": (Events.COMPLETED, _bare),
    "on_epoch_begin": (Events.EPOCH_STARTED, _bare),
    "on_epoch_end": (Events.EPOCH_COMPLETED, _bare),
    "on_step_begin": (Events.ITERATION_STARTED, _bare),
    "on_step_end": (Events.ITERATION_COMPLETED, _with_loss),
    "on_validation_begin": (Events.VALIDATION_STARTED, _bare),
    "on_validation_end": (Events.VALIDATION_COMPLETED, _with_metrics),
    "on_rollout_begin": (Events.ROLLOUT_STARTED, _bare),
    "on_rollout_end": (Events.ROLLOUT_COMPLETED, _with_metrics),
}


class CallbackList:
    """Subscribes the overridden hooks of callbacks, in the order of the list.

    Raises:
        TypeError: one is no Callback.
        ValueError: one is there twice.
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
        for attachment in self._attachments.values():
            attachment.cancel()
        self._trainer = None

    def add(self, callback: Callback) -> None:
        """Add a callback; where the list is attached, its hooks are called from now on."""
        if not isinstance(callback, Callback):
            raise TypeError(f"CallbackList.add({callback!r}): needs a Callback")
        if callback in self._attachments:
            raise ValueError(f"CallbackList.add({callback!r}): is in the list already")
        self._attachments[callback] = Attachment("CallbackList")
        trainer = self._trainer() if self._trainer is not None else None
        if trainer is not None:
            self._subscribe(callback, trainer)

    def remove(self, callback: Callback) -> None:
        """Take a callback out; its hooks are called no more.

        Raises:
            ValueError: it is not in the list.
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
