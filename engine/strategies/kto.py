"""Kahneman-Tversky optimisation: learns from answers of which each is judged as desirable or not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.arrays import Array, namespace, stop_gradient
from pulsetrain.engine.errors import raised_by
from pulsetrain.engine.losses import implicit_rewards, kto_loss
from pulsetrain.engine.step.protocols import TrainingBatch, describe
from pulsetrain.engine.strategies.answers import AnswerStrategy, Scores
from pulsetrain.engine.strategies.reference import ReferenceModel

__all__ = ["KTOStrategy"]


class KTOStrategy(AnswerStrategy):
    """Raises the probability of desirable answers and lowers that of others, relative to a reference model.

    A batch is a mapping with "input_ids" and "labels", shape (rows, length), as for `SFTStrategy`, and "desirable",
    booleans of shape (rows,). The divergence from the reference is estimated from each prompt with the answer to
    another prompt of the batch, "kl_input_ids" and "kl_labels", which `pad_unpaired` makes: it is the mean over these
    rows of the log-ratio, at least 0. Each process, and each accumulated batch, has its own estimate. These rows are
    cut at the model's context; they are part of the forward pass, which takes twice as many rows as there are answers.

    >>> tokens = torch.tensor([[1, 2], [1, 3]])
    >>> batch = {"input_ids": tokens, "labels": tokens, "desirable": torch.tensor([True, False])}
    >>> batch |= {"kl_input_ids": tokens.flip(0), "kl_labels": tokens.flip(0)}
    >>> strategy = KTOStrategy(reference=lambda tokens: torch.zeros(*tokens.shape, 4))
    >>> strategy.compute_loss(torch.zeros(4, 1, 4), strategy.prepare_batch(batch))  # the policy is the reference
    tensor(0.5000)

    Args:
        beta: how closely the policy is held to the reference; the implicit reward is beta times the log-ratio.
        loss_type: "kto" (Ethayarajh 2024), or "apo_zero_unpaired" (D'Oosterlinck 2024), whose divergence is 0: it needs
            no further rows.
        desirable_weight: of the loss of desirable answers. Ethayarajh et al. advise weights whose ratio to the numbers
            of answers is 1 to 4/3.
        undesirable_weight: of the loss of the others.
        reference: "copy" of the model at the time training is set up (for a model with adapters: a copy of those
            alone), a model, or None if every batch contains stored log-probabilities, as `store_reference` computes
            them.

    Raises:
        ConfigurationError: a value is out of range; the message names it.
    """

    beta: float
    loss_type: str
    desirable_weight: float
    undesirable_weight: float

    _remedy = (
        "a batch has input_ids, labels, kl_input_ids and kl_labels, each of shape (rows, length), and desirable, as "
        "pulsetrain.engine.data.preferences.pad_unpaired makes them"
    )

    def __init__(
        self,
        beta: float = 0.1,
        loss_type: str = "kto",
        *,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reference: ReferenceModel = "copy",
    ) -> None:
        super().__init__(reference)
        check_choice(self._place, "loss_type", loss_type, ("kto", "apo_zero_unpaired"))
        self.beta, self.loss_type = beta, loss_type
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight
        self._sides = ("", "kl_") if loss_type == "kto" else ("",)
        zeros = torch.zeros(1)
        with raised_by(self._place):  # rejects wrong values now
            kto_loss(zeros, zeros, zeros == 0, None, beta, desirable_weight, undesirable_weight)

    def _read(self, batch: Mapping[str, Tensor], side: str, check: bool) -> tuple[Tensor, Tensor]:
        if side == "kl_" and self.context is not None:  # both texts fit the model, and their combination may not
            fields = ("kl_input_ids", "kl_labels", "kl_attention_mask")
            given = {name: batch[name] for name in fields if isinstance(batch.get(name), Tensor)}
            batch = {
                **batch,
                **{name: value[:, : self.context + 1] for name, value in given.items() if value.ndim == 2},
            }
        return super()._read(batch, side, check)

    def _further_targets(self, batch: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        desirable = self._field(batch, "desirable", self._remedy)
        if desirable.shape != (rows,):
            raise ValueError(
                f"{self._place}: 'desirable' is {describe(desirable)}, and there are {rows} rows; one boolean for each"
            )
        if desirable.dtype != torch.bool:
            raise TypeError(f"{self._place}: 'desirable' is {describe(desirable)}; needs booleans, pass desirable != 0")
        return {"desirable": desirable}

    def _loss(self, scores: Scores, targets: Mapping[str, Array]) -> Array:
        return kto_loss(
            scores.policy[0], scores.reference[0], targets["desirable"], self._kl(scores), self.beta,
            self.desirable_weight, self.undesirable_weight,
        )  # fmt: skip

    def _kl(self, scores: Scores) -> Array | None:
        """The estimate of the divergence, nats, shape (); None if the loss has none."""
        if len(self._sides) == 1:
            return None
        ratios = stop_gradient(scores.policy[1]) - scores.reference[1]
        xp = namespace(ratios)
        found = xp.mean(ratios)
        return xp.where(found > 0, found, 0.0)

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Array]:
        """Means over the answers.

        The reward of an answer is beta times the amount by which its log-ratio exceeds the divergence. `reward_margin`:
        the reward of desirable answers and minus that of the others; `reward_accuracy`: the share of answers for which
        this is above 0; `kl`: the divergence, in nats; not for "apo_zero_unpaired".
        """
        scores, desirable = self._scores(outputs, batch), batch.targets["desirable"]
        kl = self._kl(scores)
        rewards = implicit_rewards(scores.policy[0], scores.reference[0], self.beta)
        if kl is not None:
            rewards = rewards - float(self.beta) * kl
        xp = namespace(rewards)
        margins = xp.where(desirable, rewards, -rewards)
        found = {
            "reward_accuracy": xp.mean(xp.astype(margins > 0, xp.float32)),
            "reward_margin": xp.mean(margins),
        }
        return found if kl is None else {**found, "kl": kl}
