"""What strategies for language models share: reading tokens from a batch, and logits from what a model gives.

A batch is a mapping, as Hugging Face's data collators make it: "input_ids" of shape (batch, length), "labels" of that
shape (-100 where nothing is to be learnt) and, where several documents share a row, "position_ids", which begin at 0
with each document. What predicts is all but the last position, what is predicted all but the first.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.arrays import Array, has_values, on_host, require_tensor
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses.checks import check_labels
from pulsetrain.engine.step.model_call import call, eval_mode
from pulsetrain.engine.step.protocols import describe

__all__ = ["LanguageStrategy", "logits_of", "values_of"]


class LanguageStrategy:
    """Base of the strategies that predict tokens: it knows the model's limits, and checks batches against them."""

    def __init__(self) -> None:
        self._context: int | None = None  # positions that the model has; None where it does not say
        self._options: dict[str, Any] = {}  # what the model's forward is to be told in any case
        self._places_documents = True  # whether its forward takes position_ids
        self._apart_in: Any = None  # the model, until it has shown that it keeps documents apart
        self._vocabulary: int | None = None  # tokens that it knows; None where it does not say

    def bind(self, model: nn.Module, backend: Any = None) -> None:
        """Learn what the model can take: `context` or Hugging Face's `config` say so, else it is not known.

        A model of Hugging Face is told to keep no cache: it would not tell documents in a row apart beside one.
        """
        config = getattr(model, "config", None)
        context = getattr(config, "max_position_embeddings", getattr(model, "context", None))
        self._context = context if isinstance(context, int) and context > 0 else None
        self._options = {"use_cache": False} if hasattr(config, "use_cache") else {}
        self._places_documents = _takes(model, "input_ids") and _takes(model, "position_ids")
        self._apart_in = model
        vocabulary = getattr(config, "vocab_size", None)
        self._vocabulary = vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else None

    @property
    def context(self) -> int | None:
        """Positions that the model has; None where it does not say."""
        return self._context

    def _inputs(self, tokens: Tensor, positions: Tensor | None = None) -> Any:
        """What the model is called with."""
        if positions is None:
            return tokens if not self._options else {"input_ids": tokens, **self._options}
        if not self._places_documents:
            raise ConfigurationError(
                f"{self._place}: several documents share a row, and the model's forward does not take both "
                "input_ids and position_ids, which would keep them apart; give each document a row of its own, or let "
                "forward(input_ids, position_ids) attend inside documents alone"
            )
        if self._apart_in is not None:
            self._check_apart(tokens.device)
        return {"input_ids": tokens, "position_ids": positions, **self._options}

    @torch.no_grad()
    def _check_apart(self, device: torch.device) -> None:
        """Once, before documents share a row: whether what one says changes what the model makes of the next.

        Raises:
            ConfigurationError: it does: many a model takes position_ids and attends to the whole row nevertheless.
        """
        model, self._apart_in = self._apart_in, None
        rows = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 1]], device=device)
        positions = torch.tensor([[0, 1, 2, 0, 1]], device=device).expand(2, -1)
        with eval_mode(model):
            named = {"input_ids": rows, "position_ids": positions, **self._options}
            one, other = logits_of(call(model, named))
        moved = (one - other).abs()
        if not moved.any():  # a head of zeros, say, tells nothing of what is before it: asked again once it has learnt
            self._apart_in = model
        elif moved[3:].max() > 1e-3 * moved[:3].max():
            self._apart_in = model
            raise ConfigurationError(
                f"{self._place}: several documents share a row, and {type(model).__name__} lets each see the one "
                "before it, whatever its position_ids say; give each document a row of its own: pad_examples in place "
                "of pack, and no separator"
            )

    @property
    def _place(self) -> str:
        return type(self).__name__

    def _field(self, batch: Any, name: str, remedy: str) -> Tensor:
        """A field of the batch.

        Raises:
            TypeError: the batch lacks it, or it is no torch tensor.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(f"{self._place}: a batch of {describe(batch)} is no mapping with {name!r}; {remedy}")
        if name not in batch:
            raise TypeError(
                f"{self._place}: a batch with {', '.join(map(str, batch)) or 'no field'} lacks {name!r}; {remedy}"
            )
        value = batch[name]
        if not isinstance(value, Tensor):
            require_tensor(self._place, name, value)
            raise TypeError(f"{self._place}: the batch's {name!r} is {type(value).__name__}, no tensor; {remedy}")
        return value

    def _tokens(self, name: str, tokens: Any, check: bool, predicts: int = 1) -> Tensor:
        """Token numbers, shape (batch, length), which fit the model's context.

        Args:
            predicts: positions at the end that the model does not see.

        Raises:
            TypeError: other numbers, or of another shape.
            ValueError: they are too many.
        """
        require_tensor(self._place, name, tokens)
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] < 2 or _is_real(tokens):
            raise TypeError(
                f"{self._place}: {name!r} is {describe(tokens)}; needs a tensor of token numbers, shape "
                "(batch, length + 1), of which the last is only predicted"
            )
        seen = tokens.shape[1] - predicts
        if self._context is not None and seen > self._context:
            raise ValueError(
                f"{self._place}: {name!r} of shape {tuple(tokens.shape)}: {seen} positions are more than the model's "
                f"context of {self._context}; cut the sequences, as pad_examples(..., truncation='left') does, or give "
                "the model a longer context"
            )
        if check and self._vocabulary is not None:
            self._check_known(name, tokens, self._vocabulary)
        return tokens

    def _check_known(self, name: str, tokens: Tensor, vocabulary: int) -> None:
        wrong = (tokens < 0) | (tokens >= vocabulary)
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{self._place}: {name}{place}={tokens[tuple(place)].item()}: the model's vocabulary has {vocabulary} "
                f"tokens, numbered from 0, and {int(wrong.sum())} of {tokens.numel()} tokens are outside; use the "
                "model's own tokenizer, and pad with a token that it knows"
            )

    def _positions(self, batch: Mapping[str, Any], tokens: Tensor) -> Tensor | None:
        """The batch's position_ids, where it has some.

        Raises:
            ValueError: they have another shape than the tokens.
        """
        positions = batch.get("position_ids")
        if positions is None:
            return None
        if not isinstance(positions, Tensor) or positions.shape != tokens.shape:
            raise ValueError(
                f"{self._place}: 'position_ids' is {describe(positions)}, the tokens have shape {tuple(tokens.shape)}; "
                "one position for each token, which begins at 0 with each document"
            )
        return positions

    def _without_padding(
        self, batch: Mapping[str, Any], labels: Tensor, check: bool, name: str = "attention_mask"
    ) -> Tensor:
        """The labels, shape (batch, length), ignored where the batch's attention_mask is 0.

        The model itself needs no mask: behind a text, padding changes nothing of what comes before it.

        Raises:
            ValueError: a mask of another shape, or of rows that are padded elsewhere.
        """
        mask = batch.get(name)
        if mask is None:
            return labels
        if not isinstance(mask, Tensor) or mask.shape != labels.shape:
            raise ValueError(
                f"{self._place}: {name!r} is {describe(mask)}, the tokens have shape {tuple(labels.shape)}; "
                "one number for each token, 0 for padding; documents in one row are told apart by 'position_ids'"
            )
        mask = mask.bool()
        if (check or on_host(mask)) and (mask[:, 1:] & ~mask[:, :-1]).any():
            raise ValueError(
                f"{self._place}: {name!r} has padding before tokens; pad on the right, as pad_examples does "
                "(of a tokenizer of Hugging Face: padding_side='right')"
            )
        return torch.where(mask, labels, IGNORED)

    def _labels(self, name: str, labels: Tensor, tokens: Tensor, remedy: str, check: bool) -> Tensor:
        """What is to be learnt of each row, in the tokens' shape; at least one of each row on the host is.

        Raises:
            ValueError: another shape, or a row of which nothing is to be learnt.
        """
        if labels.shape != tokens.shape:
            raise ValueError(
                f"{self._place}: {name!r} has shape {tuple(labels.shape)}, the tokens {tuple(tokens.shape)}; one label "
                f"for each token, {IGNORED} where nothing is to be learnt"
            )
        predicted = labels[:, 1:]
        if check or on_host(predicted):
            lacking = (predicted == IGNORED).all(1).nonzero()
            if len(lacking):
                raise ValueError(
                    f"{self._place}: {name!r} of row {lacking[0].item()} mask all of it ({len(lacking)} of "
                    f"{len(labels)} rows are so): nothing is to be learnt; {remedy}"
                )
        return predicted

    def _check_inputs(self, outputs: Any, inputs: Any) -> None:
        """Refuse tokens that the model has no logits for: where a loss is compiled, they would be taken for others."""
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        if isinstance(tokens, Tensor) and not _is_real(tokens) and tokens.ndim == 2:
            self._check_known("input_ids", tokens, logits_of(outputs).shape[-1])

    def _check_tokens(self, outputs: Any, labels: Tensor) -> None:
        """Refuse labels outside the vocabulary of the model's logits, where they can be looked at."""
        if has_values(labels):
            check_labels(self._place, logits_of(outputs), labels, IGNORED)


