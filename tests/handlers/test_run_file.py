"""run.json says what a run was made with, and each time that it began or went on."""

import json
import subprocess
import sys

import pytest
from driving import make_engine

from engine import Engine, Events
from handlers import EventRecorder
from handlers.run_file import describe_run
from tests.pulsetrain.small import trainer


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


def test_a_run_that_goes_on_adds_a_start_and_changes_nothing_else(tmp_path):
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


def test_a_validation_is_no_start(tmp_path):
    engine = make_engine()
    evaluator = Engine(lambda engine, batch: None, name="evaluator", bus=engine.bus)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    EventRecorder(tmp_path).attach(engine)
    engine.run([0], max_epochs=3)
    assert len(run_file(tmp_path)["starts"]) == 1


def test_settings_and_seed_of_a_trainer_are_there():
    facts = describe_run(trainer({"seed": 5}))
    assert facts["seed"] == facts["settings"]["seed"] == 5
    assert json.loads(json.dumps(facts)) == facts


def test_the_commit_is_that_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert describe_run(make_engine())["git"] is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    if subprocess.run([*git, "init", "-q"], check=False).returncode:
        pytest.skip("no git here")
    (tmp_path / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    state = describe_run(make_engine())["git"]
    assert len(state["commit"]) == 40
    assert state["changed"] is False
    (tmp_path / "a").write_text("2")
    assert describe_run(make_engine())["git"]["changed"] is True
