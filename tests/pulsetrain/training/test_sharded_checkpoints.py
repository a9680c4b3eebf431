"""Checkpoints of models that are split over the processes: each writes its part, all of it is there or nothing."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.utils.data import DataLoader

from pulsetrain import SignalWatch
from pulsetrain.engine import LAST, CheckpointError, ConfigurationError, Events, Every, Phase
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint, load_weights, save_safetensors
from pulsetrain.engine.checkpoint.disk import Disk
from pulsetrain.engine.checkpoint.safetensors_file import read_header
from pulsetrain.engine.distributed.joining import join
from pulsetrain.engine.recording.diff.ranks import diff_ranks
from pulsetrain.handlers import EMA, SWA, Checkpointer
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import make_with
from tests.support.runs_of_shards import KINDS, apart, net, saving, sharded, trained, whole_of


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("fsdp", "fsdp"),
        ("fsdp", "one"),
        ("one", "fsdp"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fsdp", "ddp"), ("ddp", "fsdp"))),
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
def test_a_save_that_fails_on_the_main_process_fails_on_all(tmp_path: Path):
    def run(rank: int) -> Any:
        made = saving(tmp_path / "run", rank, "fsdp")
        saver = next(each for each in made.handlers if isinstance(each, Checkpointer))
        if rank == 0:
            write, failed = saver.manager.save, []

            def fail_once(*arguments: Any, **options: Any) -> Any:
                if options.get("step") == 6 and not failed:
                    failed.append(1)
                    raise OSError(28, "No space left on device")
                return write(*arguments, **options)

            saver.manager.save = fail_once  # type: ignore[method-assign]
        noted: list[tuple[int, int, bool]] = []
        made.on(Events.ITERATION_COMPLETED)(
            lambda: noted.append((made.state.iteration, saver.saved_at, saver.failure is not None))
        )
        trained(made)
        return [each for each in noted if each[0] in (7, 10)]

    ended = in_processes(run)
    assert [each.error for each in ended] == ["", ""]
    assert ended[0].value == [(7, 3, True), (10, 9, False)]
    assert [each[:2] for each in ended[1].value] == [(7, 3), (10, 9)]


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_to_one_process_ends_all_with_a_checkpoint(who: int, tmp_path: Path):
    def run(rank: int) -> Any:
        made = saving(tmp_path / "run", rank, "fsdp", max_epochs=400)
        if rank == who:
            made.on(Events.ITERATION_COMPLETED(once=13))(lambda: os.kill(os.getpid(), signal.SIGTERM))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        saver = next(each for each in made.handlers if isinstance(each, Checkpointer))
        preempted: list[int] = []
        note = lambda: preempted.append(saver.saved_at)  # noqa: E731
        made.bus.subscribe(Events.PREEMPTED, note, sender=made, phase=Phase.PERSIST, order=LAST)
        with SignalWatch(made):
            made.train()
        return made.state.iteration, saver.saved_at, preempted

    first, second = in_processes(run, limit=40)
    assert (first.error, second.error) == ("", "")
    ((end, saved, before), (other, _, _)) = first.value, second.value
    assert end == other == saved
    assert all(at % 3 == 0 and at < 13 for at in [*before, *second.value[2]])  # not saved where the signal came
    newest = CheckpointManager(tmp_path / "run" / "checkpoints").valid()[-1]
    assert int(newest.name[:9]) == end


@pytest.mark.slow
def test_a_save_that_raises_on_the_main_process_ends_all(tmp_path: Path):
    def run(rank: int) -> None:
        made = saving(tmp_path / "run", rank, "fsdp")
        saver = next(each for each in made.handlers if isinstance(each, Checkpointer))
        if rank == 0:

            def refuse(*arguments: Any, **options: Any) -> Any:
                raise ValueError("cannot be written")

            saver.manager.save = refuse  # type: ignore[method-assign]
        made.train()

    first, second = in_processes(run, limit=40)
    assert "ValueError: cannot be written" in first.error
    assert "cannot be written" in second.error


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


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_full_disk_of_any_process_fails_the_save_on_all(who: int, tmp_path: Path):
    def run(rank: int) -> Any:
        made = saving(tmp_path / "run", rank, "fsdp")
        saver = next(each for each in made.handlers if isinstance(each, Checkpointer))
        if rank == who:
            write = Disk.write

            def full(disk: Disk, target: Path, name: str, content: Any) -> Any:
                if target.name.startswith("000000006"):
                    content(io.BytesIO())
                    raise OSError(28, "No space left on device")
                return write(disk, target, name, content)

            Disk.write = full  # type: ignore[method-assign]
        noted: list[Any] = []
        with capture_logs() as logs:
            made.on(Events.ITERATION_COMPLETED)(lambda: noted.append((saver.saved_at, saver.failure)))
            trained(made)
        return noted, [each["error"] for each in logs if each["event"].startswith("checkpoint not saved")]

    first, second = in_processes(run)
    assert (first.error, second.error) == ("", "")
    for each in (first, second):
        noted, warnings = each.value
        assert noted[6][0] == 3
        assert "No space left" in noted[6][1]
        assert noted[9] == (9, None)
        assert len(warnings) == 1
        assert "No space left on device" in warnings[0]
    assert ("rank 1: " in first.value[1][0]) == (who == 1)
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert not any("000000006" in name for name in names)
    assert any(name.startswith("000000009") for name in names)


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

    in_processes(cut, KINDS[first].processes, limit=120)
    ended = in_processes(
        lambda rank: trained(saving(tmp_path / "run", rank, then), resume="latest"), KINDS[then].processes, limit=120
    )
    whole = trained(saving(tmp_path / "one", 0, "one"))
    for each in ended:
        assert each.error == ""
        assert apart({**each.value, "val": each.value["val"][-1:]}, {**whole, "val": whole["val"][-1:]}) < 1e-12


@pytest.mark.parametrize(
    ("options", "said"),
    [({"form": "torch"}, "form='torch'"), ({"every": "auto"}, "the clocks of the processes differ")],
)
def test_a_cadence_or_form_that_processes_cannot_share_is_refused(options: dict[str, Any], said: str, tmp_path: Path):
    def run(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            saving(tmp_path / "run", rank, "fsdp", options)
        return str(refused.value)

    for each in in_processes(run):
        assert each.error == ""
        assert said in each.value


@pytest.mark.parametrize(
    "average", [lambda: EMA(0.9), lambda: SWA(after_update=2, every=Every(updates=1))], ids=["EMA", "SWA"]
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


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_save_may_take_longer_than_a_rank_may_be_late(kind: str, tmp_path: Path):
    def run(rank: int, seconds: float) -> Any:
        join(timeout=1.0)
        write = Disk.write

        def slow(disk: Disk, target: Path, name: str, content: Any) -> Any:
            time.sleep(seconds * target.name.startswith("000000005"))
            return write(disk, target, name, content)

        Disk.write = slow  # type: ignore[method-assign]
        # at the end of an epoch, after which the others next wait for a pulse, not for gradients
        made = saving(tmp_path / str(seconds), rank, kind, {"every": Every(epochs=1)}, max_epochs=2)
        made.train()
        return made.state.iteration, [whole_of(each).tolist() for each in made.model.parameters()]

    slow, fast = (in_processes(lambda rank, seconds=seconds: run(rank, seconds)) for seconds in (2.5, 0.0))  # type: ignore[misc]
    for each, expected in zip(slow, fast, strict=True):
        assert each.error == ""
        assert each.value == expected.value
    assert (tmp_path / "2.5" / "checkpoints" / "000000005-checkpoint").is_dir()


@pytest.mark.parametrize("stage", ["state", "write"])
@pytest.mark.parametrize(
    ("background", "kind"),
    [
        (False, KeyboardInterrupt),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((True, KeyboardInterrupt), (False, OSError))),
    ],
    ids=str,
)  # fmt: skip
def test_what_ends_one_process_inside_of_a_save_ends_the_other(
    stage: str, background: bool, kind: type[BaseException], tmp_path: Path
):
    if stage == "write" and kind is OSError:
        pytest.skip("costs the checkpoint alone, as another test shows")

    def run(rank: int) -> None:
        made = saving(tmp_path / "run", rank, "fsdp", {"background": background})
        if rank == 1 and stage == "state":
            state = made.checkpoint_state

            def fail() -> Any:
                if made.state.iteration == 6:
                    raise kind("in the state")
                return state()

            made.checkpoint_state = fail  # type: ignore[method-assign]
        elif rank == 1:
            write = Disk.write

            def fail_to_write(disk: Disk, target: Path, name: str, content: Any) -> Any:
                if target.name.startswith("000000006"):
                    raise kind("in the write")
                return write(disk, target, name, content)

            Disk.write = fail_to_write  # type: ignore[method-assign]
        made.train()

    first, second = in_processes(run, limit=40)
    assert second.error
    assert first.error
    assert (tmp_path / "run" / "checkpoints" / "000000003-checkpoint").is_dir()
    assert not (tmp_path / "run" / "checkpoints" / "000000006-checkpoint").exists()


@pytest.mark.slow
@pytest.mark.parametrize("after_the_run", [False, True])
def test_a_process_that_is_killed_inside_of_a_save_is_named(after_the_run: bool, tmp_path: Path):
    def run(rank: int) -> None:
        made = saving(tmp_path / "run", rank, "fsdp", max_epochs=1)
        if after_the_run:
            made.train()
        write = Disk.write

        def die(disk: Disk, target: Path, name: str, content: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(disk, target, name, content)

        Disk.write = die  # type: ignore[method-assign]
        made.save_checkpoint("own") if after_the_run else made.train()

    begun = time.monotonic()
    first, second = in_processes(run, limit=50)
    assert second.status == -signal.SIGKILL
    assert "rank 1 has given no sign of life" in first.error + first.stderr or "rank 1 has ended" in first.error
    assert time.monotonic() - begun < 40


def test_a_handler_that_one_process_lacks_costs_no_checkpoint_silently(tmp_path: Path):
    def run(rank: int) -> None:
        average = [EMA(0.9, validate=False)] if rank == 0 else []
        saving(tmp_path / "run", rank, "fsdp", None, *average).train()

    first, second = in_processes(run, limit=40)
    assert "EMA" in first.error.splitlines()[-1] + first.error
    assert "12 of its 20 items are in the files" in first.error
    assert "12 of its 20 items are in the files" in second.error
    assert not list((tmp_path / "run" / "checkpoints").glob("0*"))


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
