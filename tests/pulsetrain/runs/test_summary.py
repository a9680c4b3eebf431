"""What a run folder says of its run."""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulsetrain import Checkpointer, EventRecorder, Trainer, TrainingConfig
from pulsetrain.engine import Every, SupervisedStrategy
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.handlers.run_files.owner_process import beginning, processes
from pulsetrain.runs import summary
from pulsetrain.runs.live import LiveRun
from pulsetrain.runs.summary import Status, names_of_settings, summarize
from pulsetrain.testing import tiny_loader, tiny_model
from tests.support.run_folders import BEGUN, SECOND, write_run


def own(folder: Path, pid: int) -> None:
    """As a process does whose run is in the folder."""
    facts = {"pid": pid, "host": socket.gethostname(), "since": "now", "id": "x", "processes": processes()}
    (folder / ".owner").write_text(json.dumps(facts))


ENDS: list[tuple[str | None, str, Status, str]] = [
    ("completed", "", Status.COMPLETED, ""),
    ("terminate", "max_tokens=100 was reached", Status.COMPLETED, ""),
    (
        "terminate",
        "early stopping: val/loss has not improved",
        Status.STOPPED,
        "early stopping: val/loss has not improved",
    ),
    ("interrupt", "", Status.STOPPED, "interrupted"),
    ("exception_raised", "bad batch", Status.FAILED, "ValueError: bad batch"),
    (None, "", Status.KILLED, ""),
]


@pytest.mark.parametrize(("end", "reason", "status", "shown"), ENDS)
def test_the_last_events_say_how_it_ended(end: str | None, reason: str, status: Status, shown: str, tmp_path: Path):
    found = summarize(write_run(tmp_path / "run", [1.0, 0.5], end, reason=reason))
    assert (found.status, found.reason) == (status, shown)
    assert (found.epoch, found.iteration, found.total_epochs, found.progress) == (2, 10, 4, 0.5)


@pytest.mark.parametrize("closed", [True, False])
def test_a_run_bounded_by_tokens_says_how_long_it_is(closed: bool, tmp_path: Path):
    writer = LogWriter(tmp_path / "events")
    for seq, (event, iteration, total) in enumerate([("started", 0, 9), ("epoch_started", 0, 8), ("metrics", 2, 7)]):
        payload = {"max_iters": 1 << 60, "total_iterations": total}
        writer.add(LoggedEvent(seq, "trainer", event, iteration=iteration, payload=payload, seq=seq, t=BEGUN + seq))
    if closed:
        writer.close()
    found = summarize(tmp_path)
    assert (found.iteration, found.total_iterations, found.progress) == (2, 8, 0.25)


def test_best_values_are_those_of_the_metrics_whose_direction_is_known(tmp_path: Path):
    found = summarize(write_run(tmp_path / "run", [1.0, 0.25, 0.5]))
    assert found.best == {"val/loss": 0.25, "val/accuracy": 0.75}
    assert found.last == {"val/loss": 0.5, "val/accuracy": 0.5, "val/other": 0.5}
    assert found.settings == {"model": "Net", "training.max_epochs": 4, "training.learning_rate": 0.1}


def test_the_run_decides_which_values_are_better(tmp_path: Path):
    folder = write_run(tmp_path / "run", [1.0, 0.25, 0.5])
    described = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**described, "modes": {"val/loss": "max", "val_other": "min"}}))
    assert summarize(folder).best == {"val/loss": 1.0, "val/accuracy": 0.75, "val/other": 0.5}


def test_a_run_with_a_living_owner_is_running_until_it_has_been_silent_for_long(tmp_path: Path):
    folder = write_run(tmp_path / "the run", [1.0], None, closed=False)
    own(folder, os.getpid())
    last = BEGUN / SECOND + 6
    assert summarize(folder, now=last + 59).status == Status.RUNNING
    stalled = summarize(folder, now=last + 61)
    hint = f"no event for 61 s; `pulsetrain where '{folder}'` shows what it waits for"
    assert (stalled.status, stalled.reason) == (Status.STALLED, hint)
    own(folder, 2**22 + 1)  # no process has this number
    assert summarize(folder, now=last + 1).status == Status.KILLED


