"""Checkpoints of models that are split over the processes: each writes its part, all of it is there or nothing."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pulsetrain.engine import CheckpointError, Events, Every
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint, load_weights, reader, save_safetensors
from pulsetrain.engine.checkpoint.disk import Disk
from pulsetrain.engine.checkpoint.safetensors_file import read_header
from pulsetrain.engine.recording.diff.ranks import diff_ranks
from pulsetrain.handlers import EMA, SWA, Checkpointer
from tests.support.models import Tied, pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import make_with
from tests.support.runs_of_shards import KINDS, apart, net, saving, sharded, trained, whole_of


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("fsdp", "fsdp"),
        ("fsdp", "one"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("one", "fsdp"), ("fsdp", "ddp"), ("ddp", "fsdp"))),
    ],
)
def test_a_checkpoint_of_any_topology_resumes_on_any_other(first: str, then: str, tmp_path: Path):
    def cut(rank: int) -> None:
        made = saving(tmp_path / "run", rank, first)
        made.on(Events.ITERATION_COMPLETED(once=11))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        made.train()

    in_processes(cut, KINDS[first].processes)
    assert [path.name[:9] for path in CheckpointManager(tmp_path / "run" / "checkpoints").valid()][-1] == "000000009"
    ended = in_processes(
        lambda rank: trained(saving(tmp_path / "run", rank, then), resume="latest"), KINDS[then].processes
    )
    whole = in_processes(lambda rank: trained(saving(tmp_path / f"{then}-{rank}", 0, then)), KINDS[then].processes)
    for each in (*ended, *whole):
        assert each.error == ""
    found, expected = ended[0].value, whole[0].value
    if first == then:
        assert found["weights"] == expected["weights"]  # bit for bit
        assert not diff_ranks(tmp_path / "run")
    else:
        found["val"] = expected["val"] = found["val"][-1:]
        assert apart(found, expected) < 1e-12


def test_a_checkpoint_of_shards_has_whole_tensors_and_the_ranking_of_all(tmp_path: Path):
    for each in in_processes(lambda rank: trained(saving(tmp_path / "run", rank, "fsdp"))):
        assert each.error == ""
    one = saving(tmp_path / "one", 0, "one")
    trained(one)
    manager, other = (CheckpointManager(tmp_path / name / "checkpoints") for name in ("run", "one"))
    assert [path.name for path in manager.valid()] == [path.name for path in other.valid()]
    assert manager.get_best().name == other.get_best().name  # type: ignore[union-attr]
    saved, expected = load_checkpoint(manager.valid()[-1]), load_checkpoint(other.valid()[-1])
    for name, each in expected["model"].items():
        assert type(saved["model"][name]) is Tensor
        torch.testing.assert_close(saved["model"][name], each, rtol=0, atol=1e-12)
    for index, values in expected["optimizer"]["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(saved["optimizer"]["state"][index][name], value, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["latest", "path"])
def test_a_process_that_resumes_reads_the_files_that_it_needs(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"
    for each in in_processes(lambda rank: trained(saving(run, rank, "three", max_epochs=2)), 3):
        assert each.error == ""
    newest = CheckpointManager(run / "checkpoints").valid()[-1]
    digest_of = reader.digest_of

    def resumed(rank: int) -> Any:
        read: list[str] = []
        note = lambda file: read.append(Path(file.name).stem) or digest_of(file)  # type: ignore[func-returns-value]  # noqa: E731
        monkeypatch.setattr(reader, "digest_of", note)
        made = saving(run, rank, "three", max_epochs=3)
        made.train(resume=str(newest) if resume == "path" else resume)
        return sorted(read)

    first, second, third = in_processes(resumed, 3)
    assert [each.error for each in (first, second, third)] == [""] * 3
    assert first.value == ["rank-00001", "rank-00002", "state", "state"]
    assert (second.value, third.value) == (["rank-00001", "state"], ["rank-00002", "state"])


@pytest.mark.slow
def test_a_checkpoint_that_is_damaged_is_refused_by_every_process(tmp_path: Path):
    run = tmp_path / "run"
    for each in in_processes(lambda rank: trained(saving(run, rank, "fsdp", max_epochs=1))):
        assert each.error == ""
    newest = CheckpointManager(run / "checkpoints").valid()[-1]
    damaged = Path(str(newest)) / "rank-00001.safetensors"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for ended in in_processes(lambda rank: saving(run, rank, "fsdp", max_epochs=2).train(resume=str(newest))):
        assert "CheckpointError" in ended.error
        assert "rank-00001.safetensors: its digest differs" in ended.error


def test_each_process_writes_its_part_alone_and_none_of_it_as_code(tmp_path: Path):
    for each in in_processes(lambda rank: trained(saving(tmp_path / "run", rank, "fsdp"))):
        assert each.error == ""
    newest = CheckpointManager(tmp_path / "run" / "checkpoints").valid()[-1]
    assert isinstance(newest, Path)
    assert sorted(each.name for each in newest.iterdir()) == [
        "manifest.json", "rank-00001.safetensors", "state.safetensors",
    ]  # fmt: skip
    rows = []
    for name in ("state", "rank-00001"):
        with (newest / f"{name}.safetensors").open("rb") as file:
            entries = read_header(file)[0]
        rows.append([entries[f"{part}"].shape for part in ("model/0.weight", "optimizer/state/0/exp_avg")])
    assert rows == [[(3, 4), (3, 4)], [(2, 4), (2, 4)]]


@pytest.mark.slow
def test_a_save_in_the_background_is_of_the_iteration_in_which_it_was_begun(tmp_path: Path):
    """The writing is held up in one process until training is two iterations further."""

    def run(rank: int) -> Any:
        made = saving(tmp_path / "later", rank, "fsdp", {"background": True})
        write = Disk.write
        further = threading.Event()
        made.on(Events.ITERATION_COMPLETED(every=5))(further.set)

        def held_up(disk: Disk, target: Path, name: str, content: Any) -> Any:
            if target.name.startswith("000000003"):
                assert rank == 0 or further.wait(30)
            return write(disk, target, name, content)

        Disk.write = held_up  # type: ignore[method-assign]
        saved: list[tuple[int, int]] = []
        made.on(Events.CHECKPOINT_SAVED)(
            lambda engine, event: saved.append((event.payload.iteration, made.state.iteration))
        )
        found = trained(made)
        return found["weights"], saved

    at_once = in_processes(lambda rank: trained(saving(tmp_path / "at_once", rank, "fsdp")))
    later = in_processes(run)
    for each in (*at_once, *later):
        assert not each.error, each.error
    assert later[0].value[0] == at_once[0].value["weights"]
    announced = later[0].value[1]
    assert [iteration for iteration, _ in announced] == [3, 6, 9, 12, 15, 18, 20]
    assert announced[0][1] >= 5
    assert later[1].value[1] == []  # the main process announces for all
    for name in ("000000003-checkpoint", "000000018-checkpoint"):
        one, other = (load_checkpoint(tmp_path / run / "checkpoints" / name) for run in ("at_once", "later"))
        for part in ("model", "optimizer"):
            assert repr(one[part]) == repr(other[part])


@pytest.mark.slow
def test_a_run_whose_saves_are_made_in_the_background_resumes_bit_for_bit(tmp_path: Path):
    def cut(rank: int) -> None:
        made = saving(tmp_path / "run", rank, "fsdp", {"background": True})
        made.on(Events.ITERATION_COMPLETED(once=11))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        made.train()

    in_processes(cut)
    assert int(CheckpointManager(tmp_path / "run" / "checkpoints").valid()[-1].name[:9]) in (6, 9)
    background = {"background": True}
    ended = in_processes(lambda rank: trained(saving(tmp_path / "run", rank, "fsdp", background), resume="latest"))
    whole = in_processes(lambda rank: trained(saving(tmp_path / "whole", rank, "fsdp", background)))
    assert [each.error for each in (*ended, *whole)] == [""] * 4
    assert ended[0].value["weights"] == whole[0].value["weights"]
    assert not diff_ranks(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [("copies", "one"), ("one", "copies"), ("four", "fsdp"), ("fsdp", "copies")]
)
def test_a_checkpoint_of_four_processes_resumes_on_any_other_number(first: str, then: str, tmp_path: Path):
    def cut(rank: int) -> None:
        made = saving(tmp_path / "run", rank, first)
        made.on(Events.ITERATION_COMPLETED(once=11))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        made.train()

    in_processes(cut, KINDS[first].processes)
    ended = in_processes(
        lambda rank: trained(saving(tmp_path / "run", rank, then), resume="latest"), KINDS[then].processes, limit=120
    )
    whole = trained(saving(tmp_path / "one", 0, "one"))
    for each in ended:
        assert each.error == ""
        assert apart({**each.value, "val": each.value["val"][-1:]}, {**whole, "val": whole["val"][-1:]}) < 1e-12


@pytest.mark.parametrize(
    "average",
    [
        pytest.param(lambda: EMA(0.9), id="EMA"),
        pytest.param(lambda: SWA(after_update=2, every=Every(updates=1)), id="SWA", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("first", "then"),
    [("fsdp", "fsdp"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fsdp", "one"), ("one", "fsdp")))],
)
def test_an_average_of_shards_is_validated_saved_and_resumed(average: Any, first: str, then: str, tmp_path: Path):
    def cut(rank: int) -> None:
        made = saving(tmp_path / "run", rank, first, None, average())
        made.on(Events.ITERATION_COMPLETED(once=11))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        made.train()

    def resumed(rank: int) -> Any:
        averaging = average()
        made = saving(tmp_path / "run", rank, then, None, averaging)
        found = trained(made, resume="latest")
        with averaging.applied():
            weights = {name: whole_of(each).tolist() for name, each in made.model.state_dict().items()}
        return found, {"weights": weights, "val": found["val"][-1:]}

    averaging = average()
    one = saving(tmp_path / "one", 0, "one", None, averaging)
    whole = trained(one)
    with averaging.applied():
        expected = {name: each.tolist() for name, each in one.model.state_dict().items()}
    in_processes(cut, KINDS[first].processes)
    for each in in_processes(resumed, KINDS[then].processes):
        assert each.error == ""
        found, averaged = each.value
        assert apart({**found, "val": found["val"][-1:]}, {**whole, "val": whole["val"][-1:]}) < 1e-12
        assert apart(averaged, {"weights": expected, "val": whole["val"][-1:]}) < 1e-12
        assert averaged["weights"] != found["weights"]


def test_a_checkpoint_of_shards_gives_its_averages_to_a_whole_model(tmp_path: Path):
    """A weight with two names has two copies in it, and one average."""

    def run(rank: int) -> Any:
        saver, average = Checkpointer(tmp_path / "run", Every(epochs=1), metric="val/loss"), EMA(0.9)
        loaders = DataLoader(pairs(16), 4), DataLoader(pairs(8), 4)
        made = make_with(Tied(), *loaders, saver, average, backend=sharded(), max_epochs=2)
        made.train()
        with average.applied():
            return {name: whole_of(each).tolist() for name, each in made.model.state_dict().items()}

    for each in in_processes(run):
        assert each.error == ""
        model = Tied()
        load_weights(model, tmp_path / "run")
        assert {name: found.tolist() for name, found in model.state_dict().items()} == each.value
        load_weights(model, tmp_path / "run", averages=False)
        assert {name: found.tolist() for name, found in model.state_dict().items()} != each.value


def test_a_sharded_model_of_another_dtype_is_refused_and_weights_are_loaded_before(tmp_path: Path):
    def run(rank: int) -> Any:
        saving(tmp_path / "run", rank, "fsdp", max_epochs=1).train()
        made = saving(tmp_path / "run", rank, "fsdp", max_epochs=2)
        float32 = make_with(net().float(), DataLoader(pairs(17), 4), None, backend=sharded(), optimizer="adamw")
        said = []
        for refused in (
            lambda: float32.load_checkpoint(tmp_path / "run"),
            lambda: load_weights(made.model, tmp_path / "run"),
            lambda: save_safetensors(made.model, tmp_path / "w.safetensors"),
        ):
            with pytest.raises(CheckpointError) as error:
                refused()
            said.append(str(error.value))
        return said

    for each in in_processes(run):
        assert each.error == ""
        assert "the checkpoint has 0.weight in torch.float64, and the sharded model in torch.float32" in each.value[0]
        assert "load the weights before the Trainer splits it up" in each.value[1]
        assert "checkpoint consolidate" in each.value[2]


def test_a_handler_of_the_users_may_save_shards_and_gets_whole_tensors(tmp_path: Path):
    class Keeps:
        def __init__(self) -> None:
            self.loaded: Any = None

        def attach(self, engine: Any) -> None:
            self.model = engine.model

        def state_dict(self) -> dict[str, Any]:
            first = next(self.model.parameters())
            return {"shard": first.detach(), "local": first.detach().to_local()}

        def load_state_dict(self, state: Any) -> None:
            self.loaded = state

    def run(rank: int) -> Any:
        saving(tmp_path / "run", rank, "fsdp", None, Keeps(), max_epochs=1).train()
        keeps = Keeps()
        made = saving(tmp_path / "run", rank, "fsdp", None, keeps, max_epochs=1)
        expected = load_checkpoint(tmp_path / "run")["model"]["0.weight"]
        made.load_checkpoint(tmp_path / "run")
        return keeps.loaded["shard"].equal(expected), keeps.loaded["local"].equal(expected[:3])

    for each in in_processes(run):
        assert each.error == ""
        assert each.value == (True, True)
