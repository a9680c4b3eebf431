"""The process function of a trainer: forward, backward, and an update once its batches are together.

Nothing here waits for the device, except while the first batches of a run are checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.backends.trees import LaterMetrics
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.compiled import Dispatch
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.payloads import GradientsReady, OptimizerStepCompleted
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.engine.optimizers import NamedOptimizers, parts_of
from pulsetrain.engine.step.accumulation import Accumulate, Accumulation
from pulsetrain.engine.step.backend import Backend, InPlaceBackend, ModelStore
from pulsetrain.engine.step.first_batch import FirstBatch
from pulsetrain.engine.step.log_point import LogPoint
from pulsetrain.engine.step.protocols import (
    AlternatingStrategy,
    GradientInfo,
    Strategy,
    TrainingBatch,
    TrainingResult,
    TrainingStrategy,
)
from pulsetrain.state.part import StateDict, require
from pulsetrain.training.rank_share import RankShare, Share

__all__ = ["OnStep", "Stepper", "rates_of"]

OnStep = Callable[[TrainingBatch, TrainingResult], object]


class Stepper:
    """One training step for each batch: `Engine(stepper)` trains.

    It counts updates, samples and tokens in `engine.state`, and fires GRADIENTS_READY and OPTIMIZER_STEP_COMPLETED
    there. If a step fails, the gradients that wait for the next update are dropped.

    Args:
        backend: computes.
        strategy: what is optimised.
        store: holds the state that is trained.
        accumulate: when the gradients of several batches make one update.
        clip_grad_norm: the backend's setting, which makes each update report its gradient norm.
        on_step: called after each successful step with the prepared batch and the result.
        ranks: of several processes that train together: weighs this one's batches, since the gradients are averaged
            over the processes, and keys its random numbers.

    >>> from pulsetrain.engine import Accumulate, Engine, SupervisedStrategy, TorchBackend
    >>> from pulsetrain.engine.backends.model_store import InPlaceStore
    >>> backend, model = TorchBackend("cpu"), torch.nn.Linear(2, 1)
    >>> store = InPlaceStore(backend, model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> stepper = Stepper(backend, SupervisedStrategy("mse"), store, accumulate=Accumulate(batches=2))
    >>> engine = Engine(stepper)
    >>> engine.state.samples = engine.state.tokens = 0
    >>> state = engine.run([(torch.ones(4, 2), torch.zeros(4, 1))] * 3, max_epochs=1)
    >>> state.update, stepper.accumulated, stepper.learning_rates
    (1, 1, (0.1,))
    """

    backend: Backend
    strategy: Strategy
    store: ModelStore
    clip_grad_norm: float | None
    ranks: RankShare | None
    is_stepping: bool
    learning_rates: tuple[float, ...]
    optimizers: NamedOptimizers | None
    on_step: OnStep | None

    def __init__(
        self,
        backend: Backend,
        strategy: Strategy,
        store: ModelStore,
        *,
        accumulate: Accumulate,
        clip_grad_norm: float | None = None,
        on_step: OnStep | None = None,
        ranks: RankShare | None = None,
    ) -> None:
        self.backend, self.strategy, self.store = backend, strategy, store
        self.clip_grad_norm, self.on_step = clip_grad_norm, on_step
        self.accumulation: Accumulation = Accumulation(accumulate, weighs_each=ranks is not None)
        self.ranks, self._leads = ranks, backend.data_rank.leads
        self._share: Share | None = None  # of the current batch in its global one; None where there is one process
        self.by_hand = False  # whether other code makes the steps, so that gradients may wait at any time
        self.is_stepping = False  # between the start and the end of a step, when nothing can be saved
        self.learning_rates = rates_of(store.optimizer)  # of the last update
        self._grad_norm: Tensor | Mapping[str, Tensor] | None = None
        self.grad_norms: dict[str, Tensor] = {}  # the same of each of several optimizers
        self.optimizers = store.optimizer if isinstance(store.optimizer, NamedOptimizers) else None
        self._groups = len(store.optimizer.param_groups)  # whose gradients the updates consume
        self._skip: Tensor | None = None  # whether the current update is to be skipped
        self._checks = self._watches = True  # until an update has been made, values are checked
        self._measures = False  # whether the next step computes the metrics of its outputs
        self._point: tuple[int, LogPoint] | None = None  # the last iteration that did, and its metrics
        self._engine: Engine | None = None  # whose the two dispatches are
        self._ready: Dispatch
        self._stepped: Dispatch

    def __call__(self, engine: Engine, batch: object) -> TrainingResult:
        if engine is not self._engine:
            self._use(engine)
        state = engine.state
        strategy: Any = self._watched(state.iteration) if self._watches else self.strategy
        if self.ranks is not None:
            self.ranks.seed_generators(state.iteration)
            self.store.refresh()
        prepared = self.backend.prepare_batch(batch, strategy)
        if self.ranks is not None:
            self._share = self.ranks.of(prepared, state.iteration)
        if self.optimizers is None and len(self.store.optimizer.param_groups) != self._groups:
            self._adopt_groups()
        self.is_stepping = True
        try:
            if self.optimizers is not None:
                result = self._alternate(engine, prepared, self.optimizers)
            elif (
                self._ready.live
                or (self.clip_grad_norm is not None and self._ready.connected)  # clipping measures what one records
                or not self.accumulation.nothing_waits
                or not (self._share is None or (self._share.is_exact and self._share.weight == 1.0))
            ):
                result = self._step_in_parts(engine, prepared, strategy)
            else:
                result = self._whole_step(engine, prepared, strategy)
            counted = prepared if self._share is None else self._share.totals
            state.samples += counted.samples
            state.tokens += counted.tokens
        except BaseException:  # a part of this batch's gradients may be among those that wait
            self.discard()
            raise
        finally:
            self.is_stepping = False
        if self.on_step is not None:
            self.on_step(prepared, result)
        return result

    @property
    def counts(self) -> bool:
        """Whether the last batch counts; not if this rank had no sample of the global batch, or another counts it."""
        return self._leads if self._share is None else self._share.counts

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last update that measured it; reading it may wait for the step."""
        norm = self._grad_norm
        return norm["grad_norm"] if isinstance(norm, Mapping) else norm

    @property
    def accumulated(self) -> int:
        """How many batches wait for the next update."""
        return self.accumulation.batches

    def is_norm_wanted(self, engine: Engine) -> bool:
        """Whether a handler is due for the GRADIENTS_READY of the next update."""
        if engine is not self._engine:
            self._use(engine)
        ready = self._ready
        if ready.counter != "update":  # a counter of the user's, which only firing advances
            return ready.live
        return ready.wants(engine.state.update + 1)

    def measure_next(self, due: bool = True) -> None:
        """Whether the next step computes the strategy's metrics, from the outputs that its loss is computed from."""
        self._measures = due
        self._watches = self._watches or due

    def take_measured(self, iteration: int) -> LogPoint | None:
        """The metrics of an iteration, on the device; None if it was another one that computed some, or none has."""
        found, self._point = self._point, None
        return None if found is None or found[0] != iteration else found[1]

    def _watched(self, iteration: int) -> Any:
        """The strategy in a step that checks values or computes metrics; other steps use it as it is."""
        strategy: Any = FirstBatch(self.strategy) if self._checks else self.strategy
        self._watches, measures, self._measures = self._checks, self._measures, False
        if measures:
            strategy = LogPoint(strategy)
            self._point = iteration, strategy
        return strategy

    def _use(self, engine: Engine) -> None:
        self._engine = engine
        self._ready = engine.dispatch(Events.GRADIENTS_READY)
        self._stepped = engine.dispatch(Events.OPTIMIZER_STEP_COMPLETED)

    @contextmanager
    def as_step(self) -> Iterator[None]:
        """Count the block as a step, in which nothing can be saved."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    def skip_update(self, where: Tensor) -> None:
        """Skip the current update where the condition, shape (), bool, holds; for receivers of GRADIENTS_READY."""
        self._skip = where if self._skip is None else self._skip | where

    def consume_skip(self) -> Tensor | None:
        """The condition under which the current update is to be skipped; the next update has none."""
        skip, self._skip = self._skip, None
        return skip

    def attach(self, engine: Engine) -> None:
        engine.add_event_handler(Events.STARTED, self.start, phase=Phase.COMPUTE)

    def start(self) -> None:
        """A run starts or continues: the model trains, and the batches' values are checked until the first update."""
        self._checks = self._watches = True
        if not self.by_hand:
            for optimizer in parts_of(self.store.optimizer).values():
                _check_needs_no_closure(optimizer)
        train = getattr(self.store.optimizer, "train", None)  # of a schedule-free one
        if callable(train):
            train()
        if not self.store.module.training:  # else leave alone: parts of it may be frozen in eval mode
            self.store.module.train()

    def discard(self) -> None:
        """Drop the gradients that wait for the next update."""
        self.accumulation.reset()
        self.store.discard()

    def note_update(self, rates: tuple[float, ...], grad_norm: Tensor | None = None) -> None:
        """An update was made, or is about to be made by someone else."""
        self.learning_rates, self._checks = rates, False
        if grad_norm is not None:
            self._grad_norm = grad_norm

    def _adopt_groups(self) -> None:
        """Groups were added: no update has consumed the gradients of their parameters, and no checkpoint has them."""
        groups = self.store.optimizer.param_groups
        for parameter in [each for group in groups[self._groups :] for each in group["params"]]:
            parameter.grad = None
        self._groups = len(groups)

    def trial(self, on_step: OnStep) -> Stepper:
        """A stepper over the same model with its own counts, for steps that are rolled back."""
        return Stepper(
            self.backend,
            self.strategy,
            self.store,
            accumulate=self.accumulation.rule,
            clip_grad_norm=self.clip_grad_norm,
            on_step=on_step,
            ranks=self.ranks,
        )

    def reset(self) -> None:
        """A run begins from iteration 0: no batch waits, and no norm has been measured."""
        self.accumulation.reset()
        self._groups = len(self.store.optimizer.param_groups)
        self.store.optimizer.zero_grad(set_to_none=True)
        self.store.reset()
        self._grad_norm = None
        self.grad_norms.clear()
        if self.ranks is not None:
            self.ranks.expected = 0.0

    def state_dict(self) -> StateDict:
        """What waits, with the sum of its gradients since the last update, and what that update reported."""
        expected = 0.0 if self.ranks is None else self.ranks.expected
        return {
            **({"global_size": expected} if expected else {}),  # else a resumed run would round otherwise
            "accumulation": self.accumulation.state_dict(),
            "gradients": self.store.gradients() if self.accumulated or self.by_hand else {},
            "learning_rates": [float(rate) for rate in self.learning_rates],
            "grad_norm": self.grad_norm,
            "grad_norms": dict(self.grad_norms),
        }

    def check_state_dict(self, state: StateDict) -> None:
        require("stepper", state, ("accumulation", "gradients", "learning_rates", "grad_norm", "grad_norms"))
        self._gradients(state)

    def load_state_dict(self, state: StateDict) -> None:
        put_in_place = self._gradients(state)
        self.accumulation.load_state_dict(state["accumulation"])
        self._groups = len(self.store.optimizer.param_groups)
        self.learning_rates = tuple(state["learning_rates"])
        self._grad_norm, self.grad_norms = state["grad_norm"], dict(state["grad_norms"])
        if self.ranks is not None:
            self.ranks.expected = state.get("global_size", 0.0)
        put_in_place()

    def _gradients(self, state: StateDict) -> Callable[[], None]:
        """Check saved gradients; returns what puts them in place."""
        return self.store.load_gradients(state["gradients"], state["accumulation"]["batches"])

    def _whole_step(self, engine: Engine, batch: TrainingBatch, strategy: TrainingStrategy) -> TrainingResult:
        """An update over one batch if nobody needs the gradients before it."""
        store = self.store
        before, rates = store.state, rates_of(store.optimizer)
        result = self.backend.train_step(before, batch, strategy, donate=True)
        engine.state.update += 1
        if result.state is not before or len(result.metrics) > 1:
            assert result.state is not None
            store.commit(result.state)
            if self.clip_grad_norm is not None:
                self._grad_norm = self._readable("grad_norm", result)
            result = TrainingResult(self._readable("loss", result))  # keeping the state would keep its memory
        self.learning_rates = rates
        self._checks = False
        if self._stepped.live:
            engine.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=rates))
        return result

    def _readable(self, name: str, result: TrainingResult) -> Mapping[str, Tensor]:
        """One of the result's metrics in torch; an array of another library is converted, and waited for, when read."""
        found = {name: result.metrics[name]}
        return found if isinstance(found[name], Tensor) else LaterMetrics(self.backend.to_torch, found)

    def _step_in_parts(self, engine: Engine, batch: TrainingBatch, strategy: TrainingStrategy) -> TrainingResult:
        """Add the batch's gradients up, and make an update when it is time for one."""
        store, accumulation, update = self.store, self.accumulation, engine.state.update
        size, weight = self._expected(batch)
        scale = accumulation.weigh(size, batch.tokens, update) * weight
        gradients = self.backend.forward_backward(store.state, batch, strategy, scale, store.waiting)
        store.hold(gradients)
        if accumulation.add(*self._counted(batch), update):
            self._update(engine, gradients, accumulation.close())
        return TrainingResult({"loss": self.backend.to_torch(gradients.loss)})

    def _expected(self, batch: TrainingBatch) -> tuple[int | float | Tensor, float]:
        """What the batch's loss is a mean over, as far as it is known, and the rank's weight in it."""
        return (batch.size, 1.0) if self._share is None else (self._share.expected, self._share.weight)

    def _counted(self, batch: TrainingBatch) -> tuple[int | float | Tensor, int]:
        """What the batch's loss is a mean over, and its tokens: the same on every rank."""
        return (
            (batch.size, batch.tokens) if self._share is None else (self._share.totals.size, self._share.totals.tokens)
        )

    def _alternate(self, engine: Engine, batch: TrainingBatch, optimizers: NamedOptimizers) -> TrainingResult:
        """Each of the strategy's losses with its own optimizer; the result has their sum, and each by its name."""
        accumulation, place = self.accumulation, f"{type(self.strategy).__name__}.compute_losses"
        backend, strategy = cast(InPlaceBackend, self.backend), cast(AlternatingStrategy, self.strategy)
        size, weight = self._expected(batch)
        scale = accumulation.weigh(size, batch.tokens, engine.state.update) * weight
        correction = None
        if accumulation.add(*self._counted(batch), engine.state.update):
            correction = accumulation.close()
        found: dict[str, Tensor] = {}
        for name, loss in backend.losses(self.store.state, batch, strategy):
            if name not in optimizers.parts:
                raise ValueError(f"{place}: gave a loss for {name!r}, and the optimizers are {', '.join(optimizers)}")
            if f"{name}_loss" in found and accumulation.rule.batches != 1:
                raise ValueError(
                    f"{place}: gave two losses for {name!r} of one batch, which cannot be accumulated over several; "
                    "set accumulate=1"
                )
            found[f"{name}_loss"] = detached = backend.backward(loss, scale, optimizers[name])
            if correction is not None:
                self._update(engine, GradientInfo(detached), correction, name)
        if not found:
            raise ValueError(f"{place}: gave no loss")
        losses = list(found.values())
        return TrainingResult({"loss": sum(losses, torch.zeros_like(losses[-1])), **found})

    def _update(self, engine: Engine, gradients: GradientInfo, correction: Array, name: str = "") -> None:
        """One optimizer step over the gradients of the accumulated batches.

        Args:
            correction: what the gradients are to be multiplied by first.
            name: of the optimizer, if there are several.
        """
        backend, store = self.backend, self.store
        measure = self.is_norm_wanted(engine) or self.clip_grad_norm is not None
        gradients = backend.all_reduce_gradients(gradients)
        gradients = backend.finish_gradients(store.part(name), gradients, correction, measure=measure)
        skip = None
        if measure:
            norm, self._skip = backend.to_torch(gradients.grad_norm), None
            if name:
                self.grad_norms[name] = norm
            else:
                self._grad_norm = norm
            ready = GradientsReady(grad_norm=norm, optimizer=name)
            # firing it counts the update
            gradients = store.show_gradients(gradients, lambda: engine.fire(Events.GRADIENTS_READY, ready))
            skip = self.consume_skip()
        else:
            engine.state.update += 1
        optimizer = self.optimizers[name] if name and self.optimizers is not None else store.optimizer
        rates = rates_of(optimizer)
        # store.part() again: a receiver may have written into the model
        store.commit(backend.apply_gradients(store.part(name), gradients, skip, donate=True))
        self.learning_rates = rates if not name else self._with_rates(rates, name)
        self._checks = False
        if self._stepped.live:
            engine.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=rates, optimizer=name))

    def _with_rates(self, rates: tuple[float, ...], name: str) -> tuple[float, ...]:
        """The rates of each optimizer's last update, with new ones for this optimizer."""
        new, groups = iter(rates), self.store.optimizer.param_groups
        old = self.learning_rates if len(self.learning_rates) == len(groups) else rates_of(self.store.optimizer)
        return tuple(
            [next(new) if group["optimizer"] == name else rate for group, rate in zip(groups, old, strict=True)]
        )


def rates_of(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """Each group's learning rate; a rate that is a tensor on a device is copied there.

    >>> rates_of(torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.ones(1)], "lr": 0.5}], lr=0.1))
    (0.1, 0.5)
    """
    groups = optimizer.param_groups
    if len(groups) == 1 and type(rate := groups[0]["lr"]) is float:
        return (rate,)
    return tuple([rate if type(rate := group["lr"]) is float else _as_number(rate) for group in groups])


def _check_needs_no_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            "its step() evaluates the loss several times, by a closure, which a Trainer does not have; write the loop "
            "by hand with pulsetrain.Loop, or choose another optimizer",
            "Trainer",
            optimizer=type(optimizer),
        )


def _as_number(rate: Any) -> Any:
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return rate.detach().clone()  # a schedule will write the next rate into it
    return float(rate)
