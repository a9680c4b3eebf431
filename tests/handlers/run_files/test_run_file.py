"""run.json contains the settings of a run, and each time that it started or resumed."""

import json
import os
import stat
import subprocess
import sys

import pytest
import torch

from pulsetrain.engine import Engine, Events
from pulsetrain.handlers import EventRecorder
from pulsetrain.handlers.run_files import run_file as module
from pulsetrain.handlers.run_files.run_file import note_start, run_facts, write_run_file
from pulsetrain.handlers.run_files.run_folder import replace_file
from tests.support.engines import make_engine
from tests.support.models import trainer


def run_file(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_recorded_run_says_what_it_was_made_with(tmp_path):
    engine = make_engine()
    EventRecorder(tmp_path).attach(engine)
    assert not (tmp_path / "run.json").exists()
    engine.run([0], max_epochs=1)
    facts = run_file(tmp_path)
    assert facts["format"] == 1
    assert facts["command"] == sys.argv
    assert facts["environment"]["torch"]
    assert [start["iteration"] for start in facts["starts"]] == [0]


def test_a_resumed_run_adds_a_start_and_changes_nothing_else(tmp_path):
    for _ in range(2):
        engine = make_engine()
        recorder = EventRecorder(tmp_path).attach(engine)
        engine.run([0], max_epochs=1)
        recorder.detach()
        facts = run_file(tmp_path)
        starts = facts.pop("starts")
        if len(starts) == 1:
            first = facts
    assert facts == first
    assert len(starts) == 2


def test_a_validation_is_not_a_start(tmp_path):
    engine = make_engine()
    evaluator = Engine(lambda engine, batch: None, name="evaluator", bus=engine.bus)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    EventRecorder(tmp_path).attach(engine)
    engine.run([0], max_epochs=3)
    assert len(run_file(tmp_path)["starts"]) == 1


def test_settings_and_seed_of_a_trainer_are_there():
    facts = run_facts(trainer({"seed": 5}))
    assert facts["seed"] == facts["settings"]["seed"] == 5
    assert json.loads(json.dumps(facts)) == facts


def test_the_commit_is_that_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_facts(make_engine())["git"] is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    if subprocess.run([*git, "init", "-q"], check=False).returncode:
        pytest.skip("no git here")
    (tmp_path / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    state = run_facts(make_engine())["git"]
    assert len(state["commit"]) == 40
    assert state["changed"] is False
    (tmp_path / "a").write_text("2")
    assert run_facts(make_engine())["git"]["changed"] is True


@pytest.mark.slow
def test_several_processes_lose_no_start_of_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_git_state", lambda: None)
    engine = make_engine()
    children = []
    for child in range(4):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for iteration in range(20):
                    note_start(tmp_path, engine, 100 * child + iteration)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    noted = [start["iteration"] for start in run_file(tmp_path)["starts"]]
    assert sorted(noted) == [100 * child + iteration for child in range(4) for iteration in range(20)]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_rank_0_writes_for_all(tmp_path):
    note_start(tmp_path, make_engine(), 0, 1)
    assert not (tmp_path / "run.json").exists()
    note_start(tmp_path, make_engine(), 7, 0)
    assert [start["iteration"] for start in run_file(tmp_path)["starts"]] == [7]


@pytest.mark.parametrize("content", [b"[1", b"5", b'"\xff"', b"", b'{"starts": 5}'])
def test_a_file_that_says_nothing_is_written_again(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    note_start(tmp_path, make_engine(), 3)
    assert [start["iteration"] for start in run_file(tmp_path)["starts"]] == [3]


def test_words_and_seeds_of_any_kind_are_plain_text_and_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "\udcff"])
    engine = make_engine()
    engine.seed = torch.tensor(5)
    write_run_file(tmp_path, engine)
    facts = run_file(tmp_path)
    assert (facts["seed"], facts["command"]) == (5, ["train", "\\udcff"])


def test_a_folder_without_locks_will_do(tmp_path, monkeypatch):
    def none_here(descriptor, operation):
        raise OSError("no locks available")

    monkeypatch.setattr(module.fcntl, "flock", none_here)
    note_start(tmp_path, make_engine(), 3)
    assert len(run_file(tmp_path)["starts"]) == 1


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    replace_file(path, b"one")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    with pytest.raises(TypeError):
        replace_file(path, None)
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
