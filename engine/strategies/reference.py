"""The frozen reference model of a policy, which provides log-probabilities of tokens."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from pulsetrain.engine.losses.tokens import token_log_probs
from pulsetrain.engine.step.model_call import call, eval_mode
from pulsetrain.engine.step.precision import autocast_of
from pulsetrain.engine.step.protocols import Tree
from pulsetrain.engine.strategies.adapters import InitialWeights, adds_nothing, whole
from pulsetrain.engine.strategies.language import LanguageStrategy, logits_of

__all__ = ["Reference", "ReferenceModel"]

ReferenceModel = str | nn.Module | Callable[..., object] | None
"""The reference: "copy" of the policy at the time training is set up, a model, or None."""


class Reference:
    """Holds the reference model of a strategy.

    The copy of a policy with adapters (of the peft package) is the policy itself. As long as its adapters add nothing,
    as new ones of LoRA, it is asked with its adapters disabled, which takes no memory; otherwise with a copy of the
    weights that learn. For any other policy all weights are copied. Each checkpoint stores a digest of the copied
    weights, so a run can only resume with the reference that it started with.

    >>> reference = Reference("copy", "DPOStrategy")
    >>> policy = nn.Embedding(4, 4)  # logits of the next token from the last one
    >>> reference.bind(policy)
    >>> before = reference.log_probs(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]))
    >>> _ = nn.init.zeros_(policy.weight)  # training changes the policy alone
    >>> torch.equal(before, reference.log_probs(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])))
    True

    Args:
        given: see `ReferenceModel`.
        place: the start of error messages.

    Raises:
        ConfigurationError: it is a string other than "copy".
        TypeError: it is not callable.
    """

    given: ReferenceModel

    def __init__(self, given: ReferenceModel, place: str) -> None:
        if isinstance(given, str) and given != "copy":
            raise ConfigurationError("needs 'copy', a model, or None", place, reference=given)
        if given is not None and not isinstance(given, str) and not callable(given):
            raise ArgumentTypeError("needs 'copy', a model, or None", place, reference=type(given))
        self.given, self._place = given, place
        self._model = None if isinstance(given, str) else given
        self._policy: nn.Module | None = None
        self._as_it_was: Callable[[], AbstractContextManager[object]] = nullcontext  # of a policy with adapters
        self._initial: InitialWeights | None = None  # the weights of the adapters, if they have been trained
        self._autocast: Callable[[], AbstractContextManager[object]] = nullcontext
        self._compared = False  # the vocabularies
        self._device: torch.device | None = None  # the device it computes on, if that is torch's
        self._digest: str | None = None

    def bind(self, policy: nn.Module, backend: object = None) -> None:
        """Copies the policy as the reference, if "copy" was given.

        Raises:
            ConfigurationError: it belongs to another policy already, or shares trained weights with this one.
        """
        if self.given == "copy" and self._policy is not None and self._policy is not policy:
            raise ConfigurationError(
                f"{self._place}: already holds the reference of another model; give each Trainer its own strategy"
            )
        self._refuse_what_learns(policy)
        self._policy, self._compared = policy, False
        self._autocast = autocast_of(backend)
        if self.given == "copy":
            self._digest = None
            disabled = getattr(policy, "disable_adapter", None)
            if callable(disabled):
                self._model = policy
                adapted = getattr(disabled, "__self__", policy)  # without a value head around it
                self._initial = None if adds_nothing(adapted) else InitialWeights(adapted)
                self._as_it_was = disabled if self._initial is None else self._initial.in_use
            else:
                copied = getattr(backend, "frozen_copy", None)
                self._model = copied(policy) if callable(copied) else copy.deepcopy(policy).requires_grad_(False)
        self._device = getattr(backend, "batch_device", None)
        if isinstance(self._model, nn.Module) and self._model is not policy and self._device is not None:
            self._model.to(self._device)
        if isinstance(self._model, nn.Module) and is_sharded(self._model):
            self.state_dict()  # its digest now, since all processes have to take part

    def copies(self, policy: nn.Module) -> bool:
        """Whether `bind` will copy this policy."""
        return self.given == "copy" and not callable(getattr(policy, "disable_adapter", None))

    @property
    def _has_adapters(self) -> bool:
        return self.given == "copy" and self._model is not None and self._model is self._policy

    def _refuse_what_learns(self, policy: nn.Module) -> None:
        if not isinstance(self.given, nn.Module):
            return
        learning = {id(each) for each in policy.parameters() if each.requires_grad}
        shared = [name for name, each in self.given.named_parameters() if id(each) in learning]
        if self.given is policy or shared:
            what = "is the model that learns itself" if self.given is policy else f"shares {shared[0]!r} with the model"
            raise ConfigurationError(
                f"{what}, so it would be trained too; pass reference='copy', or copy.deepcopy(model)",
                self._place,
                reference=type(self.given),
            )

    def placed(self, value: Tree) -> Tree:
        """A tensor on the reference's device; anything else unchanged."""
        return value.to(self._device) if isinstance(value, Tensor) and self._device is not None else value

    @torch.no_grad()
    def log_probs(self, inputs: Tree, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """The log-probability of each token, in nats, the shape of the tokens, at least float32.

        Args:
            inputs: the model's inputs.
            tokens: the token that follows each position, shape (batch, length).
            temperature: divides the logits.

        Raises:
            ConfigurationError: there is no reference yet.
            ValueError: the vocabularies of the reference and the policy differ.
        """
        if self._model is None:
            raise ConfigurationError(
                "has no reference model yet; a Trainer or TrainerCore.init gives it one, or call bind(model)",
                self._place,
                reference=self.given,
            )
        frozen = eval_mode(self._model) if isinstance(self._model, nn.Module) else nullcontext()
        with frozen, self._as_it_was(), self._autocast():
            self._compare(inputs)
            logits = _torch(logits_of(call(self._model, inputs)))
        found: Tensor = token_log_probs(logits if temperature == 1.0 else logits / temperature, tokens)
        return found

    def _compare(self, inputs: Tree) -> None:
        """Checks once that the reference and the policy have logits for the same number of tokens."""
        if self._compared or self._policy is None or self._model is None or self._model is self._policy:
            return
        named = inputs if isinstance(inputs, Mapping) else {"": inputs}
        rows = {len(v) for v in named.values() if isinstance(v, Tensor)}
        if len(rows) == 1:  # else the patches of an image are not one row
            named = {name: v[:1] if isinstance(v, Tensor) else v for name, v in named.items()}
        first = named if isinstance(inputs, Mapping) else named[""]
        with eval_mode(self._policy):
            sizes = [logits_of(call(model, first)).shape[-1] for model in (self._model, self._policy)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{self._place}: the reference model has a vocabulary of {sizes[0]} tokens, the policy one of "
                f"{sizes[1]}; give a reference with the policy's tokenizer, or reference='copy'"
            )
        self._compared = True

    def state_dict(self) -> dict[str, object]:
        """A digest of the reference's weights; None for a function, or a policy whose adapters are disabled."""
        if self._digest is None:
            if self._initial is not None:
                self._digest = _digest(self._initial.weights)
            elif isinstance(self._model, nn.Module) and self._model is not self._policy:
                self._digest = _digest(self._model.state_dict())
        return {"reference": self._digest}

    def check_state_dict(self, state: Mapping[str, object]) -> None:
        """Rejects a reference whose weights differ from those that the run started with.

        Raises:
            CheckpointError: the weights differ.
        """
        theirs, mine = state.get("reference"), self.state_dict()["reference"]
        # None is a policy with its adapters disabled if this one has adapters; otherwise it may be a function
        comparable = self._has_adapters or (theirs is not None and mine is not None)
        if comparable and theirs != mine:
            raise CheckpointError(
                f"{self._place}: the reference model has other weights than the one that the run started with; "
                "create the model with the weights that it had then (the same seed or file), and load the "
                "checkpoint after that"
            )


class WithReference(LanguageStrategy):
    """Base class of the strategies with a reference model."""

    _reference: Reference
    takes_shards = True  # it calls the model as a whole

    def copies_model(self, model: nn.Module) -> bool:
        """Whether the reference is a copy of the model, which is then split over processes as the model is."""
        return self._reference.copies(model)

    def bind(self, model: nn.Module, backend: object = None) -> None:
        """Reads the model's limits, and copies the model as the reference if "copy" was given.

        Raises:
            ConfigurationError: it belongs to another policy already, or shares trained weights with this one.
        """
        super().bind(model, backend)
        self._reference.bind(model, backend)

    def state_dict(self) -> dict[str, object]:
        """A digest of the reference."""
        return self._reference.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Rejects a different reference.

        Raises:
            CheckpointError: the reference differs from the one of the saved run.
        """
        self._reference.check_state_dict(state)


def _torch(array: Array) -> Tensor:
    return array if isinstance(array, Tensor) else torch.utils.dlpack.from_dlpack(array)


def _digest(weights: Mapping[str, Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name, value in sorted(weights.items()):
        tensor = whole(value)
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        bits: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()  # a buffer
        found.update(bits)
    return found.hexdigest()
