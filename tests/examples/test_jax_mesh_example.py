"""The configuration of a mesh trains the model as one device does, and its run can be repeated."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pulsetrain.engine.checkpoint import CheckpointManager
from tests.support.programs_examples import EXAMPLES, run

pytest.importorskip("jax", reason="pip install 'pulsetrain[jax]'")
pytest.importorskip("flax", reason="pip install 'pulsetrain[jax]'")

pytestmark = pytest.mark.slow

CONFIG = EXAMPLES / "distributed" / "jax_mesh.yaml"
FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
SMALL = {
    "model.init_args.layers": 1,
    "model.init_args.width": 64,
    "model.init_args.context": 32,
    "data.init_args.context": 32,
    "data.init_args.validation_batches": 1,
    "training.max_iterations": 10,
    "training.warmup_steps": 2,
    "training.log_every_n_steps": 1,
    "training.validate_every": "{iterations: 5}",
}


def train(folder: Path, *more: object, **variables: str) -> list[dict[str, str]]:
    settings = [text for name, value in SMALL.items() for text in (f"--{name}", value)]
    run(EXAMPLES.parent, "-m", "pulsetrain", "train", CONFIG, "--run", folder, *settings, *more, **variables)
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_it_trains_by_configuration_alone_as_on_one_device_and_is_verified(tmp_path: Path) -> None:
    mesh, one = train(tmp_path / "mesh", **FOUR), train(tmp_path / "one", "--backend", "JaxBackend")
    for name, count in (("train/loss", 10), ("grad_norm", 10), ("val/loss", 2)):
        found, expected = ([float(row[name]) for row in rows if row[name]] for rows in (mesh, one))
        assert len(found) == count
        assert found == pytest.approx(expected, abs=1e-5)
    assert float(mesh[-1]["train/loss"]) < float(mesh[0]["train/loss"]) - 0.1
    output = run(EXAMPLES.parent, "-m", "pulsetrain", "verify", tmp_path / "mesh", **FOUR).output
    assert "iterations 1 to 10: reproduced" in output[0]
    assert CheckpointManager(tmp_path / "mesh" / "checkpoints").get_latest() is not None


def test_its_first_lines_say_how_it_is_run() -> None:
    text = CONFIG.read_text()
    assert (
        f"#     XLA_FLAGS={FOUR['XLA_FLAGS']} python -m pulsetrain train examples/distributed/{CONFIG.name}\n" in text
    )
    assert f"#     python -m pulsetrain train examples/distributed/{CONFIG.name} --backend JaxBackend\n" in text
