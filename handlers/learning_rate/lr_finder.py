"""Finds a learning rate by training a few steps at ever larger ones, and takes those steps back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.schedules.groups import group_ratios, write_rates
from pulsetrain.engine.step.accumulation import Accumulation
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.learning_rate.trial_steps import copy_of_loader, endless, taken_back
from pulsetrain.handlers.metric_values.step_values import to_host
from pulsetrain.handlers.plots import figures
from pulsetrain.handlers.run_files.run_folder import make_folder, replace_file

__all__ = ["LRFinder", "LRFinderResult"]

LOOK = 10  # updates between two looks at the losses, each of which waits for the device
SETTLED = 10  # updates after which the mean of the losses is no matter of single batches
LEAST = 2 * SETTLED  # updates of a sweep
_NEEDED = ("model", "held", "strategy", "backend", "optimizer", "config", "train_loader", "seed")


@dataclass(frozen=True)
class LRFinderResult:
    """What a sweep found, one entry an update.

    Args:
        rates: of a group that has the optimizer's default rate, ascending.
        losses: of the update's batches, before it.
        smoothed: their running mean, by which the sweep ends.
        suggestion: the rate at which the loss falls fastest; None where `reason` says why there is none.
        reason: empty where there is a suggestion.
        diverged: whether the loss ran away before the last rate.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None
    reason: str
    diverged: bool


