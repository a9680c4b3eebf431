"""`pulsetrain replay`: what another early stopping would have done, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import Events
from engine.recording import LoggedEvent, LogWriter
from pulsetrain.cli import main
from pulsetrain.cli.replay import parse_handler

LOSSES = [4.0, 3.0, 3.5, 3.25, 2.0, 2.5, 2.75]
PER_EPOCH = 10


def record(folder: Path, losses: list[float] = LOSSES) -> Path:
    """The log of a run that validated at the end of each epoch."""
    writer = LogWriter(folder / "events")
    place = 0

    def add(event: Events, epoch: int, **fields: object) -> None:
        nonlocal place
        iteration = epoch * PER_EPOCH
        writer.add(LoggedEvent(place, "trainer", event.value, epoch, iteration, seq=place, t=10**18 + place, **fields))
        place += 1

    add(Events.STARTED, 0)
    for epoch, loss in enumerate(losses, start=1):
        metrics = {"val/loss": loss}
        add(Events.EPOCH_COMPLETED, epoch, metrics=metrics)
        add(Events.VALIDATION_STARTED, epoch)
        add(Events.VALIDATION_COMPLETED, epoch, payload={"metrics": metrics}, observed={"seconds": 0.5})
    add(Events.COMPLETED, len(losses))
    writer.end()
    writer.close()
    return folder


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(tmp_path / "a")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_row_for_each_run_and_variant(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = record(tmp_path / "b", [1.0, 2.0, 3.0])
    variants = ["early_stopping:patience=2,metric=val/loss", "EarlyStopping:patience=3"]
    words = [word for text in variants for word in ("--handler", text)]
    before = files(tmp_path)
    assert main(["replay", str(recorded), str(other), *words, "--format", "json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(row["run"], row["handler"], row["iteration"], row["best"], row["saved"]) for row in rows]
    assert found == [
        (str(recorded), variants[0], 40, 3.0, 30),
        (str(recorded), variants[1], None, 2.0, 0),
        (str(other), variants[0], 30, 1.0, 0),
        (str(other), variants[1], None, 1.0, 0),
    ]
    assert files(tmp_path) == before  # a log is not changed by reading it


def test_the_table_says_where_the_best_and_how_much(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--handler", "early_stopping:patience=2", "--handler", "early_stopping:patience=5"]
    assert main(["replay", str(recorded), *words]) == 0
    head, stopped, went_on = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "run"
    assert "epoch 4, iteration 40 of 70" in stopped
    assert stopped.split()[-3:] == ["3", "30", "(43%)"]
    assert "nowhere in 70 iterations" in went_on
    assert went_on.split()[-2:] == ["2", "-"]


@pytest.mark.parametrize(
    ("variant", "told"),
    [
        ("early_stoping:patience=3", "did you mean 'early_stopping'?"),
        ("early_stopping:patient=3", "did you mean 'patience'?"),
        ("early_stopping:patience=0", "needs a whole number of at least 1"),
        ("early_stopping:patience=many", "patience"),
        ("early_stopping:patience", "'patience' is no ARGUMENT=VALUE"),
        ("early_stopping:metric=val/accuracy", "there are: val/loss"),
        ("checkpointer:folder=elsewhere", "has no 'checkpoint_state'"),
        ("ema", "has no 'model'"),
        ("json.JSONDecoder", "it has no attach()"),
    ],
)
def test_bad_handlers_are_one_line_and_status_2(
    recorded: Path, variant: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recorded.parent)
    assert main(["replay", str(recorded), "--handler", variant]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "nothing"), "--handler", "early_stopping"]) == 2
    error = capsys.readouterr().err
    assert "holds no event log" in error
    assert len(error.splitlines()) == 1


def test_a_run_that_never_validated_has_no_such_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "a", [])
    assert main(["replay", str(folder), "--handler", "early_stopping"]) == 2
    assert f"{folder}: EarlyStopping(metric='val/loss'): this metric does not exist" in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "--handler", "early_stopping", "--engine", "critic"]) == 2
    assert "the log has no such engine; there are trainer" in capsys.readouterr().err


def test_a_handler_that_would_write_into_the_run_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(recorded)
    assert main(["replay", str(recorded), "--handler", f"csv_logger:folder={recorded}"]) == 2
    assert "would write into the run" in capsys.readouterr().err
    assert files(recorded) == before


def test_settings_of_a_configuration_are_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "--handler", "early_stopping", "--training.seed", "1"]) == 2
    assert "--training.seed: is no option of replay" in capsys.readouterr().err


def test_values_of_arguments_are_yaml() -> None:
    assert parse_handler("m.H:a=1e-3,b=x/y,c=[1, 2],d=null,e={f: 2, g: 3}") == {
        "class_path": "m.H",
        "init_args": {"a": 1e-3, "b": "x/y", "c": [1, 2], "d": None, "e": {"f": 2, "g": 3}},
    }
    assert parse_handler("early_stopping") == {"class_path": "early_stopping", "init_args": {}}
