"""Keeps NaN and infinite gradients out of the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from pulsetrain.engine import ConfigurationError, Engine, Event, Events, Every, Phase, State, is_training_run
from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.backends.module_view import reading_once
from pulsetrain.engine.metrics.reading import number_on_host
from pulsetrain.engine.training_run import model_of
from pulsetrain.handlers.guards.guard_actions import Guard, TrainedBatch, batch_order, report_anomaly
from pulsetrain.handlers.metric_values.step_values import to_host

__all__ = ["NaNGuard"]

_REPORTED = 3  # anomalies that one check reports separately


class Update(NamedTuple):
    """An update whose gradient norm the host has not read yet."""

    norm: Tensor | float  # a number where it is on the host
    batches: list[TrainedBatch]
    optimizer: str


@runtime_checkable
class _SkipsUpdates(Protocol):
    state: State

    def skip_update(self, where: Tensor) -> None: ...


class NaNGuard(Guard):
    """Skips every update whose gradient holds NaN or infinity; nothing waits for the device.

    A skipped update does not change the weights and the optimizer. It also restores the model's floating-point buffers,
    such as the running means of a BatchNorm, which the forward pass has already changed. The host checks at the
    cadence, at the end of each epoch and at the end of the run. It then reports each skipped update by a warning and
    ANOMALY_DETECTED (kind "nan_gradient", value the norm), with the dataset rows of its batches, and lists those rows
    that hold a number that is not finite.

    On a device, this needs the fused kernels of Adam, AdamW and SGD, which `create_optimizer` chooses there. For other
    optimizers, the host decides about each update, and waits for the device. With fp16, a skipped update also lowers
    the gradient scale, as an overflow does.

    Args:
        policy: what follows: "skip" continues, "stop" ends the run, "rewind" returns to the newest checkpoint before
            the update and leaves out its batches from then on.
        every: when the host checks.
        max_in_a_row: this many skipped updates in a row end the run, whatever the policy.
        max_rewinds: per run; the next one ends it.
        clock: seconds, for `Every(seconds=...)`.

    Raises:
        ConfigurationError: an unknown policy, or a number below 1.

    >>> from structlog.testing import capture_logs
    >>> from pulsetrain import Trainer, TrainingConfig
    >>> guard, batch = NaNGuard(), (torch.full((4, 2), math.nan), torch.zeros(4, dtype=torch.long))
    >>> trainer = Trainer(nn.Linear(2, 2), [batch], handlers=[guard], config=TrainingConfig(max_epochs=1, seed=0))
    >>> with capture_logs() as logs:
    ...     history = trainer.train()
    >>> logs[0]["event"], guard.skipped
    ('an update was skipped: its gradient is not finite', 1)
    """

    def __init__(
        self,
        policy: Literal["skip", "stop", "rewind"] = "skip",
        every: Every = Every(iterations=50),  # noqa: B008  # frozen
        *,
        max_in_a_row: int = 20,
        max_rewinds: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(policy, "skip", every, max_rewinds, clock)
        check_whole_number("NaNGuard", "max_in_a_row", max_in_a_row)
        self.max_in_a_row = max_in_a_row
        self.skipped: int = 0  # updates known to have been skipped
        self._in_a_row: dict[str, int] = {}  # by optimizer
        self._unseen: list[Update] = []
        self._updated_at: dict[str, int] = {}  # iteration of the last update, by optimizer
        self._begun = 0  # iteration of the last update before this handler was attached
        self._buffers: list[_KeptBuffers] = []

    def attach(self, engine: Engine) -> Self:
        """Guard a trainer's updates.

        Raises:
            RecordingError: the engine is a replay.
            ConfigurationError: the engine cannot skip an update, as a Trainer can.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            model = model_of(engine)  # a replay without weights raises
            if not isinstance(engine, _SkipsUpdates):
                raise ConfigurationError(
                    f"NaNGuard.attach({engine.name!r}): cannot skip an update; attach it to a Trainer"
                )
            self._check_engine(engine)
            self._buffers = _keep_buffers(model)
            self._updated_at.clear()  # of an earlier engine
            self._begun = _last_update(engine)
            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE)
            subscribe(Events.GRADIENTS_READY, self._on_gradients, phase=Phase.COMPUTE)
            subscribe(self._check_events(), self._check, phase=Phase.ACT)
            subscribe(Events.TERMINATE, self._on_terminate, phase=Phase.ACT)
            subscribe(Events.EXCEPTION_RAISED, self._on_exception, phase=Phase.OBSERVE, on_error="warn")
        return self

    def state_dict(self) -> dict[str, object]:
        """The counts, and the updates that are not checked yet, whose norms are copied to the host."""
        norms = self._norms(self._unseen)
        return {
            "skipped": self.skipped,
            "in_a_row": dict(self._in_a_row),
            "updated_at": dict(self._updated_at),
            "unseen": [
                [norm, [batch.state() for batch in update.batches], update.optimizer]
                for norm, update in zip(norms, self._unseen, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts, and the updates that are not checked yet."""
        self.skipped, self._in_a_row = state["skipped"], dict(state["in_a_row"])
        self._updated_at = dict(state["updated_at"])
        self._unseen = [
            Update(norm, [TrainedBatch.from_state(batch) for batch in batches], optimizer)
            for norm, batches, optimizer in state["unseen"]
        ]

    def _on_started(self, engine: Engine) -> None:
        self._begun = _last_update(engine)
        if engine.state.iteration == 0:
            self._updated_at.clear()
            self._unseen.clear()
        for kept in self._buffers:
            kept.commit()

    def _on_gradients(self, engine: _SkipsUpdates, event: Event) -> None:
        norm, optimizer, last = event.payload.grad_norm, event.payload.optimizer, engine.state.iteration
        if norm.is_cpu:
            # nothing to wait for; a tensor that stays would lie among the gradients, and fragment the heap
            norm = number_on_host(norm)
            if math.isfinite(norm):
                for kept in self._buffers:
                    kept.commit()
            else:
                self._skip(engine, torch.tensor(True))
        else:
            self._skip(engine, norm.isfinite().logical_not_())
        first = min(self._updated_at.get(optimizer, self._begun) + 1, last)
        self._updated_at[optimizer] = last
        data = batch_order(engine)
        batches = [TrainedBatch.of_iteration(each, data) for each in range(first, last + 1)]
        self._unseen.append(Update(norm, batches, optimizer))

    def _skip(self, engine: _SkipsUpdates, where: Tensor) -> None:
        engine.skip_update(where)
        for kept in self._buffers:
            kept.restore_where(where)

    @staticmethod
    def _norms(updates: Sequence[Update]) -> list[float]:
        """Their norms on the host, in order."""
        on_device = iter(to_host([each.norm for each in updates if isinstance(each.norm, Tensor)]))
        return [next(on_device) if isinstance(each.norm, Tensor) else each.norm for each in updates]

    def _on_terminate(self, engine: Engine) -> None:
        if engine.should_terminate == "skip_completed":  # else COMPLETED follows
            self._check(engine)

    def _on_exception(self, engine: Engine, event: Event) -> None:
        self._check(engine)  # what it finds may be the reason

    def _check(self, engine: Engine) -> None:
        # the host waits for the device here
        unseen, self._unseen = self._unseen, []
        bad: list[tuple[float, Update]] = []
        longest = 0
        for norm, update in zip(self._norms(unseen), unseen, strict=True):
            row = 0 if math.isfinite(norm) else self._in_a_row.get(update.optimizer, 0) + 1
            self._in_a_row[update.optimizer] = row
            longest = max(longest, row)
            if not math.isfinite(norm):
                bad.append((norm, update))
        if not bad:
            return
        self.skipped += len(bad)
        for norm, update in bad[:_REPORTED]:
            message = "an update was skipped: its gradient is not finite"
            report_anomaly(engine, "nan_gradient", norm, update.batches, message, skipped=self.skipped)
        if len(bad) > _REPORTED:
            value, update = bad[-1]
            message = f"{len(bad) - _REPORTED} more updates were skipped: their gradients are not finite; the last one"
            report_anomaly(engine, "nan_gradient", value, update.batches, message, skipped=self.skipped)
        first, last = bad[0][1].batches[0].iteration, bad[-1][1].batches[-1].iteration
        if longest >= self.max_in_a_row:
            reason = f"{longest} updates in a row had a gradient that is not finite, the last at iteration {last}"
            engine.terminate(reason=f"NaNGuard: {reason}", alike=self._checks_alike)
        else:
            self._act(engine, first, last, f"the gradient of iteration {last} is not finite")


def _last_update(engine: Engine) -> int:
    """The iteration of the last update, before the batches that wait for the next one."""
    waiting = engine.accumulated if is_training_run(engine) else 0
    return int(engine.state.iteration) - waiting


class _KeptBuffers:
    """A model's buffers of one device and dtype as they were after the last update, in one tensor."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._kept = torch.cat([buffer.detach().flatten() for buffer in buffers])
        parts = self._kept.split([buffer.numel() for buffer in buffers])
        self._views = [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]

    def commit(self) -> None:
        torch._foreach_copy_(self._views, [buffer.detach() for buffer in self._buffers])

    def restore_where(self, bad: Tensor) -> None:
        now = torch.cat([buffer.detach().flatten() for buffer in self._buffers])
        self._kept.copy_(torch.where(bad.to(now.device), self._kept, now))
        torch._foreach_copy_([buffer.detach() for buffer in self._buffers], self._views)


def _keep_buffers(model: nn.Module | None) -> list[_KeptBuffers]:
    if model is None:
        return []
    with reading_once(model):
        if not any(map(Tensor.is_floating_point, model.buffers())):
            return []
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.numel():
            kinds.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    return [_KeptBuffers(buffers) for buffers in kinds.values()]
