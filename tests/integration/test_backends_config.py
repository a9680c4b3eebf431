"""A configuration names the backend: dry runs, training, resuming and forking from it."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pulsetrain.cli import main
from pulsetrain.engine.recording import EventLog, diff
from tests.faults.everything import logged
from tests.support.runs_backends import programs_kept

jax = pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")
pytest.importorskip("flax", reason="flax is not installed")

PARTS = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from tests.support.runs_backends import nnx_model

    def loaders():
        inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=8)
"""
CONFIG = {
    "model": "parts_on_jax.nnx_model",
    "data": "parts_on_jax.loaders",
    "backend": {"class_path": "pulsetrain.engine.JaxBackend", "init_args": {"device": "cpu"}},
    "strategy": {"class_path": "supervised", "init_args": {"loss": "mse"}},
    "training": {
        "max_epochs": 2,
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "accumulate": 2,
        "log_every_n_steps": 3,
        "seed": 3,
    },
    "handlers": [
        {"class_path": "EventRecorder", "init_args": {"grad_norm": True}},
        {"class_path": "Checkpointer", "init_args": {"every": {"iterations": 5}, "keep_last": 20}},
        "CSVLogger",
    ],
}


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Iterator[None]:
    with programs_kept():
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with the configuration and the complete run "a"."""
    folder, path = tmp_path_factory.mktemp("configured"), list(sys.path)
    (folder / "parts_on_jax.py").write_text(textwrap.dedent(PARTS))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "config.yaml", "--run", "a"]) == 0
        yield folder
    sys.path[:] = path
    sys.modules.pop("parts_on_jax", None)


@pytest.mark.slow
def test_the_run_was_computed_by_the_backend_of_its_configuration(workdir: Path):
    losses = [
        each.output["loss"] for each in EventLog(workdir / "a").read(event="iteration_completed", engine="trainer")
    ]
    assert len(losses) == 12
    kept = yaml.safe_load((workdir / "a" / "config.yaml").read_text())
    assert kept["backend"] == CONFIG["backend"]
    environment = json.loads((workdir / "a" / "run.json").read_text())["environment"]
    assert environment["jax"] == jax.__version__


@pytest.mark.slow
def test_a_dry_run_tries_everything_and_leaves_nothing(workdir: Path, capsys: pytest.CaptureFixture[str]):
    before = sorted(workdir.rglob("*"))
    assert main(["train", "config.yaml", "--dry-run", "--run", "dry"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("65 parameters", "2 batches, 1 update", "val/loss", "checkpoint"))
    assert sorted(workdir.rglob("*")) == before


@pytest.mark.slow
def test_a_run_is_resumed_from_the_command_line(workdir: Path):
    assert main(["train", "config.yaml", "--run", "parts", "--training.max_epochs", "1"]) == 0
    assert main(["train", "config.yaml", "--run", "parts", "--resume", "latest"]) == 0
    assert dict(logged(workdir / "parts")) == dict(logged(workdir / "a"))
    assert not diff(workdir / "a", workdir / "parts")


@pytest.mark.slow
def test_a_run_is_verified_from_its_folder(workdir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "a"]) == 0
    assert "iterations 1 to 12: reproduced" in capsys.readouterr().out
    assert main(["verify", "a", "--from", "8"]) == 0
    assert "iterations 6 to 12: reproduced" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--live"]], ids=["recorded", "live"])
def test_a_run_is_debugged(
    workdir: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lines = b"goto iteration 8\nnext to gradients_ready\nback to iteration_started\nstate\nquit\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert main(["debug", "a", *words]) == 0
    reported = capsys.readouterr().out
    (event,) = EventLog(workdir / "a").read(event="gradients_ready", engine="trainer", iteration=(8, 8))
    assert f"gradients_ready, epoch {event.epoch}, iteration 8" in reported
    state = reported[reported.rindex("iteration_started, epoch 2, iteration 8") :].split()
    assert state[state.index("update") + 1] == "3"


@pytest.mark.slow
def test_a_fork_continues_with_the_change(workdir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["fork", "a", "--at", "5", "--into", "same", "--train"]) == 0
    assert not diff(workdir / "a", workdir / "same")
    changed = ["--set", "training.learning_rate=1e-3", "--set", "training.weight_decay=0.5"]
    assert main(["fork", "a", "--at", "5", "--into", "changed", *changed, "--train"]) == 0
    rates = {
        each.lr[0] for each in EventLog(workdir / "changed").read(event="iteration_completed") if each.iteration > 6
    }
    assert rates == {1e-3}
    found = diff(workdir / "a", workdir / "changed").divergence
    assert found is not None
    assert found.a.iteration == 6
