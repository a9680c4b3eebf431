"""A save by all processes that share a model, which one of them ends, holds up or does not join."""

from __future__ import annotations

import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pulsetrain import SignalWatch
from pulsetrain.engine import LAST, Events, Every, Phase
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.checkpoint.disk import Disk
from pulsetrain.engine.distributed.joining import join
from pulsetrain.handlers import EMA, Checkpointer
from tests.support.cases import slow_but
from tests.support.ranks import in_processes
from tests.support.runs_of_shards import KINDS, saving, trained, whole_of


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

    first, second = in_processes(run)
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

    first, second = in_processes(run)
    assert "ValueError: cannot be written" in first.error
    assert "cannot be written" in second.error


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


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_save_may_take_longer_than_a_rank_may_be_late(kind: str, tmp_path: Path):
    def run(rank: int, seconds: float) -> Any:
        control = join()
        write = Disk.write

        def slow(disk: Disk, target: Path, name: str, content: Any) -> Any:
            time.sleep(seconds * target.name.startswith("000000005"))
            return write(disk, target, name, content)

        Disk.write = slow  # type: ignore[method-assign]
        # at the end of an epoch, after which the others next wait for a pulse, not for gradients
        made = saving(tmp_path / str(seconds), rank, kind, {"every": Every(epochs=1)}, max_epochs=2)
        made.on(Events.ITERATION_COMPLETED(once=2))(lambda: setattr(control, "timeout", 1.0))  # both have started
        made.train()
        return made.state.iteration, [whole_of(each).tolist() for each in made.model.parameters()]

    slow, fast = (in_processes(lambda rank, seconds=seconds: run(rank, seconds)) for seconds in (2.5, 0.0))  # type: ignore[misc]
    for each, expected in zip(slow, fast, strict=True):
        assert each.error == ""
        assert each.value == expected.value
    assert (tmp_path / "2.5" / "checkpoints" / "000000005-checkpoint").is_dir()


@pytest.mark.parametrize(
    ("stage", "background", "kind"),
    slow_but(
        [("state", False, KeyboardInterrupt), ("write", False, KeyboardInterrupt)],
        [
            *((stage, background, KeyboardInterrupt) for stage in ("state", "write") for background in (False, True)),
            *((stage, False, OSError) for stage in ("state", "files")),  # in the write, it costs the checkpoint alone
        ],
    ),
    ids=str,
)
def test_what_ends_one_process_inside_of_a_save_ends_the_other(
    stage: str, background: bool, kind: type[BaseException], tmp_path: Path
):
    def run(rank: int) -> None:
        made = saving(tmp_path / "run", rank, "fsdp", {"background": background})
        if rank == 1 and stage != "write":
            name = {"state": "checkpoint_state", "files": "files_to_sync"}[stage]
            given = getattr(made, name)

            def fail() -> Any:
                if made.state.iteration == 6:
                    raise kind("in the state")
                return given()

            setattr(made, name, fail)
        elif rank == 1:
            write = Disk.write

            def fail_to_write(disk: Disk, target: Path, name: str, content: Any) -> Any:
                if target.name.startswith("000000006"):
                    raise kind("in the write")
                return write(disk, target, name, content)

            Disk.write = fail_to_write  # type: ignore[method-assign]
        made.train()

    first, second = in_processes(run)
    assert second.error
    assert first.error
    assert (tmp_path / "run" / "checkpoints" / "000000003-checkpoint").is_dir()
    assert not (tmp_path / "run" / "checkpoints" / "000000006-checkpoint").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dies", "after_the_run"), [("fsdp", 1, False), ("fsdp", 1, True), ("three", 1, False), ("three", 2, False)]
)
def test_a_process_that_is_killed_inside_of_a_save_is_named(kind: str, dies: int, after_the_run: bool, tmp_path: Path):
    def run(rank: int) -> None:
        made = saving(tmp_path / "run", rank, kind, max_epochs=1)
        if after_the_run:
            made.train()
        write = Disk.write

        def die(disk: Disk, target: Path, name: str, content: Any) -> Any:
            if rank == dies:
                time.sleep(1.0)  # of signs of life, of which it gives the next one no more
                died.write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            return write(disk, target, name, content)

        Disk.write = die  # type: ignore[method-assign]
        made.save_checkpoint("own") if after_the_run else made.train()

    died = tmp_path / "died"
    ended = in_processes(run, KINDS[kind].processes)
    assert ended[dies].status == -signal.SIGKILL
    said = [each.error + each.stderr for rank, each in enumerate(ended) if rank != dies]
    assert f"rank {dies} has given no sign of life" in said[0] or f"rank {dies} has ended" in said[0]
    assert all(said), "none has taken the checkpoint for complete"
    assert time.monotonic() - float(died.read_text()) < 40
    assert after_the_run or not list((tmp_path / "run" / "checkpoints").glob("0*"))


def test_a_handler_that_one_process_lacks_costs_no_checkpoint_silently(tmp_path: Path):
    def run(rank: int) -> None:
        average = [EMA(0.9, validate=False)] if rank == 0 else []
        saving(tmp_path / "run", rank, "fsdp", None, *average).train()

    first, second = in_processes(run)
    assert "EMA" in first.error.splitlines()[-1] + first.error
    assert "12 of its 20 items are in the files" in first.error
    assert "12 of its 20 items are in the files" in second.error
    assert not list((tmp_path / "run" / "checkpoints").glob("0*"))
