"""Preference optimisation without a reference model: CPO, SimPO and ORPO."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pulsetrain.engine.argument_checks import check_number, check_positive
from pulsetrain.engine.arrays import Array
from pulsetrain.engine.errors import raised_by
from pulsetrain.engine.losses import dpo_loss, orpo_loss, simpo_loss
from pulsetrain.engine.losses.preference import OF_MEANS
from pulsetrain.engine.strategies.answers import PairStrategy, Scores

__all__ = ["CPOStrategy", "ORPOStrategy", "SimPOStrategy"]


class _ReferenceFree(PairStrategy):
    """Base class; each loss is a weighted sum with the cross entropy of the chosen answers, in nats per token.

    Args:
        beta: scales the rewards.
        sft_weight: of the cross entropy.

    Raises:
        ConfigurationError: a value is out of range.
    """

    beta: float
    sft_weight: float

    def __init__(self, beta: float, sft_weight: float) -> None:
        super().__init__(None, refers=False)
        check_positive(self._place, "beta", beta)
        check_number(self._place, "sft_weight", sft_weight)
        self.beta, self.sft_weight = beta, sft_weight

    def _loss(self, scores: Scores, targets: Mapping[str, Array]) -> Array:
        compared = self._compared(*scores.policy)
        return compared + float(self.sft_weight) * scores.cross_entropy if self.sft_weight else compared

    def _compared(self, chosen: Array, rejected: Array) -> Array:
        """The loss between the two answers, shape ()."""
        raise NotImplementedError


class CPOStrategy(_ReferenceFree):
    """Contrastive preference optimisation: DPO's loss without a reference, and the cross entropy of chosen answers.

    Source: Xu et al. 2024. Batches are those of `DPOStrategy`.

    >>> tokens, labels = torch.tensor([[1, 2, 3]]), torch.tensor([[-100, -100, 3]])
    >>> pair = {f"{side}_{name}": value for side in ("chosen", "rejected")
    ...         for name, value in (("input_ids", tokens), ("labels", labels))}
    >>> strategy = CPOStrategy()
    >>> strategy.compute_loss(torch.zeros(2, 2, 4), strategy.prepare_batch(pair))  # log 2 + log 4
    tensor(2.0794)

    Args:
        beta: scales the rewards, which are beta times an answer's log-probability.
        loss_type: a type of `pulsetrain.engine.losses.dpo_loss`.
        label_smoothing: the assumed share of pairs with the wrong preference.
        sft_weight: of the cross entropy of the chosen answers, in nats per token.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
    """

    loss_type: str
    label_smoothing: float

    def __init__(
        self, beta: float = 0.1, loss_type: str = "sigmoid", label_smoothing: float = 0.0, *, sft_weight: float = 1.0
    ) -> None:
        super().__init__(beta, sft_weight)
        self.loss_type, self.label_smoothing = loss_type, label_smoothing
        self._of_means = loss_type in OF_MEANS
        with raised_by(self._place):
            self._compared(torch.zeros(1), torch.zeros(1))  # rejects wrong values now

    def _compared(self, chosen: Array, rejected: Array) -> Array:
        return dpo_loss(chosen, rejected, None, None, self.beta, self.loss_type, self.label_smoothing)


class SimPOStrategy(_ReferenceFree):
    """Simple preference optimisation: compares the mean log-probability of the tokens of two answers.

    Source: Meng et al. 2024, eq. 6. Batches are those of `DPOStrategy`.

    Args:
        beta: scales the rewards, which are beta times the mean log-probability of an answer's tokens.
        gamma: the margin between the rewards that is aimed at.
        label_smoothing: the assumed share of pairs with the wrong preference.
        sft_weight: of the cross entropy of the chosen answers, in nats per token; above 0 it is CPO-SimPO.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
    """

    gamma: float
    label_smoothing: float

    _of_means = True

    def __init__(
        self, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0, *, sft_weight: float = 0.0
    ) -> None:
        super().__init__(beta, sft_weight)
        check_number(self._place, "gamma", gamma)
        self.gamma, self.label_smoothing = gamma, label_smoothing
        with raised_by(self._place):
            self._compared(torch.zeros(1), torch.zeros(1))  # rejects wrong values now

    def _compared(self, chosen: Array, rejected: Array) -> Array:
        return simpo_loss(chosen, rejected, self.beta, self.gamma, self.label_smoothing)


class ORPOStrategy(_ReferenceFree):
    """Odds ratio preference optimisation: fine-tuning on the chosen answers that avoids the rejected ones.

    The loss is the cross entropy of the chosen answers plus beta times `pulsetrain.engine.losses.orpo_loss`. Source:
    Hong et al. 2024, eq. 6. Batches are those of `DPOStrategy`.

    Args:
        beta: the weight of the odds ratio; rewards are beta times the mean log-probability of an answer's tokens.

    Raises:
        ConfigurationError: it is not a positive number.
    """

    _of_means = True

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__(beta, sft_weight=1.0)

    def _compared(self, chosen: Array, rejected: Array) -> Array:
        return float(self.beta) * orpo_loss(chosen, rejected)
