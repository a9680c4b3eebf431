"""Finds a learning rate by training a few steps at growing rates, and rolls those steps back."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain.engine import ConfigurationError, Engine, Events, ModelStore, Phase, TrainingBatch, TrainingResult
from pulsetrain.engine.argument_checks import check_number, check_positive, check_whole_number
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import KeyedLoader
from pulsetrain.engine.data.loaders import can_be_keyed, can_be_read_once, key_order, order_seed
from pulsetrain.engine.data.workers import workers_begin
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.optional import check_installed
from pulsetrain.engine.schedules.groups import group_ratios, write_rates
from pulsetrain.engine.step.protocols import Strategy
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.metric_values.step_values import to_host
from pulsetrain.handlers.plots import figures
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder, replace_file

__all__ = ["LRFinder", "LRFinderResult", "trial_losses"]

LOOK = 10  # updates between two reads of the losses, each of which waits for the device
SETTLED = 10  # updates after which single batches hardly matter to the mean of the losses
LEAST = 2 * SETTLED  # updates of a sweep
_NEEDED = ("model", "optimizer", "strategy", "stepper", "train_loader", "seed")


class TrialStepper(Protocol):
    """Makes a trainer's steps."""

    @property
    def store(self) -> ModelStore:
        """Holds the model."""

    def trial(
        self, on_step: Callable[[TrainingBatch, TrainingResult], object]
    ) -> Callable[[Engine, object], TrainingResult]:
        """A process function over the same model with its own counts."""


class Trainable(Protocol):
    """What a sweep needs of a trainer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    train_loader: Iterable[object]

    @property
    def seed(self) -> int:
        """The run's seed."""

    @property
    def stepper(self) -> TrialStepper:
        """Makes the steps."""


