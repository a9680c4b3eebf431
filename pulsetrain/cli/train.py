"""`pulsetrain train`: trains a run from a configuration file."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from pulsetrain.cli.launch import Launch, launch
from pulsetrain.cli.reports import FAILED, STOPPED, UNSAVED, output_may_fail, report
from pulsetrain.cli.results import logs_on_stderr, resume_command, summary, unsaved
from pulsetrain.configuration.assemble import Assembly, assemble
from pulsetrain.configuration.claim import has_checkpoint
from pulsetrain.configuration.messages import in_settings
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.rebuild import base_of
from pulsetrain.engine import ConfigurationError, Events, PulsetrainError
from pulsetrain.engine.distributed.failures import Warden
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.errors import PeerFailed
from pulsetrain.handlers import RunSummary
from pulsetrain.handlers.crash.crash_files import bundle_of, forget_bundle
from pulsetrain.signals import SignalWatch

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Assemble the run, train it, and print where the results are; or start the processes that do."""
    how = Launch.of(arguments.settings, several_nodes=True)
    if how is None:
        return _run(arguments)
    words = [str(arguments.config), *(f"--{name}={text}" for name, text in _without_launch(arguments.settings).items())]
    for name, value in (("--folder", arguments.folder), ("--resume", arguments.resume)):
        words += [name, str(value)] if value is not None else []
    words += [f"--{name}" for name in ("wait", "dry-run", "traceback") if getattr(arguments, name.replace("-", "_"))]
    config = read_config(arguments.config, _without_launch(arguments.settings))
    folder = Path(arguments.folder or config["run"])
    pattern = f"{folder.name.replace('{n}', '*')}/checkpoints/*"  # the number is not known yet
    return launch(how, words, lambda: sorted(str(each) for each in folder.parent.glob(pattern)))


def _without_launch(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in settings.items() if not name.startswith("launch.")}


def _run(arguments: argparse.Namespace) -> int:
    started = time.perf_counter()
    assembly: Assembly | None = None
    updates = [0]  # the last item: the optimizer updates that had been made when this command started training
    with SignalWatch() as watch, output_may_fail(), logs_on_stderr():
        try:
            config = read_config(arguments.config, arguments.settings)
            if arguments.dry_run:
                return _dry_run(arguments, config, watch)
            base = base_of(arguments.config.parent)
            assembly = assemble(config, base, arguments.folder, resume=arguments.resume, wait=arguments.wait)
            if ranks().is_main:
                _announce(assembly, arguments.resume)
            # only the first time: a run that goes back to a checkpoint fires STARTED again
            assembly.trainer.add_event_handler(
                Events.STARTED, lambda engine: updates.append(engine.state.update) if len(updates) == 1 else None
            )
            for handler in assembly.trainer.handlers:
                if isinstance(handler, RunSummary):
                    handler.ending = False  # this command prints the results itself
            watch.follow(assembly.trainer)
            assembly.trainer.train(resume=arguments.resume)
        except (KeyboardInterrupt, SystemExit) as stop:
            if isinstance(stop, SystemExit) and not watch.status:  # raised by other code, such as the model
                raise
            if assembly is not None:
                print(f"\npulsetrain: stopped; the run folder is {assembly.folder}", file=sys.stderr)
            else:
                print("\npulsetrain: stopped before the run started; no files were left", file=sys.stderr)
            return watch.status or STOPPED
        except Exception as error:
            if arguments.traceback:
                traceback.print_exc()
            if isinstance(error, PulsetrainError):
                error = in_settings(error)
            if assembly is None:
                return report(error)
            trainer = assembly.trainer
            return _failed(error, assembly, early=trainer.state.update == updates[-1] and not trainer.rewinds)
        if not ranks().is_main:
            return watch.status
        print(summary(assembly, time.perf_counter() - started))
        if watch.status:
            print(resume_command(assembly, arguments.config, arguments.settings))
        return UNSAVED if unsaved(assembly) else watch.status


def _dry_run(arguments: argparse.Namespace, config: Mapping[str, object], watch: SignalWatch) -> int:
    from pulsetrain.configuration.dry_run import dry_run

    if arguments.resume is not None:
        raise ConfigurationError("--dry-run: starts a new run; leave --resume out")
    for line in dry_run(config, base_of(arguments.config.parent), arguments.folder, started=watch.follow):
        print(line, flush=True)
    return watch.status


def _announce(assembly: Assembly, resume: str | None) -> None:
    folder = assembly.folder
    starts = resume == "latest" and not has_checkpoint(assembly.trainer)
    print(
        f"run folder: {folder}{', which has no checkpoint yet: starting from the beginning' if starts else ''}",
        file=sys.stderr,
    )


def _failed(error: Exception, assembly: Assembly, *, early: bool) -> int:
    """Report the error. A run without an update leaves no files: the corrected command then finds its folder free."""
    if isinstance(error, PeerFailed):
        return report(error, Warden.STATUS)
    if not ranks().is_main:
        return report(error) if isinstance(error, PulsetrainError) else report(error, FAILED)
    if early:
        assembly.claim.release()
        forget_bundle(error)
        if not isinstance(error, PulsetrainError):
            error.add_note("--traceback shows where in the code")
        return report(error)
    if isinstance(error, PulsetrainError):
        status = report(error)
        print(f"run folder {assembly.folder}: keeps the results up to the error", file=sys.stderr)
        return status
    if (bundle := bundle_of(error)) is not None:
        error.add_note(f"pulsetrain debug {shlex.quote(str(bundle))} opens the crash bundle")
        return report(error, FAILED)
    crash = assembly.folder / "crash.txt"
    try:
        crash.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        error.add_note(f"the traceback is in {crash}")
    except OSError as unwritten:
        error.add_note(f"{crash} could not be written: {unwritten}")
    return report(error, FAILED)
