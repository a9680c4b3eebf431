"""run.json contains the settings of a run, and each time that it started or resumed."""

import json
import os
import stat
import subprocess
import sys

import pytest
import torch

from pulsetrain.engine import Engine, Events, Topology, TorchBackend
from pulsetrain.handlers import EventRecorder
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
    for iteration in range(2):
        engine = make_engine()
        engine.load_state_dict({"iteration": iteration, "epoch_length": 1, "max_epochs": 2})
        recorder = EventRecorder(tmp_path).attach(engine)
        engine.run([0])
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


def test_the_topology_is_there_where_it_is_not_the_usual_one():
    assert run_facts(trainer({"seed": 5}))["parallel"] == {}
    assert run_facts(make_engine())["parallel"] == {}
    backend = TorchBackend("cpu", topology=Topology(virtual=2, reduction="tree"))
    model = torch.nn.Linear(4, 1)
    assert run_facts(trainer({"seed": 5}, backend=backend, model=model))["parallel"] == {
        "virtual": 2,
        "reduction": "tree",
    }
