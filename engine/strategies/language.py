"""Base classes of the strategies for language models: they read tokens from batches, and logits from outputs.

A batch is a mapping, as from Hugging Face's data collators: "input_ids" of shape (batch, length), "labels" of that
shape (-100 where nothing is trained on) and, if several documents share a row, "position_ids", which restart at 0
with each document. All positions but the last predict, and all but the first are predicted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from pulsetrain.engine.arrays import Array, has_values, masked_mean, on_host, require_tensor
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import check_first_batch, cross_entropy, get_loss
from pulsetrain.engine.losses.checks import check_labels
from pulsetrain.engine.metrics import perplexity
from pulsetrain.engine.step.model_call import call, eval_mode
from pulsetrain.engine.step.protocols import Number, TrainingBatch, describe

__all__ = ["LanguageStrategy", "NextTokenStrategy", "logits_of", "values_of"]


class LanguageStrategy:
    """Base class of the strategies that predict tokens; it checks batches against the model's limits."""

    def __init__(self) -> None:
        self.context: int | None = None  # the model's number of positions; None if unknown
        self._options: dict[str, bool] = {}  # keywords that the model's forward always gets
        self._takes_positions = True  # whether its forward accepts position_ids
        self._unproved: nn.Module | None = None  # the model, until it has been seen to keep documents apart
        self.vocabulary: int | None = None  # the size of the model's vocabulary; None if unknown

    def bind(self, model: nn.Module, backend: object = None) -> None:
        """Reads the model's limits from its `context` or from Hugging Face's `config`.

        A Hugging Face model gets `use_cache=False`: with a cache it would not keep the documents of a row apart.
        """
        config = getattr(model, "config", None)
        context = getattr(config, "max_position_embeddings", getattr(model, "context", None))
        self.context = context if isinstance(context, int) and context > 0 else None
        self._options = {"use_cache": False} if hasattr(config, "use_cache") else {}
        self._takes_positions = _takes(model, "input_ids") and _takes(model, "position_ids")
        self._unproved = model
        vocabulary = getattr(config, "vocab_size", None)
        self.vocabulary = vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else None

    def _inputs(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor | dict[str, Tensor | bool]:
        """The model's inputs."""
        if positions is None:
            return tokens if not self._options else {"input_ids": tokens, **self._options}
        if not self._takes_positions:
            raise ConfigurationError(
                f"{self._place}: several documents share a row, and the model's forward does not take both "
                "input_ids and position_ids, which would keep them apart; give each document its own row, or let "
                "forward(input_ids, position_ids) attend inside documents alone"
            )
        if self._unproved is not None:
            self._check_apart(tokens.device)
        return {"input_ids": tokens, "position_ids": positions, **self._options}

    @torch.no_grad()
    def _check_apart(self, device: torch.device) -> None:
        """Checks once, before documents share a row, that a document does not change the logits of the next.

        Raises:
            ConfigurationError: it does: many models accept position_ids and still attend to the whole row.
        """
        model, self._unproved = self._unproved, None
        assert model is not None
        rows = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 1]], device=device)
        positions = torch.tensor([[0, 1, 2, 0, 1]], device=device).expand(2, -1)
        with eval_mode(model):
            named = {"input_ids": rows, "position_ids": positions, **self._options}
            one, other = logits_of(call(model, named))
        moved = (one - other).abs()
        if not moved.any():  # a head of zeros, for example, shows nothing: checked again after some training
            self._unproved = model
        elif moved[3:].max() > 1e-3 * moved[:3].max():
            self._unproved = model
            raise ConfigurationError(
                f"{self._place}: several documents share a row, and {type(model).__name__} lets each see the one "
                "before it, whatever its position_ids say; give each document its own row: pad_examples instead "
                "of pack, and no separator"
            )

    @property
    def _place(self) -> str:
        return type(self).__name__

    def _field(self, batch: object, name: str, remedy: str) -> Tensor:
        """A field of the batch.

        Raises:
            TypeError: the batch lacks it, or it is not a torch tensor.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(f"{self._place}: a batch of {describe(batch)} is not a mapping with {name!r}; {remedy}")
        if name not in batch:
            raise TypeError(
                f"{self._place}: a batch with {', '.join(map(str, batch)) or 'no field'} lacks {name!r}; {remedy}"
            )
        value = batch[name]
        if not isinstance(value, Tensor):
            require_tensor(self._place, name, value)
            raise TypeError(f"{self._place}: the batch's {name!r} is {type(value).__name__}, not a tensor;  {remedy}")
        return value

    def _tokens(self, name: str, tokens: object, check: bool, predicts: int = 1) -> Tensor:
        """The token ids, shape (batch, length), after checks against the model's context and vocabulary.

        Args:
            predicts: positions at the end that the model does not see.

        Raises:
            TypeError: the tokens are not integers of this shape.
            ValueError: there are too many, or one is outside the vocabulary.
        """
        require_tensor(self._place, name, tokens)
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] < 2 or _is_real(tokens):
            raise TypeError(
                f"{self._place}: {name!r} is {describe(tokens)}; needs a tensor of token ids, shape "
                "(batch, length + 1), of which the last is only predicted"
            )
        seen = tokens.shape[1] - predicts
        if self.context is not None and seen > self.context:
            raise ValueError(
                f"{self._place}: {name!r} of shape {tuple(tokens.shape)}: {seen} positions are more than the model's "
                f"context of {self.context}; cut the sequences, as pad_examples(..., truncation='left') does, or give "
                "the model a longer context"
            )
        if check and self.vocabulary is not None:
            self._check_known(name, tokens, self.vocabulary)
        return tokens

    def _check_known(self, name: str, tokens: Tensor, vocabulary: int) -> None:
        wrong = (tokens < 0) | (tokens >= vocabulary)
        if wrong.any():
            position = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{self._place}: {name}{position}={tokens[tuple(position)].item()}: the model's vocabulary has "
                f"{vocabulary} tokens, numbered from 0, and {int(wrong.sum())} of {tokens.numel()} tokens are outside; "
                "use the model's own tokenizer, and pad with a token that it knows"
            )

    def _positions(self, batch: Mapping[str, Tensor], tokens: Tensor) -> Tensor | None:
        """The batch's position_ids, or None.

        Raises:
            ValueError: their shape differs from that of the tokens.
        """
        positions = batch.get("position_ids")
        if positions is None:
            return None
        rule = "one position for each token, which restarts at 0 with each document"
        self._check_shape("position_ids", positions, tokens.shape, rule)
        return positions

    def _check_shape(
        self, name: str, value: object, shape: torch.Size, rule: str, of: str = "tokens", *also: torch.Size
    ) -> None:
        """Rejects a field that does not have the shape of the tokens.

        Raises:
            ValueError: it does not.
        """
        if not isinstance(value, Tensor) or value.shape not in (shape, *also):
            raise ValueError(
                f"{self._place}: {name!r} is {describe(value)}, the {of} have shape {tuple(shape)}; {rule}"
            )

    def _without_padding(
        self, batch: Mapping[str, Tensor], labels: Tensor, check: bool, name: str = "attention_mask"
    ) -> Tensor:
        """The labels, shape (batch, length), with IGNORED where the batch's attention_mask is 0.

        The model itself needs no mask: padding after a text does not affect the text.

        Raises:
            ValueError: the mask has a different shape, or rows are padded on the left.
        """
        mask = batch.get(name)
        if mask is None:
            return labels
        rule = "one number for each token, 0 for padding; documents in one row are separated by 'position_ids'"
        self._check_shape(name, mask, labels.shape, rule)
        mask = mask.bool()
        if (check or on_host(mask)) and (mask[:, 1:] & ~mask[:, :-1]).any():
            raise ValueError(
                f"{self._place}: {name!r} has padding before tokens; pad on the right, as pad_examples does "
                "(of a tokenizer of Hugging Face: padding_side='right')"
            )
        return torch.where(mask, labels, IGNORED)

    def _labels(self, name: str, labels: Tensor, tokens: Tensor, remedy: str, check: bool) -> Tensor:
        """The labels of all positions but the first.

        Raises:
            ValueError: the shape differs from the tokens', or a row has no label (checked if that needs no waiting).
        """
        rule = f"one label for each token, {IGNORED} where nothing is trained on"
        self._check_shape(name, labels, tokens.shape, rule)
        predicted = labels[:, 1:]
        if check or on_host(predicted):
            lacking = (predicted == IGNORED).all(1).nonzero()
            if len(lacking):
                raise ValueError(
                    f"{self._place}: {name!r} of row {lacking[0].item()} mask all of it (as do {len(lacking)} of "
                    f"{len(labels)} rows): nothing is trained on; {remedy}"
                )
        return predicted

    def _check_inputs(self, outputs: object, inputs: object) -> None:
        """Rejects tokens that the model has no logits for: a compiled loss would use other tokens instead."""
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        if isinstance(tokens, Tensor) and not _is_real(tokens) and tokens.ndim == 2:
            self._check_known("input_ids", tokens, logits_of(outputs).shape[-1])

    def _check_tokens(self, outputs: object, labels: Tensor) -> None:
        """Rejects labels outside the vocabulary of the model's logits, if their values can be read."""
        if has_values(labels):
            check_labels(self._place, logits_of(outputs), labels, IGNORED)


