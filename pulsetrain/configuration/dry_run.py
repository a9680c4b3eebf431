"""Two batches through everything that a run is made of, in a temporary folder: `pulsetrain train --dry-run`."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch

from pulsetrain.configuration.assemble import HANDLERS, assemble
from pulsetrain.configuration.claim import resolve_folder
from pulsetrain.configuration.class_paths import find, look_in
from pulsetrain.configuration.instantiate import instantiate, spec_of
from pulsetrain.engine import Events, Every, Phase
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.data.keyed_loader import length_of
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.events.subscription import FIRST, LAST
from pulsetrain.engine.step.protocols import describe
from pulsetrain.handlers import Alert, Checkpointer, LRFinder
from pulsetrain.handlers.crash.crash_files import forget_bundle
from pulsetrain.handlers.learning_rate.lr_finder import LEAST
from pulsetrain.handlers.loggers.service import ServiceLogger
from pulsetrain.trainer import Trainer

__all__ = ["Unattached", "dry_run"]

BATCHES = 2  # of training, more where an update takes more; and of each validation set
OUTWARD = (ServiceLogger, Alert)  # beside classes that say `reaches_out = True`


class Unattached:
    """Stands for a handler that reaches out of this machine: it hears nothing."""

    def attach(self, engine: Any) -> Self:
        return self

    def detach(self) -> None: ...


def dry_run(
    config: Mapping[str, Any],
    base: Path,
    folder: str | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    begun: Callable[[Trainer], object] = lambda trainer: None,
) -> Iterator[str]:
    """Train, validate, save and load for two batches; nothing is left behind, whether it fails or not.

    Handlers write into a temporary folder in place of the run folder, and of a `folder` of their own. Those whose class
    says `reaches_out = True`, the loggers of services and Alert are made, to have their arguments checked, and not
    attached: nothing is sent. Cadences of handlers that are an `Every` become 1 of their units, and the sweep of an
    LRFinder as short as one can be.

    Args:
        config: what `read_config` gave.
        base: where class paths are looked up first.
        folder: the run folder, in place of the configuration's.
        clock: seconds.
        begun: called with the trainer before it trains.

    Returns:
        Lines that tell what was checked, and how long the run would take.

    Raises:
        Exception: whatever the run would raise.
    """
    pattern = str(folder or config["run"])
    place = resolve_folder(pattern, chosen=folder is not None)
    _check_writable(place)
    look_in(base)
    yield f"dry run; nothing is kept, and the run folder would be {place}"
    trainer: Trainer | None = None
    with tempfile.TemporaryDirectory(prefix="pulsetrain-dry-run-") as temporary:
        run = Path(temporary) / "run"
        try:
            rehearsed, silent = _rehearsal(config, run)
            trainer = assemble(rehearsed, base, run).trainer
            timing = _Timing(trainer, clock)
            begun(trainer)
            yield from _train(trainer, timing)
            yield from _told_of_handlers(trainer, silent)
            yield from _save(trainer, Path(temporary) / "saved", clock)
        except BaseException as error:
            forget_bundle(error)  # it goes with the folder
            raise
        finally:
            for handler in trainer.handlers if trainer is not None else ():
                getattr(handler, "detach", lambda: None)()
        yield from timing.told()


def _rehearsal(config: Mapping[str, Any], run: Path) -> tuple[dict[str, Any], list[str]]:
    """The configuration for the rehearsal, and the names of the handlers that hear nothing of it."""
    rehearsed: dict[str, Any] = deepcopy(dict(config))
    training = rehearsed["training"] = {**(rehearsed.get("training") or {}), "log_every_n_steps": 1}
    if training.get("run_dir") is not None:
        training["run_dir"] = str(run)
    silent: list[str] = []
    for index, spec in enumerate(rehearsed.get("handlers") or ()):
        where = f"handlers[{index}]"
        class_path, init_args = spec_of(spec, where, f"{where}.init_args")
        made_by = find(class_path, where, HANDLERS)
        if getattr(made_by, "reaches_out", isinstance(made_by, type) and issubclass(made_by, OUTWARD)):
            instantiate(spec, where, HANDLERS, folder=str(run))
            silent.append(getattr(made_by, "__name__", str(class_path)))
            rehearsed["handlers"][index] = f"{__name__}.{Unattached.__name__}"
            continue
        init_args = dict(init_args)
        if init_args.get("folder") is not None:
            init_args["folder"] = str(run)
        rehearsed["handlers"][index] = {"class_path": class_path, "init_args": init_args}
        every = init_args.get("every", _default(made_by, "every"))
        if every is None and "every" in signature(made_by).parameters:  # then the constructor says what it is
            tried = str(run.with_name(f"tried-{index}"))
            arguments = {**init_args, "folder": tried} if "folder" in init_args else init_args
            built = instantiate({"class_path": class_path, "init_args": arguments}, where, HANDLERS, folder=tried)
            every = getattr(built, "every", None)
        if units := _units(every):
            init_args["every"] = {unit: 1e-9 if unit == "seconds" else 1 for unit in units}
        if isinstance(made_by, type) and issubclass(made_by, LRFinder):
            updates = init_args.get("iterations", _default(made_by, "iterations"))
            if isinstance(updates, (int, float)) and updates > LEAST:
                init_args["iterations"] = LEAST
    return rehearsed, silent


def _units(every: Any) -> list[str]:
    """Of a cadence, as the configuration writes it or as a default; none where it is no cadence."""
    names = [each.name for each in fields(Every)]
    given = every if isinstance(every, Mapping) else {name: getattr(every, name, None) for name in names}
    known = isinstance(every, Every) or (isinstance(every, Mapping) and every.keys() <= set(names))
    return [name for name in names if known and given.get(name) is not None]


def _default(made_by: Any, name: str) -> Any:
    parameter = signature(made_by).parameters.get(name)
    return None if parameter is None else parameter.default


class _First:
    """The first batches of a loader, which keeps its other attributes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), BATCHES)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Timing:
    """What a batch took: the wait for it, and its step."""

    def __init__(self, trainer: Trainer, clock: Callable[[], float]) -> None:
        self._trainer, self._clock = trainer, clock
        self._since = 0.0
        self.waits: list[float] = []
        self.steps: list[float] = []
        self.batch = ""  # shapes
        for event, hear, phase, order in (
            (Events.GET_BATCH_STARTED, self._begin, Phase.PERSIST, LAST),
            (Events.GET_BATCH_COMPLETED, self._waited, Phase.COMPUTE, FIRST),
            (Events.ITERATION_STARTED, self._begin, Phase.PERSIST, LAST),
            (Events.ITERATION_COMPLETED, self._stepped, Phase.COMPUTE, FIRST),
        ):
            trainer.bus.subscribe(event, hear, sender=trainer, phase=phase, order=order)

    def _now(self) -> float:
        device = self._trainer.backend.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self._clock()

    def _begin(self) -> None:
        self._since = self._now()

    def _waited(self) -> None:
        self.waits.append(self._now() - self._since)

    def _stepped(self) -> None:
        self.steps.append(self._now() - self._since)
        self.batch = self.batch or describe(self._trainer.state.batch)

    def told(self) -> Iterator[str]:
        """Pace, memory, and how long the run would take; nothing where it was stopped before a batch."""
        if not self.steps:
            return
        pace = self.steps[-1] + self.waits[-1]
        first = f"; the first {self.steps[0]:.3g} s" if len(self.steps) > 1 else ""
        yield _row("speed", f"{self.steps[-1]:.3g} s a batch, and {self.waits[-1]:.3g} s of waiting for it{first}")
        yield _row("memory", _memory(self._trainer.backend.device))
        total = self._trainer.total_iterations
        if total is None:
            yield _row("the run", "its number of batches is not known before")
        else:
            long = f"about {_duration(total * pace)} at this pace, validation and saving apart"
            yield _row("the run", f"{total:,} batches, {long}")


