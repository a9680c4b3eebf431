"""Models with adapters (of the peft package) as their own reference: what they were before training, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pulsetrain.engine.distributed.shards import is_shard, local

__all__ = ["InitialWeights", "adds_nothing", "whole"]


def adds_nothing(model: nn.Module) -> bool:
    """Whether the adapters of a model leave its outputs unchanged, and nothing besides them learns.

    It is known of LoRA, whose second factors are 0 at first. All processes that hold a part of the model call this.

    >>> model = nn.ModuleDict({"lora_A": nn.Linear(4, 2), "lora_B": nn.Linear(2, 4, bias=False)})
    >>> adds_nothing(model)
    False
    >>> _ = nn.init.zeros_(model["lora_B"].weight)
    >>> adds_nothing(model)
    True
    """
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            if whole(parameter.detach()).any():
                return False
        elif parameter.requires_grad and "lora_A" not in name and "lora_embedding_A" not in name:
            return False
    return True


class InitialWeights:
    """A copy of the weights of a model that learn, with which the model can compute for a while.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> initial = InitialWeights(model)
    >>> _ = nn.init.zeros_(model.weight)
    >>> with initial.in_use():
    ...     print(model.weight.item())
    1.0
    >>> model.weight.item()
    0.0
    """

    weights: dict[str, Tensor]

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.weights = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it, the model has these weights; afterwards its own, bit for bit.

        The values are exchanged, and not the tensors: shards are gathered from the memory of the parameters.
        """
        named = dict(self._model.named_parameters())
        pairs = [(local(named[name]), local(value)) for name, value in self.weights.items()]
        own = [each.detach().clone() for each, _ in pairs]
        try:
            with torch.no_grad():
                for each, initial in pairs:
                    each.copy_(initial)
            yield
        finally:
            with torch.no_grad():
                for (each, _), value in zip(pairs, own, strict=True):
                    each.copy_(value)


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which each process may hold a part; then all of them call this.

    >>> whole(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]  # of a DTensor
