"""`pulsetrain fork`: makes a new run that starts from a checkpoint of another."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from pulsetrain.cli.launch import Launch, launch_once, started_with
from pulsetrain.cli.reports import OK
from pulsetrain.cli.results import logs_on_stderr, run_folder
from pulsetrain.configuration.parse import redacted_options
from pulsetrain.configuration.yaml_text import read_yaml
from pulsetrain.engine.checkpoint import Location
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.reproduce.fork import check_request, fork
from pulsetrain.reproduce.processes import processes_after, virtual_ranks_of
from pulsetrain.runs.summary import check_run

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Make the run, and print what has changed and the command that trains it; or start the processes that do."""
    changes = {name: text for name, text in arguments.settings.items() if not name.startswith("launch.")}
    for text in arguments.changes:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigurationError(f"--set {text}: is not KEY=VALUE, such as training.learning_rate=1e-4")
        changes[name] = value
    folder = run_folder(arguments.folder)
    check_run(folder)
    how = Launch.of(arguments.settings)
    if how is not None:
        status = _launch(how, folder, arguments, changes)
        return status if status != OK else _train(arguments, how.options, changes)
    if ranks().world_size == 1 and not started_with():
        _refuse_one_process(folder, check_request(folder, arguments.at, arguments.into, changes))
    ranges = [parse_range(text) for text in arguments.skip_batches]
    with logs_on_stderr():
        made = fork(folder, arguments.at, arguments.into, changes, ranges)
    if ranks().is_main:
        print(f"run folder  {arguments.into}")
        print(f"starts      after iteration {made.parent['iteration']:,} of {folder}")
        for index, change in enumerate(made.changed):
            print(f"{'changed' if not index else '':<12}{change}")
    if started_with():
        return OK  # the command that has started the processes continues
    count = ranks().world_size
    return _train(arguments, [] if count == 1 or arguments.train else [f"--launch.nproc={count}"], changes)


def _launch(how: Launch, folder: Path, arguments: argparse.Namespace, changes: Mapping[str, str]) -> int:
    """Fork in several processes."""
    check_request(folder, arguments.at, arguments.into, changes)
    words = ["fork", str(folder), "--at", str(arguments.at), "--into", str(arguments.into)]
    words += [f"--{name}={text}" for name, text in changes.items()]
    for text in arguments.skip_batches:
        parse_range(text)
        words += ["--skip-batches", text]
    return launch_once(how.nproc, words)


def _refuse_one_process(folder: Path, checkpoint: Location) -> None:
    count = processes_after(folder, step_of(checkpoint))
    if count == 1 or virtual_ranks_of(folder) is not None:  # any number of processes has the same results
        return
    shares = {"shard", "tensor", "pipeline"} & set(read_run_file(folder).get("parallel") or {})
    change = "--set parallel=null " if shares else ""
    raise ConfigurationError(
        f"{folder}: was trained by {count} processes after iteration {step_of(checkpoint)}; fork it in as many, "
        f"--launch.nproc {count}, or in another number of them, which then train the fork: in one by "
        f"{change}--launch.nproc 1"
    )


def _train(arguments: argparse.Namespace, options: Sequence[str], changes: Mapping[str, str]) -> int:
    """Train the new run, or print the command that does."""
    folder = arguments.into
    # config.yaml does not keep the credentials that were given to the fork
    missing = redacted_options(read_yaml(folder / "config.yaml"))
    again = {name: text for name, text in changes.items() if any(f"{each}.".startswith(f"{name}.") for each in missing)}
    words = ["train", str(folder / "config.yaml"), "--run", str(folder), "--resume", "latest", *options]
    if arguments.train:
        from pulsetrain.cli import main

        return main([*words, *(f"--{name}={text}" for name, text in again.items())])
    if ranks().is_main:
        print(f"train it: {shlex.join(['pulsetrain', *words, *(f'--{name}=VALUE' for name in again)])}")
    return OK


def parse_range(text: str) -> tuple[int, int]:
    """A range of iterations, first and last included.

    Raises:
        ConfigurationError: the text is neither a range nor a number.

    >>> parse_range("48211-48214"), parse_range("7")
    ((48211, 48214), (7, 7))
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not 1 <= first <= last:
        raise ConfigurationError(
            f"--skip-batches {text}: needs an iteration, or a first and a last one, such as 48211-48214"
        )
    return first, last
