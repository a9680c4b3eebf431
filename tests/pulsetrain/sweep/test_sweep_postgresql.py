"""A sweep whose study is on a real PostgreSQL server, which the test starts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulsetrain.sweep.results import read_results
from tests.faults.sweeps import CONFIG, MODEL


def programs() -> Path | None:
    found = shutil.which("pg_ctl")
    return Path(found).resolve().parent if found else None


@pytest.fixture
def url() -> Iterator[str]:
    folder = programs()
    if folder is None:
        pytest.skip("needs PostgreSQL's pg_ctl")
    as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
