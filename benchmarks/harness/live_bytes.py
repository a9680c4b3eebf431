"""How much memory a forward pass keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["bytes_for_backward"]


def bytes_for_backward(compute: Callable[[], Tensor]) -> int:
    """The bytes of all tensors that a forward pass makes and that its graph keeps, without those that it returns.

    It counts memory that is still in use after the pass: what operators save, the inputs of
    checkpointed modules, and the results that these keep. A storage counts once. Weights and the batch do not count.

    Args:
        compute: the forward pass; its result holds the graph.

    >>> import torch
    >>> weight = torch.ones(4, 4, requires_grad=True)
    >>> bytes_for_backward(lambda: (torch.ones(2, 4) @ weight).square().sum())  # the batch and the product, (2, 4)
    64
    """
    made = _Made()
    with made:
        result = compute()
    returned = {key for key, _ in _storages(result)}
    return sum(size for key, (storage, size) in made.storages.items() if key not in returned and not storage.expired())


class _Made(TorchDispatchMode):
    """Notes the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {key for key, _ in _storages((arguments, named))}
        result = operator(*arguments, **(named or {}))
        for key, storage in _storages(result):
            if key not in given:
                self.storages[key] = storage
        return result


def _storages(value: object) -> Iterator[tuple[int, tuple[StorageWeakRef, int]]]:
    """The storage of each tensor in containers with its size, by an address that is not used again meanwhile."""
    for each in tree_leaves(value):
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            weak = StorageWeakRef(storage)
            yield weak.cdata, (weak, storage.nbytes())
