"""Direct preference optimisation: learns to prefer the better of two answers, without a reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch

from pulsetrain.engine.argument_checks import check_bool, check_choice, is_number
from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import ConfigurationError, raised_by
from pulsetrain.engine.losses import dpo_loss
from pulsetrain.engine.losses.preference import LOSSES, OF_MEANS, SMOOTHED
from pulsetrain.engine.strategies.answers import PairStrategy, Scores
from pulsetrain.engine.strategies.reference import ReferenceModel

__all__ = ["DPOStrategy"]

_SFT = "sft"  # the cross entropy of the chosen answers, as a term


class DPOStrategy(PairStrategy):
    """Raises the probability of chosen answers over rejected ones, relative to a reference model.

    A batch is a mapping with "chosen_input_ids", "chosen_labels", "rejected_input_ids" and "rejected_labels", each of
    shape (pairs, length), with labels of -100 in prompts and padding. The reference's log-probabilities come from a
    frozen model or from the batch: "reference_chosen_log_probs" and "reference_rejected_log_probs", shape (pairs,), as
    `store_reference` computes them.

    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> pair = {"chosen_input_ids": tokens, "chosen_labels": torch.tensor([[-100, -100, 3]])}
    >>> pair |= {"rejected_input_ids": tokens, "rejected_labels": torch.tensor([[-100, -100, 3]])}
    >>> strategy = DPOStrategy(reference_free=True)
    >>> batch = strategy.prepare_batch(pair)
    >>> strategy.compute_loss(torch.zeros(2, 2, 5), batch)  # equal probabilities: log 2
    tensor(0.6931)

    Args:
        beta: how closely the policy is held to the reference; the implicit reward is beta times the log-ratio.
        loss_type: one of the types of `pulsetrain.engine.losses.dpo_loss`, or a list of them, whose losses are added;
            a list may also contain "sft", the cross entropy of the chosen answers in nats per token (Pang 2024).
            "aot" and "aot_unpaired" compare the pairs of a batch with each other, and those of each process and each
            accumulated batch separately.
        label_smoothing: the assumed share of pairs with the wrong preference (Mitchell 2023), for the types that take
            it.
        loss_weights: the weight of each loss of a list; 1 by default.
        discopop_tau: see `dpo_loss`.
        reference_free: use no reference.
        reference: "copy" of the model at the time training is set up (for a model with adapters: a copy of those
            alone), a model, or None if every batch contains stored log-probabilities.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
    """

    beta: float
    loss_type: str | Sequence[str]
    label_smoothing: float
    loss_weights: Sequence[float] | None
    discopop_tau: float

    def __init__(
        self,
        beta: float = 0.1,
        loss_type: str | Sequence[str] = "sigmoid",
        label_smoothing: float = 0.0,
        *,
        loss_weights: Sequence[float] | None = None,
        discopop_tau: float = 0.05,
        reference_free: bool = False,
        reference: ReferenceModel = "copy",
    ) -> None:
        check_bool(self._place, "reference_free", reference_free)
        self.reference_free = reference_free
        super().__init__(reference, refers=not reference_free)
        self.beta, self.loss_type, self.label_smoothing = beta, loss_type, label_smoothing
        self.loss_weights, self.discopop_tau = loss_weights, discopop_tau
        types: list[Any] = list(loss_type) if isinstance(loss_type, (list, tuple)) else [loss_type]
        weights = [1.0] * len(types) if loss_weights is None else list(loss_weights)
        self._check_terms(types, weights)
        self._terms = tuple(zip(types, map(float, weights), strict=True))
        self._of_means = all(each in (*OF_MEANS, _SFT) for each in types)

    def _check_terms(self, types: Sequence[str], weights: Sequence[float]) -> None:
        """Rejects wrong values now, and not at the first batch."""
        if len(weights) != len(types):
            raise ConfigurationError(
                "needs a weight for each loss type",
                self._place,
                loss_weights=self.loss_weights,
                loss_type=self.loss_type,
            )
        if not all(map(is_number, weights)):
            raise ConfigurationError("needs finite numbers", self._place, loss_weights=self.loss_weights)
        for each in types:
            check_choice(self._place, "loss_type", each, (*LOSSES, _SFT))
        zeros = torch.zeros(1)
        compared = [each for each in types if each != _SFT]
        if not compared:
            rule = "needs a loss that compares the answers; to learn the chosen ones alone use SFTStrategy"
            raise ConfigurationError(rule, self._place, loss_type=self.loss_type)
        takes = [each for each in compared if each in SMOOTHED]
        for each in compared:
            smoothing = self.label_smoothing if each in takes or not takes else 0.0
            with raised_by(self._place):
                dpo_loss(zeros, zeros, None, None, self.beta, each, smoothing, self.discopop_tau)

    def _loss(self, scores: Scores, targets: Mapping[str, Array]) -> Array:
        terms = [(weight, self._term(each, scores)) for each, weight in self._terms]
        return reduce(add, (loss if weight == 1.0 else weight * loss for weight, loss in terms))

    def _term(self, loss_type: str, scores: Scores) -> Array:
        if loss_type == _SFT:
            return scores.cross_entropy
        if loss_type in OF_MEANS and not self._of_means:
            scores = scores.means()
        smoothing = self.label_smoothing if loss_type in SMOOTHED else 0.0
        policy, reference = scores.policy, scores.reference
        return dpo_loss(
            policy[0], policy[1], reference[0], reference[1], self.beta, loss_type, smoothing, self.discopop_tau
        )
