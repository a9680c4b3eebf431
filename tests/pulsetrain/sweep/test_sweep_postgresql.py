"""A sweep whose study is on a real PostgreSQL server, which the test starts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.sweep.coordinator import _Coordinator, _owned
from pulsetrain.sweep.results import read_results, results_of
from pulsetrain.sweep.spec import Spec, read_spec
from tests.faults.sweeps import CONFIG, MODEL
from tests.support.ports import free_port
from tests.support.training_jobs import until, write_run


def programs() -> Path | None:
    found = shutil.which("pg_ctl")
    return Path(found).resolve().parent if found else None


@pytest.fixture
def url() -> Iterator[str]:
    folder = programs()
    if folder is None:
        pytest.skip("needs PostgreSQL's pg_ctl")
    as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        if as_user:
            shutil.chown(data, "postgres")
        ctl = [*as_user, str(folder / "pg_ctl"), "-D", f"{data}/d", "-w"]
        options = {"check": True, "stdout": subprocess.DEVNULL, "cwd": "/"}
        subprocess.run([*as_user, str(folder / "initdb"), "-D", f"{data}/d", "-A", "trust", "-U", "me"], **options)  # type: ignore[call-overload]
        subprocess.run([*ctl, "-o", f"-p {port} -k {data}", "-l", f"{data}/log", "start"], **options)  # type: ignore[call-overload]
        try:
            yield f"postgresql://me:hunter2@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*ctl, "-m", "fast", "stop"], **options)  # type: ignore[call-overload]


@pytest.mark.slow
def test_the_study_is_on_the_server_and_the_password_in_no_file(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "s.yaml").write_text(
        "config: base.yaml\nfolder: out\nsampler: grid\nmetric: val/loss\n"
        "space: {training.learning_rate: [1e-3, 1e-2]}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PULSETRAIN_SWEEP_STORAGE", url)
    done = subprocess.run([sys.executable, "-m", "pulsetrain", "sweep", "s.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    assert [each.state for each in read_results(Path("out")).trials] == ["completed", "completed"]
    assert not Path("out/sweep.sqlite").exists()
    assert [path for path in Path("out").rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()] == []


@pytest.mark.slow
def test_a_study_of_another_sweep_is_refused_and_two_folders_share_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "base.yaml").write_text(CONFIG)
    entries = "config: base.yaml\nsampler: grid\nmetric: val/loss\nstudy: shared\n"
    (tmp_path / "s.yaml").write_text(f"{entries}space: {{training.learning_rate: [1e-3, 1e-2, 2e-2]}}\n")
    (tmp_path / "other.yaml").write_text(f"{entries}space: {{model.init_args.width: [4, 6]}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PULSETRAIN_SWEEP_STORAGE", url)
    words = [sys.executable, "-m", "pulsetrain", "sweep"]
    sharing = [subprocess.Popen([*words, "s.yaml", "--folder", name]) for name in ("a", "b")]
    assert [each.wait(timeout=240) for each in sharing] == [0, 0]
    trials = read_results(Path("a")).trials
    assert [each.state for each in trials] == ["completed"] * 3  # none is drawn twice, and none beyond the grid
    assert all((each.folder / "run.json").exists() for each in trials)
    refused = subprocess.run([*words, "other.yaml"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "the study 'shared' of a sweep with other values of space" in refused.stderr


@contextmanager
def process(spec: Spec, worker: str | None) -> Iterator[_Coordinator]:
    """A process of the sweep, which is killed at the end of the block."""
    with _owned(Path(spec.folder), worker):
        yield _Coordinator(spec, main, lambda trial: None, worker)


@pytest.fixture
def spec(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "s.yaml").write_text(
        "config: base.yaml\nsampler: grid\nmetric: val/loss\nspace: {training.learning_rate: [1e-3, 1e-2, 2e-2]}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PULSETRAIN_SWEEP_STORAGE", url)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return read_spec(Path("s.yaml"))


def draw_and_leave(begun: _Coordinator) -> None:
    """Two trials of a process that is killed next: while it trains the first, and before it owns the second."""
    begun.study.ask().set_user_attr("owner", begun._owner)
    begun.study.ask()


@pytest.mark.slow
def test_a_sweep_continues_what_it_left_on_another_host_and_with_and_without_workers(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for before, after in ((None, None), (None, "a"), ("a", None), ("a", "a"), ("a", "b")):
        own = replace(spec, folder=f"{before}-{after}", study=f"{before}-{after}")
        monkeypatch.setattr(socket, "gethostname", lambda: "first")
        with process(own, before) as begun:
            draw_and_leave(begun)
        monkeypatch.setattr(socket, "gethostname", lambda: "second")
        with process(own, after) as continued:
            assert [each.number for each in continued._left()] == [0, 1], own.folder
            owners = [each.user_attrs["owner"]["worker"] for each in continued._trials()]
        assert owners == [after, after]


@pytest.mark.slow
def test_no_process_continues_what_another_one_trains(spec: Spec) -> None:
    with process(replace(spec, folder="one"), "0") as training, process(replace(spec, folder="one"), "1") as beside:
        training.study.ask().set_user_attr("owner", training._owner)
        assert beside._left() == []
        with process(
            replace(spec, folder="two"), "0"
        ) as elsewhere:  # with the study and the worker's name of the first
            assert elsewhere._left() == []
            (trial,) = results_of(Path("two"), spec.directions, elsewhere._trials()).trials
    assert trial.folder == Path("one/trials/0000").resolve()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_population_that_is_killed_continues_on_another_host(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, pause=0.02)
    (tmp_path / "s.yaml").write_text(
        "config: base.yaml\nfolder: out\nsampler: population\nmetric: val/loss\npopulation: 4\ngenerations: 1\n"
        "interval: 10\nspace: {training.learning_rate: {low: 1e-3, high: 1e-2}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PULSETRAIN_SWEEP_STORAGE", url)
    command = (
        "import socket; socket.gethostname = lambda: '{}'; from pulsetrain.cli import main; "
        "raise SystemExit(main(['sweep', 's.yaml']))"
    )
    killed = subprocess.Popen([sys.executable, "-c", command.format("first")], start_new_session=True)
    until(lambda: list(Path("out/trials").glob("*/checkpoints/*/manifest.json")))
    os.killpg(killed.pid, 9)
    killed.wait()
    again = subprocess.run([sys.executable, "-c", command.format("second")], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert [each.state for each in read_results(Path("out")).trials] == ["completed"] * 4
