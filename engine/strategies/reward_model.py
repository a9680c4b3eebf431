"""Trains a reward model on pairs of answers, by the model of Bradley and Terry."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pulsetrain.engine.argument_checks import check_number
from pulsetrain.engine.arrays import Array, at_least_float32, on_host, take_last
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.losses import bradley_terry_loss
from pulsetrain.engine.losses.masks import constant
from pulsetrain.engine.step.protocols import TrainingBatch, describe
from pulsetrain.engine.strategies.answers import metrics_of_rewards
from pulsetrain.engine.strategies.fields_of_sides import fields_of_sides, padded_to
from pulsetrain.engine.strategies.language import LanguageStrategy

__all__ = ["RewardModelStrategy"]

_SIDES = ("chosen_", "rejected_")
_REMEDY = (
    "a batch of pairs has chosen_input_ids, chosen_labels, rejected_input_ids and rejected_labels, each of shape "
    "(pairs, length), as pulsetrain.engine.data.preferences.pad_pairs makes them"
)


class RewardModelStrategy(LanguageStrategy):
    """Gives the chosen answer of a pair a higher reward than the rejected one.

    The model returns one reward for each row, shape (rows,) or (rows, 1), as transformers' models for sequence
    classification with num_labels=1 do, or one for each token, shape (rows, length) or (rows, length, 1), alone or as
    the values of `WithValueHead`; then that of the row's last token counts. Models of transformers also get an
    attention_mask, and their pad_token_id after each text.

    Batches are those of `DPOStrategy`. A row's text ends at its last label that is not -100, or, if the batch has
    "chosen_attention_mask" and "rejected_attention_mask", where these become 0. "margin", shape (pairs,), is optional:
    by how much the reward of the chosen answer should exceed the other.

    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> pair = {f"{side}_{name}": tokens for side in ("chosen", "rejected") for name in ("input_ids", "labels")}
    >>> strategy = RewardModelStrategy()
    >>> batch = strategy.prepare_batch(pair)
    >>> strategy.compute_loss(torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 1.0]]), batch)  # -log sigmoid(2 - 1)
    tensor(0.3133)

    Args:
        center_coef: the weight of the squared sum of the two rewards, which keeps them near 0, such as 0.01 (Eisenstein
            2023).
        aux_loss_coef: weight of the auxiliary loss that the model returns as `aux_loss`; 0 leaves it out. None: as the
            model's configuration says.

    Raises:
        ConfigurationError: one of them is not a number of at least 0.
    """

    takes_shards = True  # it calls the model as a whole

    def __init__(self, center_coef: float = 0.0, aux_loss_coef: float | None = None) -> None:
        super().__init__(aux_loss_coef)
        check_number(self._place, "center_coef", center_coef)
        self.center_coef = center_coef
        self._pad_token: int | None = None  # after whose last other token a model of transformers looks for the reward
        self._takes_mask = False

    def bind(self, model: nn.Module, backend: object = None) -> None:
        """Reads the model's limits and its padding."""
        super().bind(model, backend)
        config = getattr(model, "config", None)
        pad_token = getattr(config, "pad_token_id", None)
        self._pad_token = pad_token if isinstance(pad_token, int) else None
        self._takes_mask = config is not None and "attention_mask" in inspect.signature(model.forward).parameters

    def prepare_batch(self, batch: Mapping[str, Tensor] | TrainingBatch, check: bool = False) -> TrainingBatch:
        """Stacks chosen rows and rejected rows for one forward pass; the targets say where each text ends.

        Raises:
            TypeError: a field is missing, is not a tensor of token ids, or is one that the model does not accept.
            ValueError: shapes do not fit, a row has no token, rows exceed the model's context, or margins are not
                finite.
        """
        if isinstance(batch, TrainingBatch):
            return batch
        names = [f"{side}input_ids" for side in _SIDES]
        read = [self._tokens(name, self._field(batch, name, _REMEDY), check, predicts=0) for name in names]
        pairs, length = len(read[0]), max(tokens.shape[1] for tokens in read)
        if len(read[1]) != pairs:
            raise ValueError(
                f"{self._place}: {pairs} rows of '{names[0]}' and {len(read[1])} of '{names[1]}'; {_REMEDY}"
            )
        ends = torch.cat([self._ends(batch, side, each, check) for side, each in zip(_SIDES, read, strict=True)])
        tokens = torch.cat([padded_to(length, each, self._pad_token or 0) for each in read])
        within = torch.arange(length, device=tokens.device) <= ends[:, None]
        if self._pad_token is not None:  # the model finds the end of a text by it, whatever the batch is padded with
            tokens = torch.where(within, tokens, self._pad_token)
        fields = fields_of_sides(self, batch, dict(zip(_SIDES, read, strict=True)), cut=False)
        if self._takes_mask:
            fields["attention_mask"] = within.long()
        inputs = self._inputs(tokens, None, fields)
        targets = {"ends": ends}
        if batch.get("margin") is not None:
            targets["margin"] = self._margin(batch, pairs, check)
        return TrainingBatch(inputs, targets, pairs, tokens.numel(), pairs)

    def _ends(self, batch: Mapping[str, Tensor], side: str, tokens: Tensor, check: bool) -> Tensor:
        """The position of the last token of each text, shape (rows,)."""
        if batch.get(f"{side}position_ids") is not None:
            raise ValueError(
                f"{self._place}: '{side}position_ids' mark rows of several documents, but a row needs to be one "
                "answer; do not pack them"
            )
        name = f"{side}attention_mask" if batch.get(f"{side}attention_mask") is not None else f"{side}labels"
        marks = self._field(batch, name, _REMEDY)
        self._check_shape(name, marks, tokens.shape, "one number for each token")
        if name.endswith("labels"):
            within = marks != IGNORED
        else:
            self._without_padding(batch, marks, check, name)  # refuses padding before tokens
            within = marks.bool()
        if (check or on_host(within)) and not within.any(1).all():
            row = int((~within.any(1)).nonzero()[0])
            raise ValueError(f"{self._place}: {name!r} of row {row} mask all of it; leave such rows out")
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return torch.where(within, places, 0).amax(1)

    def _margin(self, batch: Mapping[str, Tensor], pairs: int, check: bool) -> Tensor:
        margin = self._field(batch, "margin", _REMEDY)
        if margin.shape != (pairs,):
            raise ValueError(
                f"{self._place}: 'margin' is {describe(margin)}, and there are {pairs} pairs; one number for each"
            )
        if (check or on_host(margin)) and not margin.isfinite().all():
            raise ValueError(f"{self._place}: 'margin' has numbers that are not finite; leave such pairs out")
        return margin

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The mean loss of the pairs, shape (); a pair of it and its parts if the model has an auxiliary loss."""
        if check:
            self._check_aux_loss(outputs)
        loss = bradley_terry_loss(*self._rewards(outputs, batch), batch.targets.get("margin"), self.center_coef)
        return self._with_aux_loss(loss, outputs)

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Array]:
        """Means over the pairs.

        `reward_accuracy`: the share of pairs whose chosen answer has the larger reward; `reward_margin`: the
        difference; `chosen_reward` and `rejected_reward`: the rewards.
        """
        return metrics_of_rewards(*map(constant, self._rewards(outputs, batch)))

    def _rewards(self, outputs: object, batch: TrainingBatch) -> tuple[Array, Array]:
        """The rewards of the chosen and of the rejected answers, shape (pairs,)."""
        found, ends = _rewards_in(outputs), batch.targets["ends"]
        rows = ends.shape[0]
        if tuple(found.shape) not in ((rows,), (rows, batch.tokens // rows)):
            raise TypeError(
                f"{self._place}: the model returned {describe(outputs)}; needs a reward for each row, shape (rows,), "
                "or for each token, shape (rows, length): a model for sequence classification with num_labels=1, or "
                "pulsetrain.engine.strategies.WithValueHead over a language model"
            )
        rewards = at_least_float32(found if found.ndim == 1 else take_last(found, ends))
        return rewards[: rows // 2], rewards[rows // 2 :]


def _rewards_in(outputs: object) -> Array:
    """The values of a critic, else the logits, else the outputs themselves; shape (rows,) or (rows, length)."""
    found: Array = outputs
    if isinstance(outputs, Mapping):
        found = outputs["values"] if outputs.get("values") is not None else outputs.get("logits")
    elif isinstance(outputs, (tuple, list)) and outputs:
        found = outputs[min(len(outputs), 2) - 1]
    elif not hasattr(outputs, "shape"):
        found = getattr(outputs, "logits", None)
    if not hasattr(found, "shape"):
        raise TypeError(f"RewardModelStrategy: the model returned {describe(outputs)}; needs rewards or values")
    return found[..., 0] if found.ndim > 1 and found.shape[-1] == 1 else found
