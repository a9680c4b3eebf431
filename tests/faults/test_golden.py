"""Golden checkpoints of every format version: all of them still load, and runs resume from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.checkpoint.manifest import FORMATS
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.state.older_formats import upgrade
from pulsetrain.state.run_state import FORMAT
from tests.faults.everything import bits, leaves, make
from tests.support.checkpoints import downgraded

GOLDEN = Path(__file__).parent.parent / "golden" / "checkpoints"
RUNS = GOLDEN.parent / "trainer"  # a trainer's state in each of its formats: `everything.make`, cut at iteration 13


def bits_of(state: Any) -> dict[str, Any]:
    return {path: bits(value) for path, value in leaves(state)}


def test_every_format_has_its_golden_checkpoint():
    assert sorted(path.name for path in GOLDEN.iterdir()) == [f"format_{number}" for number in FORMATS]


@pytest.mark.parametrize("number", FORMATS)
def test_a_checkpoint_of_each_format_loads_bit_for_bit(number: int):
    loaded = load_checkpoint(GOLDEN / f"format_{number}" / "000000003-golden")
    weights, half = loaded.pop("weights"), loaded.pop("half")
    assert torch.equal(weights, torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [1.5]
    nested = {"rates": [0.1, float("inf")], "done": (True, None)}
    assert loaded == {"nested": nested, "bytes": b"\x00\xff", "step": 3}


@pytest.mark.parametrize("number", FORMATS)
def test_a_folder_of_each_format_takes_new_checkpoints(number: int, tmp_path: Path):
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
    assert formats == [3, 4, FORMAT]
    assert [path.name for path in sorted(RUNS.iterdir())] == [f"format_{number}" for number in formats]


@pytest.mark.parametrize("number", [3, 4])
def test_the_state_of_an_older_format_is_read_without_a_loss(number: int):
    saved = load_checkpoint(RUNS / f"format_{number}" / "000000013-checkpoint")
    upgraded = upgrade(saved)
    assert bits_of(downgraded(upgraded, number)) == bits_of(saved | {"counters": upgraded["counters"]})
    assert upgraded["counters"] == {"rollout_round": 0} | saved["counters"]
    assert upgrade(upgraded) is upgraded


@pytest.mark.parametrize("number", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (4, FORMAT))])
def test_a_trainer_resumes_from_a_state_of_each_format(number: int, tmp_path: Path):
    shutil.copytree(RUNS / f"format_{number}", tmp_path / "checkpoints")
    saved = load_checkpoint(tmp_path / "checkpoints" / "000000013-checkpoint")
    run = make(tmp_path)
    run.load_checkpoint(tmp_path / "checkpoints" / "000000013-checkpoint")
    loaded = dict(leaves(run.checkpoint_state()))
    saved = dict(leaves(upgrade(saved)))
    saved["counters/save"] += 1  # its own, which is counted when it is durable
    # the rest describes this process, and how much is in the log and the table, which are not there
    other = ("made_with/", "handlers/EventRecorder/", "handlers/CSVLogger/", *(["strategy"] if number == 3 else []))
    for path, value in saved.items():
        if not path.startswith(other) and not path.endswith("/settings"):
            assert bits(loaded[path]) == bits(value), path
    assert loaded["handlers/EMA/state/average/number_averaged"] > 0

    shutil.copytree(tmp_path / "checkpoints", tmp_path / "again" / "checkpoints")
    again = make(tmp_path / "again")
    with structlog.testing.capture_logs() as logs:
        again.train(resume="latest")
    assert (again.state.iteration, again.state.epoch) == (32, 4)
    reported = {entry["event"] for entry in logs if entry["log_level"] == "warning"}
    assert reported <= {
        "the environment differs from the checkpoint's: results may differ in their last bits",
        "the checkpoint has no state for a part of the run, which starts from its beginning",  # newer ones
        "metrics.csv has fewer rows than when the checkpoint was saved; the run continues it without the missing ones, "
        "unless you stop it and restore the file",  # it is not there
        *(["the checkpoint has no state for the strategy, which starts from its beginning"] if number == 3 else []),
    }
