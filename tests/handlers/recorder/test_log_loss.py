"""A log that has lost events never counts as whole, however the run continues."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig, verify
from pulsetrain.cli import main
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.engine.recording import EventLog, LogWriter, diff
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.scan import scan
from pulsetrain.handlers import Checkpointer, EventRecorder, NaNGuard
from tests.integration.test_unseen_iterations import covers
from tests.support.runs import guarded_data, guarded_run

ITERATIONS = 600


def make(folder: Path) -> Trainer:
    torch.manual_seed(0)
    data = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(ITERATIONS // 2)]
    return Trainer(
        nn.Linear(3, 1),
        data,
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=2, seed=0),
        handlers=[Checkpointer(folder, every=Every(iterations=250), keep_last=9), EventRecorder(folder)],
    )


def killed(folder: Path, iteration: int, older: int | None = None) -> None:
    """A run that is killed at an iteration; its log is that of an earlier iteration, if one is given."""
    run, events = make(folder), folder / "events"

    def keep(engine: Trainer) -> None:
        if engine.state.iteration == (older or iteration):
            shutil.copytree(events, folder / "kept")
        if engine.state.iteration == iteration:
            raise ZeroDivisionError

    run.add_event_handler(Events.ITERATION_COMPLETED, keep, phase=3)
    with pytest.raises(ZeroDivisionError):
        run.train()
    shutil.rmtree(events)
    (folder / "kept").rename(events)


def resumed(folder: Path) -> list[Any]:
    with structlog.testing.capture_logs() as logs:
        make(folder).train(resume="latest")
    return logs


@pytest.mark.slow
@pytest.mark.parametrize("older", [1, 200, 249])
def test_a_log_older_than_the_checkpoint_says_what_is_lost(tmp_path: Path, older: int):
    make(tmp_path / "whole").train()
    folder = tmp_path / "run"
    killed(folder, 520, older)
    logs = resumed(folder)
    (warning,) = [entry for entry in logs if entry["event"] == "the event log has lost events"]
    assert f"between iteration {older} and 500 of 'trainer'" in warning["lost"]
    assert [entry["event"] for entry in logs if entry["event"].startswith("resumed")] == ["resumed; nothing to compare"]
    log = EventLog(folder)
    (damage,) = log.verify()
    assert damage.reason == warning["lost"]
    assert main(["events", str(folder), "--check"]) == 3
    found = diff(folder, tmp_path / "whole")
    assert (found.divergence, found.missing, bool(found.damage)) == (None, (), True)
    assert found.unread > 0
    proof = verify(folder, make)
    assert not proof
    assert proof.damage
    assert "not proven" in proof.report()


@pytest.mark.parametrize("reached", [11, 15])
def test_events_that_a_rewind_discarded_do_not_count_if_its_record_is_lost(tmp_path: Path, reached: int):
    """The log of before the rewind is all that is left; it ends at iteration 12, the checkpoint is before or after."""

    def build(folder: Path = tmp_path) -> Trainer:
        saver = Checkpointer(folder, every=Every(iterations=1), keep_last=99)
        guard = NaNGuard("rewind", Every(iterations=4))
        return guarded_run(saver, EventRecorder(folder), guard, dataset=guarded_data((37,)), shuffle=False)

    run, events, kept = build(), tmp_path / "events", tmp_path / "kept"

    @run.on(Events.ITERATION_COMPLETED, phase=3)
    def keep(engine: Trainer) -> None:
        if engine.state.iteration == 12 and not engine.rewinds:
            shutil.copytree(events, kept)
        if engine.state.iteration == reached and engine.rewinds:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.train()
    shutil.rmtree(events)
    kept.rename(events)
    build().train(resume="latest")
    assert EventLog(tmp_path).verify()
    iterations = [event.iteration for event in EventLog(tmp_path).read(event="iteration_completed")]
    assert iterations == [*range(1, 10), *range(reached + 1, 17)]
    found = verify(tmp_path, build)
    assert (found.divergence, found.missing, bool(found.damage)) == (None, None, True), str(found)


def test_a_log_that_is_gone_before_a_resume_is_lost_not_new(tmp_path: Path):
    killed(tmp_path, 300)
    shutil.rmtree(tmp_path / "events")
    logs = resumed(tmp_path)
    assert [entry for entry in logs if entry["event"] == "the event log has lost events"]
    assert EventLog(tmp_path).verify()


def test_the_iterations_that_a_damaged_record_of_lost_events_named_are_named(tmp_path: Path):
    killed(tmp_path, 520)
    shutil.rmtree(tmp_path / "events")
    resumed(tmp_path)
    sealed, _ = log_files(tmp_path / "events")
    content, contents = bytearray(sealed.read_bytes()), scan(sealed)
    for end in (*contents.index.start[1:], contents.end):
        content[end - 9] ^= 1
    sealed.write_bytes(content)
    assert covers("\n".join(map(str, EventLog(tmp_path).verify())), set(range(1, ITERATIONS + 1)))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def blank(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.slow
@pytest.mark.parametrize("lose", [empty, blank, Path.unlink], ids=["emptied", "all NUL", "deleted"])
@pytest.mark.parametrize("file", [0, 1], ids=["sealed", "tail"])
def test_a_lost_file_of_a_killed_run_is_damage_before_and_after_it_resumes(
    tmp_path: Path, file: int, lose: Callable[[Path], None]
):
    killed(tmp_path, 520)
    lose(log_files(tmp_path / "events")[file])
    before = EventLog(tmp_path).verify()
    assert before
    resumed(tmp_path)
    assert EventLog(tmp_path).verify()
    assert main(["events", str(tmp_path), "--check"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("lose", [empty, blank, Path.unlink], ids=["emptied", "all NUL", "deleted"])
def test_a_closed_log_without_its_blocks_is_damaged(tmp_path: Path, lose: Callable[[Path], None]):
    make(tmp_path).train()
    lose(log_files(tmp_path / "events")[0])
    assert EventLog(tmp_path).verify()
    assert not verify(tmp_path, make)


@pytest.mark.slow
def test_a_block_of_another_run_is_damage(tmp_path: Path):
    for name in "ab":
        make(tmp_path / name).train()
    (sealed, tail), (other, _) = (log_files(tmp_path / name / "events") for name in "ab")
    content, foreign = sealed.read_bytes(), other.read_bytes()
    own, others = (each[: each.index(b"PTLB", 20) - 8] for each in (content, foreign))
    sealed.write_bytes(own + foreign[len(others) :])
    reasons = [each.reason for each in EventLog(tmp_path / "a").verify()]
    assert any("another run" in reason for reason in reasons), reasons
    shutil.copy(other, sealed)
    assert EventLog(tmp_path / "a").verify()
    assert tail.exists()


def test_a_second_attempt_to_continue_another_run_begins_the_log_again(tmp_path: Path):
    make(tmp_path / "first").train()
    checkpoint = tmp_path / "first" / "checkpoints" / "000000500-checkpoint"
    for _ in range(2):
        run = make(tmp_path / "second")
        run.add_event_handler(Events.ITERATION_COMPLETED(once=550), run.terminate)
        run.train(resume=checkpoint)
        shutil.rmtree(tmp_path / "second" / "checkpoints")
    log = EventLog(tmp_path / "second")
    iterations = [event.iteration for event in log.read(event="iteration_completed")]
    assert iterations == list(range(501, 551))
    assert log.verify() == []
    assert not diff(tmp_path / "second", tmp_path / "second")


def test_the_log_is_on_disk_before_a_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noting_fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noting_rename(source: Path, target: Path) -> None:
        calls.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    make(tmp_path).train()
    saved = [number for number, name in enumerate(calls) if name.endswith("-checkpoint") and name[0] != "."]
    assert len(saved) == 3
    before = 0
    for now in saved:
        assert {"events.jsonl.zst", "tail.jsonl", "events"} <= set(calls[before:now])
        before = now


def moved_log(source: Path, folder: Path) -> None:
    """The log of one run replaces that of another one."""
    shutil.rmtree(folder / "events")
    shutil.copytree(source / "events", folder / "events")


@pytest.mark.parametrize("longer", [False, True], ids=["a shorter log", "a longer log"])
def test_a_log_of_another_run_is_damage_and_counts_as_lost(longer: bool, tmp_path: Path):
    folder, other = tmp_path / "run", tmp_path / "other"
    killed(folder, 520)
    killed(other, 590 if longer else 300)
    assert EventLog(folder).verify() == EventLog(other).verify() == []
    moved_log(other, folder)
    assert ["the log of another run" in each.reason for each in EventLog(folder).damage] == [True]
    assert main(["events", str(folder), "--check"]) == 3
    logs = resumed(folder)
    (warning,) = [entry for entry in logs if entry["event"] == "the event log has lost events"]
    assert "that of another run" in warning["lost"]
    assert "between iteration 0 and 500 of 'trainer'" in warning["lost"]
    (entry,) = [entry for entry in logs if entry["event"].startswith("resumed")]
    assert "another folder" not in entry["reason"]
    log = EventLog(folder)
    assert warning["lost"] in [each.reason for each in log.verify()]
    own = [event.iteration for event in log.read(event="iteration_completed")]
    assert own == list(range(501, own[-1] + 1))
    assert not verify(folder, make)


def test_copies_and_continuations_of_a_run_show_no_damage(tmp_path: Path):
    folder = tmp_path / "run"
    killed(folder, 520)
    shutil.copytree(folder, tmp_path / "copy")
    with structlog.testing.capture_logs() as logs:
        make(tmp_path / "elsewhere").train(resume=folder)
    assert any("another folder" in entry.get("reason", "") for entry in logs)
    resumed(tmp_path / "copy")
    for each in ("run", "copy", "elsewhere"):
        assert EventLog(tmp_path / each).verify() == []


def test_a_resume_whose_place_a_full_disk_could_not_seal_is_compared_and_counts_each_event_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    killed(tmp_path, 520)
    seal = LogWriter.seal

    def fail_once(writer: LogWriter) -> None:
        monkeypatch.setattr(LogWriter, "seal", seal)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LogWriter, "seal", fail_once)
    logs = resumed(tmp_path)
    assert LogWriter.seal is seal
    assert [each["event"] for each in logs if each["event"].startswith("resumed")] == [
        "resumed exactly: the events that the log held after the checkpoint were reproduced bit for bit"
    ]
    log = EventLog(tmp_path)
    assert [each.iteration for each in log.read(event="iteration_completed")] == [*range(1, ITERATIONS + 1)]
    assert log.verify() == []
