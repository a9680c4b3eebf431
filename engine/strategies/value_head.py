"""Adds a critic to a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pulsetrain.engine.errors import refused
from pulsetrain.engine.strategies.language import logits_of

if TYPE_CHECKING:
    from torch.nn import Linear

__all__ = ["PolicyOutputs", "WithValueHead"]


class PolicyOutputs(NamedTuple):
    """The outputs of an actor with a critic."""

    logits: Tensor  # (..., actions)
    values: Tensor  # (...)


class WithValueHead(nn.Module):
    """A language model that returns values besides its logits: a linear layer over the inputs of its head.

    Values are 0 initially. All other attributes (`context`, `config`, `generate`, `sample` ...) are the model's.

    >>> model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    >>> logits, values = WithValueHead(model, head="1")(torch.tensor([[1, 2, 3]]))
    >>> logits.shape, values
    (torch.Size([1, 3, 5]), tensor([[0., 0., 0.]], grad_fn=<CloneBackward0>))

    Args:
        model: a language model; for a Hugging Face model the head is found automatically.
        head: the name of the module that computes the logits, such as "head" or "lm_head".

    Raises:
        ConfigurationError: there is no such module, or it has no `in_features`.
    """

    def __init__(self, model: nn.Module, head: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.head = head
        width = getattr(self._head(), "in_features", None)
        if not isinstance(width, int):
            rule = f"{type(self._head()).__name__} has no in_features; name the linear layer that computes the logits"
            raise refused(self, rule, "head")
        parameter = next(model.parameters())
        self.value: Linear = nn.Linear(width, 1, device=parameter.device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def _head(self) -> nn.Module:
        known = getattr(self.model, "get_output_embeddings", None)
        if self.head is None and callable(known) and isinstance(found := known(), nn.Module):
            return found
        try:
            return self.model.get_submodule(self.head or "")
        except AttributeError:
            names = [name for name, each in self.model.named_children() if hasattr(each, "in_features")]
            has = ", ".join(names) or "no linear layer of its own"
            raise refused(self, f"{type(self.model).__name__} has no such module; it has {has}", "head") from None

    def forward(self, *args: object, **kwargs: object) -> PolicyOutputs:
        """Logits (batch, length, vocabulary) and values (batch, length), the latter in float32 at least."""
        hidden: list[Tensor] = []
        handle = self._head().register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
        try:
            outputs = self.model(*args, **kwargs)
        finally:
            handle.remove()
        seen = hidden[-1].to(torch.promote_types(hidden[-1].dtype, self.value.weight.dtype))
        values: Tensor = self.value(seen)
        # copied: torch warns of a sharded module that returns a view
        return PolicyOutputs(logits_of(outputs), values.squeeze(-1).clone())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model" or name.startswith("__"):  # such as __deepcopy__, which would copy the inner model
                raise
            return getattr(super().__getattr__("model"), name)
