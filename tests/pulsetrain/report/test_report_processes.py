"""The report's section about the processes of a run that several have trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from pulsetrain.cli import main
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.report import write_report
from pulsetrain.report.processes import Processes, read_processes
from tests.support.recordings_report import ERROR, T, small_run

LOADING, STEP = 2_000_000, 5_000_000  # nanoseconds


class Rank:
    """Writes the log of a rank; each iteration of rank r loads for r + 1 times 2 ms, and computes for 5 ms."""

    def __init__(self, run: Path, rank: int, iterations: int = 3, rate: float = 0.1) -> None:
        self.writer, self.rank, self.t = LogWriter(run / "events", rank), rank, T
        self.add("started", 0)
        for iteration in range(1, iterations + 1):
            self.add("get_batch_started", iteration - 1, 0)
            self.add("get_batch_completed", iteration - 1, LOADING * (rank + 1))
            self.add("iteration_started", iteration)
            self.add("iteration_completed", iteration, STEP, output={"loss": 1.0 + rank}, lr=[rate])

    def add(self, event: str, iteration: int, after: int = 1_000_000, **fields: Any) -> None:
        self.t += after
        seq = self.writer.last_seq + 1
        self.writer.add(LoggedEvent(seq, "trainer", event, 1, iteration, seq=seq, t=self.t, **fields))

    def end(self) -> None:
        self.writer.end()
        self.writer.close()

    def kill(self) -> None:
        self.writer.close()


def note(run: Path, *hosts: str) -> None:
    starts = [{"iteration": 0, "processes": [{"host": host} for host in hosts]}]
    (run / "run.json").write_text(json.dumps({"starts": starts}))


def read(run: Path) -> Processes:
    found = read_processes(run)
    assert found is not None
    return found


def test_each_process_has_its_host_its_last_event_and_its_times(tmp_path: Path):
    for rank in (0, 1):
        made = Rank(tmp_path, rank)
        made.add("completed", 3)
        made.end()
    note(tmp_path, "alpha", "beta<")
    found = read(tmp_path)
    assert [(each.rank, each.host, each.state, each.is_waited_for) for each in found.each] == [
        (0, "alpha", "its run has ended", False),
        (1, "beta<", "its run has ended", False),
    ]
    assert [(each.step, each.loading) for each in found.each] == [(0.005, 0.002), (0.005, 0.004)]
    assert (found.agree, found.error, found.diverged, found.damage) == (True, "", "", ())
    page = write_report(tmp_path, tmp_path.with_name("page.html")).path.read_text()
    assert "<h2>Processes</h2>" in page
    cells = re.findall(r'<th scope="row">rank 1</th>(.*?)</tr>', page)
    assert cells == [
        "<td>beta&lt;</td><td>trainer&#x27;s completed at epoch 1, iteration 3</td><td>its run has ended</td>"
        "<td>5.0 ms</td><td>4.0 ms</td>"
    ]
    assert "<dt>logs</dt><dd>ranks 0, 1 agree in 6 events</dd>" in page


def test_what_went_wrong_is_named_with_its_rank(tmp_path: Path):
    run = tmp_path / "run"
    for rank, late in ((0, 9), (1, 1)):  # rank 0 fails since rank 1 has failed
        made = Rank(run, rank, rate=0.1 + rank)
        payload = {"field": "learning_rates", "ranks": [1], "values": ["0.1", "1.1"], "at_iteration": 2}
        made.add("ranks_diverged", 3, payload=payload)
        error = {**ERROR, "message": f"of rank {rank}"}
        made.add("exception_raised", 3, late * 10**9, payload={"error": error})
        made.end()
    note(run, "alpha", "beta")
    found = read(run)
    assert found.error == "rank 1, trainer's exception_raised at epoch 1, iteration 3: ValueError: of rank 1"
    assert found.diverged == "learning_rates of rank 1, found after iteration 2"
    assert not found.agree
    assert found.agreement.startswith("rank 1 differs from rank 0 after 1 events that agree\nfirst difference: ")
    other = small_run(tmp_path / "other")
    page = write_report([other, run], tmp_path / "page.html").path.read_text()
    assert page.count("<h2>Processes of run</h2>") == 1
    assert page.count("<dd class=failed>") == 3


def test_a_run_that_was_resumed_has_left_its_error(tmp_path: Path):
    for rank in (0, 1):
        made = Rank(tmp_path, rank)
        made.add("exception_raised", 3, payload={"error": ERROR})
        made.add("started", 3)
        made.end()
    assert read(tmp_path).error == ""


def test_the_process_that_the_others_wait_for_is_marked(tmp_path: Path):
    run = tmp_path / "run"
    for rank, iterations in ((0, 4), (1, 3)):
        made = Rank(run, rank, iterations)
        made.add("get_batch_started", iterations)
        made.kill()
    note(run, "alpha", "beta")
    (run / "events" / "stall.rank1.json").write_text(json.dumps({"seq": 13, "stack": ["data.py:31 read", "x.py:1 y"]}))
    assert [each.is_waited_for for each in read(run).each] == [False, True]
    assert read(run).each[1].state == "loading a batch: data.py:31 read; the others wait for it"
    page = write_report(run, tmp_path / "page.html").path.read_text()
    assert '<tr class=differs><th scope="row">rank 1</th>' in page
    assert '<tr><th scope="row">rank 0</th>' in page
    note(run, "alpha")  # resumed by one process: nobody waits for the other one, which has not come back
    starts = json.loads((run / "run.json").read_text())["starts"]
    (run / "run.json").write_text(json.dumps({"starts": [*starts, {"iteration": 3}]}))
    assert [each.state for each in read(run).each] == ["loading a batch", "not in the last start of the run"]


def test_a_log_that_is_missing_or_damaged_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    for rank in (0, 1, 2):
        Rank(run, rank).end()
    note(run, "alpha", "beta", "gamma")
    for file in log_files(run / "events", 1):
        file.unlink()
    file, _ = log_files(run / "events", 2)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0xFF
    file.write_bytes(content)
    assert EventLog(run, 2).verify()
    found = read(run)
    assert [each.state for each in found.each][1] == "its log is missing"
    assert main(["report", str(run), "--into", str(tmp_path / "page.html")]) == 3
    said = capsys.readouterr().err
    assert "damaged: run: rank 1: its log is missing" in said
    assert "damaged: run: rank 2: events.rank2.jsonl.zst" in said
    page = (tmp_path / "page.html").read_text()
    assert "<b>run</b>: rank 1: its log is missing" in page
    for file in log_files(run / "events", 2):
        file.unlink()
    assert (read(run).agree, read(run).agreement[:30]) == (False, "has the log of rank 0 alone; a")


def test_a_run_of_one_process_has_no_such_section(tmp_path: Path):
    folder = small_run(tmp_path / "one")
    (folder / "run.json").write_text(json.dumps({"starts": [{"iteration": 0}]}))
    assert read_processes(folder) is None
    assert "<h2>Processes" not in write_report(folder, tmp_path / "page.html").path.read_text()
