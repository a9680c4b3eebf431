"""`pulsetrain examples`, `init` and `doctor`: the first commands of a new user."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

from pulsetrain.cli import doctor as doctor_command
from pulsetrain.cli import main

ROOT = Path(__file__).parents[3]


def test_each_example_is_listed_with_what_it_shows(capsys: pytest.CaptureFixture[str]):
    assert main(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in lines if line and not line.startswith("copy one")}
    there = {path.stem for path in (ROOT / "examples").glob("*.py")}
    there |= {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "project"}
    assert names == there - {"__pycache__"}
    assert not [line for line in lines if line and len(line.split()) < 3]


@pytest.mark.parametrize(("name", "file"), [("minimal", "minimal.py"), ("byte_lm", "byte_lm/config.yaml")])
def test_a_copy_is_the_same_and_is_never_overwritten(
    name: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["examples", name, "--into", str(tmp_path / "new")]) == 0
    copied = tmp_path / "new" / file
    assert copied.read_text() == (ROOT / "examples" / file).read_text()
    assert "run it: " in capsys.readouterr().out
    copied.write_text("mine")
    assert main(["examples", name, "--into", str(tmp_path / "new")]) == 2
    assert "exists already, and nothing is overwritten" in capsys.readouterr().err
    assert copied.read_text() == "mine"


def test_an_unknown_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["examples", "minimol"]) == 2
    assert "did you mean 'minimal'?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_new_project_trains_and_its_tests_pass(tmp_path: Path):
    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path / "digits",
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout

    assert main(["init", str(tmp_path / "digits")]) == 0
    assert "val/accuracy" in run("pulsetrain", "train", "config.yaml")
    assert "3 passed" in run("pytest", "-q")


def test_init_does_not_touch_a_folder_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["init", str(tmp_path)]) == 2
    assert "choose another NAME" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_says_what_each_extra_is_for():
    extras = set(metadata("pulsetrain").get_all("Provides-Extra") or ()) - set(doctor_command._NOT_FOR_USERS)
    assert extras == set(doctor_command._PURPOSE)


def test_the_doctor_finds_this_installation_healthy(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert output.count("passed in ") == 4
    for word in ("pulsetrain ", "torch ", "devices", "optional", "tensorboard"):
        assert f"  {word}" in output or f"\n{word}" in output


def test_a_test_that_fails_is_shown_and_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(folder: Path) -> None:
        raise RuntimeError("the disk is on fire")

    monkeypatch.setitem(doctor_command._TESTS, "a model learns", fail)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "FAILED: RuntimeError: the disk is on fire" in output
    assert "please report this" in output
