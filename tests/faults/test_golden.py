"""Checkpoints as each version of the formats wrote them, kept as files: all of them still load, and runs go on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import structlog
import torch

from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.checkpoint.manifest import FORMATS
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.state.resume import FORMAT
from tests.faults.everything import bits, leaves, make

GOLDEN = Path(__file__).parent.parent / "golden" / "checkpoints"
RUNS = GOLDEN.parent / "trainer"  # a trainer's state in each of its formats: `everything.make`, cut at iteration 13


def test_every_format_has_its_golden_checkpoint():
    assert sorted(path.name for path in GOLDEN.iterdir()) == [f"format_{number}" for number in FORMATS]


@pytest.mark.parametrize("number", FORMATS)
def test_a_checkpoint_of_each_format_loads_to_the_bit(number: int):
    loaded = load_checkpoint(GOLDEN / f"format_{number}" / "000000003-golden")
    weights, half = loaded.pop("weights"), loaded.pop("half")
    assert torch.equal(weights, torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [1.5]
    nested = {"rates": [0.1, float("inf")], "done": (True, None)}
    assert loaded == {"nested": nested, "bytes": b"\x00\xff", "step": 3}


@pytest.mark.parametrize("number", FORMATS)
def test_a_folder_of_each_format_is_gone_on_with(number: int, tmp_path: Path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(GOLDEN / f"format_{number}", folder)
    manager = CheckpointManager(folder, keep_last_n=1)
    old = folder / "000000003-golden"
    assert manager.get_latest() == manager.get_best() == old
    new = manager.save({"step": 4}, step=4)
    assert manager.get_latest() == new
    assert manager.valid() == [old, new]  # the best one stays


def test_the_first_format_notices_a_flipped_bit_of_the_state(tmp_path: Path):
    shutil.copytree(GOLDEN / "format_1" / "000000003-golden", tmp_path / "c")
    state = tmp_path / "c" / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 4
    state.write_bytes(content)
    with pytest.raises(CheckpointError, match="its digest differs from the manifest's"):
        load_checkpoint(tmp_path / "c")


def test_every_format_of_a_trainers_state_that_is_read_has_its_golden_checkpoint():
    formats = [load_checkpoint(path / "000000013-checkpoint")["format"] for path in sorted(RUNS.iterdir())]
    assert formats == [3, FORMAT]
    assert [path.name for path in sorted(RUNS.iterdir())] == [f"format_{number}" for number in formats]


@pytest.mark.parametrize("number", [3, FORMAT])
def test_a_trainer_goes_on_from_a_state_of_each_format(number: int, tmp_path: Path):
    shutil.copytree(RUNS / f"format_{number}", tmp_path / "checkpoints")
    saved = load_checkpoint(tmp_path / "checkpoints" / "000000013-checkpoint")
    run = make(tmp_path)
    run.load_checkpoint(tmp_path / "checkpoints" / "000000013-checkpoint")
    loaded = dict(leaves(run.checkpoint_state()))
    for part in ("model", "optimizer", "accumulation", "metrics", "history", "losses", "position", "validated_at"):
        for path, value in leaves(saved[part], part):
            assert bits(loaded[path]) == bits(value), path
    assert loaded["handlers/EMA/average/number_averaged"] == saved["handlers"]["EMA"]["average"]["number_averaged"] > 0

    shutil.copytree(tmp_path / "checkpoints", tmp_path / "again" / "checkpoints")
    again = make(tmp_path / "again")
    with structlog.testing.capture_logs() as logs:
        again.train(resume="latest")
    assert (again.state.iteration, again.state.epoch) == (32, 4)
    told = {entry["event"] for entry in logs if entry["log_level"] == "warning"}
    assert told <= {
        "the environment differs from the checkpoint's: results need not be the same to the bit",
        *(["the strategy begins anew"] if number == 3 else []),
    }
