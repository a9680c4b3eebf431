"""Base classes of the strategies for language models: they read tokens from batches, and logits from outputs.

A batch is a mapping, as from Hugging Face's data collators: "input_ids" of shape (batch, length), "labels" of that
shape (-100 where nothing is trained on) and, if several documents share a row, "position_ids", which restart at 0
with each document. All positions but the last predict, and all but the first are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.argument_checks import check_number
from pulsetrain.engine.arrays import Array, has_values, masked_mean, on_host, require_tensor
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.errors import ConfigurationError, raised_by
from pulsetrain.engine.losses import check_first_batch, cross_entropy, get_loss
from pulsetrain.engine.losses.checks import check_labels
from pulsetrain.engine.metrics import perplexity
from pulsetrain.engine.step.model_call import call, eval_mode
from pulsetrain.engine.step.model_outputs import aux_loss_of, logits_of, values_of
from pulsetrain.engine.step.protocols import Number, TrainingBatch, describe
from pulsetrain.engine.strategies.model_signature import accepted_by, own_coefficient, takes

__all__ = ["LanguageStrategy", "NextTokenStrategy", "logits_of", "values_of"]

READ = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
"""The fields of a batch that every strategy knows."""


class LanguageStrategy:
    """Base class of the strategies that predict tokens; it checks batches against the model's limits.

    A model of transformers with a mixture of experts has an auxiliary loss of its own, for its routers, if its
    configuration says so (`output_router_logits=True`): it is added with the model's coefficient, and reported as
    "aux_loss".

    Args:
        aux_loss_coef: weight of the auxiliary loss that the model returns as `aux_loss`; 0 leaves it out. None: as the
            model's configuration says.

    Raises:
        ConfigurationError: the weight is not a number of at least 0.
    """

    def __init__(self, aux_loss_coef: float | None = None) -> None:
        if aux_loss_coef is not None:
            check_number(self._place, "aux_loss_coef", aux_loss_coef)
        self.aux_loss_coef = aux_loss_coef
        self._aux_weight = aux_loss_coef or 0.0  # the one in use, once the model is known
        self.context: int | None = None  # the model's number of positions; None if unknown
        self._options: dict[str, bool] = {}  # keywords that the model's forward always gets
        self._takes_positions = True  # whether its forward accepts position_ids
        self._accepts: frozenset[str] | None = None  # the names that its forward accepts; None if any, or unknown
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
        self._takes_positions = takes(model, "input_ids") and takes(model, "position_ids")
        self._accepts = accepted_by(model)
        self._unproved = model
        vocabulary = getattr(config, "vocab_size", None)
        self.vocabulary = vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else None
        self._aux_weight = self.aux_loss_coef or 0.0
        has_routers = getattr(config, "output_router_logits", None)
        if self.aux_loss_coef is not None and has_routers is not None:
            self._options["output_router_logits"] = self.aux_loss_coef > 0
        elif self.aux_loss_coef is None and has_routers:
            self._aux_weight = own_coefficient(model)

    def _inputs(
        self, tokens: Tensor, positions: Tensor | None = None, fields: Mapping[str, Tensor] | None = None
    ) -> Tensor | dict[str, Tensor | bool]:
        """The model's inputs; `fields` are further ones, by name."""
        fields = fields or {}
        if positions is None:
            return tokens if not (self._options or fields) else {"input_ids": tokens, **self._options, **fields}
        if not self._takes_positions:
            raise ConfigurationError(
                f"{self._place}: several documents share a row, and the model's forward does not take both "
                "input_ids and position_ids, which would keep them apart; give each document its own row, or let "
                "forward(input_ids, position_ids) attend inside documents alone"
            )
        if self._unproved is not None:
            self._check_apart(tokens.device)
        return {"input_ids": tokens, "position_ids": positions, **self._options, **fields}

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
                f"context of {self.context}; cut the sequences, as pad_examples(..., truncation='left') and, of "
                "preferences, from_preferences(..., length=, truncation=) do, or give the model a longer context"
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

    def _further(self, batch: Mapping[str, Any], tokens: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
        """The tensors that only the model reads, by name; those in the shape of the tokens without the last position.

        The model gets the attention_mask, too, if it has an auxiliary loss, which would count padding otherwise.

        Raises:
            TypeError: the model's forward does not accept a field, or it is an array of another library.
        """
        takes_mask = bool(self._aux_weight) and positions is None
        found = self.unread(batch, lambda name: name in READ and not (takes_mask and name == "attention_mask"))
        return {name: each[:, :-1] if each.shape == tokens.shape else each for name, each in found.items()}

    def accepts(self, name: str) -> bool:
        """Whether the model's forward accepts a field of this name beside input_ids; true if that is unknown."""
        return self._accepts is None or name in self._accepts

    def unread(self, batch: Mapping[str, Any], reads: Callable[[str], bool]) -> dict[str, Tensor]:
        """The tensors that the strategy does not read and the model's forward accepts, by name.

        Values that are not arrays, such as texts, are left out.

        Args:
            batch: the loader's.
            reads: whether the strategy reads the field of this name.

        Raises:
            TypeError: forward does not accept a field, or it is an array of another library.
        """
        found: dict[str, Tensor] = {}
        for name, value in batch.items():
            if reads(name):
                continue
            if not isinstance(value, Tensor):
                require_tensor(self._place, name, value)
                continue
            if not self.accepts(name):
                raise TypeError(
                    f"{self._place}: the batch has {name!r}, {describe(value)}, which neither the strategy reads nor "
                    "the model's forward accepts beside input_ids; let the loader drop the column, or give forward a "
                    "parameter of that name"
                )
            found[name] = value
        return found

    def _with_aux_loss(self, loss: Array, outputs: object) -> Array:
        """The loss; if the model has an auxiliary loss of its own, a pair: the sum, and the auxiliary loss by name.

        Raises:
            ConfigurationError: it is to be added, and the model returned none.
        """
        if not self._aux_weight:
            return loss
        own = aux_loss_of(outputs)
        if own is None:
            raise ConfigurationError(
                f"{self._place}: the model's auxiliary loss is to be added with a weight of {self._aux_weight:g}, and "
                f"the model returned none, but {describe(outputs)}; return it as `aux_loss`, or leave it out: "
                "aux_loss_coef=0.0, or output_router_logits=False in the model's configuration"
            )
        return loss + self._aux_weight * own, {"aux_loss": own}

    def _check_aux_loss(self, outputs: object) -> None:
        """Rejects a model whose auxiliary loss would be left out although nobody has said so.

        Raises:
            ConfigurationError: it is one.
        """
        if not self._aux_weight and self.aux_loss_coef is None and aux_loss_of(outputs) is not None:
            raise ConfigurationError(
                "the model returns an `aux_loss`, and its configuration gives no weight for it; pass one, or 0.0 to "
                "leave it out",
                self._place,
                aux_loss_coef=None,
            )

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
        loss_options: keywords of `pulsetrain.engine.losses.cross_entropy`; `ignore_index` has to be -100.

    Raises:
        ConfigurationError: an option is unknown, or another `ignore_index` is given.
    """

    takes_shards = takes_pipelines = True  # it calls the model as a whole

    def __init__(self, loss_options: Mapping[str, object] | None, aux_loss_coef: float | None = None) -> None:
        super().__init__(aux_loss_coef)
        options = loss_options or {}
        with raised_by(self._place, lambda option, value: ("loss_options", {option: value})):
            self._loss = get_loss("cross_entropy", **options)
        ignored = options.get("ignore_index", IGNORED)
        if ignored != IGNORED:  # a batch's weight counts the tokens that are not -100
            raise ConfigurationError(
                f"needs {IGNORED}; leave it out, and let the loader return an 'attention_mask' that is 0 for padding",
                self._place,
                loss_options={"ignore_index": ignored},
            )
        self._plain = not any(options.get(name) for name in ("label_smoothing", "z_loss"))

    @property
    def _is_cross_entropy(self) -> bool:
        """Whether the loss is only the cross entropy, so that perplexity and bits per byte follow from it."""
        return self._plain and not self._aux_weight

    def check_batch(self, outputs: object, batch: TrainingBatch) -> None:
        """Rejects tokens outside the vocabulary; it waits for the device.

        Args:
            outputs: the model's outputs, or any object with their `shape`: a backend that compiles `compute_loss`,
                where values cannot be read, calls this beforehand.

        Raises:
            ValueError: names the first such token, its index, and how many there are.
            ConfigurationError: the model has an auxiliary loss, and nothing says how it is weighted.
        """
        self._check_aux_loss(outputs)
        self._check_inputs(outputs, batch.inputs)
        check_first_batch(self._loss, logits_of(outputs), batch.targets)

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The cross entropy in nats per trained token, shape ().

        Outputs with a method `token_losses(targets)`, whose logits may be split over processes, compute it of each
        token themselves, if the loss is only that. With an auxiliary loss of the model it is a pair: their sum, and
        "aux_loss" by name.
        """
        if check:
            self.check_batch(outputs, batch)
        if self._plain and hasattr(outputs, "token_losses"):
            loss = masked_mean(outputs.token_losses(batch.targets), batch.targets != IGNORED)
        else:
            loss = self._loss(logits_of(outputs), batch.targets)
        return self._with_aux_loss(loss, outputs)

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> dict[str, Array]:
        """The cross entropy in nats per token, if the loss includes more than that."""
        if self._is_cross_entropy:
            return {}
        return {"cross_entropy": cross_entropy(logits_of(outputs), batch.targets)}

    def derive_metrics(self, loss: Number) -> dict[str, Number]:
        """The perplexity per token, if the loss is only the cross entropy. A loss on the device stays there."""
        return {"perplexity": perplexity(loss)} if self._is_cross_entropy else {}


def _is_real(tokens: Tensor) -> bool:
    return tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool
