"""`pulsetrain train --dry-run`: tries two batches of training, validation, handlers and a checkpoint."""

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

from pulsetrain.configuration.assemble import assemble
from pulsetrain.configuration.claim import resolve_folder
from pulsetrain.configuration.class_paths import Factory, find, look_in
from pulsetrain.configuration.instantiate import instantiate, spec_of
from pulsetrain.configuration.shipped_handlers import HANDLERS
from pulsetrain.engine import FIRST, LAST, Events, Every, Phase, RunFolderError
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.data.loaders import length_of
from pulsetrain.engine.durations import duration
from pulsetrain.engine.plain_text import format_count
from pulsetrain.engine.step.protocols import describe
from pulsetrain.handlers import Alert, Checkpointer, LRFinder
from pulsetrain.handlers.crash.crash_files import forget_bundle
from pulsetrain.handlers.learning_rate.lr_finder import LEAST
from pulsetrain.handlers.loggers.service import ServiceLogger
from pulsetrain.trainer import Trainer

__all__ = ["Unattached", "dry_run"]

BATCHES = 2  # of training, or more where an update needs more; and of each validation set
OUTWARD = (ServiceLogger, Alert)  # and any class with `reaches_out = True`


class Unattached:
    """Takes the position of a handler that would send something out of this machine."""

    def attach(self, engine: object) -> Self:
        return self

    def detach(self) -> None: ...


def dry_run(
    config: Mapping[str, object],
    base: Path,
    folder: str | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    started: Callable[[Trainer], object] = lambda trainer: None,
) -> Iterator[str]:
    """Train, validate, save and load for two batches; no file is left, whether it fails or not.

    Handlers write into a temporary folder, also those that have a `folder` of their own. Loggers of services, Alert and
    classes with `reaches_out = True` are made, which checks their arguments, and not attached: nothing is sent. Each
    unit of a handler's `Every` becomes 1, and the sweep of an LRFinder as short as it can be.

    Args:
        config: the configuration, as `read_config` returns it.
        base: the folder in which class paths are looked up first.
        folder: the run folder, instead of the configuration's.
        clock: returns seconds.
        started: called with the trainer before it trains.

    Yields:
        Lines about what was checked, and how long the run would take.

    Raises:
        Exception: any error that the run would raise.
    """
    pattern = str(folder or config["run"])
    run_folder = resolve_folder(pattern, chosen=folder is not None)
    _check_writable(run_folder)
    look_in(base)
    yield f"dry run; nothing is kept, and the run folder would be {run_folder}"
    trainer: Trainer | None = None
    with tempfile.TemporaryDirectory(prefix="pulsetrain-dry-run-") as temporary:
        run = Path(temporary) / "run"
        try:
            rehearsed, silent = _rehearsal(config, run)
            trainer = assemble(rehearsed, base, run).trainer
            timing = _Timing(trainer, clock)
            started(trainer)
            yield from _train(trainer, timing)
            yield from _handler_rows(trainer, silent)
            yield from _save(trainer, Path(temporary) / "saved", clock)
        except BaseException as error:
            forget_bundle(error)  # it is deleted with the folder
            raise
        finally:
            for handler in trainer.handlers if trainer is not None else ():
                getattr(handler, "detach", lambda: None)()
        yield from timing.rows()


def _rehearsal(config: Mapping[str, Any], run: Path) -> tuple[dict[str, Any], list[str]]:
    """The configuration for the rehearsal, and the names of the handlers that are not attached."""
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
        if every is None and "every" in signature(made_by).parameters:  # then the constructor chooses it
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


def _units(every: object) -> list[str]:
    """The units of a cadence, as a mapping of the configuration or as an Every; none for anything else."""
    names = [each.name for each in fields(Every)]
    given = every if isinstance(every, Mapping) else {name: getattr(every, name, None) for name in names}
    known = isinstance(every, Every) or (isinstance(every, Mapping) and every.keys() <= set(names))
    return [name for name in names if known and given.get(name) is not None]


def _default(made_by: Factory, name: str) -> object:
    parameter = signature(made_by).parameters.get(name)
    return None if parameter is None else parameter.default


