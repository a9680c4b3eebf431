"""Checkpoints as each version of the format wrote them, kept as files: all of them still load."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engine.checkpoint import CheckpointManager, load_checkpoint
from engine.checkpoint.manifest import FORMATS
from engine.errors import CheckpointError

GOLDEN = Path(__file__).parent.parent / "golden" / "checkpoints"


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
    with pytest.raises(CheckpointError, match="its digest is not the manifest's"):
        load_checkpoint(tmp_path / "c")