def test_a_run_that_ends_while_its_log_is_read_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, read = write_run(tmp_path / "a", [1.0], None, closed=False), summary._read_log
    own(run, os.getpid())
    assert summarize(run, now=BEGUN / SECOND).status is Status.RUNNING

    def end_after(folder: Path, described: Any) -> Any:
        found = read(folder, described)
        monkeypatch.setattr(summary, "_read_log", read)
        shutil.rmtree(run)
        write_run(run, [1.0], "completed")
        return found

    monkeypatch.setattr(summary, "_read_log", end_after)
    assert summarize(run).status is Status.COMPLETED


def test_long_gaps_of_its_own_are_not_a_stall(tmp_path: Path):
    folder = write_run(tmp_path / "run", [1.0], None, closed=False, last=100.0)
    own(folder, os.getpid())
    last = BEGUN / SECOND + 106
    assert summarize(folder, now=last + 1900).status == Status.RUNNING
    assert summarize(folder, now=last + 2100).status == Status.STALLED


def test_the_pause_before_a_resume_is_not_a_gap_of_its_own(tmp_path: Path):
    writer = LogWriter(tmp_path / "events")
    times = {"started": 0, "terminate": 1, "completed": 2}
    resumed = {"started": 86_402, "epoch_started": 86_403, "iteration_started": 86_404}
    for number, (event, at) in enumerate([*times.items(), *resumed.items()]):
        writer.add(LoggedEvent(number, "trainer", event, iteration=3, seq=number, t=BEGUN + at * SECOND))
    own(tmp_path, os.getpid())
    now = BEGUN / SECOND + 86_404 + 3600
    assert summarize(tmp_path, now=now).status is Status.STALLED
    run = LiveRun(tmp_path, clock=lambda: now)
    run.update()
    assert run.status is Status.STALLED
    writer.close()


