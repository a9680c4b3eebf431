"""What every rollout shares: when the policy acts, how often its rows are learnt from, and what is told of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.payloads import PolicyUpdated, RewardsComputed, RolloutCompleted
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.engine.step.model_call import call, eval_mode
from pulsetrain.engine.step.precision import autocast_of
from pulsetrain.engine.step.protocols import describe
from pulsetrain.engine.strategies.policy import PolicyStrategy

__all__ = ["Rollouts"]


class _NoPolicyError(ConfigurationError, TypeError):
    """There is no policy yet. It is a TypeError too, as of whatever has no length that one could ask for."""


class Rollouts:
    """Batches without end: the policy acts, its rows are given out in shuffled batches, and it acts again.

    It is a trainer's train_loader, and the trainer's strategy (a `PolicyStrategy`) says how its rows are learnt from.
    Its length, an epoch, is what one rollout gives that is not ended early. The trainer fires ROLLOUT_STARTED,
    REWARDS_COMPUTED and ROLLOUT_COMPLETED before the first batch of each rollout, and POLICY_UPDATED behind the last;
    the metrics of the latter two are in `state.metrics` and in the history as well.

    A subclass writes `rows`, `collect` and, where it holds more than its rows, `progress` and `go_on`.
    """

    fires_rollouts = True

    def __init__(self) -> None:
        self._trainer: Any = None
        self.seed = 0  # of what a rollout draws beside the policy: the run's, a resume's that of its checkpoint
        self._restored = False
        self.restart()

    def restart(self) -> None:
        """Stand before the first rollout."""
        self.rollouts = 0  # begun
        self.kl_coef: float | None = None  # the strategy's, unless it adapts
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._rows: dict[str, Tensor] | None = None
        self._order: Tensor | None = None  # of the rows, in one epoch over them
        self._ordered = -1  # which epoch that is
        self._given = 0  # batches of the rollout
        self._done = False  # with the rollout

    # ------------------------------------------------------------------------------------------ what a subclass writes

    @property
    def rows(self) -> int:
        """Rows of a rollout."""
        raise NotImplementedError

    def collect(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Let the policy act: a rollout as the strategy learns from it, and metrics by their full names.

        It is called without gradients, the model in eval mode. "rewards" are among the tensors.
        """
        raise NotImplementedError

    def progress(self) -> dict[str, Any]:
        """What the next rollout depends on, beside the weights, as tensors and plain containers."""
        return {}

    def go_on(self, progress: Mapping[str, Any]) -> None:
        """Take over what `progress` gave."""

    def begin(self, trainer: Any) -> None:
        """The trainer is known; refuse what does not fit."""

    # --------------------------------------------------------------------------------------------------- for a trainer

    def attach(self, trainer: Any) -> None:
        """Act by this trainer's model, for its strategy; the trainer calls it.

        Raises:
            ConfigurationError: its strategy does not learn from rollouts, or the batches do not fit a rollout.
        """
        name, strategy = type(self).__name__, trainer.strategy
        if not isinstance(strategy, PolicyStrategy):
            raise ConfigurationError(
                f"{name}: {type(strategy).__name__} does not learn from rollouts; use PPOStrategy or GRPOStrategy, or "
                "another loader"
            )
        if self._trainer is not None and self._trainer is not trainer:
            raise ConfigurationError(f"{name}: serves another trainer already; give each Trainer rollouts of its own")
        before, self._trainer = self._trainer, trainer
        try:
            self._check(strategy)
            self.begin(trainer)
        except Exception:
            self._trainer = before  # that trainer is not made: another may have these rollouts
            raise
        self.seed = trainer.seed
        trainer.add_event_handler(Events.STARTED, self._on_started, phase=Phase.COMPUTE)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._on_iteration, phase=Phase.COMPUTE)

    def _check(self, strategy: PolicyStrategy) -> None:
        size = strategy.minibatch_size
        if size is not None and self.rows % size:
            raise ConfigurationError(
                f"{type(strategy).__name__}(minibatch_size={size}): a rollout of {type(self).__name__} has {self.rows} "
                "rows, which do not make whole batches; choose a divisor"
            )

    @property
    def trainer(self) -> Any:
        """Whose policy acts.

        Raises:
            ConfigurationError: there is none yet.
        """
        if self._trainer is None:
            raise _NoPolicyError(f"{type(self).__name__}: has no policy yet; pass it to a Trainer as train_loader")
        return self._trainer

    @property
    def strategy(self) -> PolicyStrategy:
        """How the trainer learns."""
        strategy: PolicyStrategy = self.trainer.strategy
        return strategy

    def __len__(self) -> int:
        return self.strategy.minibatch_epochs * self._batches

    @property
    def _batches(self) -> int:
        """Of one epoch over the rows."""
        return self.rows // (self.strategy.minibatch_size or self.rows)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self._restored:
            self._forget_rows()
        self._restored = False
        return self._batches_without_end()

    def _batches_without_end(self) -> Iterator[dict[str, Tensor]]:
        while True:
            if self._rows is None or self._done or self._given == len(self):
                trainer = self.trainer
                trainer.in_step = True  # nothing is saved meanwhile: no run could go on exactly inside a rollout
                try:
                    if self._rows is not None and not self._done:
                        self._end()  # its last batch was left out, and no iteration has come behind it
                    self._roll_out()
                finally:
                    trainer.in_step = False
            yield self._next_batch()

    def _next_batch(self) -> dict[str, Tensor]:
        assert self._rows is not None
        epoch, place = divmod(self._given, self._batches)
        if self._order is None or epoch != self._ordered:
            self._order, self._ordered = torch.randperm(self.rows), epoch
        size = self.rows // self._batches
        start = place * size
        self._given += 1
        return self._batch_of(self._order[start : start + size])

    def _batch_of(self, indices: Tensor) -> dict[str, Tensor]:
        assert self._rows is not None
        indices = indices.to(self.trainer.backend.device)  # where the rows are; once, as it may wait
        return {name: each[indices] if each.ndim else each for name, each in self._rows.items()}

    # ------------------------------------------------------------------------------------------------------- a rollout

    def _roll_out(self) -> None:
        trainer = self.trainer
        self._forget_rows()
        if self.kl_coef is None:
            self.kl_coef = self.strategy.kl_coef
        trainer.fire(Events.ROLLOUT_STARTED)
        self.rollouts += 1
        start = time.perf_counter()
        try:
            with torch.no_grad(), eval_mode(trainer.model):
                rollout, metrics = self.collect()
            self._announce_rewards(rollout["rewards"])
        except BaseException:
            self.rollouts -= 1  # nothing was learnt from it: whoever trains on begins it again
            raise
        self._rows = self.strategy.learn_from(rollout, self.kl_coef)
        self._tell(Events.ROLLOUT_COMPLETED, metrics, seconds=time.perf_counter() - start)

    def _announce_rewards(self, rewards: Tensor) -> None:
        """Refuse rewards that nothing can be learnt from, before anything is."""
        wrong = (~rewards.isfinite()).nonzero()
        if len(wrong):
            place = wrong[0].tolist()
            raise ValueError(
                f"{type(self).__name__}: rewards{place}={rewards[tuple(place)].item()}: needs finite numbers, and "
                f"{len(wrong)} of {rewards.numel()} are not; mend the reward, or let it give 0.0 there"
            )
        wide = rewards.cpu().double()  # there: not every accelerator has float64
        computed = RewardsComputed(
            mean=wide.mean().item(), std=wide.std(correction=0).item(), minimum=wide.min().item(),
            maximum=wide.max().item(), count=wide.numel(),
        )  # fmt: skip
        self.trainer.fire(Events.REWARDS_COMPUTED, computed)

    def _tell(self, event: Events, metrics: dict[str, float], **more: float) -> None:
        trainer = self.trainer
        trainer.state.metrics.update(metrics)
        trainer.history.update(metrics)
        payload = RolloutCompleted if event == Events.ROLLOUT_COMPLETED else PolicyUpdated
        trainer.fire(event, payload(metrics=metrics, **more))

    def act(self, inputs: Any) -> Any:
        """What the policy gives for such inputs, in the precision that it learns in.

        Raises:
            Exception: what the model raises, with a note of what it was given.
        """
        try:
            with self.autocast():
                return call(self.trainer.model, inputs)
        except Exception as error:
            error.add_note(f"in {type(self).__name__}, where the policy acts, given {describe(inputs, ranges=True)}")
            raise

    def autocast(self) -> AbstractContextManager[Any]:
        """What the trainer's backend computes in, as a context: else a policy would act otherwise than it learns."""
        context: AbstractContextManager[Any] = autocast_of(self.trainer.backend)()
        return context

    def _on_started(self) -> None:
        if self.trainer.state.iteration == 0:
            self.restart()

    def _on_iteration(self) -> None:
        """Behind each epoch over the rows: whether the policy has gone far enough."""
        if self._rows is None or self._done or self._given % self._batches:
            return
        strategy = self.strategy
        last = self._given == len(self)
        if not last and strategy.target_kl is None:
            return
        metrics = self._measure()
        if last or (strategy.target_kl is not None and metrics["policy/kl"] > strategy.target_kl):
            self._end(metrics)

    def _end(self, metrics: dict[str, float] | None = None) -> None:
        """The rollout is done with."""
        metrics, epochs = self._measure() if metrics is None else metrics, self._given // self._batches
        self._forget_rows()  # a checkpoint from here on need not hold them
        self._done = True
        assert self.kl_coef is not None
        divergence = self.trainer.state.metrics.get("rollout/reference_kl", metrics["policy/kl"])
        self.kl_coef = self.strategy.adapted(self.kl_coef, divergence)
        self._tell(Events.POLICY_UPDATED, {**metrics, "policy/kl_coef": self.kl_coef, "policy/epochs": float(epochs)})

    def _measure(self) -> dict[str, float]:
        """The strategy's metrics over all rows, means over actions: of texts, over what was generated."""
        assert self._order is not None
        totals: dict[str, Any] = {}
        weight: Any = 0
        with torch.no_grad(), eval_mode(self.trainer.model):
            for indices in self._order.chunk(self._batches):
                batch = self.strategy.prepare_batch(self._batch_of(indices))
                size = batch.targets["mask"].sum() if "mask" in batch.targets else batch.samples
                for name, value in self.strategy.compute_metrics(self.act(batch.inputs), batch).items():
                    totals[name] = totals.get(name, 0) + value * size
                weight = weight + size
        return {f"policy/{name}": float(total / weight) for name, total in totals.items()}

    # ----------------------------------------------------------------------------------------------------- its position

    def state_dict(self) -> dict[str, Any]:
        """Rows and all else that the next batch depends on beside the weights."""
        return self.state_before(0)

    def state_before(self, batches: int) -> dict[str, Any]:
        """The state as it would be had so many batches of this rollout not been given out."""
        given = self._given - batches
        if given < 0:
            raise CheckpointError(
                f"{type(self).__name__}: {batches} batches were given out that nothing was learnt from, more than the "
                f"{self._given} of this rollout"
            )
        return {
            "seed": self.seed,
            "rollouts": self.rollouts,
            "kl_coef": self.kl_coef,
            "size": self.rows,
            "rows": self._rows,
            "order": self._order,
            "ordered": self._ordered,
            "given": given,
            "done": self._done,
            "progress": self.progress(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: the next pass begins in the midst of its rollout."""
        rows = state["rows"]
        if state["size"] != self.rows:
            raise CheckpointError(
                f"{type(self).__name__}: the checkpoint's rollout has {state['size']} rows, and one of these has "
                f"{self.rows}; go on with the sizes that the run began with"
            )
        self.seed, self.rollouts, self.kl_coef = state["seed"], state["rollouts"], state["kl_coef"]
        device = self.trainer.backend.device
        self._rows = None if rows is None else {name: each.to(device) for name, each in rows.items()}
        self._order, self._ordered = state["order"], state["ordered"]
        self._given, self._done = state["given"], state["done"]
        self.go_on(state["progress"])
        self._restored = True
