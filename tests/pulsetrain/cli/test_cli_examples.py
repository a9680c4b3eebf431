"""`pulsetrain examples`, `init` and `doctor`: the first commands of a new user."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata, version
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


@pytest.mark.parametrize(
    ("name", "copied", "command"),
    [
        ("ported", {"ported", "byte_lm"}, "python -m examples.ported.digits"),
        ("byte_lm_jax", {"byte_lm_jax", "byte_lm"}, "python -m examples.byte_lm_jax.train"),
        ("byte_lm_tuning", {"byte_lm_tuning", "byte_lm"}, "pulsetrain train examples/byte_lm/config.yaml"),
        ("distributed", {"distributed", "byte_lm_jax", "byte_lm"}, "python examples/distributed/compare.py"),
        ("memory", {"memory.py", "byte_lm"}, "python examples/memory.py"),
        (
            "sweep_digits",
            {"sweep_digits.py", "sweep_digits.yaml", "sweep.yaml"},
            "pulsetrain sweep examples/sweep.yaml",
        ),
        ("time_travel", {"time_travel.py", "time_travel.yaml"}, "python examples/time_travel.py"),
    ],
)
def test_an_example_that_needs_others_is_copied_with_them(
    name: str, copied: set[str], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["examples", name, "--into", str(tmp_path)]) == 0
    assert {each.name for each in (tmp_path / "examples").iterdir()} == copied
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith(command)]
    assert f"in {tmp_path}:" in "\n".join(lines)
    assert main(["examples", name, "--into", str(tmp_path)]) == 2
    assert "exists already, and nothing is overwritten" in capsys.readouterr().err


def test_an_example_that_was_copied_before_serves_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["examples", "ported", "--into", str(tmp_path)]) == 0
    (tmp_path / "examples" / "byte_lm" / "model.py").write_text("mine")
    assert main(["examples", "byte_lm_tuning", "--into", str(tmp_path)]) == 0
    assert (tmp_path / "examples" / "byte_lm" / "model.py").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ported", "byte_lm_tuning", "memory", "time_travel"])
def test_what_was_copied_finds_what_it_imports(name: str, tmp_path: Path):
    assert main(["examples", name, "--into", str(tmp_path)]) == 0
    scripts = (tmp_path / "examples").rglob("*.py")
    modules = [".".join(each.relative_to(tmp_path).with_suffix("").parts) for each in scripts]
    code = f"import importlib, sys\nfor name in {modules}: print(importlib.import_module(name).__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(tmp_path) for line in done.stdout.split())


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


def test_init_says_what_the_project_needs_and_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["init", str(tmp_path / "digits")]) == 0
    train, _, test = capsys.readouterr().out.splitlines()[1:]
    assert train == f"train:   cd {tmp_path}/digits && pip install scikit-learn && pulsetrain train config.yaml"
    assert test == f"test:    cd {tmp_path}/digits && pytest"


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


@pytest.mark.parametrize(
    ("found", "damaged", "line"),
    [
        ("", False, "blinker            missing; pip install 'blinker>=1.9'"),
        ("1.2", False, "blinker            1.2, but >=1.9 is needed; pip install 'blinker>=1.9'"),
        ("1.9", True, "blinker            1.9, but it cannot be imported: ModuleNotFoundError"),
    ],
    ids=["missing", "too old", "damaged"],
)
def test_a_package_that_is_not_usable_is_named_with_its_remedy_and_nothing_is_tested(
    found: str, damaged: bool, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor_command, "version", lambda name: version_but("blinker", found, name))
    if damaged:
        monkeypatch.setitem(sys.modules, "blinker", None)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert f"  {line}" in output
    assert "\nblinker: not usable, see above; nothing is tested" in output
    assert "passed in" not in output


def test_a_package_that_only_commands_need_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor_command, "version", lambda name: version_but("jsonargparse", "", name))
    assert main(["doctor", "--no-test"]) == 0
    remedy = "which the engine can do without; pip install 'jsonargparse[signatures]>="
    assert f"  jsonargparse       missing, {remedy}" in capsys.readouterr().out


def test_an_extra_whose_package_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(doctor_command, "version", lambda name: version_but("plotly", "5.0", name))
    assert main(["doctor", "--no-test"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  report "))
    assert line.endswith("plotly 5.0; needed: plotly>=6.3; pip install 'pulsetrain[report]'")


def version_but(package: str, found: str, name: str) -> str:
    """The version of a package; of this one, the one that is said to be found."""
    if name != package:
        return version(name)
    if not found:
        raise PackageNotFoundError(name)
    return found