def logits_of(outputs: Any) -> Array:
    """The scores of the vocabulary, shape (batch, length, vocabulary), in whatever a model gives.

    It may give them alone, first in a tuple, or under the name `logits`, as Hugging Face's models do.

    Raises:
        TypeError: there are none.
    """
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    else:
        first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        logits = getattr(outputs, "logits", first)
    if not hasattr(logits, "shape"):
        raise TypeError(
            f"the model gave {describe(outputs)}; needs logits of shape (batch, length, vocabulary), alone, first in a "
            "tuple, or as `.logits`"
        )
    return logits


def values_of(outputs: Any, shape: Iterable[int]) -> Array:
    """The values beside the logits, of this shape: second in a tuple, or under the name `values`.

    Raises:
        TypeError: there are none, or of another shape.
    """
    values: Any = outputs.get("values") if isinstance(outputs, Mapping) else getattr(outputs, "values", None)
    if values is None and isinstance(outputs, (tuple, list)) and len(outputs) > 1:
        values = outputs[1]
    shape = tuple(shape)
    if hasattr(values, "shape") and tuple(values.shape) == (*shape, 1):
        values = values[..., 0]
    if not hasattr(values, "shape") or tuple(values.shape) != shape:
        raise TypeError(
            f"the model gave {describe(outputs)}; needs a pair (logits, values), values of shape {shape}; "
            "pulsetrain.engine.strategies.WithValueHead gives a language model such"
        )
    return values


def _is_real(tokens: Tensor) -> bool:
    return tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool


def _takes(model: Any, name: str) -> bool:
    """Whether the model's forward takes a keyword of that name; where it cannot be told, yes."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError, AttributeError):
        return True
    return any(each.name == name or each.kind == each.VAR_KEYWORD for each in parameters)