def _train(trainer: Trainer, timing: _Timing) -> Iterator[str]:
    trainer.val_loaders, whole = {name: _First(each) for name, each in trainer.val_loaders.items()}, trainer.val_loaders

    def stop_epoch() -> None:
        if trainer.state.iteration >= BATCHES and trainer.state.update >= 1:
            trainer.terminate_epoch()

    trainer.add_event_handler(Events.ITERATION_COMPLETED, stop_epoch, phase=Phase.PERSIST)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, trainer.validator.validate_once, phase=Phase.COMPUTE)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.terminate(reason="dry run"), phase=Phase.PERSIST)
    trainer.train()
    if not timing.steps:
        yield _row("stopped", f"before a batch was trained: {trainer.state.stop_reason}")
        return
    trainer.validator.validate_once()  # where the run's bound came before the epoch's end
    parameters = list(trainer.model.parameters())
    count = sum(each.numel() for each in parameters)
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    frozen = f", {trained:,} of them trained" if trained != count else ""
    backend, state = trainer.backend, trainer.state
    what = (
        f"{type(trainer.model).__name__}, {count:,} parameters{frozen}, {trainer.config.precision} on {backend.device}"
    )
    yield _row("model", what)
    yield _row("batch", timing.batch)
    losses = [value for name, value in sorted(trainer.history.get_history().items()) if name == "train/loss"]
    mean = f", mean loss {losses[0][-1]:.4g}" if losses and losses[0] else ""
    yield _row("trained", f"{_count(state.iteration, 'batch')}, {_count(state.update, 'update')}{mean}")
    for name, loader in whole.items():
        length = length_of(loader)
        of = "" if length is None else f" of {length:,}"
        metrics = [f"{key} {value:.4g}" for key, value in state.metrics.items() if key.startswith(f"{name}/")]
        read = BATCHES if length is None else min(length, BATCHES)
        yield _row("validated", f"{name}: {read}{of} batches, {', '.join(metrics)}")


