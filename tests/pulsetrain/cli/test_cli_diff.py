"""`pulsetrain diff`: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.recording import LoggedEvent, LogWriter


def write(folder: Path, losses: list[float], rank: int = 0) -> str:
    writer = LogWriter(folder / "events", rank)
    for place, loss in enumerate(losses):
        writer.add(
            LoggedEvent(place, "trainer", "iteration_completed", 1, place + 1, output={"loss": loss}, seq=place, t=1)
        )
    writer.end()
    writer.close()
    return str(folder)


@pytest.fixture
def logs(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "a", [1.0] * 1500), write(tmp_path / "b", [1.0] * 1200 + [1.25] * 300)


def flip(folder: str, at: int) -> None:
    path = Path(folder) / "events" / "events.jsonl.zst"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_same_log_is_0(logs, capsys):
    assert main(["diff", logs[0], logs[0]]) == 0
    assert "agree: 1,500 deterministic events" in capsys.readouterr().out


def test_a_difference_is_1(logs, capsys):
    assert main(["diff", *logs]) == 1
    said = capsys.readouterr()
    assert "first difference: event 1,200, trainer's iteration_completed at epoch 1, iteration 1201" in said.out
    assert "1.25" in said.out
    assert "0.25 apart" in said.out
    assert "largest difference, by iterations" in said.out
    assert said.err == ""


def test_the_logs_of_a_rank_are_compared(logs, capsys):
    write(Path(logs[0]), [2.0] * 3, rank=2)
    assert main(["diff", *logs, "--rank", "2"]) == 2
    capsys.readouterr()
    write(Path(logs[1]), [2.0] * 3, rank=2)
    assert main(["diff", *logs, "--rank", "2"]) == 0
    assert "agree: 3 deterministic events" in capsys.readouterr().out


def test_within_a_tolerance_it_is_0(logs):
    assert main(["diff", *logs, "--atol", "0.25"]) == 0
    assert main(["diff", *logs, "--rtol", "0.1"]) == 1


def test_first_leaves_out_what_follows(logs, capsys):
    assert main(["diff", *logs, "--first"]) == 1
    assert "largest difference" not in capsys.readouterr().out


def test_json_holds_the_differences(logs, capsys):
    assert main(["diff", *logs, "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False
    assert found["agreed"] == found["divergence"]["ord"] == 1200
    assert found["divergence"]["fields"] == {"output.loss": {"a": 1.0, "b": 1.25}}
    assert found["divergence"]["b"]["iteration"] == 1201
    assert found["growth"]["trainer output.loss"][0] == {"first": 0, "last": 0, "largest": 0.25}
    assert main(["diff", *logs, "--format", "json", "--first"]) == 1
    assert "growth" not in json.loads(capsys.readouterr().out)


def test_equal_but_damaged_is_3(tmp_path, capsys):
    a, b = write(tmp_path / "a", [1.0] * 1500), write(tmp_path / "b", [1.0] * 1024 + [1.1] * 476)
    flip(b, -100)  # the table
    flip(b, 600)  # the first block, which is alike
    assert main(["diff", a, b, "--atol", "0.2"]) == 3
    assert "damage: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["diff", "A", "nowhere"], "nowhere: does not exist"),
        (["diff", "A", "A/events/events.jsonl.zst"], "holds no event log"),
        (["diff", "A", "A", "--atol", "-1"], "diff(atol=-1.0): needs a number of at least 0"),
        (["diff", "A", "A", "--rtol", "nan"], "diff(rtol=nan): needs a number of at least 0"),
        (["diff", "A", "A", "--training.seed", "1"], "--training.seed: diff has no such option"),
    ],
)
def test_runs_that_cannot_be_compared_give_2_and_one_line(logs, words, output, capsys):
    assert main([word.replace("A", logs[0]) for word in words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert output in said.err
    assert said.err.count("\n") == 1


def test_ranks_are_compared_without_first(logs, capsys):
    assert main(["diff", logs[0], "--ranks", "--first"]) == 2
    assert "diff --ranks: always shows the first difference alone; leave --first out" in capsys.readouterr().err
