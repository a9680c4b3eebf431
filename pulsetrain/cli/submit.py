"""`pulsetrain submit`: trains as a job of this machine's queue, of Slurm, or of Kubernetes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pulsetrain.cli.queue_table import follow, print_status
from pulsetrain.cli.reports import OK, until_closed
from pulsetrain.configuration.claim import resolve_folder
from pulsetrain.configuration.messages import in_settings
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.resolve import resolve
from pulsetrain.configuration.resumable import check_resumable
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine.backends.torch_computation import find_device
from pulsetrain.engine.errors import ConfigurationError, PulsetrainError, RunFolderError
from pulsetrain.submit import kubernetes, slurm
from pulsetrain.submit.local_queue import LocalQueue, default_folder, environment_here
from pulsetrain.submit.submission import FOLDER, Resources, Submission, check_words, job_name, memory_of, minutes_of
from pulsetrain.submit.topology import layout_of

__all__ = ["run"]

# options that not every target has
_OF = {
    **dict.fromkeys(("devices", "wait"), ("local",)),
    **dict.fromkeys(("gpus", "cpus", "memory"), ("slurm", "kubernetes")),
    **dict.fromkeys(("time", "partition", "account"), ("slurm",)),
    **dict.fromkeys(("image", "claim", "directory", "namespace", "secret", "queue"), ("kubernetes",)),
}
_LEAST = {"workers": 1, "devices": 1, "cpus": 1, "gpus": 0, "restarts": 0}
_MOST = 100_000  # of each of these: the jobs and the devices of a queue are listed in memory


class _TakenError(Exception):
    """Another submission has made the folder since it was chosen."""


def run(arguments: argparse.Namespace) -> int:
    """Submit the job or jobs, or print what would be submitted."""
    for name, targets in _OF.items():
        given = getattr(arguments, name)
        if given is not None and given is not False and arguments.to not in targets:
            raise ConfigurationError(
                f"--{name}: is for --to {' or '.join(targets)}, not for {arguments.to}; leave it out"
            )
    for name, least in _LEAST.items():
        given = getattr(arguments, name)
        if given is not None and not least <= given <= _MOST:
            raise ConfigurationError(f"--{name} {given}: needs a whole number from {least} to {_MOST:,}")
    if arguments.status or arguments.cancel is not None:
        if arguments.to != "local" or arguments.config is not None:
            option = "--status" if arguments.status else "--cancel"
            raise ConfigurationError(
                f"{option}: is for the queue of this machine, without CONFIG: pulsetrain submit --to local {option}; "
                "squeue and kubectl list and cancel jobs of a cluster"
            )
        return print_status(LocalQueue(default_folder()), arguments.cancel)
    if arguments.config is None:
        raise ConfigurationError("CONFIG: is missing; give the configuration or the sweep to submit")
    target = {"local": _to_local, "slurm": _to_slurm, "kubernetes": _to_kubernetes}[arguments.to]
    while True:
        submission = _sweep(arguments) if _is_sweep(arguments.config) else _run(arguments)
        for words in (*submission.commands, [arguments.name or ""]):
            check_words(words)
        try:
            return target(arguments, submission)
        except _TakenError as error:
            if submission.new == submission.folder:
                raise _submitted_already(submission.folder.parent) from error
            # else the next number


def _is_sweep(path: Path) -> bool:
    try:
        given = load_yaml(path.read_text(encoding="utf-8"))
    except Exception:  # reading it as a configuration reports the error
        return False
    return isinstance(given, dict) and "space" in given


def _run(arguments: argparse.Namespace) -> Submission:
    """One job, which trains a configuration."""
    if arguments.workers is not None:
        raise ConfigurationError(f"--workers: is for sweeps, and {arguments.config} is a configuration; leave it out")
    settings = {name: text for name, text in arguments.settings.items() if not name.startswith("launch.")}
    config = read_config(arguments.config, settings)
    try:
        if arguments.to != "kubernetes":  # where the image, not this machine, has what the configuration imports
            resolve(arguments.config, settings)
        check_resumable(config, arguments.config, imports=arguments.to != "kubernetes")
        if arguments.to == "local":
            find_device((config.get("training") or {}).get("device", "auto"))
        layout = layout_of(config, arguments.settings)
    except PulsetrainError as error:
        raise in_settings(error) from error
    pattern = str(arguments.folder or config["run"])
    new = None
    if arguments.to == "kubernetes":
        if "{n}" in pattern:
            raise ConfigurationError(
                f"--run {pattern}: which numbers are taken on the cluster's volume is not known here; name the folder, "
                "such as --run runs/a"
            )
        folder = Path(pattern)
    else:
        folder = resolve_folder(pattern, resume=arguments.resume)
        if arguments.resume is None:
            new = folder if "{n}" in pattern else folder / FOLDER
            if new != folder and new.exists():
                raise _submitted_already(folder)
    words = ["train", _path(arguments.config), *(f"--{name}={text}" for name, text in settings.items())]
    if arguments.to == "local":
        if layout.nnodes > 1:
            raise ConfigurationError(f"--launch.nnodes={layout.nnodes}: --to local is one machine; leave it out")
        words += [f"--launch.nproc={layout.nproc}"] if layout.nproc > 1 else []
        words += [f"--launch.min_nproc={layout.min_nproc}"] if layout.min_nproc else []
    elif layout.min_nproc is not None:
        raise ConfigurationError("--launch.min_nproc: is for --to local; a cluster gives a job what it asks for")
    words += [f"--folder={folder}", "--resume=latest", "--wait"]
    needs = _resources(arguments, config, layout.nproc, layout.nnodes)
    return Submission(_name(arguments, folder), (tuple(words),), folder / FOLDER, needs, new)


def _submitted_already(folder: Path) -> RunFolderError:
    return RunFolderError(
        f"run folder {folder}: a job for it was submitted already; choose another with --run, or continue it with "
        "--resume latest"
    )


def _sweep(arguments: argparse.Namespace) -> Submission:
    """An array of jobs, which divide the trials of a sweep."""
    from pulsetrain.sweep.coordinator import check_sweep
    from pulsetrain.sweep.spec import STORAGE, read_spec
    from pulsetrain.sweep.trials import check_settings

    for name in arguments.settings:
        raise ConfigurationError(f"--{name}: {arguments.config} is a sweep, whose settings are in its file")
    spec = read_spec(arguments.config)
    if arguments.to == "kubernetes":  # where the image and the volume have what the sweep names
        check_settings(spec, imports=False)
    else:
        check_sweep(spec)
    if arguments.to == "local" and not arguments.show and spec.storage in (None, os.environ.get(STORAGE)):
        _check_storage(LocalQueue(default_folder()))
    is_population = spec.sampler == "population"
    if is_population and arguments.workers not in (None, 1):
        raise ConfigurationError(
            f"--workers {arguments.workers}: a population compares its members, which one job has to train; leave it "
            "out"
        )
    count = 1 if is_population else arguments.workers or spec.workers
    folder = Path(arguments.folder or spec.folder)
    commands = []
    for index in range(count):
        words = ["sweep", _path(arguments.config), f"--folder={folder}"]
        words += [] if is_population else ["--workers=1"]
        commands.append((*words, "--worker", str(index)) if count > 1 else tuple(words))
    needs = _resources(arguments, dict(spec.base or {}), 1, 1)
    return Submission(_name(arguments, folder), tuple(commands), folder / FOLDER, needs)


def _check_storage(queue: LocalQueue) -> None:
    """Refuse a sweep whose jobs would find another storage in their environment, which is that of the queue."""
    from pulsetrain.sweep.spec import STORAGE

    here, there = (each.get(STORAGE) or None for each in (environment_here(), queue.environment))
    if here != there and queue.is_running:
        raise ConfigurationError(
            f"{STORAGE}: is {here or 'not set'} here, and {there or 'not set'} where the queue of this machine was "
            "started, whose environment the jobs get; submit the sweep when no job is left, or set PULSETRAIN_QUEUE "
            "to another folder"
        )


def _resources(arguments: argparse.Namespace, config: dict[str, Any], processes: int, nodes: int) -> Resources:
    on_cpu = (config.get("training") or {}).get("device") == "cpu"
    gpus = arguments.gpus if arguments.gpus is not None else 0 if on_cpu else processes
    return Resources(
        processes=processes, nodes=nodes, gpus=gpus, cpus=arguments.cpus,
        memory=None if arguments.memory is None else memory_of("--memory", arguments.memory),
        minutes=None if arguments.time is None else minutes_of("--time", arguments.time),
        partition=arguments.partition, account=arguments.account, restarts=arguments.restarts,
    )  # fmt: skip


def _name(arguments: argparse.Namespace, folder: Path) -> str:
    return job_name(arguments.name or folder.name)


def _path(path: Path) -> str:
    """The path as a word of a command line, which is not an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _to_local(arguments: argparse.Namespace, submission: Submission) -> int:
    from pulsetrain.submit.devices import devices_here
    from pulsetrain.submit.queue_process import ensure_running

    needed = submission.resources.processes
    if arguments.show:
        with until_closed():
            for words in submission.commands:
                print(f"{needed} device(s): {_shell(words)}")
        return OK
    queue = LocalQueue(default_folder())
    _set_devices(queue, arguments.devices, devices_here(arguments.devices))
    total = len(queue.devices or ())
    if needed > total:
        raise ConfigurationError(
            f"--launch.nproc={needed}: the queue of this machine has {total} device(s); --devices sets more"
        )
    with _made(submission):
        numbers = queue.add(
            submission.commands, name=arguments.name or str(submission.folder.parent), directory=Path.cwd(),
            python=sys.executable, output=submission.folder, devices=needed, restarts=arguments.restarts,
        )  # fmt: skip
    ensure_running(queue)
    _print_submitted([str(number) for number in numbers], submission, f"{submission.folder}/local-JOB.txt")
    if arguments.wait:
        return follow(queue, numbers)
    print("status         pulsetrain submit --to local --status")
    return OK