class LRFinder:
    """Learning-rate range test (Smith 2017): one update at each of a series of rates that grow by a constant factor.

    `run(trainer)` gives the result; attached, it runs before a run's first batch and logs it. Either way the trainer
    is afterwards as it was, to the bit, its own handlers have heard nothing, and its rate is not changed.

    Parameter groups keep their ratios. Accumulation, clipping and precision are the trainer's; the data goes round.

    Args:
        start_lr: the first rate.
        end_lr: the last.
        iterations: updates; the rates lie evenly on a logarithmic scale.
        smoothing: weight of the past in the running mean of the losses, from 0 to below 1; the first ten count alike.
        diverge: the sweep ends where the smoothed loss is this many times the least so far (the first updates apart,
            which hang on single batches), or a loss is not finite.
        folder: the run folder; FOLDER/plots/lr_finder.png and .svg are written there.

    Raises:
        ConfigurationError: a value out of range.
    """

    def __init__(
        self,
        start_lr: float = 1e-7,
        end_lr: float = 10.0,
        iterations: int = 100,
        smoothing: float = 0.98,
        diverge: float = 4.0,
        folder: str | Path | None = None,
    ) -> None:
        for name, value in (("start_lr", start_lr), ("end_lr", end_lr)):
            if not _is_number(value) or not 0 < value < math.inf:
                raise ConfigurationError(f"LRFinder({name}={value!r}): needs a positive number")
        if start_lr >= end_lr:
            raise ConfigurationError(f"LRFinder(start_lr={start_lr!r}, end_lr={end_lr!r}): has to begin below its end")
        if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < LEAST:
            raise ConfigurationError(
                f"LRFinder(iterations={iterations!r}): needs a whole number of at least {LEAST}, such as 100"
            )
        if not _is_number(smoothing) or not 0 <= smoothing < 1:
            raise ConfigurationError(f"LRFinder(smoothing={smoothing!r}): needs a number from 0 to below 1")
        if not _is_number(diverge) or not diverge > 1:
            raise ConfigurationError(f"LRFinder(diverge={diverge!r}): needs a number above 1")
        self.start_lr = start_lr
        self.end_lr = end_lr
        self.iterations = iterations
        self.smoothing = smoothing
        self.diverge = diverge
        self.folder = None if folder is None else Path(folder)
        self.result: LRFinderResult | None = None  # of the last sweep
        self._attachment = Attachment("LRFinder")

    def attach(self, engine: Engine) -> Self:
        """Sweep whenever a run of this trainer begins from its start; one that fails is told of and leaves the run be.

        Raises:
            TypeError: it is no trainer.
            RecordingError: it is a replay.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            _check(engine)
            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE, on_error="warn")
        return self

    def detach(self) -> None:
        self._attachment.cancel()

    def run(self, trainer: Any, loader: Any = None) -> LRFinderResult:
        """Sweep, draw, and put everything back.

        Args:
            trainer: a pulsetrain.Trainer; its run may have begun.
            loader: read its batches; by default a copy of the trainer's, whose own stays where it is.

        Raises:
            TypeError: it is no trainer.
            ConfigurationError: it has several optimizers or a body of its own, or the loader cannot be copied.
            RunFolderError: the folder cannot be written.
        """
        _check(trainer)
        if self.folder is not None:
            make_folder("LRFinder", self.folder / "plots")
        batches = endless(copy_of_loader(trainer.train_loader) if loader is None else loader, trainer.seed)
        with closing(batches), taken_back(trainer):  # type: ignore[type-var]  # it is a generator
            rng.seed_everything(trainer.seed)
            losses = self._sweep(trainer, batches)
        self.result = self._judge(losses)
        if self.folder is not None:
            found = self.result
            figure = figures.range_test(found.rates, found.losses, found.smoothed, found.suggestion)
            for kind in figures.FORMATS:
                replace_file(self.folder / "plots" / f"lr_finder.{kind}", figures.render(figure, kind))
        return self.result

    def rate(self, update: int) -> float:
        """That of the update behind so many others."""
        return float(self.start_lr * (self.end_lr / self.start_lr) ** (update / (self.iterations - 1)))

    def _sweep(self, trainer: Any, batches: Any) -> list[float]:
        """The losses, until one is seen to diverge; some come after it, since the host looks every few updates."""
        accumulation = Accumulation(trainer.config.accumulation)
        ratios = group_ratios(trainer.optimizer, "LRFinder")
        for each in (trainer.model, trainer.optimizer):
            if callable(getattr(each, "train", None)) and not getattr(each, "training", False):
                each.train()  # the optimizer, where it is a schedule-free one
        if hasattr(trainer.strategy, "check_values"):
            trainer.strategy.check_values = True
        losses: list[float] = []
        waiting: list[Tensor] = []
        for update in range(self.iterations):
            rate = self.rate(update)
            write_rates(trainer.optimizer, [rate * ratio for ratio in ratios])
            waiting.append(_update(trainer, batches, accumulation, update))
            if hasattr(trainer.strategy, "check_values"):
                trainer.strategy.check_values = False
            if len(waiting) == LOOK or update + 1 == self.iterations:
                losses += to_host(waiting)
                waiting.clear()
                if self._end(losses, self._smooth(losses)) is not None:
                    break
        return losses

    def _smooth(self, losses: Sequence[float]) -> list[float]:
        """The mean of the first few, and from there on exponentially weighted."""
        mean, smoothed = 0.0, []
        for number, loss in enumerate(losses, start=1):
            new = 1 / number if number <= SETTLED else 1 - self.smoothing
            mean += new * (loss - mean)
            smoothed.append(mean)
        return smoothed

    def _end(self, losses: Sequence[float], smoothed: Sequence[float]) -> int | None:
        """The update at which the sweep has diverged; None where it has not."""
        least = math.inf
        for update, (loss, value) in enumerate(zip(losses, smoothed, strict=True)):
            if not math.isfinite(loss):
                return update
            if update >= SETTLED - 1 and value > 0:
                if value > self.diverge * least:
                    return update
                least = min(least, value)
        return None

    def _judge(self, losses: Sequence[float]) -> LRFinderResult:
        smoothed = self._smooth(losses)
        end = self._end(losses, smoothed)
        used = len(losses) if end is None else end
        rates = [self.rate(update) for update in range(len(losses))]
        suggestion, reason = self._steepest(losses[:used], end is not None)
        shown = used if end is None or not math.isfinite(losses[end]) else end + 1
        shown = max(shown, 1)
        return LRFinderResult(
            tuple(rates[:shown]), tuple(losses[:shown]), tuple(smoothed[:shown]), suggestion, reason, end is not None
        )

    def _steepest(self, losses: Sequence[float], diverged: bool) -> tuple[float | None, str]:
        """The rate where the loss falls fastest over the logarithm of the rate, or why there is none.

        The running mean lags behind by too much; this compares the means of a tenth of the updates on either side.
        """
        if len(losses) < SETTLED + 3:
            return None, f"the loss ran away after {len(losses)} updates; begin with a smaller start_lr"
        width = max(3, min(self.iterations // 10, len(losses) // 3))
        means = np.convolve(losses, np.full(width, 1 / width), "valid")  # the first is over the first `width`
        changes = (means[width:] - means[:-width])[: max(0, int(np.argmin(means)) - width + 1)]
        if not _falls(np.asarray(losses), max(5, self.iterations // 10)) or not (changes < 0).any():
            return None, "the loss falls no further than by chance; look at data and loss, or sweep other rates"
        steepest = width + int(np.argmin(changes))
        if not diverged and steepest + width == len(losses):
            return None, "the loss falls fastest at the very last rates; go on to a larger end_lr"
        return self.rate(steepest), ""

    def _on_started(self, engine: Any) -> None:
        if engine.state.iteration:
            return
        found = self.run(engine)
        log = get_logger("handlers")
        if found.suggestion is None:
            log.warning("LRFinder suggests no learning rate", reason=found.reason)
        else:
            now = float(engine.optimizer.defaults["lr"])
            log.info("LRFinder suggests a learning rate", suggestion=found.suggestion, configured=now)


def _check(trainer: Any) -> None:
    lacking = [name for name in _NEEDED if not hasattr(trainer, name)]  # a replay says itself that it has no model
    if lacking:
        raise TypeError(
            f"LRFinder({type(trainer).__name__}): needs a pulsetrain.Trainer; this has no {', '.join(lacking)}"
        )
    if getattr(trainer, "optimizers", None) is not None:
        raise ConfigurationError(
            "LRFinder: the trainer has several optimizers, and no one loss says which rate is good"
        )
    if getattr(trainer.train_loader, "fires_rollouts", False):
        raise ConfigurationError(
            "LRFinder: the policy makes the batches itself, and no loss over its own rollouts says which rate is good; "
            "compare the returns of short runs"
        )
    if getattr(trainer, "external_step", False):
        raise ConfigurationError(
            f"LRFinder: the step of {type(trainer).__name__} is the loop's body, which cannot be called; use a Trainer"
        )


def _update(trainer: Any, batches: Any, accumulation: Accumulation, update: int) -> Tensor:
    """One update, as the trainer makes it, without an event; returns the mean loss over its batches, shape ()."""
    backend, held, strategy = trainer.backend, trainer.held, trainer.strategy
    losses: list[Tensor] = []
    sizes: list[Any] = []
    ready = False
    while not ready:
        batch = backend.prepare_batch(next(batches), strategy)
        scale = accumulation.weigh(batch.size, batch.tokens, update)
        gradients = backend.forward_backward(held.state, batch, strategy, scale, held.waiting)
        held.wait(gradients)
        losses.append(backend.to_torch(gradients.loss))
        sizes.append(batch.size)
        ready = accumulation.add(batch.size, batch.tokens, update)
    measure = trainer.config.clip_grad_norm is not None
    gradients = backend.finish_gradients(held.state, gradients, accumulation.close(), measure=measure)
    held.take(backend.apply_gradients(held.state, gradients))
    held.waiting = None
    if len(losses) == 1:
        return losses[0]
    weights = torch.stack([torch.as_tensor(size, device=losses[0].device) for size in sizes])
    return (torch.stack(losses).float() * weights).sum() / weights.sum()


def _falls(losses: Any, width: int) -> bool:
    """Whether the mean over some `width` losses in a row is below that of the first ones by more than chance.

    For losses that differ by chance alone it is so in about one sweep of twenty.
    """
    deviation = np.median(np.abs(np.diff(losses))) / 0.954  # of normally distributed ones, whatever few outliers are
    width = min(width, len(losses) - SETTLED)
    means = np.convolve(losses[SETTLED:], np.full(width, 1 / width), "valid")
    fall = losses[:SETTLED].mean() - means.min()
    return bool(fall > 3 * deviation * math.sqrt(1 / SETTLED + 1 / width))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
