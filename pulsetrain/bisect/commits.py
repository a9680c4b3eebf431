"""Commits between two runs, each checked out into a folder of its own; the user's checkout stays as it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from pulsetrain.bisect.trials import Pair, Trials, handlers_until
from pulsetrain.configuration.rebuild import base_of
from pulsetrain.configuration.yaml_text import dump_yaml
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording.log.run_file import read_run_file

__all__ = ["Commit", "commit_of", "commits_between", "notes_of", "repository_of", "train_commit"]

_CHECKOUT = "checkout"  # of the commit that is being trained, in the folder of the short runs


@dataclass(frozen=True)
class Commit:
    """A commit that contains the good run's."""

    hash: str
    subject: str
    parents: tuple[str, ...]  # of these, the good run's commit or one that contains it
    merged: tuple[str, ...]  # the other ones


def repository_of(pair: Pair) -> Path:
    """The repository in which the good run was started.

    Raises:
        ConfigurationError: git is not installed, or the folder is not in a repository.
    """
    base = base_of(pair.good)
    found = _git(base, "rev-parse", "--show-toplevel")
    return Path(found)


def commits_between(pair: Pair, repository: Path) -> list[Commit]:
    """The commits up to the bad run's that contain the good one's, which is left out; each follows its parents.

    Raises:
        ConfigurationError: a run has recorded no commit, the good one's does not come before, or both are the same.
    """
    good, bad = (commit_of(each) for each in (pair.good, pair.bad))
    if good == bad:
        raise ConfigurationError(f"both runs are of the commit {good[:12]}; leave --git out to compare their settings")
    options = ("--ancestry-path", "--topo-order", "--reverse", "--format=%H %P%x09%s")
    lines = _git(repository, "rev-list", *options, f"{good}..{bad}").splitlines()
    found = [line.partition("\t") for line in lines if not line.startswith("commit ")]  # git's own line for each
    if not found:
        raise ConfigurationError(f"the commit of {pair.good}, {good[:12]}, does not come before that of {pair.bad}")
    known = {good, *(hashes.split()[0] for hashes, _, _ in found)}
    commits = []
    for hashes, _, subject in found:
        commit, *parents = hashes.split()
        inside = tuple(each for each in parents if each in known)
        commits.append(Commit(commit, subject, inside, tuple(each for each in parents if each not in known)))
    return commits


def notes_of(pair: Pair) -> list[str]:
    """What the commits do not say: files that were changed and not committed, settings that differ."""
    found = []
    for each in (pair.good, pair.bad):
        git = read_run_file(each).get("git")
        if isinstance(git, dict) and git.get("changed"):
            found.append(f"{each}: its uncommitted changes are not part of the runs here")
    if pair.changes:
        found.append(f"{len(pair.changes)} settings differ, too; every run here has those of {pair.good}")
    return found


def train_commit(trials: Trials, repository: Path, commit: str, folder: Path) -> str:
    """Train the good configuration with the files of a commit, from the beginning; returns the error, or ""."""
    base = base_of(trials.pair.good).resolve().relative_to(repository.resolve())
    config = deepcopy(trials.pair.configs[0])
    config["handlers"] = handlers_until(trials.until, config.get("handlers") or ())
    config.pop("run", None)
    (config.get("training") or {}).pop("run_dir", None)
    with _checkout(repository, commit, trials.into / _CHECKOUT) as checkout:
        if not (checkout / base).is_dir():
            return f"the commit has no folder {base}"
        file = checkout / base / f".bisect-{commit[:12]}.yaml"
        file.write_text(dump_yaml(config), encoding="utf-8")
        words = ["train", str(file), "--run", str(folder.resolve())]
        cwd = _current_folder(repository, checkout) or checkout / base
        return trials.run(folder.resolve(), words, cwd=cwd, paths=_paths(repository, checkout, base))


def _current_folder(repository: Path, checkout: Path) -> Path | None:
    """This process's, in the checkout: relative paths of the configuration start there. None: it is not in there."""
    here = Path.cwd().resolve()
    if not here.is_relative_to(repository.resolve()):
        return None
    found = checkout / here.relative_to(repository.resolve())
    return found if found.is_dir() else None


def _paths(repository: Path, checkout: Path, base: Path) -> list[Path]:
    """Where modules are looked up: as here, but in the checkout instead of the repository."""
    found = [checkout / base, checkout]
    for each in map(Path, sys.path):
        if each.is_absolute() and each.resolve().is_relative_to(repository.resolve()):
            own = checkout / each.resolve().relative_to(repository.resolve())
            found += [own] if own.is_dir() and own not in found else []
    return found


@contextmanager
def _checkout(repository: Path, commit: str, folder: Path) -> Iterator[Path]:
    folder = folder.resolve()

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(ConfigurationError):  # there is no record of it
            _git(repository, "worktree", "remove", "--force", "--force", str(folder))  # also a locked one, half made

    remove()  # what a killed search has left
    try:
        _git(repository, "worktree", "add", "--detach", "--force", str(folder), commit)
        yield folder
    finally:
        remove()


def commit_of(run: Path) -> str:
    """The commit that a run has recorded."""
    git = read_run_file(run).get("git")
    commit = git.get("commit") if isinstance(git, dict) else None
    if not isinstance(commit, str):
        raise ConfigurationError(f"{run}: has recorded no commit: it was not started inside a git repository")
    return commit


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigurationError("--git: git is not installed; install it, or leave --git out") from error
    if done.returncode:
        said: Sequence[str] = done.stderr.strip().splitlines() or ["it failed"]
        raise ConfigurationError(f"--git: git {words[0]} in {folder}: {said[-1]}")
    return done.stdout.strip()
