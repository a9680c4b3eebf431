"""Checkpoints of pipelines: each process saves its layers, and any other number of processes reads them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pulsetrain.engine import Events
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.recording.diff.ranks import diff_ranks
from pulsetrain.handlers import EMA
from tests.support.ranks import in_processes
from tests.support.runs_of_shards import KINDS, apart, saving, trained


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("pipeline", "pipeline"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("pipeline", "one"), ("one", "pipeline"), ("pipeline", "ddp"), ("ddp", "pipeline"),
                ("pipeline", "copies"),
                ("copies", "pipeline"), ("pipelines", "pipelines"), ("pipelines", "pipeline"),
                ("pipelines of shards", "pipelines of shards"), ("pipelines of shards", "fsdp"),
            )
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_of_a_pipeline_resumes_on_any_other_number(first: str, then: str, tmp_path: Path):
    def cut(rank: int) -> None:
        made = saving(tmp_path / "run", rank, first, None, EMA(0.9))
        made.on(Events.ITERATION_COMPLETED(once=11))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        made.train()

    def resume(rank: int) -> Any:
        return trained(saving(tmp_path / "run", rank, then, None, EMA(0.9)), resume="latest")

    in_processes(cut, KINDS[first].processes)
    assert [path.name[:9] for path in CheckpointManager(tmp_path / "run" / "checkpoints").valid()][-1] == "000000009"
    ended = in_processes(resume, KINDS[then].processes)
    whole = in_processes(
        lambda rank: trained(saving(tmp_path / f"{then}-{rank}", 0, then, None, EMA(0.9))), KINDS[then].processes
    )
    for each in (*ended, *whole):
        assert not each.error, each.error
    for one, other in zip(ended, whole, strict=True):
        found, expected = one.value, other.value
        assert found["weights"]
        if first == then:
            assert found["weights"] == expected["weights"]  # bit for bit
            assert found["val"] == expected["val"]
        else:
            found["val"] = expected["val"] = found["val"][-1:]
            assert apart(found, expected) < 1e-12
    if first == then:
        assert not diff_ranks(tmp_path / "run")


def digests_after_loading(path: Path, kind: str, folder: Path) -> list[dict[str, Any]]:
    """What the processes of a kind have of the weights, the optimizer's state and the average that they load."""

    def load(rank: int) -> dict[str, Any]:
        made = saving(folder / f"{kind}-{rank}", rank + 7, kind, None, average := EMA(0.9))
        made.load_checkpoint(path)
        found = {f"model/{name}": each for name, each in made.model.state_dict().items()}
        state = made.optimizer.state_dict()
        for index, values in state["state"].items():
            found |= {f"optimizer/{index}/{name}": each for name, each in values.items()}
            assert not any(each.is_meta for each in values.values())  # none for the layers of other processes
        found |= {f"average/{name}": each for name, each in average.state_dict()["average"]["weights"].items()}
        whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}
        groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
        return {"tensors": {name: each.tolist() for name, each in whole.items() if not each.is_meta}, "groups": groups}

    ended = in_processes(load, KINDS[kind].processes)
    for each in ended:
        assert not each.error, each.error
    return [each.value for each in ended]


_KINDS = ("one", "ddp", "pipeline", "copies", "pipelines of shards")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", "one", "ddp", "copies", "pipelines of shards"])
def test_what_a_checkpoint_holds_is_loaded_bit_for_bit_by_any_other_number(kind: str, tmp_path: Path):
    for each in in_processes(
        lambda rank: trained(saving(tmp_path / "run", rank, kind, None, EMA(0.9))), KINDS[kind].processes, limit=120
    ):
        assert not each.error, each.error
    path = CheckpointManager(tmp_path / "run" / "checkpoints").valid()[-1]
    assert isinstance(path, Path)
    expected = digests_after_loading(path, "one", tmp_path)[0]
    assert len(expected["tensors"]) == 4 + 3 * 4 + 4  # with three numbers of AdamW's for each parameter
    for other in _KINDS[1:]:
        found: dict[str, Any] = {}
        for each in digests_after_loading(path, other, tmp_path):
            found |= each["tensors"]
            assert each["groups"] == expected["groups"]
        assert found == expected["tensors"], other


def test_a_checkpoint_of_a_pipeline_has_the_whole_of_each_tensor_once(tmp_path: Path):
    for each in in_processes(lambda rank: trained(saving(tmp_path / "run", rank, "pipeline", None, EMA(0.9)))):
        assert not each.error, each.error
    one = saving(tmp_path / "one", 0, "one", None, EMA(0.9))
    trained(one)
    manager, other = (CheckpointManager(tmp_path / name / "checkpoints") for name in ("run", "one"))
    assert [path.name for path in manager.valid()] == [path.name for path in other.valid()]
    assert manager.get_best().name == other.get_best().name  # type: ignore[union-attr]
    saved, expected = load_checkpoint(manager.valid()[-1]), load_checkpoint(other.valid()[-1])
    assert list(saved["model"]) == list(expected["model"])
    assert list(saved["optimizer"]["state"]) == list(expected["optimizer"]["state"])
    assert saved["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]
    for name, each in expected["model"].items():
        assert type(saved["model"][name]) is Tensor
        torch.testing.assert_close(saved["model"][name], each, rtol=0, atol=1e-12)
    for index, values in expected["optimizer"]["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(saved["optimizer"]["state"][index][name], value, rtol=0, atol=1e-12)
