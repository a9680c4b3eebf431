"""Optimizer state in a mapped file: how much of it is in memory, and where it has no room."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from benchmarks.harness.resident import resident_bytes, rss_of_mapping
from pulsetrain.engine import OptimizerOffload
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.file_system import FileSystem
from pulsetrain.engine.memory import state_memory
from pulsetrain.engine.memory.optimizer_state import offload_optimizer
from pulsetrain.engine.optimizers import create_optimizer
from tests.support.largest_file import largest_file
from tests.support.offloaded import learn, network, to_disk


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 128), *[nn.Linear(128, 128) for _ in range(24)], nn.Linear(128, 7))


def lopsided() -> nn.Module:
    """Nearly all weights are in one matrix, as in a small model of a large vocabulary."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 60_000), nn.Linear(60_000, 1), nn.Linear(1, 1))


@pytest.mark.parametrize("make", [wide, lopsided])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adam"])
def test_less_than_10_percent_of_the_state_is_resident(name: str, make: Any, tmp_path: Path, monkeypatch):
    model = make()
    optimizer = create_optimizer(model, name, 0.01)
    offload_optimizer(optimizer, OptimizerOffload(folder=str(tmp_path)))
    slots = {id(each): each for values in optimizer._slots.values() for each in values.values()}
    size, found = sum(each.nbytes for each in slots.values()), []
    ((mapped, address),) = optimizer._memory._maps
    assert size <= len(mapped) < 1.2 * size
    release = state_memory.MappedState.release

    def measured(memory: Any, parts: Any = None) -> None:  # when the most is in memory: before any of it is released
        state = [each for values in optimizer.state.values() for each in values.values()]
        found.append(resident_bytes(address, len(mapped)) + sum(each.nbytes for each in state if id(each) not in slots))
        if len(found) == 40:
            assert resident_bytes(address, len(mapped)) == rss_of_mapping(address) > 0
        release(memory, parts)

    monkeypatch.setattr(state_memory.MappedState, "release", measured)
    learn(model, optimizer, steps=3)
    assert len(found) > 3 * 20
    assert 0 < max(found) < 0.1 * size
    assert resident_bytes(address, len(mapped)) == 0
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert sum(float(each.sum()) for each in slots.values()) != 0  # as a checkpoint reads them
    assert resident_bytes(address, len(mapped)) >= size
    found.clear()
    learn(model, optimizer, steps=1)
    assert found[0] >= size > 0.1 * size > max(found[1:])


def test_the_folder_shows_nothing_and_has_the_room_reserved(tmp_path: Path, monkeypatch):
    reserved = []
    real = state_memory.os.posix_fallocate
    monkeypatch.setattr(state_memory.os, "posix_fallocate", lambda *given: (reserved.append(given[2]), real(*given)))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    offload_optimizer(optimizer, to_disk(tmp_path / "new" / "folder"))
    learn(model, optimizer)
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    assert sum(reserved) >= sum(each.nbytes for each in model.parameters()) * 2


def test_a_full_disk_is_refused_and_the_optimizer_left_as_it_was(tmp_path: Path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    rule = r"OptimizerOffload\(folder='.*'\): no room there for 1 MiB of optimizer state: File too large; make room"
    with largest_file(8192), pytest.raises(ConfigurationError, match=rule):
        offload_optimizer(optimizer, to_disk(tmp_path))
    assert type(optimizer) is torch.optim.AdamW
    learn(model, optimizer)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    optimizer = torch.optim.AdamW(network().parameters())
    with pytest.raises(ConfigurationError, match=r"no room there .*: File exists; make room, or choose another folder"):
        offload_optimizer(optimizer, to_disk(tmp_path / "file"))


def test_a_folder_in_memory_is_reported(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(state_memory, "file_system_of", lambda path: FileSystem("tmpfs"))
    with structlog.testing.capture_logs() as logs:
        offload_optimizer(torch.optim.AdamW(network().parameters()), to_disk(tmp_path))
    assert [each["event"] for each in logs] == [
        "the folder for the optimizer's state is in memory (tmpfs), so nothing is saved; choose one on a disk"
    ]
