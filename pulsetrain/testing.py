"""Helpers for tests of training code: small models and data, recorded events, and proofs that are one call each.

    from pulsetrain.testing import assert_resumes_exactly

    def test_my_run_resumes(tmp_path):
        assert_resumes_exactly(build_trainer, tmp_path)

With the package installed, pytest also finds the fixtures `tiny_model`, `tiny_loader` and `manual_clock`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain.engine import LAST, Engine, Event, EventBus, Events, Every, Phase
from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import Replay, diff
from pulsetrain.handlers import Checkpointer, EventRecorder, Fingerprints, TimeLimit
from pulsetrain.handlers.learning_rate.lr_finder import trial_losses
from pulsetrain.handlers.loggers.service import ServiceLogger
from pulsetrain.state.digests import bits_of
from pulsetrain.trainer import Trainer

__all__ = [
    "ManualClock",
    "RecordedEvents",
    "assert_overfits",
    "assert_replays_equal",
    "assert_resumes_exactly",
    "run_two_batches",
    "tiny_loader",
    "tiny_model",
]

_SHOWN = 5  # names of values that differ, in a message
_OF_ONE_RUN = (EventRecorder, ServiceLogger, TimeLimit)  # whose states have times, or ids of the run

BuildTrainer = Callable[[list[Any]], Trainer]
"""Makes a trainer with everything that it needs, and adds the handlers that it is given to its own."""


def tiny_model(inputs: int = 4, outputs: int = 1, *, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    """A network with one hidden layer of 8 units; the caller's random generators do not change.

    >>> tiny_model()(torch.ones(2, 4)).shape
    torch.Size([2, 1])
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, outputs))


