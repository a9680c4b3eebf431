"""The run loop: pytorch-ignite's Engine with its own dispatch, in one place for training, evaluation and resuming."""

from __future__ import annotations

import inspect
import logging
import math
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ignite.engine import Engine as IgniteEngine
from ignite.engine import State as IgniteState

from pulsetrain.engine.errors import ConfigurationError, shortened
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.data_source import DataSource, IterableSource
from pulsetrain.engine.events.names import COUNTERS, Events
from pulsetrain.engine.events.payloads import EpochTerminated, Terminated
from pulsetrain.engine.events.run_control import RunControl, StepStopped, StopEpoch, StopRun
from pulsetrain.engine.events.state import State
from pulsetrain.engine.notebook import shorten_traceback

__all__ = ["Engine"]


class Engine(RunControl, IgniteEngine):  # type: ignore[misc]  # _event_handlers is a view here, a dict there
    """Runs a function over batches and fires typed events on a bus.

    Whatever accepts a pytorch-ignite Engine accepts this one. It adds phases, typed payloads, `fire` and `post`, one
    total order over the engines of a bus, and a loop that costs a fraction of ignite's.

    >>> engine = Engine(lambda engine, batch: 2 * batch)
    >>> outputs = []
    >>> handle = engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: outputs.append(e.state.output))
    >>> engine.run([1, 2, 3], max_epochs=2).iteration
    6
    >>> outputs
    [2, 4, 6, 2, 4, 6]

    A subclass that needs other data, another bound or another reaction to data that ends overrides `source`, `is_done`,
    `around_epoch`, `report_exhausted` or `empty_data_error`.

    Args:
        process_function: called with (engine, batch) for each batch; its result becomes `state.output`.
        name: what the engine's events carry; unique on the bus.
        bus: share one with other engines; by default the engine gets its own.

    Raises:
        ValueError: process_function is None or does not take (engine, batch); the name is already used on this bus.
    """

    source: DataSource
    """Makes the iterators over the data."""

    state: State
    """What the run knows: counters, the batch and its output, metrics."""

    logger: logging.Logger
    run_number: int

    external_step: bool
    """Whether the caller makes the step between two calls of `proceed`, and sets `state.output`."""

    def __init__(
        self, process_function: Callable[[Any, Any], Any], *, name: str | None = None, bus: EventBus | None = None
    ) -> None:
        if process_function is None:
            raise ValueError("Engine must be given a processing function in order to run.")
        _check_process_function(process_function)
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")  # ignite's subclasses log here
        RunControl.__init__(self, name, bus)
        self._process_function = process_function
        self._state_dict_user_keys: list[str] = []
        self._dataloader_iter: Iterator[Any] | None = None
        self._init_iter: int | None = None
        self._internal_run_generator: Generator[Any, None, Any] | None = None
        self._failure: BaseException | None = None
        self._running = False
        self._awaits_step = False
        self._first_iteration = 0  # the counter when this run began
        self.source = IterableSource()
        self.external_step = False
        self.state = State(self)
        self.register_events(*Events, event_to_attr=COUNTERS)

    def __repr__(self) -> str:
        state = self.state
        return f"<{type(self).__name__} {self.name!r} at epoch {state.epoch}, iteration {state.iteration}>"

    @property
    def is_running(self) -> bool:
        """Whether a run of this engine is in progress."""
        return self._running

    @property
    def is_paused(self) -> bool:
        """Whether a run was interrupted, so that `run` continues it."""
        return self._internal_run_generator is not None and not self._running

    @property
    def awaits_step(self) -> bool:
        """Whether the loop has a batch for which the caller makes the step; see `external_step`."""
        return self._awaits_step

    @property
    def is_done(self) -> bool:
        """Whether the run has reached its bound."""
        return bool(super()._is_done(self.state))

    def describe_bound(self) -> str:
        """The setting that makes the run end at `state.max_iters`, with its value."""
        return f"max_iters={self.state.max_iters}"

    def around_epoch(self, done: int) -> AbstractContextManager[object]:
        """Entered around the batches of each epoch; EPOCH_STARTED comes before it, EPOCH_COMPLETED after it.

        Args:
            done: how many batches of the epoch an earlier run has done.
        """
        return nullcontext()

    def report_exhausted(self) -> None:
        """The data ended, and a new pass gave no batch: warn if the run is not done.

        Raises:
            Exception: `empty_data_error`, if the run has had no batch at all.
        """
        state = self.state
        if state.iteration == self._first_iteration:
            raise self.empty_data_error()
        if not self.is_done:
            total = state.max_iters if state.max_epochs is None else (state.epoch_length or 0) * state.max_epochs
            warnings.warn(
                "Data iterator can not provide data anymore but required total number of iterations to run is not "
                f"reached. Current iteration: {state.iteration} vs Total iterations to run : {total}",
                stacklevel=2,
            )

    def empty_data_error(self) -> Exception:
        """What a run over data without a batch raises."""
        return ConfigurationError(
            "the loader gave no batch; an iterator can be run over once, give a list or a DataLoader to run again",
            f"{self.name!r}.run",
            data=shortened(self.state.dataloader),
        )

    def run(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> Any:
        """Run over the data. The arguments, and how a run continues, are those of pytorch-ignite's `Engine.run`.

        Returns:
            The state, at the end or where `interrupt()` paused.

        Raises:
            RuntimeError: called from inside this engine's own run.
            ValueError: arguments that contradict each other, the state or the data.
            TypeError: data is not iterable.
        """
        self._refuse_inside("run")
        return super().run(data, max_epochs=max_epochs, max_iters=max_iters, epoch_length=epoch_length)

    def resume(self, data: Iterable[Any], max_epochs: int | None = None, max_iters: int | None = None) -> Any:
        """Continue from the state's counters to this bound; `source.resume` finds the next batch.

        Unlike `run`, this never starts again from iteration 0. If the bound is already reached, only STARTED and
        COMPLETED are fired.

        Returns:
            The state, as `run` does.

        Raises:
            RuntimeError: called from inside this engine's own run.
        """
        self._refuse_inside("resume")
        self.abandon()
        self.state.max_epochs, self.state.max_iters, self.state.dataloader = max_epochs, max_iters, data
        return self._internal_run()

    def proceed(self) -> Any:
        """Continue a paused run, up to the next pause or the end; returns the state.

        Raises:
            RuntimeError: called from inside this engine's own run.
        """
        self._refuse_inside("proceed")
        return self._internal_run() if self.is_paused else self.state

    def abandon(self) -> None:
        """Abandon a paused run, and forget how the last one ended: the next run starts the loop again."""
        if not self._running:
            self._internal_run_generator = self._init_iter = None
            self._terminate = self._awaits_step = False

    def _refuse_inside(self, method: str) -> None:
        if self._running:
            raise RuntimeError(
                f"{self.name!r}.{method}() was called from inside its own run; use another engine for that"
            )

    @staticmethod
    def _is_done(state: IgniteState) -> bool:  # ignite's run() asks it; users ask it of the class
        owner = state.owner() if isinstance(state, State) else None
        return owner.is_done if isinstance(owner, Engine) else bool(super(Engine, Engine)._is_done(state))

    def _setup_dataloader_iter(self) -> None:
        state = self.state
        if state.dataloader is None:
            super()._setup_dataloader_iter()
        else:
            self._dataloader_iter = self.source.begin(state.dataloader, state.iteration)

    def _setup_engine(self) -> None:
        state = self.state
        if state.dataloader is None:
            super()._setup_engine()
            return
        self._dataloader_iter, done = self.source.resume(state.dataloader, state.iteration, state.epoch_length)
        if self._init_iter is None:  # else 0: after terminate() the next epoch begins
            self._init_iter = done

    def _internal_run(self) -> Any:
        generator = self._internal_run_generator
        if generator is None:
            if self.state.iteration == 0 and self.state.epoch == 0:
                self.run_number += 1
            generator = self._internal_run_generator = self._loop()
        self._running = True
        try:
            next(generator)  # until an interrupt
        except StopIteration:
            self._internal_run_generator = None
        finally:
            self._running = False
        failure, self._failure = self._failure, None
        if failure is not None:
            shorten_traceback(failure)
            try:
                raise failure
            finally:
                del failure  # a frame must not keep the error that keeps the frame
        return self.state

    _internal_run_legacy = _internal_run  # where interrupting is switched off it is the same loop

    def _loop(self) -> Generator[Any, None, None]:
        """One run, from STARTED to COMPLETED. A generator: an interrupt is a yield, and continuing is next()."""
        state = self.state
        self._terminate = self._terminate_epoch = self._interrupt = False
        self._termination_reason, self._termination_observed = "", False
        self._attention = bool(self._posts)
        state.stop_reason = None
        self._first_iteration = state.iteration
        self._initialise_counters()
        self._init_timers(state)
        start = time.time()
        try:
            try:
                self._signal(Events.STARTED)
                if self._attention and self._attend():
                    yield
                while not self.is_done and not self._terminate:
                    state.epoch += 1
                    epoch_start = time.time()
                    self._signal(Events.EPOCH_STARTED)
                    elapsed = time.time() - epoch_start
                    if self._attention and self._attend():
                        yield
                    if self._dataloader_iter is None:
                        self._setup_engine()
                    done, self._init_iter = self._init_iter or 0, None
                    with self.around_epoch(done):
                        elapsed += yield from self._epoch(done)
                    state.times["EPOCH_COMPLETED"] = elapsed  # handlers read it; grown below by their own time
                    if self.should_terminate_single_epoch != "skip_epoch_completed":
                        handlers_start = time.time()
                        self._signal(Events.EPOCH_COMPLETED)
                        state.times["EPOCH_COMPLETED"] = elapsed + time.time() - handlers_start
                    self._terminate_epoch = False
                    if self._attention and self._attend():
                        yield
            except StopRun:
                state.stop_reason = self._termination_reason or "should_terminate was set"
                ended = Terminated(reason=state.stop_reason, observed=self._termination_observed)
                self._signal(Events.TERMINATE, ended)
            except StopEpoch:
                raise RuntimeError(
                    "The method terminate_epoch() should not be called on Event.STARTED or Event.EPOCH_STARTED; "
                    "no batch of the epoch has been seen: call it from GET_BATCH_STARTED on"
                ) from None
            state.times["COMPLETED"] = time.time() - start
            if self.should_terminate != "skip_completed":
                self._signal(Events.COMPLETED)
                state.times["COMPLETED"] = time.time() - start
        except GeneratorExit:  # an interrupted run was abandoned for a new one
            raise
        except BaseException as error:
            self._dataloader_iter = None  # its workers end before the handlers of EXCEPTION_RAISED run
            self._failure = self._after_failure(error.cause if isinstance(error, StepStopped) else error)
        finally:
            self._dataloader_iter = None

    def _epoch(self, counter: int) -> Generator[Any, None, float]:
        """One epoch's batches; returns its seconds. The lines between two emits are what an iteration costs.

        Args:
            counter: how many batches of the epoch are done already; above 0 when resuming inside an epoch.
        """
        state, sequence, deliver = self.state, self._sequence, self._deliver
        external = self.external_step
        # looked up once: an attribute of an enum class costs 40 ns each time
        get, have = self.dispatch(Events.GET_BATCH_STARTED), self.dispatch(Events.GET_BATCH_COMPLETED)
        begin, end = self.dispatch(Events.ITERATION_STARTED), self.dispatch(Events.ITERATION_COMPLETED)
        start = time.time()
        restarted = False  # the loader was exhausted and started again, and has given nothing yet
        try:
            if self._attention and self._attend():  # a resumed epoch may have to end at once
                yield
            if counter and counter == state.epoch_length:
                return 0.0  # resumed after the epoch's last batch: only EPOCH_COMPLETED is left
            while True:
                state.batch = None
                if state.dataloader is None:
                    state.batch = next(self._dataloader_iter, None)  # type: ignore[arg-type]  # set up by the run
                    state.output = None
                else:
                    if not restarted:
                        sequence.last += 1
                        if get.connected and (get.always or not get.low <= state.iteration < get.high):
                            deliver(self, get, None, sequence.last)
                            if self._attention and self._attend():
                                yield
                    try:
                        state.batch = next(self._dataloader_iter)  # type: ignore[arg-type]  # set up by the run
                    except StopIteration:
                        if state.epoch_length is None:
                            self._learn_epoch_length(counter)
                            break
                        if restarted:
                            self.report_exhausted()
                            break
                        self._signal(Events.DATALOADER_STOP_ITERATION)
                        if self._attention and self._attend():
                            yield
                        self._setup_dataloader_iter()
                        restarted = True
                        continue
                    state.output = None
                    sequence.last += 1
                    if have.connected and (have.always or not have.low <= state.iteration < have.high):
                        deliver(self, have, None, sequence.last)
                    if self._attention and self._attend():  # the loader, too, may have terminated
                        yield
                counter += 1
                restarted = False
                state.iteration += 1
                sequence.last += 1
                if begin.connected and (begin.always or not begin.low <= state.iteration < begin.high):
                    deliver(self, begin, None, sequence.last)
                    if self._attention and self._attend():
                        yield
                if external:  # the caller makes the step, and sets the output
                    self._awaits_step = True
                    yield
                    self._awaits_step = False
                else:
                    state.output = self._process_function(self, state.batch)
                sequence.last += 1
                if end.connected and (end.always or not end.low <= state.iteration < end.high):
                    deliver(self, end, None, sequence.last)
                if self._attention and self._attend():
                    yield
                if counter == state.epoch_length:
                    break
                if state.max_iters is not None and state.iteration == state.max_iters:
                    self._termination_reason = f"{self.describe_bound()} was reached"
                    self._terminate = True
                    raise StopRun
        except StopEpoch:
            try:
                self._signal(Events.TERMINATE_SINGLE_EPOCH, EpochTerminated(iter_counter=counter))
                self._setup_dataloader_iter()
            except StopIteration as error:
                raise StepStopped(error) from None
        except StopIteration as error:  # would turn into a RuntimeError on leaving a generator
            raise StepStopped(error) from None
        return time.time() - start

    def _learn_epoch_length(self, counter: int) -> None:
        state = self.state
        if counter == 0:
            raise self.empty_data_error()
        state.epoch_length = counter
        if state.max_iters is not None:
            state.max_epochs = math.ceil(state.max_iters / counter)


def _check_process_function(process_function: Callable[[Any, Any], Any]) -> None:
    signature = inspect.signature(process_function)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"Error adding {process_function!r} 'process_function': takes parameters {list(signature.parameters)} "
            f"but will be called with (engine, batch) ({error})"
        ) from None