class _First:
    """The first batches of a loader, with its other attributes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[object]:
        return islice(iter(self._loader), BATCHES)

    def evaluate_policy(self, name: str) -> dict[str, float]:  # of rollouts that are a validation set
        found: dict[str, float] = self._loader.evaluate_policy(name, batches=BATCHES)
        return found

    def __getattr__(self, name: str) -> Any:  # of the loader
        return getattr(self._loader, name)


class _Timing:
    """Measures how long the wait for each batch and its step take."""

    def __init__(self, trainer: Trainer, clock: Callable[[], float]) -> None:
        self._trainer, self._clock = trainer, clock
        self._since = 0.0
        self.waits: list[float] = []
        self.steps: list[float] = []
        self.batch = ""  # shapes
        for event, handler, phase, order in (
            (Events.GET_BATCH_STARTED, self._begin, Phase.PERSIST, LAST),
            (Events.GET_BATCH_COMPLETED, self._waited, Phase.COMPUTE, FIRST),
            (Events.ITERATION_STARTED, self._begin, Phase.PERSIST, LAST),
            (Events.ITERATION_COMPLETED, self._stepped, Phase.COMPUTE, FIRST),
        ):
            trainer.bus.subscribe(event, handler, sender=trainer, phase=phase, order=order)

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

    def rows(self) -> Iterator[str]:
        """Pace, memory, and how long the run would take; nothing where the run ended before a batch."""
        if not self.steps:
            return
        pace = self.steps[-1] + self.waits[-1]
        first = f"; the first {self.steps[0]:.3g} s" if len(self.steps) > 1 else ""
        yield _row("speed", f"{self.steps[-1]:.3g} s a batch, and {self.waits[-1]:.3g} s of waiting for it{first}")
        yield _row("memory", _memory(self._trainer.backend.device))
        total = self._trainer.total_iterations
        if total is None:
            yield _row("the run", "the number of batches is not known in advance")
        else:
            long = f"about {duration(total * pace)} at this pace, without validation and saving"
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
    trainer.validator.validate_once()  # if the run ended before its first epoch did
    parameters = list(trainer.model.parameters())
    count = sum(each.numel() for each in parameters)
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    frozen = f", {trained:,} of them trained" if trained != count else ""
    backend, state = trainer.backend, trainer.state
    size = f"{count:,} parameters{frozen}"
    yield _row("model", f"{type(trainer.model).__name__}, {size}, {trainer.config.precision} on {backend.device}")
    yield _row("batch", timing.batch)
    losses = trainer.history.get_history().get("train/loss")
    mean = f", mean loss {losses[-1]:.4g}" if losses else ""
    yield _row("trained", f"{format_count(state.iteration, 'batch')}, {format_count(state.update, 'update')}{mean}")
    for name, loader in whole.items():
        metrics = [f"{key} {value:.4g}" for key, value in state.metrics.items() if key.startswith(f"{name}/")]
        yield _row("validated", f"{name}: {_read_of(loader)}, {', '.join(metrics)}")


def _read_of(loader: Any) -> str:
    """How much of a validation set was read."""
    if getattr(loader, "judges_policy", False):
        total = len(loader.prompts)
        return f"{min(total, BATCHES * loader.prompts_per_rollout):,} of {total:,} prompts"
    length = length_of(loader)
    return f"{BATCHES} batches" if length is None else f"{min(length, BATCHES)} of {length:,} batches"


def _handler_rows(trainer: Trainer, silent: list[str]) -> Iterator[str]:
    names = [type(each).__name__ for each in trainer.handlers if not isinstance(each, Unattached)]
    yield _row("handlers", f"{', '.join(names) or 'none'}: attached, and wrote to a temporary folder")
    if silent:
        yield _row("not attached", f"{', '.join(silent)}: only made, so that nothing is sent")


def _save(trainer: Trainer, folder: Path, clock: Callable[[], float]) -> Iterator[str]:
    saver = next((each for each in trainer.handlers if isinstance(each, Checkpointer)), None)
    if saver is None:
        yield _row("checkpoint", "none: no handler is a Checkpointer")
        return
    start = clock()
    manager = CheckpointManager(folder)
    path = saver.save_with(manager, trainer, "dry_run")
    saved = clock()
    trainer.load_checkpoint(str(path))
    size = manager.size(path)
    yield _row("checkpoint", f"{size / 1e6:,.2f} MB, saved in {saved - start:.2g} s, loaded in {clock() - saved:.2g} s")


def _check_writable(folder: Path) -> None:
    """Reject a run folder that cannot be made, without making it."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "Permission denied" if existing.is_dir() else "Not a directory"
        raise RunFolderError(f"run folder {folder}: cannot be made: {why}; choose another with --run")


def _memory(device: torch.device) -> str:
    unit = 1 if sys.platform == "darwin" else 1024
    host = f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.2f} GB of this machine's memory"
    if device.type != "cuda":
        return host
    return f"{host}, {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB of the device's"


def _row(name: str, text: str) -> str:
    return f"{name:<12}{text}"
