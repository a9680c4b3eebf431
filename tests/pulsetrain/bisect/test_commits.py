"""The commits between two runs, of real repositories, and their checkouts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pulsetrain.bisect.commits import _checkout, commits_between, train_commit
from pulsetrain.bisect.search import Verdict, first_bad
from pulsetrain.bisect.trials import Pair
from pulsetrain.cli.bisect import _commits


class Repository:
    """Commits are made a minute after each other; each adds a file of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.time = folder, 1_790_000_000
        folder.mkdir()
        self.git("init", "-q", "-b", "main")
        self.git("commit", "-q", "--allow-empty", "-m", "empty")

    def git(self, *words: str) -> str:
        self.time += 60
        who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        dates = {f"GIT_{role}_DATE": f"{self.time} +0000" for role in ("AUTHOR", "COMMITTER")}
        done = subprocess.run(
            ["git", *words], cwd=self.folder, env={**os.environ, **who, **dates}, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        return done.stdout.strip()

    def commit(self, name: str, branch: str) -> None:
        self.git("checkout", "-q", branch)
        (self.folder / name).touch()
        self.git("add", name)
        self.git("commit", "-q", "-m", name)

    def merge(self, *branches: str) -> None:
        self.git("checkout", "-q", branches[0])
        self.git("merge", "-q", "--no-ff", "-m", "merge", *branches[1:])

    def pair(self, good: str, bad: str) -> Pair:
        runs = []
        for name, revision in (("good", good), ("bad", bad)):
            run = self.folder.parent / name
            run.mkdir()
            (run / "run.json").write_text(json.dumps({"format": 1, "git": {"commit": self.git("rev-parse", revision)}}))
            runs.append(run)
        return Pair(runs[0], runs[1], (), "val/loss", "min", 0, 8, ({}, {}))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repository")
    made.commit("old", "main")
    made.git("branch", "early")  # forked before the good run
    made.commit("start", "main")
    made.git("tag", "good")
    for branch in ("a", "b"):
        made.git("branch", branch)
    return made


@pytest.mark.parametrize("cause", ["a1", "a2", "b1", "merge"])
@pytest.mark.parametrize("order", [("a1", "b1", "a2"), ("a1", "a2", "b1"), ("b1", "a1", "a2")])
def test_the_cause_is_found_on_the_branch_that_has_it(repository: Repository, order: tuple[str, ...], cause: str):
    for name in order:
        repository.commit(name, name[0])
    repository.merge("a", "b")
    commits = commits_between(repository.pair("good", "a"), repository.folder)
    subjects = {each.hash: each.subject for each in commits}
    assert sorted(subjects.values()) == ["a1", "a2", "b1", "merge"]

    def judge(commit: str) -> Verdict:
        files = repository.git("ls-tree", "--name-only", commit).split()
        return Verdict.BAD if cause in files or subjects[commit] == cause else Verdict.GOOD

    (found,), unresolved = first_bad({each.hash: each.parents for each in commits}, judge)
    assert (subjects[found], unresolved) == (cause, [])


def test_commits_without_the_good_one_are_left_out_and_their_merge_says_so(repository: Repository):
    repository.commit("e1", "early")
    repository.commit("a1", "a")
    repository.merge("a", "early")
    pair = repository.pair("good", "a")
    commits = commits_between(pair, repository.folder)
    good, early = (repository.git("rev-parse", each) for each in ("good", "early"))
    assert [each.subject for each in commits] == ["a1", "merge"]
    assert [each.merged for each in commits] == [(), (early,)]
    assert [each.parents for each in commits] == [(good,), (commits[0].hash,)]
    verdicts = {good[:12]: Verdict.GOOD, commits[0].hash[:12]: Verdict.GOOD, commits[1].hash[:12]: Verdict.BAD}
    trials: Any = SimpleNamespace(
        pair=pair, all=[], add=lambda name, what, start: verdicts[name],
        controls_of=lambda check, ends: [check(each) for each in ends],
    )  # fmt: skip
    answer = _commits(trials, repository.folder, commits)
    assert answer["causes"] == [[commits[1].hash]]
    assert answer["text"] == [
        "\nthe first commit with a worse val/loss:",
        f"  {commits[1].hash[:12]} merge",
        f"    it merges commits without {good[:12]}, which were not trained: git log {good[:12]}..{early[:12]}",
    ]


def test_a_commit_without_a_message(repository: Repository):
    repository.git("commit", "-q", "--allow-empty", "--allow-empty-message", "-m", "")
    (commit,) = commits_between(repository.pair("good", "HEAD"), repository.folder)
    assert (commit.subject, commit.parents) == ("", (repository.git("rev-parse", "good"),))


def test_the_record_of_another_worktree_that_is_missing_stays(repository: Repository, tmp_path: Path):
    """Such as one on a disk that is not mounted."""
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    repository.git("worktree", "add", "-q", str(own), "a")
    own.rename(elsewhere)
    before = repository.git("worktree", "list", "--porcelain")
    with _checkout(repository.folder, "good", tmp_path / "checkout") as checkout:
        assert (checkout / "start").exists()
    assert repository.git("worktree", "list", "--porcelain") == before
    elsewhere.rename(own)
    assert repository.git("-C", str(own), "status", "--porcelain") == ""


@pytest.mark.parametrize("is_locked", [False, True])
@pytest.mark.parametrize("is_there", [True, False])
def test_the_checkout_of_a_killed_search_is_replaced(
    repository: Repository, tmp_path: Path, is_locked: bool, is_there: bool
):
    folder = tmp_path / "checkout"
    repository.git("worktree", "add", "-q", "--detach", *["--lock"] * is_locked, str(folder), "early")
    if not is_there:
        shutil.rmtree(folder)
    with _checkout(repository.folder, "good", folder) as checkout:
        assert (checkout / "start").exists()
    assert not folder.exists()
    assert repository.git("worktree", "list").count("\n") == 0


@pytest.mark.parametrize(
    ("here", "expected"), [(".", "."), ("data", "data"), ("untracked", "configs"), ("..", "configs")]
)
def test_a_commit_is_trained_in_the_folder_of_the_command(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, expected: str
):
    for folder in ("configs", "data"):
        (repository.folder / folder).mkdir()
        repository.commit(f"{folder}/file", "main")
    (repository.folder / "untracked").mkdir()
    pair = repository.pair("main", "main")
    (pair.good / "run.json").write_text(json.dumps({"base": str(repository.folder / "configs")}))
    monkeypatch.chdir(repository.folder / here)
    folders = []

    def run(folder: Path, words: list[str], *, cwd: Path, paths: list[Path]) -> str:
        assert (cwd / words[1]).is_file()
        folders.append(cwd.resolve())
        return ""

    trials: Any = SimpleNamespace(pair=pair, into=tmp_path / "into", until=8, run=run)
    trials.into.mkdir()
    assert train_commit(trials, repository.folder, repository.git("rev-parse", "main"), tmp_path / "into" / "a") == ""
    assert folders == [(tmp_path / "into" / "checkout" / expected).resolve()]