def _told_of_handlers(trainer: Trainer, silent: list[str]) -> Iterator[str]:
    names = [type(each).__name__ for each in trainer.handlers if not isinstance(each, Unattached)]
    yield _row("handlers", f"{', '.join(names) or 'none'}: heard it, and wrote to a temporary folder")
    if silent:
        yield _row("not heard", f"{', '.join(silent)}: made, and not attached, so that nothing is sent")


def _save(trainer: Trainer, folder: Path, clock: Callable[[], float]) -> Iterator[str]:
    saver = next((each for each in trainer.handlers if isinstance(each, Checkpointer)), None)
    if saver is None:
        yield _row("checkpoint", "none: there is no Checkpointer among the handlers")
        return
    start = clock()
    manager = CheckpointManager(folder)
    form = saver.form_for(trainer)
    path = manager.save(trainer.checkpoint_state(), "dry_run", step=trainer.state.iteration, form=form)
    saved = clock()
    trainer.load_checkpoint(str(path))
    size = manager.size(path)
    yield _row("checkpoint", f"{size / 1e6:,.2f} MB, saved in {saved - start:.2g} s, loaded in {clock() - saved:.2g} s")


def _check_writable(folder: Path) -> None:
    """Refuse a run folder that could not be made; it is not made."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "Permission denied" if there.is_dir() else "Not a directory"
        raise RunFolderError(f"run folder {folder}: cannot be made: {why}; choose another with --run")


def _memory(device: torch.device) -> str:
    unit = 1 if sys.platform == "darwin" else 1024
    host = f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.2f} GB of this machine's"
    if device.type != "cuda":
        return host
    return f"{host}, {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB of the device's"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def _count(number: int, thing: str) -> str:
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"


def _row(name: str, text: str) -> str:
    return f"{name:<12}{text}"
