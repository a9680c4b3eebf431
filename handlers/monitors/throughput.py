"""Measures a run's speed: iterations, waiting for data, and the share of the device's peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer

from pulsetrain.engine import ConfigurationError, Engine, Event, Events, Every, is_training_run
from pulsetrain.engine.argument_checks import check_positive
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.attachment.attachment import Handler, subscribe_first, subscribe_last
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import attribute, device_of, reject_replay
from pulsetrain.handlers.attachment.publishing import publish
from pulsetrain.handlers.monitors.flop_count import FlopCount, Shapes, is_compiled, peak_flops_of, shapes_of

__all__ = ["Throughput"]

MAX_SHAPES = 16  # of batches; with more of them operations are not counted


class Throughput(Handler):
    """Publishes speeds in addition to the trainer's own samples_per_second and tokens_per_second.

    throughput/iterations_per_second;
    throughput/step_seconds: mean time of an iteration, including the wait for its batch;
    throughput/data_share: the part of that time, from 0 to 1, in which the loop waited for batches;
    throughput/flops_per_second: floating-point operations of forward and backward passes, of one process;
    throughput/mfu: these over `peak_flops`, the model FLOPs utilization ("hfu" if recomputed activations were counted).

    Time spent in validation, in checkpoints written by the training thread and in the counting itself is left out. This
    handler never waits for the device: an interval is host time, and the host runs at most a few iterations ahead of
    the device if something is logged at the same cadence.

    Args:
        every: when to publish; the end of the run publishes the rest.
        flops_per_sample: of forward and backward passes; by default, one step of each batch shape is counted with
            torch.utils.flop_counter, which makes that step several times slower and does not change results. A compiled
            model is not counted, since it would run uncompiled.
        peak_flops: of the device, operations per second; by default those of 16-bit matrix products, if the device's
            name is known. Pass it if the run uses another precision, or on a CPU, whose peak is not known: without it,
            throughput/mfu is left out there.
        clock: seconds, monotonic.

    Raises:
        ConfigurationError: a number is not positive.
        TypeError: the cadence is not an Every.

    >>> engine = Engine(lambda engine, batch: None)
    >>> throughput = Throughput(Every(iterations=2), flops_per_sample=None, peak_flops=1e12).attach(engine)
    >>> subscription = engine.on(Events.METRICS_LOGGED)(lambda engine, event: print(*event.payload.metrics))
    >>> state = engine.run([1, 2])
    throughput/iterations_per_second throughput/step_seconds throughput/data_share
    """

    every: Every
    flops_per_sample: float | None
    peak_flops: float | None
    clock: Callable[[], float]

    def __init__(
        self,
        every: Every | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        every = Every(iterations=50) if every is None else every
        check_every("Throughput", every)
        for name, value in (("flops_per_sample", flops_per_sample), ("peak_flops", peak_flops)):
            check_positive("Throughput", name, value, or_none=True)
        self.every, self.flops_per_sample, self.peak_flops, self.clock = every, flops_per_sample, peak_flops, clock
        self._flops_of: dict[Shapes, int] = {}  # of a step, by the shapes of its batch
        self._counting: FlopCount | None = None
        self._shapes: Shapes | None = None  # of the current batch
        self._counts = True  # whether steps with new shapes are counted
        self._peak_missed = False
        self._restart(0)

    def attach(self, engine: Engine) -> Self:
        """Measure this engine's runs.

        Raises:
            ConfigurationError: flops_per_sample is given, and the engine counts no samples.
            RecordingError: the engine is a replay.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            reject_replay("Throughput", engine, "process that trains")
            if self.flops_per_sample is not None and not hasattr(engine.state, "samples"):
                rule = f"{engine.name!r} counts no state.samples, as a Trainer does; leave it out to have steps counted"
                raise ConfigurationError(rule, "Throughput", flops_per_sample=self.flops_per_sample)
            self._flops_of.clear()
            self._counts, self._peak_missed = True, False

            first, last = partial(subscribe_first, subscribe), partial(subscribe_last, subscribe)
            last(Events.STARTED, self._on_started)
            last(Events.GET_BATCH_STARTED, self._on_asking)
            first(Events.GET_BATCH_COMPLETED, self._on_batch)
            if self.flops_per_sample is None:
                last(Events.ITERATION_STARTED, self._on_step_begins)
            first(Events.ITERATION_COMPLETED, self._on_step_ended)
            first(Events.VALIDATION_STARTED | Events.INTERRUPT, self._pause)
            last(Events.VALIDATION_COMPLETED, self._resume)
            last(Events.CHECKPOINT_SAVED, self._on_saved)
            subscribe(reading_events(self.every, self.clock), self._read, on_error="warn")
            first(Events.COMPLETED, self._read)
            first(Events.INTERRUPT | Events.TERMINATE | Events.EXCEPTION_RAISED, self._stop_counting)
        return self

    def detach(self) -> None:
        super().detach()
        self._stop_counting()

    def _restart(self, samples: int) -> None:
        self._since = self.clock()
        self._iterations, self._waited, self._paused = 0, 0.0, 0.0
        self._flops: float | None = 0.0  # None if unknown for some step
        self._samples = samples
        self._asked_at: float | None = None
        self._wait = 0.0  # for the latest batch
        self._paused_at: float | None = None

    def _on_started(self, engine: Engine) -> None:
        self._stop_counting()
        self._restart(getattr(engine.state, "samples", 0))

    def _on_asking(self) -> None:
        self._resume()  # after an interruption
        self._asked_at = self.clock()

    def _on_batch(self) -> None:
        if self._asked_at is not None:
            self._wait = self.clock() - self._asked_at
            self._waited += self._wait
            self._asked_at = None

    def _pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = self.clock()

    def _resume(self) -> None:
        if self._paused_at is not None:
            self._paused += self.clock() - self._paused_at
            self._paused_at = None

    def _on_saved(self, engine: Engine, event: Event) -> None:
        if not event.payload.background and self._paused_at is None:  # otherwise the pause includes it
            self._paused += event.payload.seconds

    def _on_step_begins(self, engine: Engine) -> None:
        if not self._counts:
            return
        self._shapes = shapes_of(engine.state.batch)
        if self._shapes in self._flops_of:
            return
        if len(self._flops_of) >= MAX_SHAPES:
            why = f"batches have more than {MAX_SHAPES} shapes, and steps are no longer counted"
        elif is_compiled(attribute(engine, "model", nn.Module)):
            why = "the model is compiled, and its steps are not counted"
        else:
            self._pause()
            self._counting = FlopCount(attribute(engine, "optimizer", Optimizer))
            return
        self._counts = False
        get_logger("handlers").warning(f"{why}: the share of the device's peak is left out; pass flops_per_sample=")

    def _on_step_ended(self) -> None:
        if self._counting is not None:
            assert self._shapes is not None
            count, self._counting = self._counting, None
            self._flops_of[self._shapes] = count.end()
            self._resume()
            self._waited -= self._wait  # it took longer than others and is not measured
            self._paused += self._wait
            return
        self._iterations += 1
        if self.flops_per_sample is None and self._flops is not None:
            flops = self._flops_of.get(self._shapes) if self._counts and self._shapes is not None else None
            self._flops = None if flops is None else self._flops + flops

    def _stop_counting(self, *_: object) -> None:
        """Discard the count of a step that did not complete."""
        if self._counting is not None:
            count, self._counting = self._counting, None
            count.end()

    def _read(self, engine: Engine) -> None:
        if not self._iterations:
            return
        now = self.clock()
        paused = self._paused + (0.0 if self._paused_at is None else now - self._paused_at)
        seconds = max(now - self._since - paused, 1e-9)
        metrics = {
            "throughput/iterations_per_second": self._iterations / seconds,
            "throughput/step_seconds": seconds / self._iterations,
            "throughput/data_share": min(self._waited / seconds, 1.0),
        }
        samples = getattr(engine.state, "samples", 0)
        flops = self._flops
        if self.flops_per_sample is not None:
            processes = ranks().world_size if is_training_run(engine) else 1  # a trainer counts the samples of all
            flops = (samples - self._samples) * self.flops_per_sample / processes
        if flops:
            metrics["throughput/flops_per_second"] = flops / seconds
            peak = self._peak(engine)
            if peak is not None:
                backend = attribute(engine, "backend", object)
                recomputes = attribute(backend, "activation_checkpointing", object) is not None
                share = "hfu" if recomputes and self.flops_per_sample is None else "mfu"
                metrics[f"throughput/{share}"] = flops / seconds / peak
        publish(engine, metrics, measured=True)
        paused_at = self._paused_at
        self._restart(samples)
        self._paused_at = None if paused_at is None else self._since

    def _peak(self, engine: Engine) -> float | None:
        if self.peak_flops is not None:
            return self.peak_flops
        device = device_of(engine) or torch.device("cpu")
        if device.type == "cpu":
            return None
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak = peak_flops_of(name)
        if peak is None and not self._peak_missed:
            self._peak_missed = True
            get_logger("handlers").warning(
                "the peak of this device is not known: throughput/mfu is left out; pass peak_flops=", device=name
            )
        return peak