def test_events_that_a_resumed_run_has_replaced_do_not_count(tmp_path: Path):
    def build(epochs: int) -> Trainer:
        config = TrainingConfig(max_epochs=epochs, seed=0, progress=False, learning_rate=0.05)
        handlers: list[Any] = [Checkpointer(tmp_path / "run", Every(epochs=1)), EventRecorder(tmp_path / "run")]
        return Trainer(
            tiny_model(), tiny_loader(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=config,
            handlers=handlers,
        )  # fmt: skip

    build(3).train()
    trainer = build(3)
    trainer.load_checkpoint(tmp_path / "run" / "checkpoints" / "000000004-checkpoint")
    trainer.train_epoch()
    found = summarize(tmp_path / "run")
    assert found.iteration == 8
    losses = [
        each.payload["metrics"]["val/loss"] for each in EventLog(tmp_path / "run").read(event="validation_completed")
    ]
    assert len(losses) == 2
    assert found.best["val/loss"] == min(losses)


def test_the_mark_of_an_event_in_a_text_is_not_taken_for_one(tmp_path: Path):
    folder = tmp_path / "run"
    writer = LogWriter(folder / "events")
    text = '"event":"validation_completed"'
    writer.add(LoggedEvent(engine="trainer", event="media_logged", payload={"value": text}, seq=0, t=BEGUN))
    writer.add(LoggedEvent(engine="trainer", event="metrics_logged", payload={"metrics": {"a": 1.0}}, seq=1, t=BEGUN))
    writer.close()
    found = summarize(folder)
    assert (found.last, found.best) == ({"a": 1.0}, {})


def test_a_damaged_log_is_a_reason_and_not_an_error(tmp_path: Path):
    folder = write_run(tmp_path / "run", [1.0] * 400)  # some of it is sealed in blocks
    log = folder / "events" / "events.jsonl.zst"
    content = log.read_bytes()
    log.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    assert "damaged" in summarize(folder).reason
    assert f"; `pulsetrain events {folder} --check` lists what is lost" in summarize(folder).reason
    log.write_bytes(b"nonsense")
    assert "damaged log" in summarize(folder).reason


def test_a_killed_run_whose_process_number_another_process_has_is_killed(tmp_path: Path):
    folder = write_run(tmp_path / "run", [1.0], None)
    own(folder, os.getpid())
    assert summarize(folder).status is not Status.KILLED  # this process is there
    facts = json.loads((folder / ".owner").read_text())
    for began, status in ((beginning(os.getpid()), Status.STALLED), (1, Status.KILLED), (None, Status.STALLED)):
        (folder / ".owner").write_text(json.dumps({**facts, "began": began}))
        assert summarize(folder).status is status


@pytest.mark.parametrize("part", ["run.json", "config.yaml"])
def test_files_that_are_not_what_they_should_be_cost_only_what_they_say(part: str, tmp_path: Path):
    folder = write_run(tmp_path / "run", [1.0])
    for content in (b"\xff\xfe", b"{", b"[1]", b""):
        (folder / part).write_bytes(content)
        assert summarize(folder).status == Status.COMPLETED


def test_settings_that_are_nested_too_deep_are_left_out(tmp_path: Path):
    found = summarize(write_run(tmp_path / "run", [1.0]))
    deep = replace(found, not_given=b'{"a":' * 5000 + b"1" + b"}" * 5000)
    assert (deep.setting("training.a"), deep.setting("training.max_epochs")) == (None, 4)
    assert [*names_of_settings([deep])] == [*found.settings]


def test_what_is_not_a_run_is_refused(tmp_path: Path):
    with pytest.raises(RunFolderError, match="is not a run folder"):
        summarize(tmp_path)


def write_log(folder: Path, *events: tuple[str, str, int]) -> Path:
    """A log of (engine, event, iteration), sealed."""
    writer = LogWriter(folder / "events")
    for number, (engine, event, iteration) in enumerate(events):
        payload = {"reason": "enough"} if event == "terminate" else None
        at = {"iteration": iteration, "seq": number, "t": BEGUN + number * SECOND}
        writer.add(LoggedEvent(number, engine, event, payload=payload, **at))
    writer.end()
    writer.close()
    return folder


def iterations(count: int) -> list[tuple[str, str, int]]:
    return [("trainer", "iteration_completed", number) for number in range(1, count + 1)]


STARTED = ("trainer", "started", 0)


@pytest.mark.parametrize("between", [0, 15, 300, 5000])
def test_the_events_of_another_engine_after_the_end_do_not_hide_it(between: int, tmp_path: Path):
    tested = [("evaluator", "started", 0), *[("evaluator", "iteration_completed", 1)] * between]
    tested += [("evaluator", "completed", 1)]
    end, completed = ("trainer", "terminate", 3), ("trainer", "completed", 3)
    stopped = write_log(tmp_path / "stopped", STARTED, *iterations(3), end, *tested, completed)
    assert summarize(stopped).status is Status.STOPPED
    after = write_log(tmp_path / "after", STARTED, *iterations(3), end, completed, *tested)
    assert (summarize(after).status, summarize(after).reason) == (Status.STOPPED, "enough")
    done = summarize(write_log(tmp_path / "done", STARTED, *iterations(3), completed, *tested))
    assert (done.status, done.iteration, done.updated) == (Status.COMPLETED, 3, (BEGUN / SECOND) + between + 6)


@pytest.mark.parametrize("since", [1, 15, 300, 5000])
def test_a_run_that_was_continued_after_its_end_has_not_ended(since: int, tmp_path: Path):
    ended = [STARTED, *iterations(3), ("trainer", "terminate", 3), ("trainer", "completed", 3)]
    resumed = write_log(tmp_path / "resumed", *ended, ("trainer", "started", 2), *iterations(since))
    assert summarize(resumed).status is Status.KILLED
    longer = write_log(tmp_path / "longer", *ended, *iterations(since + 3)[3:])  # after an interrupt nothing is started
    assert summarize(longer).status is Status.KILLED


def test_the_end_may_be_in_another_block_than_the_last_event(tmp_path: Path):
    for count in range(1020, 1026):
        run = [STARTED, *iterations(count), ("trainer", "terminate", count), ("trainer", "completed", count)]
        assert summarize(write_log(tmp_path / str(count), *run)).status is Status.STOPPED, count


def test_a_damaged_last_block_leaves_what_the_others_say(tmp_path: Path):
    run = write_log(tmp_path, STARTED, *iterations(3000), ("trainer", "completed", 3000))
    path = run / "events" / "events.jsonl.zst"
    content = bytearray(path.read_bytes())
    content[content.rfind(b"\x28\xb5\x2f\xfd") + 40] ^= 1  # in its zstd frame
    path.write_bytes(content)
    found = summarize(run)
    assert (found.status, found.iteration) == (Status.KILLED, 2047)
    assert found.updated == BEGUN / SECOND + 2047
    assert found.reason.startswith("damaged log: ")
