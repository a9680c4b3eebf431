"""Forks a run: makes a new run that continues from a checkpoint of another, with changed settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pulsetrain.configuration.claim import holds_run
from pulsetrain.configuration.parse import differences
from pulsetrain.configuration.rebuild import config_file, rebuild
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine import CheckpointLoaded, ConfigurationError, Events, RunFolderError
from pulsetrain.engine.checkpoint import Location, load_checkpoint
from pulsetrain.engine.distributed.joining import join
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.handlers import LRScheduler
from pulsetrain.handlers.run_files.run_file import write_run_file
from pulsetrain.reproduce.rerun import nearest_checkpoint
from pulsetrain.state.older_formats import upgrade
from pulsetrain.state.run_state import IN_PIECES
from pulsetrain.trainer import Trainer

__all__ = ["Fork", "check_request", "fork"]

_OPTIMIZER_SETTINGS = ("training.weight_decay", "training.no_decay", "training.optimizer_options")
_FIXED = {
    "training.seed": "random numbers and the order of the data continue from the checkpoint",
    "run": "--into names the folder",
}


@dataclass(frozen=True)
class Fork:
    """A run that was forked from another."""

    folder: Path
    parent: dict[str, Json]  # the entry `parent` of run.json
    changed: tuple[str, ...]  # settings, as "training.learning_rate: 0.001 -> 0.0001"


def fork(
    run: Path,
    at: int,
    into: Path,
    settings: Mapping[str, str] | None = None,
    skip_batches: Sequence[tuple[int, int]] = (),
) -> Fork:
    """Make a new run from the last checkpoint of a run that was saved at or before an iteration.

    The new run's first checkpoint is that one, with the changed settings applied. Its log continues the numbers of the
    original log, so that `diff` compares the two from there on. The folder of the original run is only read. Of several
    processes, all call this; a sharded model needs as many as one of its copies has parts.

    Args:
        run: the folder of a run that was made from a configuration.
        at: the iteration.
        into: the new folder.
        settings: values as YAML by their dotted keys, such as {"training.learning_rate": "1e-4"}.
        skip_batches: first and last iterations of batches to skip, as the original run counts them.

    Raises:
        RunFolderError: the new folder is not empty, or the run was not made from a configuration.
        CheckpointError: there is no checkpoint at or before the iteration, or it does not fit the changed settings.
        ConfigurationError: a fork cannot change the setting, or the run has no Checkpointer.
    """
    settings, control = dict(settings or {}), join()
    checkpoint = control.main_decides(lambda: check_request(run, at, into, settings))
    if skip_batches:
        settings["training.skip_batches"] = str(_joined(run, skip_batches))
    assembly = rebuild(run, into, settings)
    try:
        trainer = assembly.trainer
        in_pieces = IN_PIECES if is_sharded(trainer.model) else ()
        saved = dict(upgrade(load_checkpoint(checkpoint, in_pieces=in_pieces)))
        _keep_configured_schedules(trainer, saved)
        groups = [dict(group) for group in trainer.optimizer.param_groups]
        trainer.load_checkpoint_state(saved)
        _check_effect(trainer, skip_batches)
        _apply(trainer, groups, settings)
        trainer.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=checkpoint, iteration=trainer.state.iteration))
        with trainer.sharing():
            trainer.save_checkpoint("fork")
        for handler in trainer.handlers:  # `pulsetrain train` makes the trainer again
            if hasattr(handler, "detach"):  # a user's need not have it
                handler.detach()
        iteration = trainer.state.iteration
        return control.main_decides(lambda: _described(run, into, trainer, checkpoint, iteration))
    except BaseException:
        assembly.claim.release()
        raise


def check_request(run: Path, at: int, into: Path, settings: Mapping[str, str]) -> Location:
    """Refuse what cannot be forked, before anything is made; returns the checkpoint to start from.

    Args:
        run: as for `fork`, as the others.

    Raises:
        RunFolderError, CheckpointError, ConfigurationError: as `fork`.
    """
    config_file(run, "a new Trainer with another run folder continues from a checkpoint by train(resume=PATH)")
    for name, reason in _FIXED.items():
        if name in settings:
            raise ConfigurationError(f"--set {name}: cannot be changed in a fork: {reason}")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        what = "already holds a run" if into.is_dir() and holds_run(into) else "is not empty"
        raise RunFolderError(f"--into {into}: {what}, and nothing is overwritten; choose another folder")
    if run.resolve() in into.resolve().parents:
        raise RunFolderError(f"--into {into}: is inside the run {run}, which is only read; choose another folder")
    if at < 1:
        raise ConfigurationError(f"--at {at}: needs the number of an iteration, at least 1")
    return nearest_checkpoint(run, at + 1)


def _described(run: Path, into: Path, trainer: Trainer, checkpoint: Location, iteration: int) -> Fork:
    """Write where the new run comes from into its run.json."""
    before, now = (load_yaml((folder / "config.yaml").read_text(encoding="utf-8")) for folder in (run, into))
    changed = tuple(differences({**before, "run": ""}, {**now, "run": ""}))
    parent = {
        "run": str(run.resolve()),
        "id": read_run_file(run).get("id"),
        "iteration": iteration,
        "checkpoint": checkpoint.name,
        "changed": list(changed),
    }
    write_run_file(into, trainer, base=read_run_file(into).get("base"), parent=parent)
    return Fork(into, parent, changed)


def _joined(run: Path, ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The ranges together with those that the run itself skips, in the numbering of a run that skips nothing."""
    config = load_yaml((run / "config.yaml").read_text(encoding="utf-8"))
    own = sorted((first, last) for first, last in (config.get("training") or {}).get("skip_batches") or ())

    def counted(iteration: int) -> int:
        for first, last in own:
            if iteration >= first:
                iteration += last - first + 1
        return iteration

    return [[first, last] for first, last in sorted([*own, *((counted(a), counted(b)) for a, b in ranges)])]


def _check_effect(trainer: Trainer, ranges: Sequence[tuple[int, int]]) -> None:
    begin, end = trainer.state.iteration, trainer.total_iterations
    for first, last in ranges:
        if last <= begin or (end is not None and first > end):
            raise ConfigurationError(
                f"--skip-batches {first}-{last}: the fork starts after iteration {begin}"
                + (f" and ends at {end}" if end is not None else "")
                + ", so it has none of these batches; choose others, or fork earlier"
            )


def _keep_configured_schedules(trainer: Trainer, saved: dict[str, Json]) -> None:
    """Schedules continue at their saved step, with the formula of the new configuration."""
    for key, handler in trainer.registry.stateful().items():
        if isinstance(handler, LRScheduler) and key in saved["handlers"]:
            saved["handlers"][key]["state"]["schedule"] = handler.state_dict()["schedule"]


def _apply(trainer: Trainer, configured: Sequence[Mapping[str, object]], settings: Mapping[str, str]) -> None:
    """Apply the changed settings of the optimizer again, which loading its state has overwritten."""
    rates, others = "training.learning_rate" in settings, any(name.startswith(_OPTIMIZER_SETTINGS) for name in settings)
    for group, wanted in zip(trainer.optimizer.param_groups, configured, strict=True):
        for name, value in wanted.items():
            if name != "params" and (rates if name in ("lr", "initial_lr") else others):
                group[name] = value