@dataclass(frozen=True)
class LRFinderResult:
    """The result of a sweep, one entry per update.

    Args:
        rates: those of a group that has the optimizer's default rate, ascending.
        losses: those of the batches of each update, before the update.
        smoothed: their running mean, which decides when the sweep ends.
        suggestion: the rate at which the loss falls fastest; None if `reason` says why there is none.
        reason: empty if there is a suggestion.
        diverged: whether the loss diverged before the last rate.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None
    reason: str
    diverged: bool


class LRFinder(Handler):
    """Learning-rate range test (Smith 2017): one update at each of a series of rates that grow by a constant factor.

    `run(trainer)` returns the result; an attached finder runs before a run's first batch and logs it. Afterwards the
    trainer is bit for bit what it was before: its handlers have received no event, and its rate has not changed.

    Parameter groups keep their ratios. Accumulation, clipping and precision are the trainer's; the data are repeated.

    Args:
        start_lr: the first rate.
        end_lr: the last rate.
        iterations: updates; the rates lie evenly on a logarithmic scale.
        smoothing: weight of the past in the running mean of the losses, from 0 to below 1; the first ten losses have
            equal weight.
        diverge: the sweep ends when the smoothed loss is this many times the smallest so far (without the first
            updates, which depend on single batches), or when a loss is not finite.
        folder: the run folder; FOLDER/plots/lr_finder.png and .svg are written there.

    Raises:
        ConfigurationError: a value out of range, or matplotlib is not installed and there is a folder.

    >>> finder = LRFinder(start_lr=1e-4, end_lr=1.0, iterations=20)
    >>> round(finder.rate(0), 6), round(finder.rate(19), 6)
    (0.0001, 1.0)
    """

    folder: Path | None

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
            check_positive("LRFinder", name, value)
        if start_lr >= end_lr:
            raise ConfigurationError("needs to be below {end_lr}", "LRFinder", start_lr=start_lr, end_lr=end_lr)
        check_whole_number("LRFinder", "iterations", iterations, LEAST)
        check_number("LRFinder", "smoothing", smoothing, below=1.0)
        if not isinstance(diverge, (int, float)) or not diverge > 1:
            raise ConfigurationError("needs a number above 1", "LRFinder", diverge=diverge)
        self.start_lr = start_lr
        self.end_lr = end_lr
        self.iterations = iterations
        self.smoothing = smoothing
        self.diverge = diverge
        if folder is not None:
            check_installed("LRFinder(folder=...)", "matplotlib")
        self.folder = None if folder is None else local_folder("LRFinder", folder)
        self.result: LRFinderResult | None = None  # of the last sweep

    def attach(self, engine: Engine) -> Self:
        """Sweep whenever a run of this trainer begins at iteration 0; a sweep that fails is reported as a warning.

        Raises:
            TypeError: the engine is not a trainer.
            RecordingError: it is a replay.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            _check(engine)
            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE, on_error="warn")
        return self

    def run(self, trainer: Trainable, loader: Iterable[object] | None = None) -> LRFinderResult:
        """Sweep, draw the figure, and roll everything back.

        Args:
            trainer: a pulsetrain.Trainer; its run may have begun.
            loader: gives the batches; by default a copy of the trainer's, whose position does not change.

        Raises:
            TypeError: it is not a trainer.
            ConfigurationError: several processes train, it has several optimizers, its steps are made by a hand-written
                loop, or the loader cannot be copied.
            RunFolderError: the folder cannot be written.
        """
        _check(trainer)
        if self.folder is not None:
            make_folder("LRFinder", self.folder / "plots")
        given = trainer.train_loader if loader is None else loader
        seed = order_seed(given, trainer.seed)
        batches = _endless(_copy_of_loader(given) if loader is None else loader, seed)
        undone = trainer.stepper.store.rollback(trainer.strategy)
        with closing(batches), rng.preserve_rng(), undone:
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
        """The rate of an update, counted from 0."""
        return float(self.start_lr * (self.end_lr / self.start_lr) ** (update / (self.iterations - 1)))

    def _sweep(self, trainer: Trainable, batches: Iterator[object]) -> list[float]:
        """The losses until they are seen to diverge; a few more come after, since the host reads every few updates."""
        found = trial_losses(trainer.stepper, batches)
        ratios = group_ratios(trainer.optimizer, "LRFinder")
        for each in (trainer.model, trainer.optimizer):  # a schedule-free optimizer has modes, too
            train = getattr(each, "train", None)
            if train is not None and not getattr(each, "training", False):
                train()
        losses: list[float] = []
        waiting: list[Tensor] = []
        for update in range(self.iterations):
            rate = self.rate(update)
            write_rates(trainer.optimizer, [rate * ratio for ratio in ratios])
            waiting.append(next(found))
            if len(waiting) == LOOK or update + 1 == self.iterations:
                losses += to_host(waiting)
                waiting.clear()
                if self._end(losses, self._smooth(losses)) is not None:
                    break
        return losses

    def _smooth(self, losses: Sequence[float]) -> list[float]:
        """The mean of the first few losses, exponentially weighted from there on."""
        mean, smoothed = 0.0, []
        for number, loss in enumerate(losses, start=1):
            new = 1 / number if number <= SETTLED else 1 - self.smoothing
            mean += new * (loss - mean)
            smoothed.append(mean)
        return smoothed

    def _end(self, losses: Sequence[float], smoothed: Sequence[float]) -> int | None:
        """The update at which the sweep diverged; None if it did not."""
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
        """The rate at which the loss falls fastest over the logarithm of the rate, or why there is none.

        The running mean lags too much; this compares the means of a tenth of the updates on either side.
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
            return None, "the loss falls fastest at the very last rates; choose a larger end_lr"
        return self.rate(steepest), ""

    def _on_started(self, engine: Engine) -> None:
        if engine.state.iteration:
            return
        trainer = cast(Trainable, engine)
        found = self.run(trainer)
        log = get_logger("handlers")
        if found.suggestion is None:
            log.warning("LRFinder suggests no learning rate", reason=found.reason)
        else:
            now = float(trainer.optimizer.defaults["lr"])
            log.info("LRFinder suggests a learning rate", suggestion=found.suggestion, configured=now)


def _check(trainer: object) -> None:
    lacking = [name for name in _NEEDED if not hasattr(trainer, name)]  # a replay raises its own error
    if lacking:
        raise TypeError(
            f"LRFinder({type(trainer).__name__}): needs a pulsetrain.Trainer; this one has no {', '.join(lacking)}"
        )
    world_size = ranks().world_size
    if world_size > 1:
        raise ConfigurationError(
            "each process would end the sweep according to its losses, and the others would wait for it; start one "
            "process to find the rate",
            "LRFinder",
            world_size=world_size,
        )
    if getattr(trainer, "optimizers", None) is not None:
        raise ConfigurationError(
            "LRFinder: the trainer has several optimizers, and no one loss says which rate is good"
        )
    if getattr(getattr(trainer, "train_loader", None), "fires_rollouts", False):
        raise ConfigurationError(
            "LRFinder: the policy makes the batches itself, and no loss over its own rollouts says which rate is good; "
            "compare the returns of short runs"
        )
    if getattr(trainer, "external_step", False):
        raise ConfigurationError(
            f"LRFinder: the step of {type(trainer).__name__} is the loop's body, which cannot be called; use a Trainer"
        )


def trial_losses(stepper: TrialStepper, batches: Iterator[object]) -> Iterator[Tensor]:
    """Updates as the trainer makes them, on an engine that nobody listens to.

    Yields:
        The mean loss over the batches of each update, shape ().
    """
    noted: list[tuple[Tensor, int | Tensor]] = []
    step = stepper.trial(lambda batch, result: noted.append((result.loss, batch.size)))
    engine = Engine(step, name="lr_finder")
    engine.state.samples = engine.state.tokens = 0
    while True:
        noted.clear()
        before = engine.state.update
        while engine.state.update == before:
            step(engine, next(batches))
        losses = torch.stack([loss for loss, _ in noted])
        if len(noted) == 1:
            yield losses[0]
        else:
            weights = torch.stack([torch.as_tensor(size, device=losses.device) for _, size in noted])
            yield (losses.float() * weights).sum() / weights.sum()


def _falls(losses: NDArray[np.float64], width: int) -> bool:
    """Whether the mean over some `width` losses in a row is below that of the first ones by more than chance.

    For losses that differ only by chance, that is so in about one sweep of twenty.
    """
    deviation = np.median(np.abs(np.diff(losses))) / 0.954  # of normally distributed losses, robust to a few outliers
    width = min(width, len(losses) - SETTLED)
    means = np.convolve(losses[SETTLED:], np.full(width, 1 / width), "valid")
    fall = losses[:SETTLED].mean() - means.min()
    return bool(fall > 3 * deviation * math.sqrt(1 / SETTLED + 1 / width))


def _copy_of_loader(loader: object) -> object:
    """A loader that gives the same batches, and leaves the position of this one unchanged.

    A list of batches is shared, and so is the map-style dataset of a DataLoader; anything else is copied.

    Raises:
        ConfigurationError: the loader can be read only once, or cannot be copied.

    >>> _copy_of_loader([1, 2])
    [1, 2]
    """
    if type(loader) in (list, tuple):
        return loader
    remedy = "and training would miss the batches that are read now; pass loader="
    if can_be_read_once(loader):
        raise ConfigurationError(f"it can be read only once, {remedy}", train_loader=type(loader))
    try:
        if not isinstance(loader, DataLoader):
            return copy.deepcopy(loader)
        copied = copy.copy(loader)
        vars(copied)["_iterator"] = None  # the workers of a pass under way
        shared: dict[int, object] = {id(loader.dataset): loader.dataset} if can_be_keyed(loader) else {}
        vars(copied).update(copy.deepcopy(vars(copied), shared))
        return copied
    except Exception as error:  # a file, a socket, a lock ...
        raise ConfigurationError(f"it cannot be copied ({error}), {remedy}", train_loader=type(loader)) from error


def _endless(loader: Any, seed: int) -> Generator[Any]:
    """The loader's batches, pass after pass, in the order of a run's passes if the seed decides it.

    Raises:
        ConfigurationError: the loader gives none.

    >>> list(itertools.islice(_endless([1, 2], seed=0), 5))
    [1, 2, 1, 2, 1]
    """
    keyed = KeyedLoader(loader, seed) if can_be_keyed(loader) else None
    for number in itertools.count(1):
        given = False
        for batch in keyed.begin(number) if keyed is not None else _a_pass(loader, rng.derive(seed, number)):
            given = True
            yield batch
        if not given:
            raise ConfigurationError("gives no batch; give it data", train_loader=type(loader))


def _a_pass(loader: Iterable[object], seed: int) -> Iterator[object]:
    if type(loader) in (list, tuple):
        return iter(loader)
    key_order(loader, seed)
    with workers_begin(loader):
        return rng.Draws(seed).around(loader)
