"""The commands that read one log, of a run with a log for each of several processes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.recording import LoggedEvent, LogWriter

ERROR = {"__type__": "builtins.ValueError", "message": "no such row"}


def write(run: Path, rank: int, *more: LoggedEvent) -> None:
    """Two iterations with a loss by which the ranks are distinguished."""
    writer = LogWriter(run / "events", rank)
    events = [LoggedEvent(0, "trainer", "started")]
    events += [LoggedEvent(0, "trainer", "iteration_completed", 1, at, output={"loss": rank + at}) for at in (1, 2)]
    for seq, event in enumerate([*events, *more]):
        event.ord, event.seq, event.t = seq, seq, 10**18 + seq
        writer.add(event)
    writer.end()
    writer.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "run", 0)
    write(tmp_path / "run", 1)
    return tmp_path / "run"


def debug(monkeypatch: pytest.MonkeyPatch, *words: str, commands: str = "next 3\nstate\n") -> int:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(commands.encode()), isatty=lambda: False))
    return main(["debug", *words])


@pytest.mark.parametrize("rank", [0, 1])
def test_debug_says_whose_log_it_shows(
    rank: int, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert debug(monkeypatch, str(run), *(["--rank", str(rank)] if rank else [])) == 0
    said = capsys.readouterr().out
    assert f"this is the log of rank {rank}; --rank N opens that of another one: {1 - rank}" in said
    assert f"rank {rank}, seq 2: trainer's iteration_completed, epoch 1, iteration 2" in said
    assert f"output: loss                 {rank + 2}" in said


def test_debug_of_one_process_names_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write(tmp_path / "one", 0)
    assert debug(monkeypatch, str(tmp_path / "one")) == 0
    assert "rank" not in capsys.readouterr().out.replace(str(tmp_path), "")


def test_the_error_of_a_rank_is_found_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write(tmp_path, 0)
    write(tmp_path, 1, LoggedEvent(0, "trainer", "exception_raised", 1, 2, payload={"error": ERROR}))
    bundle = tmp_path / "crash" / "of-rank-0"  # its number is by chance that of the event of rank 1
    bundle.mkdir(parents=True)
    (bundle / "bundle.json").write_text(json.dumps({"what": "another", "seq": 3, "event": "exception_raised"}))
    assert debug(monkeypatch, str(tmp_path), commands="") == 0
    assert "the run ended in" not in capsys.readouterr().out
    assert debug(monkeypatch, str(tmp_path), "--rank=1", commands="") == 0
    said = capsys.readouterr().out
    assert "the run ended in: ValueError: no such row" in said
    assert "crash bundle" not in said


def test_live_is_refused_for_a_run_of_several_processes(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert debug(monkeypatch, str(run), "--live") == 2
    assert f"--live: {run} was trained by 2 processes, and --live computes in one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["events"],
        ["events", "--check"],
        ["debug"],
        ["export", "--format=csv", "--into=a.csv"],
        ["replay", "--handler=early_stopping:patience=3,metric=loss"],
    ],
    ids=" ".join,
)
def test_an_unknown_rank_is_refused_with_those_that_exist(
    command: list[str], run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(run.parent)
    assert main([command[0], "run", *command[1:], "--rank=2"]) == 2
    assert "run: has no log of rank 2; there are the logs of these ranks: 0, 1" in capsys.readouterr().err
    assert main([command[0], "nowhere", *command[1:], "--rank=2"]) == 2
    assert "nowhere: does not exist" in capsys.readouterr().err


def test_events_and_export_read_the_log_of_a_rank(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(run.parent)
    for rank in (0, 1):
        assert main(["events", "run", f"--rank={rank}", "--fields=output.loss", "--format=csv"]) == 0
        assert capsys.readouterr().out.split()[-2:] == [str(rank + 1), str(rank + 2)]
        assert main(["events", "run", f"--rank={rank}", "--check"]) == 0
        assert f"events, rank {rank} of 0, 1: 3 events, ended; no damage" in capsys.readouterr().out
        assert main(["export", "run", f"--rank={rank}", "--format=csv"]) == 0
    tables: list[Any] = [Path(name).read_text() for name in ("run.csv", "run.rank1.csv")]
    assert [table.splitlines()[1].rstrip(",").rpartition(",")[2] for table in tables] == ["1", "2"]