def _set_devices(queue: LocalQueue, count: int | None, here: list[str]) -> None:
    """Give the queue these devices, unless jobs are left that have been submitted for others and none are asked for."""
    before = queue.devices
    if count is not None or before is None or not queue.jobs(ended=False):
        if here != before:
            queue.devices = here
    elif here != before and any((*here, *before)):  # a number of slots was chosen
        print(
            f"pulsetrain: note: the queue keeps its devices while jobs are left: {_devices(before)}; visible here: "
            f"{_devices(here)}, which --devices {len(here)} gives it now",
            file=sys.stderr,
        )


def _devices(names: list[str]) -> str:
    return f"GPU {', '.join(names)}" if any(names) else f"{len(names)} slot(s) without a GPU"


def _to_slurm(arguments: argparse.Namespace, submission: Submission) -> int:
    if arguments.show:
        with until_closed():
            print(slurm.script(submission), end="")
            for index, words in enumerate(submission.commands):
                print(f"# {'task ' + str(index) + ': ' if len(submission.commands) > 1 else ''}{_shell(words)}")
        return OK
    with _made(submission):
        numbers = slurm.submit(submission)
    _print_submitted(numbers, submission, f"{submission.folder}/JOB_0_log.out")
    return OK


def _to_kubernetes(arguments: argparse.Namespace, submission: Submission) -> int:
    if arguments.image is None:
        raise ConfigurationError("--image: is missing; name a container's image with pulsetrain and your code in it")
    names = ("image", "claim", "directory", "namespace", "secret", "queue")
    cluster = kubernetes.Cluster(**{name: getattr(arguments, name) for name in names})
    if arguments.show:
        with until_closed():
            print(kubernetes.manifest_text(submission, cluster), end="")
        return OK
    print(kubernetes.apply(submission, cluster))
    return OK


@contextmanager
def _made(submission: Submission) -> Iterator[None]:
    """The folder of a submission; where it fails, what was made for it and is empty is removed."""
    folder, new = submission.folder, submission.new
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        if new is not None:
            new.parent.mkdir(parents=True, exist_ok=True)
            try:
                new.mkdir()
            except FileExistsError as error:
                raise _TakenError from error
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be made: {error.strerror}; choose another with --run") from error
    try:
        yield
    except BaseException:
        for path in made:
            try:
                path.rmdir()
            except OSError:  # another process uses it by now
                break
        raise


def _print_submitted(numbers: list[str], submission: Submission, output: str) -> None:
    print(f"submitted      {', '.join(numbers)}")
    print(f"folder         {submission.folder.parent}")
    print(f"output         {output}")


def _shell(words: tuple[str, ...]) -> str:
    import shlex

    return shlex.join(["pulsetrain", *words])
