"""The model that a policy is held to: frozen, and asked for the probabilities that it gives to tokens."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.losses.tokens import token_log_probs
from pulsetrain.engine.step.backend import InPlaceBackend
from pulsetrain.engine.step.model_call import call, eval_mode
from pulsetrain.engine.step.precision import autocast_of
from pulsetrain.engine.strategies.language import LanguageStrategy, logits_of

__all__ = ["Reference", "ReferenceModel"]

ReferenceModel = str | nn.Module | Callable[..., Any] | None
"""Who is the reference: "copy" of the policy as it is when training is set up, another model, or None for none."""


class Reference:
    """Holds the reference of a strategy.

    A copy of a policy with adapters (of the peft package) is the policy itself with its adapters switched off, which
    takes no memory. Of any other the weights are copied. Each checkpoint keeps a digest of a reference's weights: a run
    goes on with the reference that it began with, or not at all.

    Args:
        given: see `ReferenceModel`.
        place: what errors begin with.

    Raises:
        ConfigurationError: another text than "copy".
        TypeError: something that cannot be called.
    """

    def __init__(self, given: ReferenceModel, place: str) -> None:
        if isinstance(given, str) and given != "copy":
            raise ConfigurationError("needs 'copy', a model, or None", place, reference=given)
        if given is not None and not isinstance(given, str) and not callable(given):
            raise TypeError(f"{place}(reference={type(given).__name__}): needs 'copy', a model, or None")
        self.given, self._place = given, place
        self._model: Any = None if isinstance(given, str) else given
        self._policy: Any = None
        self._switched_off: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._compared = False  # the vocabularies
        self._device: Any = None  # where it computes, if that is torch's
        self._digest: str | None = None

    def bind(self, policy: nn.Module, backend: Any = None) -> None:
        """Take the policy as it is now as the reference, where a copy was asked for.

        Raises:
            ConfigurationError: it belongs to another policy already, or would learn with this one.
        """
        if self.given == "copy" and self._policy is not None and self._policy is not policy:
            raise ConfigurationError(
                f"{self._place}: holds the reference of another model already; give each Trainer a strategy of its own"
            )
        self._refuse_what_learns(policy)
        self._policy, self._compared = policy, False
        self._autocast = autocast_of(backend)
        if self.given == "copy":
            self._digest = None
            switched_off = getattr(policy, "disable_adapter", None)
            if callable(switched_off):
                self._model, self._switched_off = policy, switched_off
            else:
                self._model = copy.deepcopy(policy).requires_grad_(False)
        self._device = backend.device if isinstance(backend, InPlaceBackend) else None
        if isinstance(self._model, nn.Module) and self._model is not policy and self._device is not None:
            self._model.to(self._device)

    def _refuse_what_learns(self, policy: nn.Module) -> None:
        if not isinstance(self.given, nn.Module):
            return
        learning = {id(each) for each in policy.parameters() if each.requires_grad}
        shared = [name for name, each in self.given.named_parameters() if id(each) in learning]
        if self.given is policy or shared:
            what = "is the model that learns itself" if self.given is policy else f"shares {shared[0]!r} with the model"
            raise ConfigurationError(
                f"{what}, so that it would move along; pass reference='copy', or copy.deepcopy(model)",
                self._place,
                reference=type(self.given),
            )

    def placed(self, value: Any) -> Any:
        """A tensor where the reference computes; anything else as it is."""
        return value.to(self._device) if isinstance(value, Tensor) and self._device is not None else value

    @torch.no_grad()
    def log_probs(self, inputs: Any, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """What it gives to each of the tokens, in nats, shape of the tokens, at least float32.

        Args:
            inputs: what a model is called with.
            tokens: those that follow each position, shape (batch, length).
            temperature: that the logits are divided by.

        Raises:
            ConfigurationError: there is no reference yet.
            ValueError: it is a model of another vocabulary than the policy's.
        """
        if self._model is None:
            raise ConfigurationError(
                "has no reference model yet; a Trainer or TrainerCore.init gives it one, or call bind(model)",
                self._place,
                reference=self.given,
            )
        with self._frozen(), self._switched_off(), self._autocast():
            self._compare(inputs)
            logits = _torch(logits_of(call(self._model, inputs)))
        found: Tensor = token_log_probs(logits if temperature == 1.0 else logits / temperature, tokens)
        return found

    def _frozen(self) -> AbstractContextManager[Any]:
        return eval_mode(self._model) if isinstance(self._model, nn.Module) else nullcontext()

    def _compare(self, inputs: Any) -> None:
        """Once: reference and policy score one token each, and have to score as many."""
        if self._compared or self._policy is None or self._model is self._policy:
            return
        named = inputs if isinstance(inputs, Mapping) else {"": inputs}
        one = {name: torch.zeros_like(v[:1, :1]) if isinstance(v, Tensor) else v for name, v in named.items()}
        first = one if isinstance(inputs, Mapping) else one[""]
        with eval_mode(self._policy):
            sizes = [logits_of(call(model, first)).shape[-1] for model in (self._model, self._policy)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{self._place}: the reference model has a vocabulary of {sizes[0]} tokens, the policy one of "
                f"{sizes[1]}; give a reference with the policy's tokenizer, or reference='copy'"
            )
        self._compared = True

    def state_dict(self) -> dict[str, Any]:
        """A digest of the reference's weights; of a function, or a policy with adapters, none."""
        if isinstance(self._model, nn.Module) and self._model is not self._policy:
            if self._digest is None:
                self._digest = _digest(self._model)
            return {"reference": self._digest}
        return {"reference": None}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on with a reference of other weights than the run began with.

        Raises:
            CheckpointError: it has others.
        """
        theirs, mine = state.get("reference"), self.state_dict()["reference"]
        if theirs is not None and mine is not None and theirs != mine:
            raise CheckpointError(
                f"{self._place}: the reference model has other weights than the one that the run began with; make the "
                "model with the weights that it had then (the same seed or file), and load the checkpoint behind that"
            )


class WithReference(LanguageStrategy):
    """Base of the strategies that hold a policy to a reference."""

    _reference: Reference

    def bind(self, model: nn.Module, backend: Any = None) -> None:
        """Learn the model's limits, and take it as the reference where a copy was asked for.

        Raises:
            ConfigurationError: the reference belongs to another policy already, or would learn with this one.
        """
        super().bind(model, backend)
        self._reference.bind(model, backend)

    def state_dict(self) -> dict[str, Any]:
        """A digest of the reference."""
        return self._reference.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on with another reference.

        Raises:
            CheckpointError: it is one.
        """
        self._reference.check_state_dict(state)


def _torch(array: Array) -> Tensor:
    return array if isinstance(array, Tensor) else torch.utils.dlpack.from_dlpack(array)


def _digest(model: nn.Module) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()
