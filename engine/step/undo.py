"""Puts objects back as they were, in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.distributed.shards import local

__all__ = ["Undo"]


class Undo:
    """Remembers modules, containers and tensors, and puts them back in place: references to them stay valid.

    Tensors are copied to the host. Of other objects, only what their containers hold is remembered.

    >>> weights, history = torch.zeros(2), [1]
    >>> undo = Undo({"weights": weights, "history": history})
    >>> _ = weights.add_(1), history.append(2)
    >>> undo.put_back()
    >>> weights, history
    (tensor([0., 0.]), [1])
    """

    def __init__(self, *values: object) -> None:
        self._steps: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # the objects too: an id is theirs only while they live
        for value in values:
            self.remember(value)

    def remember(self, value: object) -> None:
        """Note what the value holds, and what that holds in turn."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._remember_tensor(value)
        elif isinstance(value, nn.Module):
            self.remember(vars(value))
        elif isinstance(value, dict):
            self._remember_items(value, dict(value), value.update)
            for item in list(value.values()):
                self.remember(item)
        elif isinstance(value, (list, deque)):
            self._remember_items(value, list(value), value.extend)
            for item in list(value):
                self.remember(item)
        elif isinstance(value, set):
            self._remember_items(value, set(value), value.update)
        elif isinstance(value, tuple):
            for item in value:
                self.remember(item)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything what it was when it was remembered."""
        for step in self._steps:
            step()

    def _remember_items(self, container: Any, items: Any, fill: Callable[[Any], None]) -> None:
        def put_back() -> None:
            container.clear()
            fill(items)

        self._steps.append(put_back)

    def _remember_tensor(self, tensor: Tensor) -> None:
        tensor = local(tensor)
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        if any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=False)):
            return  # several elements share one place in memory, and torch refuses to write there
        before = tensor.detach().to("cpu", copy=True)
        self._steps.append(lambda: tensor.detach().copy_(before))