class NextTokenStrategy(LanguageStrategy):
    """Base class of pretraining and fine-tuning: targets are tokens, or -100 where nothing is trained on.

    Args:
        loss_options: keywords of `pulsetrain.engine.losses.cross_entropy`.

    Raises:
        ConfigurationError: an option is unknown.
    """

    takes_shards = takes_pipelines = True  # it calls the model as a whole

    def __init__(self, loss_options: Mapping[str, object] | None) -> None:
        super().__init__()
        options = loss_options or {}
        self._loss = get_loss("cross_entropy", **options)
        # whether the loss is only the cross entropy, so that perplexity and bits per byte follow from it
        self._plain = not any(options.get(name) for name in ("label_smoothing", "z_loss"))
        self._is_mean = self._plain and options.get("ignore_index", IGNORED) == IGNORED

    def check_batch(self, outputs: object, batch: TrainingBatch) -> None:
        """Rejects tokens outside the vocabulary; it waits for the device.

        Args:
            outputs: the model's outputs, or any object with their `shape`: a backend that compiles `compute_loss`,
                where values cannot be read, calls this beforehand.

        Raises:
            ValueError: names the first such token, its index, and how many there are.
        """
        self._check_inputs(outputs, batch.inputs)
        check_first_batch(self._loss, logits_of(outputs), batch.targets)

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The cross entropy in nats per trained token, shape ().

        Outputs with a method `token_losses(targets)`, whose logits may be split over processes, compute it of each
        token themselves, if the loss is only that.
        """
        if check:
            self.check_batch(outputs, batch)
        if self._is_mean and hasattr(outputs, "token_losses"):
            return masked_mean(outputs.token_losses(batch.targets), batch.targets != IGNORED)
        return self._loss(logits_of(outputs), batch.targets)

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> dict[str, Array]:
        """The cross entropy in nats per token, if the loss includes more than that."""
        return {} if self._plain else {"cross_entropy": cross_entropy(logits_of(outputs), batch.targets)}

    def derive_metrics(self, loss: Number) -> dict[str, Number]:
        """The perplexity per token, if the loss is only the cross entropy. A loss on the device stays there."""
        return {"perplexity": perplexity(loss)} if self._plain else {}


def logits_of(outputs: object) -> Array:
    """The logits, shape (batch, length, vocabulary), in the outputs of a model.

    A model may return them alone, first in a tuple, or under the name `logits`, as Hugging Face models do.

    >>> logits_of({"logits": torch.zeros(1, 2, 5), "loss": None}).shape
    torch.Size([1, 2, 5])

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
            f"the model returned {describe(outputs)}; needs logits of shape (batch, length, vocabulary), alone, first "
            "in a tuple, or as `.logits`"
        )
    return logits


def values_of(outputs: object, shape: Iterable[int]) -> Array:
    """The values of a critic, with this shape: second in a tuple, or under the name `values`.

    >>> values_of((torch.zeros(1, 2, 5), torch.ones(1, 2, 1)), (1, 2))
    tensor([[1., 1.]])

    Raises:
        TypeError: there are none, or the shape differs.
    """
    values: Array = outputs.get("values") if isinstance(outputs, Mapping) else getattr(outputs, "values", None)
    if values is None and isinstance(outputs, (tuple, list)) and len(outputs) > 1:
        values = outputs[1]
    shape = tuple(shape)
    if hasattr(values, "shape") and tuple(values.shape) == (*shape, 1):
        values = values[..., 0]
    if not hasattr(values, "shape") or tuple(values.shape) != shape:
        raise TypeError(
            f"the model returned {describe(outputs)}; needs a pair (logits, values), values of shape {shape}; "
            "pulsetrain.engine.strategies.WithValueHead gives a language model such"
        )
    return values


def _is_real(tokens: Tensor) -> bool:
    return tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool


def _takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward accepts a keyword; True if that is unknown."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError, AttributeError):
        return True
    return any(each.name == name or each.kind == each.VAR_KEYWORD for each in parameters)
