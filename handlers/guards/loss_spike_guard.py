"""Reports losses that jump, and stops or rewinds the run if asked to."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Literal, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from pulsetrain.engine import Engine, Events, Every, Phase
from pulsetrain.engine.argument_checks import check_positive, check_whole_number
from pulsetrain.engine.distributed.joining import join
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metrics.reading import number_on_host
from pulsetrain.handlers.guards.guard_actions import Guard, TrainedBatch, batch_order, report_anomaly
from pulsetrain.handlers.metric_values.step_values import scalars, to_host

__all__ = ["LossSpikeGuard"]

_MAD = 1.4826  # times the median absolute deviation is the standard deviation of normally distributed numbers
_LONGEST = 50_000  # losses that are judged at once: their windows take 10 times as many bytes as `window` losses each
_LEAST_SPREAD = 1e-3  # of the median: if losses hardly differ, the next one is not a spike for that


class LossSpikeGuard(Guard):
    """Reports each loss above `median + threshold * spread` of the last `window` losses.

    The spread is 1.4826 times their median absolute deviation, and at least a thousandth of the median: neither a few
    spikes nor a flat stretch moves the bound. A loss that is not finite is a spike. Spikes do not enter the window
    until there are `patience` finite ones in a row: then the loss has a new level, and the window starts from there.

    The losses stay on the device until the host checks them: at the cadence, at the end of each epoch and of the run.
    The first spike of each row is reported by a warning and ANOMALY_DETECTED (kind "loss_spike", value the loss), with
    the dataset rows of its batch; `spikes` counts them all. Median and spread are computed again with every tenth of
    the window. If several processes train together, a loss is the mean of their losses, each reports its own rows, and
    the policy has to be "warn". If the steps return no such value, a warning names what they return.

    Args:
        threshold: how many spreads above the median.
        window: number of losses.
        policy: what follows: "warn" continues, "stop" ends the run, "rewind" returns to the newest checkpoint before
            the first spike and leaves out the batches of the spikes from then on.
        every: when the host checks.
        patience: this many spikes in a row are a new level.
        margin: batches before the first spike that "rewind" leaves out as well; the cause may be the update of the
            previous batch.
        max_rewinds: per run; the next one ends it.
        metric: which of the step's values to watch, "loss" or another of its output.
        clock: seconds, for `Every(seconds=...)`.

    Raises:
        ConfigurationError: an unknown policy, or a number out of range.

    >>> from structlog.testing import capture_logs
    >>> engine = Engine(lambda engine, batch: {"loss": batch})
    >>> guard = LossSpikeGuard(window=8).attach(engine)
    >>> with capture_logs() as logs:
    ...     _ = engine.run([1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1, 50.0, 1.0])
    >>> logs[0]["event"], logs[0]["iteration"], guard.spikes
    ('the loss has jumped', 9, 1)
    """

    def __init__(
        self,
        threshold: float = 10.0,
        window: int = 100,
        policy: Literal["warn", "stop", "rewind"] = "warn",
        every: Every = Every(iterations=50),  # noqa: B008  # frozen
        *,
        patience: int = 10,
        margin: int = 1,
        max_rewinds: int = 3,
        metric: str = "loss",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_positive("LossSpikeGuard", "threshold", threshold)
        check_whole_number("LossSpikeGuard", "window", window, 8)
        check_whole_number("LossSpikeGuard", "patience", patience)
        check_whole_number("LossSpikeGuard", "margin", margin, 0)
        super().__init__(policy, "warn", every, max_rewinds, clock)
        self.threshold = threshold
        self.window = window
        self.patience = patience
        self.margin = margin
        self.metric: str = metric.removeprefix("train/").removeprefix("train_")
        self.spikes: int = 0
        self._losses: deque[float] = deque(maxlen=window)
        self._in_a_row: list[float] = []  # the newest `patience` spikes since the last ordinary loss
        self._spiking = False  # whether the last loss was one
        self._bound = math.inf  # above it a loss is a spike
        self._since_bound = 0  # losses that entered the window since the bound was computed
        self._unseen: list[tuple[TrainedBatch, Tensor | float]] = []
        self._has_warned = False  # that there is nothing to watch
        self._returned: list[str] | None = None  # what a step without such a value returned

    def attach(self, engine: Engine) -> Self:
        """Watch the losses of the engine's steps.

        Raises:
            ConfigurationError: the policy is "rewind", and the engine cannot return to a checkpoint.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            self._check_engine(engine)
            subscribe(Events.STARTED, self._on_started, phase=Phase.ACT)
            subscribe(Events.ITERATION_COMPLETED, self._on_iteration, phase=Phase.COMPUTE)
            subscribe(self._check_events(), self._check, phase=Phase.ACT)
        return self

    def state_dict(self) -> dict[str, object]:
        """The window and the spikes; losses that are not checked yet are copied to the host."""
        return {
            "losses": list(self._losses),
            "in_a_row": list(self._in_a_row),
            "spiking": self._spiking,
            "bound": self._bound,
            "since_bound": self._since_bound,
            "spikes": self.spikes,
            "unseen": [[batch.state(), loss] for (batch, _), loss in zip(self._unseen, self._fetched(), strict=True)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window, the spikes, and the losses that are not checked yet."""
        self._losses = deque(state["losses"], maxlen=self.window)
        self._in_a_row = list(state["in_a_row"])
        self._spiking, self._bound = state["spiking"], state["bound"]
        self._since_bound, self.spikes = state["since_bound"], state["spikes"]
        self._unseen = [(TrainedBatch.from_state(batch), loss) for batch, loss in state["unseen"]]

    def _on_started(self, engine: Engine) -> None:
        if engine.state.iteration == 0:
            self._unseen.clear()

    def _on_iteration(self, engine: Engine) -> None:
        values = scalars(engine.state.output)
        loss = values.get(self.metric)
        if isinstance(loss, Tensor) and loss.is_cpu:
            loss = number_on_host(loss)  # a tensor that stays would lie among the activations, and fragment the heap
        if loss is None:
            self._returned = sorted(values)
        else:
            self._unseen.append((TrainedBatch.of_iteration(engine.state.iteration, batch_order(engine)), loss))

    def _fetched(self) -> list[float]:
        tensors = [loss for _, loss in self._unseen if isinstance(loss, Tensor)]
        host = iter(to_host(tensors))
        return [next(host) if isinstance(loss, Tensor) else loss for _, loss in self._unseen]

    def _check(self, engine: Engine) -> None:
        losses = _averaged(self._fetched())  # waits for the device
        unseen, self._unseen = self._unseen, []
        if not unseen and not self._losses and not self.spikes:
            self._warn_of_no_values()
        found: list[int] = []
        for (batch, _), loss in zip(unseen, losses, strict=True):
            before, bound = self._spiking, self._bound
            self._spiking = self.step(loss)
            if not self._spiking:
                continue
            self.spikes += 1
            found.append(batch.iteration)
            if not before:
                message = "the loss has jumped"
                report_anomaly(engine, "loss_spike", loss, [batch], message, bound=bound, metric=f"train/{self.metric}")
        if found:
            first, last = found[0] - self.margin, found[-1]
            self._act(engine, first, last, f"the loss has jumped at iteration {found[0]}")

    def _warn_of_no_values(self) -> None:
        if self._returned is not None and not self._has_warned and ranks().is_main:
            self._has_warned = True
            get_logger("handlers").warning(
                "LossSpikeGuard has nothing to watch so far: the steps return no such value",
                metric=self.metric,
                returned=self._returned,
            )

    def step(self, loss: float) -> bool:
        """Judge the next loss, without an engine; returns whether it is a spike."""
        if math.isfinite(loss) and loss <= self._bound:
            self._losses.append(loss)
            self._in_a_row.clear()
            self._since_bound += 1
            if self._since_bound * 10 >= self.window or len(self._losses) == self._least:
                self._update_bound()
            return False
        if math.isfinite(loss):
            self._in_a_row.append(loss)
        if len(self._in_a_row) < self.patience:
            return True
        get_logger("handlers").warning(
            "the loss stays at the level that it jumped to", loss=loss, before=median(self._losses)
        )
        self._losses = deque(self._in_a_row, maxlen=self.window)
        self._in_a_row.clear()
        self._update_bound()
        return False

    def steps(self, losses: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Judge many losses, without an engine: as `step` judges each, and about ten times faster if few are spikes.

        >>> losses = np.array([1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1, 50.0, 1.0])
        >>> LossSpikeGuard(window=8).steps(losses).nonzero()[0]
        array([8])
        """
        found = np.zeros(len(losses), dtype=bool)
        at, stretch, pause, together_from = 0, 4 * self.window, 0, 0
        while at < len(losses):
            if at >= together_from and len(self._losses) == self.window and not self._in_a_row:
                following = losses[at : at + stretch]
                at += (judged := self._pass(following))
                if judged == len(following):
                    stretch, pause = min(2 * stretch, _LONGEST), 0
                    continue
                # windows that were sorted in vain: while spikes are frequent, losses are judged one by one for longer
                stretch, pause = 4 * self.window, min(2 * pause + self.window // 2, 20 * self.window)
                together_from = at + 1 + pause
            found[at] = self.step(float(losses[at]))
            at += 1
        return found

    def _pass(self, losses: NDArray[np.float64]) -> int:
        """Let those before the first spike enter the full window; returns how many."""
        step = -(-self.window // 10) if self.window > self._least else 1  # losses between two bounds
        ahead = min(step - self._since_bound, len(losses))  # that are judged by today's bound
        every = np.concatenate([self._losses, losses])
        windows = sliding_window_view(every, self.window)[ahead::step]
        middles = _middles(windows)
        spreads = _MAD * _middles(np.abs(windows - middles[:, None]))
        bounds = middles + self.threshold * np.maximum(spreads, _LEAST_SPREAD * np.abs(middles))
        allowed = np.concatenate([np.full(ahead, self._bound), np.repeat(bounds, step)])[: len(losses)]
        ordinary = np.isfinite(losses) & (losses <= allowed)
        count = len(losses) if ordinary.all() else int(ordinary.argmin())
        if count:
            self._losses = deque(every[count : count + self.window].tolist(), maxlen=self.window)
            updates, since = divmod(self._since_bound + count, step)
            self._since_bound = since
            if updates:
                self._bound = float(bounds[updates - 1])
        return count

    @property
    def _least(self) -> int:
        """How many losses a bound needs."""
        return min(self.window, 20)

    def _update_bound(self) -> None:
        self._since_bound = 0
        self._bound = math.inf
        if len(self._losses) >= self._least:
            middle = median(self._losses)
            spread = _MAD * median(abs(loss - middle) for loss in self._losses)
            self._bound = middle + self.threshold * max(spread, _LEAST_SPREAD * abs(middle))


def _middles(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of each row."""
    rows = np.sort(rows, axis=1)  # it is vectorised, and three times faster than a partition
    half = rows.shape[1] // 2
    return rows[:, half] if rows.shape[1] % 2 else (rows[:, half - 1] + rows[:, half]) / 2


def _averaged(losses: list[float]) -> list[float]:
    """The mean over the processes that train together; each has as many losses."""
    here = ranks()
    if here.world_size == 1:
        return losses
    return [loss / here.world_size for loss in join().sum(losses, "a look at the losses")]
