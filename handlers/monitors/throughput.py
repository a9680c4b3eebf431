"""How fast a run goes: iterations, waiting for data, and the share of what the device could do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Self

import torch

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.subscription import FIRST, LAST, Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import reject_replay
from pulsetrain.handlers.attachment.publishing import publish
from pulsetrain.handlers.monitors.flop_count import FlopCount, is_compiled, peak_flops_of, shapes_of

__all__ = ["Throughput"]

MAX_SHAPES = 16  # of batches that are counted; where there are more the operations are left out


class Throughput:
    """Publishes what the trainer's own samples_per_second and tokens_per_second do not tell.

    throughput/iterations_per_second;
    throughput/step_seconds: the mean of an iteration, with the wait for its batch;
    throughput/data_share: the part of that time, from 0 to 1, in which the loop waited for batches;
    throughput/flops_per_second: floating-point operations of forward and backward passes;
    throughput/mfu: these over `peak_flops`, the model's share of what the device could do ("hfu" where activations are
    recomputed and that was counted as well).

    Time that goes to validation, to checkpoints written in the training thread and to the counting itself is left out.
    Nothing here waits for the device: an interval is as long as the host takes, which runs ahead of a device by a few
    iterations at most where something is logged at the same cadence.

    Args:
        every: how often; at the run's end what is left is published as well.
        flops_per_sample: of forward and backward passes; by default one step of each shape of batch is counted by
            torch.utils.flop_counter, which takes that step several times as long and changes no number. A compiled
            model is not counted: it would run uncompiled.
        peak_flops: operations a second of the device at best; by default those of 16-bit matrix products of a device
            whose name is known. Where that is not the precision of the run, give it.
        clock: seconds, never running backwards.

    Raises:
        ConfigurationError: a number is not positive.
        TypeError: the cadence is no Every.
    """

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
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise ConfigurationError(f"Throughput({name}={value!r}): needs a positive number")
        self.every, self.flops_per_sample, self.peak_flops, self.clock = every, flops_per_sample, peak_flops, clock
        self._flops_of: dict[tuple[Any, ...], int] = {}  # a step, by the shapes of its batch
        self._counting: FlopCount | None = None
        self._shapes: tuple[Any, ...] | None = None  # of the batch under way
        self._counts = True  # steps, of shapes that are not known yet
        self._peak_missed = False
        self._attachment = Attachment("Throughput")
        self._restart(0)

    def attach(self, engine: Engine) -> Self:
        """Follow this engine's runs.

        Raises:
            ConfigurationError: flops_per_sample is given, and the engine counts no samples.
            RecordingError: the engine is a replay.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            reject_replay("Throughput", engine, "process that trains")
            if self.flops_per_sample is not None and not hasattr(engine.state, "samples"):
                raise ConfigurationError(
                    f"Throughput(flops_per_sample={self.flops_per_sample!r}): {engine.name!r} counts no state.samples, "
                    "as a Trainer does; leave it out, and steps are counted"
                )
            self._flops_of.clear()
            self._counts, self._peak_missed = True, False

            def first(event: Any, handler: Callable[..., None]) -> None:
                subscribe(event, handler, phase=Phase.COMPUTE, on_error="warn", order=FIRST)

            def last(event: Any, handler: Callable[..., None]) -> None:
                subscribe(event, handler, phase=Phase.PERSIST, on_error="warn", order=LAST)

            last(Events.STARTED, self._on_started)
            last(Events.GET_BATCH_STARTED, self._on_asking)
            first(Events.GET_BATCH_COMPLETED, self._on_batch)
            if self.flops_per_sample is None:
                last(Events.ITERATION_STARTED, self._on_step_begins)
            first(Events.ITERATION_COMPLETED, self._on_step_ended)
            first(Events.VALIDATION_STARTED | Events.INTERRUPT, self._pause)
            last(Events.VALIDATION_COMPLETED, self._go_on)
            last(Events.CHECKPOINT_SAVED, self._on_saved)
            subscribe(reading_events(self.every, self.clock), self._read, on_error="warn")
            subscribe(Events.COMPLETED, self._read, phase=Phase.COMPUTE, on_error="warn", order=FIRST)
            first(Events.INTERRUPT | Events.TERMINATE, self._stop_counting)
            first(Events.EXCEPTION_RAISED, self._on_failure)
        return self

    def detach(self) -> None:
        self._attachment.cancel()
        self._stop_counting()

    def _restart(self, samples: int) -> None:
        self._since = self.clock()
        self._iterations, self._waited, self._paused = 0, 0.0, 0.0
        self._flops: float | None = 0.0  # None: not known of some step
        self._samples = samples
        self._asked_at: float | None = None
        self._wait = 0.0  # for the last batch
        self._paused_at: float | None = None

    def _on_started(self, engine: Engine) -> None:
        self._stop_counting()
        self._restart(getattr(engine.state, "samples", 0))

    def _on_asking(self) -> None:
        self._go_on()  # behind an interruption
        self._asked_at = self.clock()

    def _on_batch(self) -> None:
        if self._asked_at is not None:
            self._wait = self.clock() - self._asked_at
            self._waited += self._wait
            self._asked_at = None

    def _pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = self.clock()

    def _go_on(self) -> None:
        if self._paused_at is not None:
            self._paused += self.clock() - self._paused_at
            self._paused_at = None

    def _on_saved(self, engine: Engine, event: Event) -> None:
        if not event.payload.background and self._paused_at is None:  # else it is in the pause
            self._paused += event.payload.seconds

    def _on_step_begins(self, engine: Any) -> None:
        if not self._counts:
            return
        self._shapes = shapes_of(engine.state.batch)
        if self._shapes in self._flops_of or not self._may_count(engine):
            return
        self._pause()
        self._counting = FlopCount(getattr(engine, "optimizer", None))

    def _may_count(self, engine: Any) -> bool:
        if len(self._flops_of) >= MAX_SHAPES:
            self._tell(f"batches have more than {MAX_SHAPES} shapes, and steps are counted no more")
        elif is_compiled(getattr(engine, "model", None)):
            self._tell("the model is compiled, and its steps are not counted")
        else:
            return True
        self._counts = False
        return False

    def _tell(self, why: str) -> None:
        get_logger("handlers").warning(f"{why}: the share of the device's peak is left out; pass flops_per_sample=")

    def _on_step_ended(self) -> None:
        if self._counting is not None:
            assert self._shapes is not None
            count, self._counting = self._counting, None
            self._flops_of[self._shapes] = count.end()
            self._go_on()
            self._waited -= self._wait  # it took longer than others: it is no iteration to go by
            self._paused += self._wait
            return
        self._iterations += 1
        if self.flops_per_sample is None and self._flops is not None:
            flops = self._flops_of.get(self._shapes) if self._counts and self._shapes is not None else None
            self._flops = None if flops is None else self._flops + flops

    def _stop_counting(self) -> None:
        """A step that has not ended as it should is not counted."""
        if self._counting is not None:
            count, self._counting = self._counting, None
            count.end()

    def _on_failure(self, engine: Engine, event: Event) -> None:
        self._stop_counting()

    def _read(self, engine: Any) -> None:
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
            flops = (samples - self._samples) * self.flops_per_sample
        if flops:
            metrics["throughput/flops_per_second"] = flops / seconds
            peak = self._peak(engine)
            if peak is not None:
                metrics[f"throughput/{self._share_name(engine)}"] = flops / seconds / peak
        publish(engine, metrics, measured=True)
        paused_at = self._paused_at
        self._restart(samples)
        self._paused_at = None if paused_at is None else self._since

    def _share_name(self, engine: Any) -> str:
        recomputes = getattr(getattr(engine, "backend", None), "activation_checkpointing", None) is not None
        return "hfu" if recomputes and self.flops_per_sample is None else "mfu"

    def _peak(self, engine: Any) -> float | None:
        if self.peak_flops is not None:
            return self.peak_flops
        device = getattr(getattr(engine, "backend", None), "device", torch.device("cpu"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak = peak_flops_of(name)
        if peak is None and not self._peak_missed:
            self._peak_missed = True
            get_logger("handlers").warning(
                "what this device could do at best is not known: throughput/mfu is left out; pass peak_flops=",
                device=name,
            )
        return peak
