"""Base class of rollouts: when the policy acts, how often its rows are used, and which events report it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.data import rng
from pulsetrain.engine.distributed.ranks import DataRank
from pulsetrain.engine.errors import CheckpointError, ConfigurationError, refused
from pulsetrain.engine.events.names import Events, EventType
from pulsetrain.engine.events.payloads import PolicyUpdated, RewardsComputed, RolloutCompleted
from pulsetrain.engine.events.state import State
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.engine.metrics import MetricTracker
from pulsetrain.engine.rollouts.sharing import SharedRollout
from pulsetrain.engine.step.backend import Backend, InPlaceBackend
from pulsetrain.engine.step.model_call import call, eval_mode
from pulsetrain.engine.step.precision import autocast_of
from pulsetrain.engine.step.protocols import describe
from pulsetrain.engine.strategies.policy import PolicyStrategy

__all__ = ["PolicyTrainer", "Rollouts"]


_REWARDS = ("rollout/reward/", "rollout/reward_std/")  # of one reward function each


class PolicyTrainer(Protocol):
    """The parts of a Trainer that rollouts use."""

    model: nn.Module
    backend: Backend
    strategy: Any  # a PolicyStrategy, once `Rollouts.attach` has checked it
    state: State
    history: MetricTracker

    @property
    def seed(self) -> int: ...

    def as_step(self) -> AbstractContextManager[None]: ...

    def fire(self, event: EventType, payload: object = None) -> object: ...

    def hears(self, event: EventType) -> bool: ...

    def add_event_handler(self, event: EventType, handler: Callable[..., object], *, phase: Phase) -> object: ...


class _NoPolicyError(ConfigurationError, TypeError):
    """There is no policy yet. It is also a TypeError, the error of `len` for objects without a length."""


class Rollouts:
    """An endless loader: the policy acts, its rows are returned in shuffled batches, and the policy acts again.

    Pass it to a Trainer as train_loader, with a `PolicyStrategy`, which decides how often the rows are used. The length
    (an epoch) is the number of batches of one full rollout. The trainer fires ROLLOUT_STARTED, REWARDS_COMPUTED and
    ROLLOUT_COMPLETED before the first batch of each rollout, and POLICY_UPDATED after the last; the metrics of the
    latter two are also in `state.metrics` and in the history.

    A subclass implements `rows`, `collect` and, if it has state besides its rows, `progress` and `resume`.

    >>> class Bandit(Rollouts):  # one state, two actions; the second pays 1.0
    ...     rows = 4
    ...     def collect(self):
    ...         observations = torch.zeros(4, 1)
    ...         outputs = self.act(observations)
    ...         actions = torch.multinomial(self.strategy.scores(outputs).softmax(-1), 1).squeeze(-1)
    ...         log_probs = self.strategy.action_log_probs(outputs, actions)
    ...         rewards = (actions == 1).float()
    ...         rows = {"observations": observations, "actions": actions, "log_probs": log_probs}
    ...         return {**rows, "rewards": rewards}, {}
    >>> len(Bandit())
    Traceback (most recent call last):
        ...
    pulsetrain.engine.rollouts.base._NoPolicyError: Bandit: has no policy yet; pass it to a Trainer as train_loader
    """

    sharing: SharedRollout
    seed: int
    rollouts: int

    fires_rollouts = True
    shares_ranks = False  # whether several processes share a rollout out
    judges_policy = False  # whether it can be a validation set, with `attach_for_validation` and `evaluate_policy`

    def __init__(self) -> None:
        self._trainer: PolicyTrainer | None = None
        self.sharing = SharedRollout(DataRank())  # over the processes that train together
        self.seed = 0  # for draws other than the policy's: the run's seed, after a resume that of the checkpoint
        self._restored = False
        self.restart()

    def restart(self) -> None:
        """Returns to the state before the first rollout."""
        self.rollouts = 0  # number of rollouts started
        self.kl_coef: float | None = None  # the strategy's, unless adapted
        self._drop_rows()

    def _drop_rows(self) -> None:
        self._rows: dict[str, Tensor] | None = None
        self._order: Tensor | None = None  # the order of the rows in the current epoch over them
        self._ordered = -1  # the epoch that has this order
        self._given = 0  # batches of this rollout that were returned
        self._done = False  # whether the rollout has ended

    # ------------------------------------------------------------------------------------------------ for subclasses

    @property
    def rows(self) -> int:
        """The number of rows of a rollout."""
        raise NotImplementedError

    def collect(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Lets the policy act; returns the rollout's tensors, among them "rewards", and metrics by their full names.

        It runs without gradients and with the model in eval mode.
        """
        raise NotImplementedError

    def progress(self) -> dict[str, Any]:
        """The state besides the weights that the next rollout depends on, as tensors and plain containers."""
        return {}

    def resume(self, progress: Mapping[str, object]) -> None:
        """Restores the result of `progress`."""

    def begin(self, trainer: PolicyTrainer) -> None:
        """Called once the trainer is known; rejects a trainer that does not fit."""

    def rows_of(self, rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows that batches are made from, with the strategy's advantages."""
        assert self.kl_coef is not None
        rows = self.strategy.learn_from(rollout, self.kl_coef)
        numbers = self.strategy.scheduled(self.rollouts - 1)
        return rows | {name: rollout["rewards"].new_tensor(value) for name, value in numbers.items()}

    # ------------------------------------------------------------------------------------------------- for the trainer

    def attach(self, trainer: PolicyTrainer) -> None:
        """Uses this trainer's model and strategy; the Trainer calls it.

        Raises:
            ConfigurationError: the strategy does not learn from rollouts, or a rollout does not make whole batches.
        """
        self._adopt(trainer, self._check_and_begin)
        self.seed = trainer.seed
        trainer.add_event_handler(Events.STARTED, self._on_started, phase=Phase.COMPUTE)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._on_iteration, phase=Phase.COMPUTE)

    def _adopt(self, trainer: PolicyTrainer, begin: Callable[[PolicyTrainer], None]) -> None:
        name, strategy = type(self).__name__, trainer.strategy
        if not isinstance(strategy, PolicyStrategy):
            raise ConfigurationError(
                f"{name}: {type(strategy).__name__} does not learn from rollouts; use PPOStrategy or GRPOStrategy, or "
                "another loader"
            )
        if self._trainer is not None and self._trainer is not trainer:
            raise ConfigurationError(f"{name}: already belongs to another trainer; give each Trainer its own rollouts")
        before, self._trainer = self._trainer, trainer
        self.sharing = SharedRollout(trainer.backend.data_rank)
        try:
            begin(trainer)
        except Exception:
            self._trainer = before  # this trainer was not created, so another one may use these rollouts
            raise

    def _check_and_begin(self, trainer: PolicyTrainer) -> None:
        self._check(trainer.strategy)
        self.begin(trainer)

    def _check(self, strategy: PolicyStrategy) -> None:
        size = strategy.minibatch_size
        if size is not None and self.rows % size:
            rows = f"a rollout of {type(self).__name__} has {self.rows} rows"
            raise refused(strategy, f"{rows}, which do not make whole batches; choose a divisor", "minibatch_size")
        count = self.sharing.rank.count
        if (self.rows if size is None else size) % count:
            of = f"a batch of {self.rows} rows" if size is None else "a batch"
            raise refused(strategy, f"{count} processes cannot share {of} evenly; choose a multiple", "minibatch_size")

    @property
    def trainer(self) -> PolicyTrainer:
        """The trainer whose policy acts.

        Raises:
            ConfigurationError: there is none yet.
        """
        if self._trainer is None:
            raise _NoPolicyError(f"{type(self).__name__}: has no policy yet; pass it to a Trainer as train_loader")
        return self._trainer

    @property
    def strategy(self) -> PolicyStrategy:
        """The trainer's strategy."""
        strategy: PolicyStrategy = self.trainer.strategy
        return strategy

    def __len__(self) -> int:
        return self.strategy.minibatch_epochs * self._batches

    @property
    def _batches(self) -> int:
        """The batches in one epoch over the rows."""
        return self.rows // (self.strategy.minibatch_size or self.rows)

    @property
    def trains_in_one_pass(self) -> bool:
        """Whether a rollout is one batch, used once, whose own forward pass gives the policy's log-probabilities."""
        one = len(self) == 1 and self.strategy.can_learn_in_one_pass
        return one and isinstance(self.trainer.backend, InPlaceBackend)  # others compile the loss

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self._restored:
            self._drop_rows()
        self._restored = False
        return self._batches_without_end()

    def _batches_without_end(self) -> Iterator[dict[str, Tensor]]:
        while True:
            if self.acts_next:
                with self.trainer.as_step():  # no checkpoint meanwhile: a run cannot resume inside a rollout
                    if self._rows is not None and not self._done:
                        self._end()  # its last batch was skipped, so no iteration has ended it
                    self._roll_out()
            yield self._next_batch()

    @property
    def acts_next(self) -> bool:
        """Whether the next batch is the first of a rollout, for which the policy acts beforehand."""
        return self._rows is None or self._done or self._given == len(self)

    def _next_batch(self) -> dict[str, Tensor]:
        assert self._rows is not None
        epoch, index = divmod(self._given, self._batches)
        if self._order is None or epoch != self._ordered:
            # the same on all ranks
            keyed = torch.Generator().manual_seed(rng.derive(self.seed, self.rollouts, epoch))
            self._order, self._ordered = torch.randperm(self.rows, generator=keyed), epoch
        size = self.rows // self._batches
        start = index * size
        self._given += 1
        whole = self.strategy.minibatch(self._batch_of(self._order[start : start + size]))
        if self.sharing.rank.count == 1:
            return whole
        return {name: self.sharing.part_of_batch(each) if each.ndim else each for name, each in whole.items()}

    def _batch_of(self, indices: Tensor) -> dict[str, Tensor]:
        assert self._rows is not None
        indices = indices.to(self.trainer.backend.device)  # the device of the rows; once, since the copy may wait
        return {name: each[indices] if each.ndim else each for name, each in self._rows.items()}

    # ------------------------------------------------------------------------------------------------------- a rollout

    def _roll_out(self) -> None:
        trainer = self.trainer
        self._drop_rows()
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
            self.rollouts -= 1  # it was not used: if training continues, the rollout starts again
            raise
        self._rows = self.rows_of(rollout)
        self._report(Events.ROLLOUT_COMPLETED, metrics, seconds=time.perf_counter() - start)

    def _announce_rewards(self, rewards: Tensor) -> None:
        """Reports the rewards, after rejecting any that are not finite."""
        wrong = (~rewards.isfinite()).nonzero()
        if len(wrong):
            index = wrong[0].tolist()
            raise ValueError(
                f"{type(self).__name__}: rewards{index}={rewards[tuple(index)].item()}: needs finite numbers, and "
                f"{len(wrong)} of {rewards.numel()} are not; fix the reward, or let it return 0.0 there"
            )
        wide = rewards.cpu().double()  # on the host: not every accelerator has float64
        computed = RewardsComputed(
            mean=wide.mean().item(), std=wide.std(correction=0).item(), minimum=wide.min().item(),
            maximum=wide.max().item(), count=wide.numel(),
        )  # fmt: skip
        self.trainer.fire(Events.REWARDS_COMPUTED, computed)

    def _report(self, event: EventType, metrics: dict[str, float], **more: float) -> None:
        trainer = self.trainer
        if event == Events.ROLLOUT_COMPLETED:  # a reward that applied to no text of this rollout keeps no old value
            for name in [each for each in trainer.state.metrics if each.startswith(_REWARDS) and each not in metrics]:
                del trainer.state.metrics[name]
        trainer.state.metrics.update(metrics)
        trainer.history.update(metrics)
        payload = RolloutCompleted if event == Events.ROLLOUT_COMPLETED else PolicyUpdated
        trainer.fire(event, payload(metrics=metrics, **more))

    def act(self, inputs: object) -> object:
        """The policy's outputs for these inputs, in the precision that it is trained in.

        Raises:
            Exception: the model's exception, with a note that describes the inputs.
        """
        try:
            with self.autocast():
                return call(self.trainer.model, inputs)
        except Exception as error:
            error.add_note(f"in {type(self).__name__}, where the policy acts, given {describe(inputs, ranges=True)}")
            raise

    def autocast(self) -> AbstractContextManager[object]:
        """The backend's precision as a context, so that the policy acts with the numbers it is trained with."""
        return autocast_of(self.trainer.backend)()

    def _on_started(self) -> None:
        if self.trainer.state.iteration == 0:
            self.seed = self.trainer.seed
            self.restart()

    def _on_iteration(self) -> None:
        """After each epoch over the rows: ends the rollout if it is complete or exceeds target_kl."""
        if self._rows is None or self._done or self._given % self._batches:
            return
        strategy = self.strategy
        last = self._given == len(self)
        if not last and strategy.target_kl is None:
            return
        metrics = self._take_measured() or self._measure()
        if last or (strategy.target_kl is not None and metrics["policy/kl"] > strategy.target_kl):
            self._end(metrics)

    def _end(self, metrics: dict[str, float] | None = None) -> None:
        """Ends the rollout and reports it."""
        metrics, epochs = metrics or self._measure(), self._given // self._batches
        self._drop_rows()  # later checkpoints need not contain them
        self._done = True
        assert self.kl_coef is not None
        divergence = self.trainer.state.metrics.get("rollout/reference_kl", metrics["policy/kl"])
        self.kl_coef = self.strategy.adapted(self.kl_coef, divergence)
        numbers = {f"policy/{name}": value for name, value in self.strategy.scheduled(self.rollouts - 1).items()}
        numbers |= {"policy/kl_coef": self.kl_coef, "policy/epochs": float(epochs)}
        self._report(Events.POLICY_UPDATED, {**metrics, **numbers})

    def _measure(self) -> dict[str, float]:
        """The strategy's metrics over all rows, as means over actions; for texts, over generated tokens."""
        assert self._order is not None
        totals: dict[str, Array] = {}
        weight: int | Tensor = 0
        with torch.no_grad(), eval_mode(self.trainer.model):
            for indices in self._order.chunk(self._batches):
                batch = self.strategy.prepare_batch(self._batch_of(self.sharing.part_of_batch(indices)))
                size = batch.targets["mask"].sum() if "mask" in batch.targets else batch.samples
                for name, value in self.strategy.compute_metrics(self.act(batch.inputs), batch).items():
                    totals[name] = totals.get(name, 0) + value * size
                weight = weight + size
        *sums, whole = self.sharing.sums([*map(float, totals.values()), float(weight)])
        return {f"policy/{name}": total / whole for name, total in zip(totals, sums, strict=True)}

    def _take_measured(self) -> dict[str, float]:
        """What the pass that trained on the whole rollout has measured, over all processes."""
        means = self.strategy.take_measured()
        if not means or not self.sharing.is_shared:
            return means
        assert self._order is not None
        batch = self.strategy.prepare_batch(self._batch_of(self.sharing.part_of_batch(self._order)))
        weight = float(batch.targets["mask"].sum())
        *sums, total = self.sharing.sums([*(value * weight for value in means.values()), weight])
        return {name: value / total for name, value in zip(means, sums, strict=True)}

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The rows and everything else besides the weights that the next batch depends on."""
        return self.state_before(0)

    def state_before(self, batches: int) -> dict[str, Any]:
        """The state before the last `batches` batches of this rollout were returned."""
        given = self._given - batches
        if given < 0:
            raise CheckpointError(
                f"{type(self).__name__}: {batches} batches were returned without an update, more than the "
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
        """Restores the state; the next iteration continues inside its rollout."""
        rows = state["rows"]
        if state["size"] != self.rows:
            raise CheckpointError(
                f"{type(self).__name__}: the checkpoint's rollout has {state['size']} rows, and this one has "
                f"{self.rows}; resume with the sizes that the run started with"
            )
        if rows is not None and "log_probs" not in rows and not self.trains_in_one_pass:
            raise CheckpointError(
                f"{type(self).__name__}: the checkpoint's rollout was to be used once, and holds no log-probabilities; "
                "resume with the minibatch_size, minibatch_epochs and target_kl that the run started with"
            )
        self.seed, self.rollouts, self.kl_coef = state["seed"], state["rollouts"], state["kl_coef"]
        device = self.trainer.backend.device
        self._rows = None if rows is None else {name: each.to(device) for name, each in rows.items()}
        self._order, self._ordered = state["order"], state["ordered"]
        self._given, self._done = state["given"], state["done"]
        self.resume(state["progress"])
        self._restored = True
