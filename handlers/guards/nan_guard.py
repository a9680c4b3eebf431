"""Keeps gradients that are not finite out of the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.guards.guard_actions import Batch, Policy, announce, batches_between
from pulsetrain.handlers.metric_values.step_values import to_host

__all__ = ["NaNGuard"]

_TOLD = 3  # anomalies of one look that are told one by one


class Update(NamedTuple):
    """An update whose gradient the host has not looked at."""

    norm: Tensor
    batches: list[Batch]
    optimizer: str


class NaNGuard:
    """Leaves out every update whose gradient holds NaN or infinity; nothing waits for the device.

    The weights and the optimizer stay as they were, and so do the floating-point buffers of the model, such as the
    running means of a BatchNorm, which the forward pass has changed already. The host looks at the cadence, at the end
    of each epoch and of the run: then each update that was left out is told by a warning and ANOMALY_DETECTED
    (kind "nan_gradient", value the norm), with the rows of its batches, and those of them that the dataset gives with a
    number that is not finite.

    On a device it does so for the fused kernels of Adam, AdamW and SGD, which `create_optimizer` takes there; other
    optimizers are asked each update whether to leave it out, and wait. With fp16 such an update also lowers the
    gradient scale, as an overflow does.

    Args:
        policy: behind it: "skip" goes on, "stop" ends the run, "rewind" goes back to the newest checkpoint before it
            and leaves its batches out from then on.
        every: when the host looks.
        max_in_a_row: so many updates left out one after another end the run, whatever the policy.
        max_rewinds: of one run; the next one ends it.
        clock: seconds, for `Every(seconds=...)`.

    Raises:
        ConfigurationError: an unknown policy, or a number below 1.
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
        self._policy = Policy("NaNGuard", policy, "skip", max_rewinds)
        check_every("NaNGuard", every)
        check_whole_number("NaNGuard", "max_in_a_row", max_in_a_row)
        self.policy = policy
        self.every = every
        self.max_in_a_row = max_in_a_row
        self.max_rewinds = max_rewinds
        self.skipped = 0  # updates known to have been left out
        self._clock = clock
        self._in_a_row: dict[str, int] = {}  # by optimizer
        self._unseen: list[Update] = []
        self._updated_at: dict[str, int] = {}  # iteration of the last update, by optimizer
        self._begun = 0  # iteration behind the last update before this handler was there
        self._buffers: list[_KeptBuffers] = []
        self._attachment = Attachment("NaNGuard")

    def attach(self, engine: Engine) -> Self:
        """Guard a trainer's updates.

        Raises:
            RecordingError: the engine is a replay.
            ConfigurationError: the engine cannot leave an update out, as a Trainer can.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            model = getattr(engine, "model", None)  # a replay without weights raises
            if not callable(getattr(engine, "skip_update", None)):
                raise ConfigurationError(f"NaNGuard: {engine.name!r} cannot leave an update out, which a Trainer can")
            self._policy.check(engine)
            self._buffers = _keep_buffers(model)
            self._updated_at.clear()  # of where it was attached before
            self._begun = engine.state.iteration - getattr(engine, "accumulated", 0)
            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE)
            subscribe(Events.GRADIENTS_READY, self._on_gradients, phase=Phase.COMPUTE)
            looks = reading_events(self.every, self._clock) | Events.EPOCH_COMPLETED | Events.COMPLETED
            subscribe(looks, self._look, phase=Phase.ACT)
            subscribe(Events.TERMINATE, self._on_terminate, phase=Phase.ACT)
            subscribe(Events.EXCEPTION_RAISED, self._on_exception, phase=Phase.OBSERVE, on_error="warn")
        return self

    def detach(self) -> None:
        self._attachment.cancel()

    def state_dict(self) -> dict[str, Any]:
        """What was left out; what the host has not looked at yet is brought to it."""
        norms = to_host([update.norm for update in self._unseen])
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
        self.skipped, self._in_a_row = state["skipped"], dict(state["in_a_row"])
        self._updated_at = dict(state["updated_at"])
        self._unseen = [
            Update(torch.tensor(norm), [Batch.of_state(batch) for batch in batches], optimizer)
            for norm, batches, optimizer in state["unseen"]
        ]

    def _on_started(self, engine: Engine) -> None:
        self._begun = engine.state.iteration - getattr(engine, "accumulated", 0)
        if engine.state.iteration == 0:
            self._updated_at.clear()
            self._unseen.clear()
        for kept in self._buffers:
            kept.take()

    def _on_gradients(self, engine: Any, event: Event) -> None:
        norm, optimizer, last = event.payload.grad_norm, event.payload.optimizer, engine.state.iteration
        bad = norm.isfinite().logical_not_()
        engine.skip_update(bad)
        for kept in self._buffers:
            kept.put_back_where(bad)
        first = min(self._updated_at.get(optimizer, self._begun) + 1, last)
        self._updated_at[optimizer] = last
        self._unseen.append(Update(norm, batches_between(engine, first, last), optimizer))

    def _on_terminate(self, engine: Engine) -> None:
        if engine.should_terminate == "skip_completed":  # else COMPLETED comes
            self._look(engine)

    def _on_exception(self, engine: Engine, event: Event) -> None:
        self._look(engine)  # what it has to tell may be the reason

    def _look(self, engine: Engine) -> None:
        """Where the host waits for the device."""
        unseen, self._unseen = self._unseen, []
        bad: list[tuple[float, Update]] = []
        longest = 0
        for norm, update in zip(to_host([each.norm for each in unseen]), unseen, strict=True):
            row = 0 if math.isfinite(norm) else self._in_a_row.get(update.optimizer, 0) + 1
            self._in_a_row[update.optimizer] = row
            longest = max(longest, row)
            if not math.isfinite(norm):
                bad.append((norm, update))
        if not bad:
            return
        self.skipped += len(bad)
        for norm, update in bad[:_TOLD]:
            message = "an update was left out: its gradient is not finite"
            announce(engine, "nan_gradient", norm, update.batches, message, skipped=self.skipped)
        if len(bad) > _TOLD:
            value, update = bad[-1]
            message = f"{len(bad) - _TOLD} more updates were left out: their gradients are not finite; the last one"
            announce(engine, "nan_gradient", value, update.batches, message, skipped=self.skipped)
        first, last = bad[0][1].batches[0].iteration, bad[-1][1].batches[-1].iteration
        if longest >= self.max_in_a_row:
            reason = f"{longest} updates in a row had a gradient that is not finite, the last at iteration {last}"
            engine.terminate(reason=f"NaNGuard: {reason}")
        else:
            self._policy.apply(engine, first, last, f"the gradient of iteration {last} is not finite")


class _KeptBuffers:
    """A model's buffers of one kind as they were behind the last update that was made, in one tensor."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._kept = torch.cat([buffer.detach().flatten() for buffer in buffers])
        parts = self._kept.split([buffer.numel() for buffer in buffers])
        self._views = [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]

    def take(self) -> None:
        torch._foreach_copy_(self._views, [buffer.detach() for buffer in self._buffers])

    def put_back_where(self, bad: Tensor) -> None:
        now = torch.cat([buffer.detach().flatten() for buffer in self._buffers])
        self._kept.copy_(torch.where(bad.to(now.device), self._kept, now))
        torch._foreach_copy_([buffer.detach() for buffer in self._buffers], self._views)


def _keep_buffers(model: Any) -> list[_KeptBuffers]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for buffer in model.buffers() if isinstance(model, nn.Module) else ():
        if buffer.is_floating_point() and buffer.numel():
            kinds.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    return [_KeptBuffers(buffers) for buffers in kinds.values()]