def tiny_loader(
    batches: int = 4, batch_size: int = 8, *, inputs: int = 4, seed: int = 0, **options: Any
) -> DataLoader[Any]:
    """Shuffled pairs (inputs, sum of the inputs), which `tiny_model` learns with the loss "mse".

    >>> loader = tiny_loader()
    >>> len(loader), [each.shape for each in next(iter(loader))]
    (4, [torch.Size([8, 4]), torch.Size([8, 1])])

    Args:
        batches: number of batches.
        batch_size: rows of each batch.
        inputs: columns of the inputs.
        seed: the seed of the data.
        options: further arguments of DataLoader.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batches * batch_size, inputs, generator=generator)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    return DataLoader(data, batch_size=batch_size, **{"shuffle": True, **options})


class ManualClock:
    """A clock that stands still until it is set: for `Every(seconds=...).events(clock)` and whatever accepts a clock.

    >>> clock = ManualClock()
    >>> clock.now += 5
    >>> clock()
    5.0
    """

    def __init__(self) -> None:
        self.now: float = 0.0  # seconds

    def __call__(self) -> float:
        return self.now


class RecordedEvents:
    """The events of an engine or a bus, in order, kept in memory.

    By default, it does not cause any: events that are fired only if something subscribes to them, such as
    METRICS_LOGGED and GRADIENTS_READY, are then seen only if something else subscribes.

    >>> engine = Engine(lambda engine, batch: batch)
    >>> events = RecordedEvents(engine)
    >>> _ = engine.run([1, 2])
    >>> events.names.count("iteration_completed"), [each.iteration for each in events.of(Events.ITERATION_COMPLETED)]
    (2, [1, 2])

    Args:
        engine_or_bus: an engine, or a bus for all of its engines.
        custom: events in addition to those of `Events`.
        passive: False also causes the events that are fired only if something subscribes to them.
    """

    def __init__(self, engine_or_bus: Engine | EventBus, *custom: Any, passive: bool = True) -> None:
        engine = engine_or_bus if isinstance(engine_or_bus, Engine) else None
        bus = engine_or_bus.bus if isinstance(engine_or_bus, Engine) else engine_or_bus
        self.events: list[Event] = []
        for event in (*Events, *custom):
            bus.subscribe(event, self._note, sender=engine, phase=Phase.OBSERVE, order=LAST, passive=passive)

    def _note(self, engine: Engine, event: Event) -> None:
        self.events.append(event)

    @property
    def names(self) -> list[str]:
        """The names of all events, such as "epoch_started"."""
        return [event.type for event in self.events]

    def of(self, wanted: Any) -> list[Event]:
        """The events of one type."""
        return [event for event in self.events if event.type == wanted.value]

    def payloads(self, wanted: Any) -> list[Any]:
        """The payloads of the events of one type."""
        return [event.payload for event in self.of(wanted)]


def assert_resumes_exactly(build_trainer: BuildTrainer, folder: Path, *, at: int | None = None, seed: int = 0) -> None:
    """Assert that a run that is interrupted and resumed ends like one that never was, bit for bit.

    Three trainers are made: one trains without a break; one is interrupted after `at` iterations; one resumes from its
    checkpoint. Their recorded events, with digests of weights, optimizer, generators and batches at each update, are
    compared, and at the end everything that a checkpoint holds: weights, optimizer, generators, the place in the data,
    and the states of the strategy and the handlers. Not compared are what the runs were made with, the number of saves,
    and the states of an EventRecorder, a TimeLimit and of loggers to a service, which differ between equal runs.

    >>> import tempfile
    >>> from structlog.testing import capture_logs
    >>> from pulsetrain import SupervisedStrategy, TrainingConfig
    >>> def build_trainer(handlers):
    ...     config = TrainingConfig(max_epochs=2, seed=1, progress=False)
    ...     return Trainer(tiny_model(dropout=0.5), tiny_loader(), strategy=SupervisedStrategy("mse"), config=config,
    ...                    handlers=handlers)
    >>> with tempfile.TemporaryDirectory() as folder, capture_logs():
    ...     assert_resumes_exactly(build_trainer, Path(folder), at=3)

    Args:
        build_trainer: makes the trainer from scratch, with these handlers in addition to its own. It must not share
            objects between two calls, such as a model or a generator.
        folder: an empty folder, for recordings and checkpoints.
        at: iterations before the interruption; by default half of the run's.
        seed: the seed of the generators before each call.

    Raises:
        AssertionError: the runs differ, or events are lost and cannot be compared; the message names the first event
            or the parts of the state that differ.
        ConfigurationError: the run has too few iterations.
    """
    whole = _build(build_trainer, folder / "whole", seed, every=1)
    whole.train()
    total = whole.state.iteration
    at = total // 2 if at is None else at
    if not 0 < at < total:
        raise ConfigurationError(
            f"needs an iteration before the run's last, which is {total}", "assert_resumes_exactly", at=at
        )
    cut = _build(build_trainer, folder / "resumed", seed, every=1)

    def interrupt() -> None:
        raise _InterruptedError

    cut.bus.subscribe(Events.ITERATION_COMPLETED(once=at), interrupt, sender=cut, phase=Phase.PERSIST, order=LAST)
    try:
        cut.train()
    except _InterruptedError:
        pass
    resumed = _build(build_trainer, folder / "resumed", seed, every=1)
    resumed.train(resume="latest")
    found = diff(folder / "whole", folder / "resumed")
    if found:
        raise AssertionError(f"a run that was resumed after iteration {at} differs from one without a break:\n{found}")
    if found.unread or found.damage:
        raise AssertionError(
            f"some events of a run that was resumed after iteration {at} were not compared, or are damaged:\n{found}"
        )
    if differing := list(_differing(_comparable(whole), _comparable(resumed))):
        raise AssertionError(
            f"after a resume at iteration {at} and in a run without a break, these parts of their states differ: "
            f"{', '.join(differing[:_SHOWN])}{' ...' if len(differing) > _SHOWN else ''}; look at the state_dict() and "
            "load_state_dict() of the objects named"
        )


def assert_replays_equal(make_handler: Callable[[], Any], build_trainer: BuildTrainer, folder: Path) -> None:
    """Assert that a handler that is replayed over a run's recording reaches the state that it had in the run.

    >>> import tempfile
    >>> from pulsetrain import EarlyStopping, SupervisedStrategy, TrainingConfig
    >>> def build_trainer(handlers):
    ...     config = TrainingConfig(max_epochs=3, seed=1, progress=False)
    ...     return Trainer(tiny_model(), tiny_loader(), tiny_loader(), strategy=SupervisedStrategy("mse"),
    ...                    config=config, handlers=handlers)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     assert_replays_equal(lambda: EarlyStopping(patience=2, mode="min"), build_trainer, Path(folder))

    Args:
        make_handler: makes the handler; called twice.
        build_trainer: as for `assert_resumes_exactly`.
        folder: an empty folder, for the recording.

    Raises:
        AssertionError: the states differ.
    """
    live, replayed = make_handler(), make_handler()
    build_trainer([live, EventRecorder(folder)]).train()
    replay = Replay(folder)
    replayed.attach(replay)
    replay.run()
    states = [_state_of(each) for each in (live, replayed)]
    differing = [name for name in {**states[0], **states[1]} if not _equal(states[0].get(name), states[1].get(name))]
    if differing:
        pairs = ", ".join(f"{name}: {states[0].get(name)!r} and {states[1].get(name)!r}" for name in sorted(differing))
        raise AssertionError(f"{type(live).__name__} in the run and in its replay: {pairs}")


def assert_overfits(trainer: Trainer, *, updates: int = 200, to: float = 0.1) -> list[float]:
    """Assert that the model can memorise one batch; the trainer does not change.

    A model, loss or optimizer that cannot do this will not learn more data either.

    >>> from pulsetrain import SupervisedStrategy, TrainingConfig
    >>> config = TrainingConfig(learning_rate=0.05, progress=False)
    >>> trainer = Trainer(tiny_model(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=config)
    >>> losses = assert_overfits(trainer)
    >>> losses[-1] < 0.1 * losses[0]
    True

    Args:
        trainer: a trainer that has not trained, or one between two runs.
        updates: the largest number of updates.
        to: the share of the first loss that must be reached.

    Returns:
        The losses.

    Raises:
        AssertionError: the loss did not fall that far.
        ConfigurationError: the training data is empty.
    """
    with rng.preserve_rng():  # a loader that shuffles draws
        batch = next(iter(trainer.train_loader), None)
    if batch is None:
        raise ConfigurationError("gave no batch; it is empty", "assert_overfits", train_loader=...)
    losses: list[float] = []
    with rng.preserve_rng(), trainer.stepper.store.rollback(trainer.strategy):
        rng.seed_everything(trainer.seed)
        trainer.model.train()
        for loss in islice(trial_losses(trainer.stepper, _forever(batch)), updates):
            losses.append(loss.item())
            if not math.isfinite(losses[-1]) or losses[-1] <= to * losses[0]:
                break
    if not losses[-1] <= to * losses[0]:
        raise AssertionError(
            f"after {len(losses)} updates on one batch the loss is {losses[-1]:.4g}, and it was {losses[0]:.4g} at "
            f"first: it did not fall to {to:g} of that; look at the loss, the learning rate, and what is frozen"
        )
    return losses


def run_two_batches(trainer: Trainer) -> dict[str, float]:
    """Train on two batches and validate on two of each set, with all handlers, to see whether everything fits together.

    >>> from pulsetrain import SupervisedStrategy, TrainingConfig
    >>> trainer = Trainer(tiny_model(), tiny_loader(), tiny_loader(), strategy=SupervisedStrategy("mse"),
    ...                   config=TrainingConfig(progress=False))
    >>> list(run_two_batches(trainer))
    ['train/loss', 'val/loss']

    Args:
        trainer: a trainer that has not trained; its validation sets are shortened.

    Returns:
        The mean training loss and the validation metrics.

    Raises:
        AssertionError: the loss is not finite.
    """
    losses: list[float] = []

    @trainer.on(Events.ITERATION_COMPLETED, phase=Phase.OBSERVE)
    def note(engine: Trainer) -> None:
        losses.append(float(engine.state.output["loss"]))
        if engine.state.iteration == 2:
            engine.terminate(reason="two batches were trained")

    trainer.val_loaders = {
        name: each if getattr(each, "judges_policy", False) else list(islice(each, 2))
        for name, each in trainer.val_loaders.items()
    }
    trainer.train()
    metrics = {"train/loss": sum(losses) / len(losses)}
    if trainer.val_loaders:
        metrics.update(trainer.validate())
    bad = [name for name, value in metrics.items() if name.endswith("loss") and not math.isfinite(value)]
    if bad:
        raise AssertionError(f"not finite after two batches: {', '.join(f'{name}={metrics[name]}' for name in bad)}")
    return metrics


class _InterruptedError(Exception):
    """Ends a run as an error would."""


def _build(build_trainer: BuildTrainer, folder: Path, seed: int, every: int) -> Trainer:
    rng.seed_everything(seed)
    handlers = [
        Checkpointer(folder, every=Every(iterations=every), at_end=False),
        Fingerprints(every=Every(updates=1), batches=True),
        EventRecorder(folder),
    ]
    return build_trainer(handlers)


def _comparable(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint holds, as far as equal runs have it in common."""
    state = trainer.checkpoint_state()
    own = [key for key, handler in trainer.registry.stateful().items() if isinstance(handler, _OF_ONE_RUN)]
    handlers = {
        key: each["state"] for key, each in state["handlers"].items() if key not in own
    }  # settings name folders
    counters = {name: each for name, each in state["counters"].items() if name != "save"}
    rest = {name: each for name, each in state.items() if name not in ("made_with", "unsaved")}
    return {**rest, "handlers": handlers, "counters": counters}


def _differing(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """The names of the values that differ, such as "counters.epoch"."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        for key, value in one.items():
            yield from _differing(value, other[key], f"{name}.{key}" if name else str(key))
    elif not _equal(one, other):
        yield name


def _state_of(handler: Any) -> Mapping[str, Any]:
    if hasattr(handler, "state_dict"):
        state: Mapping[str, Any] = handler.state_dict()
        return state
    return {name: value for name, value in vars(handler).items() if not name.startswith("_")}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        kinds = [(each.shape, each.dtype) for each in (one, other)]
        bits = (bits_of(each.detach().reshape(-1)) for each in (one, other))  # nan is equal to itself here
        return kinds[0] == kinds[1] and next(bits) == next(bits)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _forever(batch: Any) -> Iterator[Any]:
    while True:
        yield batch
