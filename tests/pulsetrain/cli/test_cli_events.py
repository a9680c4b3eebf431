"""`pulsetrain events`: which events it prints, how, and its exit status."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.cli import events as command
from pulsetrain.cli import main
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter


class Writer:
    """Writes a log event by event."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.log = LogWriter(folder / "events", rank)

    def add(self, engine: str, event: str, epoch: int, iteration: int, **fields: Any) -> LoggedEvent:
        seq = self.log.last_seq + 1
        ord = fields.pop("ord", seq)
        logged = LoggedEvent(ord, engine, event, epoch, iteration, seq=seq, t=1_763_000_000_000_000_000, **fields)
        self.log.add(logged)
        return logged

    def end(self) -> None:
        self.log.end()
        self.log.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    writer = Writer(tmp_path / "run")
    for epoch in (1, 2, 3):
        for iteration in range(2 * epoch - 1, 2 * epoch + 1):
            writer.add("trainer", "iteration_completed", epoch, iteration, output={"loss": 6.0 - iteration}, lr=[0.1])
        metrics = {"val/loss": 4.0 - epoch, "a.b": "NaN"}
        writer.add("evaluator", "iteration_completed", epoch, 1)
        writer.add("trainer", "validation_completed", epoch, 2 * epoch, metrics=metrics, payload={"metrics": metrics})
    writer.end()
    return str(tmp_path / "run")


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["events", *words, "--format", "json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


class TestWhich:
    @pytest.mark.parametrize(
        ("words", "places"),
        [
            ([], list(range(12))),
            (["--engine", "evaluator"], [2, 6, 10]),
            (["--event", "validation_completed"], [3, 7, 11]),
            (["--event", "validation_completed", "--event", "iteration_completed", "--engine", "trainer"],
             [0, 1, 3, 4, 5, 7, 8, 9, 11]),
            (["--epoch", "2-3", "--event", "validation_completed"], [7, 11]),
            (["--from", "3", "--to", "4"], [4, 5, 7]),
            (["--where", 'metrics["val/loss"] < 3'], [7, 11]),
            (["--where", 'output["loss"] > 4', "--epoch", "1"], [0]),
            (["--where", 'isnan(metrics["a.b"])'], [3, 7, 11]),
        ],
    )  # fmt: skip
    def test_filters_select_events(self, folder, words, places, capsys):
        assert [row["seq"] for row in rows(capsys, folder, *words)] == places

    def test_a_ranks_events_are_selected(self, folder, capsys):
        writer = Writer(Path(folder), rank=1)
        writer.add("trainer", "started", 0, 0)
        writer.end()
        assert [row["event"] for row in rows(capsys, folder, "--rank", "1")] == ["started"]
        assert len(rows(capsys, folder)) == 12
        assert main(["events", folder, "--rank", "2"]) == 2

    def test_superseded_events_are_shown_when_asked_for(self, tmp_path, capsys):
        writer = Writer(tmp_path)
        writer.add("trainer", "iteration_completed", 1, 1)
        writer.add("trainer", "iteration_completed", 1, 2)
        writer.log.rewind(after=0, ord=1, seq=2, t=1)
        writer.add("trainer", "iteration_completed", 1, 2, ord=1)
        writer.end()
        assert [row["seq"] for row in rows(capsys, str(tmp_path))] == [0, 2, 3]
        assert [row["seq"] for row in rows(capsys, str(tmp_path), "--superseded")] == [0, 1, 2, 3]


class TestHow:
    def test_json_holds_the_chosen_fields(self, folder, capsys):
        words = ["--event", "validation_completed", "--epoch", "2", "--fields", "epoch,payload.metrics.val/loss,lr.0"]
        assert rows(capsys, folder, *words) == [{"epoch": 2, "payload.metrics.val/loss": 2.0, "lr.0": None}]
        assert rows(capsys, folder, "--epoch", "2", "--to", "3", "--fields", "lr.0")[0] == {"lr.0": 0.1}
        assert rows(capsys, folder, "--epoch", "3", "--fields", "metrics.a.b")[-1] == {"metrics.a.b": "NaN"}

    def test_csv_has_a_column_for_each_field(self, folder, capsys):
        assert main(["events", folder, "--format", "csv", "--fields", "iteration,output.loss,metrics"]) == 0
        found = list(csv.DictReader(capsys.readouterr().out.splitlines()))
        assert found[0] == {"iteration": "1", "output.loss": "5.0", "metrics": ""}
        assert json.loads(found[3]["metrics"]) == {"val/loss": 3.0, "a.b": "NaN"}

    def test_a_table_lines_up_its_columns(self, folder, capsys):
        assert main(["events", folder, "--from", "3", "--to", "3"]) == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split() == ["seq", "t", "engine", "event", "epoch", "iteration", "values"]
        assert row.split()[3:] == ["trainer", "iteration_completed", "2", "3", 'output={"loss":3.0}', "lr=[0.1]"]
        assert head.index("engine") == row.index("trainer")

    def test_text_cannot_drive_the_terminal(self, tmp_path, capsys):
        writer = Writer(tmp_path)
        writer.add("trainer", "x", 1, 1, error="one\n\x1b[31mtwo")
        writer.end()
        assert main(["events", str(tmp_path), "--fields", "error"]) == 0
        assert capsys.readouterr().out.splitlines()[1] == '"one\\n\\u001b[31mtwo"'

    def test_no_match_is_an_empty_answer(self, folder, capsys):
        assert main(["events", folder, "--engine", "nobody"]) == 0
        said = capsys.readouterr()
        assert said.out == ""
        assert "evaluator" in said.err

    @pytest.mark.parametrize("form", ["table", "json", "csv"])
    @pytest.mark.parametrize(
        ("words", "hint"),
        [
            (["--event", "iteration_complete"], "this type; did you mean 'iteration_completed'?"),
            (["--event", "VALIDATION_COMPLETED"], "this type; did you mean 'validation_completed'?"),
            (["--event", "anomaly_detcted"], "this type; did you mean 'anomaly_detected'?"),
            (["--event", "anomaly_detected"], "this type; it has iteration_completed, validation_completed"),
            (["--event", "zzz"], "--event zzz: no event of "),
            (["--engine", "trianer"], "its engines: trainer, evaluator; did you mean 'trainer'?"),
        ],
    )
    def test_a_name_that_the_log_does_not_have_is_answered_with_the_nearest(self, words, hint, form, folder, capsys):
        assert main(["events", folder, "--format", form, *words]) == 0
        said = capsys.readouterr()
        assert hint in said.err
        assert len(said.out.splitlines()) == (form == "csv")  # its header

    def test_a_misspelt_name_beside_others_is_mentioned_and_a_custom_one_is_not(self, folder, capsys):
        names = ["--event", "validation_completed", "--event", "iteration_complete"]
        assert main(["events", folder, *names]) == 0
        said = capsys.readouterr()
        assert len(said.out.splitlines()) == 4
        assert said.err.count("\n") == said.err.count("did you mean 'iteration_completed'?") == 1
        assert main(["events", folder, "--event", "validation_completed", "--event", "games_won"]) == 0
        assert capsys.readouterr().err == ""

    @pytest.mark.slow
    def test_a_reader_may_close_the_pipe_early(self, folder):
        command = [sys.executable, "-m", "pulsetrain", "events", folder, "--format", "json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait(timeout=60) == 0


class TestFollow:
    def test_events_come_as_they_are_written_until_the_log_ends(self, tmp_path):
        writer = Writer(tmp_path)
        writer.add("trainer", "started", 0, 0)
        opened: list[LoggedEvent] = []

        def steps():
            opened.append(writer.add("trainer", "epoch_completed", 1, 2, open=True))
            writer.add("evaluator", "started", 0, 0)
            yield
            opened[0].metrics = {"loss": 1.0}
            writer.log.complete(opened[0])
            yield
            yield
            writer.add("trainer", "completed", 1, 2)
            writer.end()
            yield

        going = steps()
        followed = command.follow(EventLog(tmp_path), None, lambda seconds: next(going))
        found = [(event.seq, event.event, event.metrics) for event in followed]
        assert found == [
            (0, "started", None),
            (2, "started", None),
            (1, "epoch_completed", {"loss": 1.0}),
            (3, "completed", None),
        ]

    def test_a_condition_sees_an_event_once_it_is_complete(self, tmp_path):
        writer = Writer(tmp_path)
        event = writer.add("trainer", "epoch_completed", 1, 2, open=True)
        looks: list[float] = []

        def wait(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 2:
                event.metrics = {"loss": 1.0}
                writer.log.complete(event)
                writer.end()

        wanted = command.follow(EventLog(tmp_path), lambda event: event.metrics is not None, wait, engine="trainer")
        assert [each.seq for each in wanted] == [0]
        assert len(looks) == 2

    def test_an_ended_log_is_printed_once(self, folder, capsys):
        assert main(["events", folder, "--follow", "--format", "csv", "--fields", "seq"]) == 0
        assert capsys.readouterr().out.split() == ["seq", *map(str, range(12))]

    def test_ctrl_c_ends_it_quietly(self, tmp_path, monkeypatch, capsys):
        writer = Writer(tmp_path)
        writer.add("trainer", "started", 0, 0)

        def interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(command.time, "sleep", interrupt)
        assert main(["events", str(tmp_path), "--follow", "--fields", "event"]) == 0
        said = capsys.readouterr()
        assert (said.out.split(), said.err) == (["event", "started"], "")
        writer.end()


class TestDamage:
    def flipped(self, folder: str) -> str:
        path = Path(folder) / "events" / "events.jsonl.zst"
        data = bytearray(path.read_bytes())
        data[data.index(b"\x28\xb5\x2f\xfd") + 20] ^= 1  # in the first zstd frame
        path.write_bytes(data)
        return folder

    def test_check_accepts_a_sound_log(self, folder, capsys):
        assert main(["events", folder, "--check"]) == 0
        assert "12 events, ended; no damage" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "option",
        [
            "--engine=trainer", "--event=started", "--from=0", "--to=0", "--epoch=1", "--where=seq > 1", "--fields=seq",
            "--format=json", "--follow", "--superseded",
        ],
    )  # fmt: skip
    def test_check_takes_no_options_about_events(self, folder, option, capsys):
        assert main(["events", folder, "--check", option]) == 2
        said = capsys.readouterr()
        rule = f"--check: reads the whole log and prints no events; leave {option.partition('=')[0]} out"
        assert (said.out, rule in said.err) == ("", True)

    def test_check_accepts_a_log_that_was_not_closed(self, tmp_path, capsys):
        writer = Writer(tmp_path)
        writer.add("trainer", "started", 0, 0)
        assert main(["events", str(tmp_path), "--check"]) == 0
        output = "1 events, not closed: the run is still going or was killed, or the end is missing; no damage"
        assert output in capsys.readouterr().out
        writer.end()

    def test_check_reports_damage(self, folder, capsys):
        assert main(["events", self.flipped(folder), "--check"]) == 3
        assert "12 events, seq 0 to 11" in capsys.readouterr().out

    def test_dropped_events_are_reported(self, folder, capsys):
        assert main(["events", self.flipped(folder), "--format", "json"]) == 3
        said = capsys.readouterr()
        assert said.out == ""
        assert "damaged: events.jsonl.zst, bytes 0 to" in said.err


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["nowhere"], "nowhere: does not exist"),
        (["RUN", "--fields", "epoch,metric.x"], "--fields='metric.x'): unknown; choose one of"),
        (["RUN", "--where", "loss > 3"], "where: no field 'loss'"),
        (["RUN", "--where", "epoch >"], "where: invalid syntax\n  epoch >\n         ^\n"),
        (["RUN", "--epoch", "x"], "'x': choose an epoch such as 3, or a range such as 3-5"),
        (["RUN", "--model.x", "3"], "--model.x: events has no such option"),
    ],
)
def test_wrong_input_is_2(folder, words, output, capsys):
    assert main(["events", *(folder if word == "RUN" else word for word in words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert output in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("condition", ["1/0", "1/0 > 2", "event + 1 > 2", "event < 3", "len(epoch) > 1"])
def test_a_condition_that_cannot_be_computed_on_any_event_is_wrong_input(condition, folder, capsys):
    assert main(["events", folder, "--where", condition]) == 2
    assert "cannot be computed on any event" in capsys.readouterr().err


@pytest.mark.parametrize("condition", ['output["absent"] < 2', "1/iteration > 99", "epoch > 99"])
def test_a_condition_that_only_lacks_values_on_some_events_matches_none(condition, folder, capsys):
    assert main(["events", folder, "--where", condition]) == 0
    assert "no event" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["events.jsonl.zst", "tail.jsonl"])
@pytest.mark.parametrize("command", [["events", "--check"], ["events"], ["diff"]], ids=" ".join)
def test_a_log_file_that_is_a_folder_is_named_with_a_remedy(command, file, folder, capsys):
    log = Path(folder) / "events" / file
    log.unlink(missing_ok=True)
    log.mkdir()
    words = [command[0], folder, *([folder] if command[0] == "diff" else []), *command[1:]]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "Error" not in said
    assert f"{file}: cannot be read" in said
    assert "restore it" in said
