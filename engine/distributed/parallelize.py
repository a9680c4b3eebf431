"""Making one model of the copies that several processes train: torch's DistributedDataParallel around the user's."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pulsetrain.engine.distributed.ranks import is_shared, ranks

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["DataParallelModule", "start_alike", "without_wrapper"]

_SYNC_BUFFERS = next(  # before each step; they are sent before each validation instead. Older versions of torch
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class DataParallelModule:
    """What a training step calls in place of a module, so that its gradients are averaged over the ranks.

    The module itself stays as it is: its names, its state dict and what handlers find. Alone, and where the user has
    wrapped it, `called` is the module. DistributedDataParallel reads `requires_grad` when it is created; so it is
    created again when a handler has frozen or unfrozen a parameter, which has to happen on all ranks alike.

    >>> module = nn.Linear(2, 1)
    >>> DataParallelModule(module).called is module
    True

    Args:
        module: on its device, the same on all ranks but for its values, which are those of rank 0 from now on.
        wraps: whether to wrap it at all.
    """

    called: Module

    def __init__(self, module: nn.Module, *, wraps: bool = True) -> None:
        self.module = module
        self.called = module
        self.is_wrapped: bool = wraps and ranks().world_size > 1 and not is_shared(module)
        if self.is_wrapped:
            self._wrap()

    def refresh(self) -> bool:
        """Wrap again if other parameters learn than before; returns whether they do."""
        if not self.is_wrapped or self._learning == self._learning_now():
            return False
        self._wrap()
        return True

    def _learning_now(self) -> list[int]:
        return [id(each) for each in self.module.parameters() if each.requires_grad]

    def _wrap(self) -> None:
        self._learning = self._learning_now()
        self.called = self.module
        if self._learning:  # else there is nothing to average
            options: dict[str, Any] = {_SYNC_BUFFERS: False}
            self.called = DistributedDataParallel(self.module, **options)


def start_alike(module: nn.Module) -> None:
    """Give a module the values of rank 0, in place; all processes call this. What has no values stays without."""
    if ranks().world_size == 1:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                torch.distributed.broadcast(tensor.detach(), src=0)


def without_wrapper(module: nn.Module) -> nn.Module:
    """The module inside of a DistributedDataParallel, for a forward pass that needs no other rank; else itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module
