"""`pulsetrain replay`: the effect of other early stopping settings, and the input it rejects."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.cli.replay import parse_handler
from pulsetrain.engine import ConfigurationError, Events
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.non_finite import finite_or_text
from tests.support.programs import Program

LOSSES = [4.0, 3.0, 3.5, 3.25, 2.0, 2.5, 2.75]
PER_EPOCH = 10


def record(folder: Path, losses: list[float] = LOSSES, rank: int = 0) -> Path:
    """The log of a run that validated at the end of each epoch."""
    writer = LogWriter(folder / "events", rank)
    place = 0

    def add(event: Events, epoch: int, **fields: object) -> None:
        nonlocal place
        iteration = epoch * PER_EPOCH
        writer.add(LoggedEvent(place, "trainer", event.value, epoch, iteration, seq=place, t=10**18 + place, **fields))
        place += 1

    add(Events.STARTED, 0)
    for epoch, loss in enumerate(losses, start=1):
        metrics = {"val/loss": finite_or_text(loss)}
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
    head, stopped, continued = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "run"
    assert "epoch 4, iteration 40 of 70" in stopped
    assert stopped.split()[-3:] == ["3", "30", "(43%)"]
    assert "nowhere in 70 iterations" in continued
    assert continued.split()[-2:] == ["2", "-"]


def test_json_has_a_best_value_that_is_not_finite_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "a", [math.inf, math.nan])
    assert main(["replay", str(run), "--handler", "early_stopping:patience=3", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["best"] == "Infinity"


@pytest.mark.parametrize(
    ("variant", "output"),
    [
        ("early_stoping:patience=3", "did you mean 'early_stopping'?"),
        ("early_stopping:patient=3", "did you mean 'patience'?"),
        ("early_stopping:patience=0", "needs a whole number of at least 1"),
        ("early_stopping:patience=many", "patience"),
        ("early_stopping:patience", "'patience' is not ARGUMENT=VALUE"),
        ("checkpointer:folder=elsewhere", "has no 'checkpoint_state'"),
        ("ema", "has no 'model'"),
        ("json.JSONDecoder", "it has no attach()"),
        ("early_stopping:patience=" + "[" * 5000, "--handler early_stopping: the value of 'patience' nests too deep"),
    ],
)
def test_bad_handlers_are_one_line_and_status_2(
    recorded: Path, variant: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recorded.parent)
    assert main(["replay", str(recorded), "--handler", variant]) == 2
    said = capsys.readouterr()
    assert output in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


@pytest.mark.parametrize("name", ["early_stoping", "EarlyStoping"])
def test_the_handlers_to_choose_from_are_listed_once(
    name: str, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recorded), "--handler", name]) == 2
    listed = capsys.readouterr().err.partition("choose one of ")[2].partition("; did you mean 'early_stopping'?")[0]
    names = listed.split(", ")
    assert {"early_stopping", "nan_guard", "lr_finder"} <= set(names)
    assert len({each.replace("_", "").lower() for each in names}) == len(names)


def test_a_folder_that_is_not_a_run_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "nothing"), "--handler", "early_stopping"]) == 2
    error = capsys.readouterr().err
    assert "nothing: does not exist" in error
    assert len(error.splitlines()) == 1


def test_a_run_that_never_validated_has_no_such_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "a", [])
    assert main(["replay", str(folder), "--handler", "early_stopping"]) == 2
    assert f"{folder}: EarlyStopping(metric='val/loss'): this metric does not exist" in capsys.readouterr().err


def record_rollouts(folder: Path, validates: bool = False) -> Path:
    """The log of a run of rollouts, the first of which reports no return."""
    writer = LogWriter(folder / "events")
    output: list[tuple[Events, dict[str, float]]] = [(Events.ROLLOUT_COMPLETED, {"rollout/length": 9.0})]
    output += [(Events.ROLLOUT_COMPLETED, {"rollout/return": each}) for each in (3.0, 5.0, 4.0, 2.0, 1.0)]
    if validates:
        output.insert(1, (Events.VALIDATION_COMPLETED, {"val/loss": 1.0}))
    for n, (event, metrics) in enumerate(output):
        fields = {"payload": {"metrics": metrics}, "observed": {"seconds": 0.5}}
        writer.add(LoggedEvent(n, "trainer", event.value, 1, 10 * n, seq=n, t=10**18 + n, **fields))
    writer.end()
    writer.close()
    return folder


@pytest.mark.parametrize("validates", [False, True])
def test_runs_of_rollouts_are_judged_by_the_metrics_of_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], validates: bool
) -> None:
    folder = record_rollouts(tmp_path / "a", validates)
    variants = ["rollout/return,mode=max", "rollout_return,mode=max", "rollout/retrun,mode=max"]
    words = [word for each in variants for word in ("--handler", f"early_stopping:patience=2,metric={each}")]
    assert main(["replay", str(folder), *words, "--format", "json"]) == 2
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    stops = 40 + 10 * validates
    assert [(row["iteration"], row["best"]) for row in rows] == [(stops, 5.0), (stops, 5.0), (None, None)]
    assert "EarlyStopping(metric='rollout/retrun'): this metric does not exist" in said.err
    assert "did you mean 'rollout/return'?" in said.err


def test_a_missing_metric_has_a_row_of_its_own(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = record(tmp_path / "b", [])
    words = ["--handler", "early_stopping:patience=2,metric=val/accuracy", "--handler", "early_stopping:patience=2"]
    assert main(["replay", str(recorded), str(other), *words]) == 2
    said = capsys.readouterr()
    rows = said.out.splitlines()[1:]
    assert ["unknown: the run has no such metric" in row for row in rows] == [True, False, True, True]
    assert "epoch 4, iteration 40 of 70" in rows[1]
    errors = said.err.splitlines()
    assert len(errors) == 3
    assert f"{recorded}: EarlyStopping(metric='val/accuracy')" in errors[0]
    assert "there are: val/loss" in errors[0]
    assert main(["replay", str(recorded), *words, "--format", "json"]) == 2
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["error"] is None, row["iteration"], row["best"]) for row in found] == [
        (False, None, None),
        (True, 40, 3.0),
    ]


def test_a_damaged_log_is_replayed_as_far_as_it_can_be_read(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = recorded / "events" / "events.jsonl.zst"
    data = bytearray(log.read_bytes())
    data[data.index(b"\x28\xb5\x2f\xfd") + 20] ^= 1  # in the first zstd frame
    log.write_bytes(data)
    other = record(tmp_path / "b")
    runs = ["replay", str(recorded), str(other)]
    assert main([*runs, "--handler", "early_stopping:patience=2"]) == 2  # no value of the metric remains
    said = capsys.readouterr()
    assert f"{recorded}: damaged: events.jsonl.zst" in said.err
    assert len(said.err.splitlines()) == 2
    assert len(said.out.splitlines()) == 3
    assert main([*runs, "--handler", f"csv_logger:folder={tmp_path / 'out'}"]) == 3
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    assert said.err.startswith(f"pulsetrain: {recorded}: damaged: events.jsonl.zst, bytes 0 to")
    assert len(said.err.splitlines()) == 1


def test_the_log_of_a_rank_is_replayed(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(recorded, [1.0, 2.0, 3.0], rank=3)
    words = ["replay", str(recorded), "--handler", "early_stopping:patience=2", "--rank"]
    assert main([*words, "3"]) == 0
    assert "epoch 3, iteration 30 of 30" in capsys.readouterr().out
    assert main([*words, "0"]) == 0
    assert "epoch 4, iteration 40 of 70" in capsys.readouterr().out
    assert main([*words, "1"]) == 2


def test_a_reader_may_close_the_pipe_early(recorded: Path) -> None:
    program = Program("-m", "pulsetrain", "replay", recorded, "--handler", "early_stopping")
    program.stdout.close()
    assert program.stderr.read() == ""
    assert program.wait(timeout=60) == 0
    program.close()


def test_an_engine_that_does_not_exist_is_rejected(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "--handler", "early_stopping", "--engine", "critic"]) == 2
    assert "the log has no such engine; there are trainer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "variant",
    ["csv_logger:folder={}", "csv_logger:folder={}/plots/more", "checkpointer:folder={}", "event_recorder:folder={}"],
)
@pytest.mark.parametrize("run", ["a", "other"])
def test_a_handler_that_would_write_into_a_run_is_rejected(
    variant: str, run: str, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "other")
    before = files(tmp_path), sorted(tmp_path.rglob("*"))
    words = ["--handler", "early_stopping", "--handler", variant.format(tmp_path / run)]
    assert main(["replay", str(recorded), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"would write into the run {tmp_path / run}; choose another folder" in said.err
    assert (files(tmp_path), sorted(tmp_path.rglob("*"))) == before


class Writer:
    """A handler that writes to an unexpected path."""

    path = "other/file"

    def attach(self, engine: object) -> None:
        raise AssertionError("played")


def test_a_path_inside_the_handler_is_checked_as_well(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert main(["replay", str(recorded), "--handler", f"{__name__}.Writer"]) == 2
    assert f"would write into the run {tmp_path / 'other'}" in capsys.readouterr().err


def test_a_handler_may_write_elsewhere(recorded: Path, tmp_path: Path) -> None:
    assert main(["replay", str(recorded), "--handler", f"csv_logger:folder={tmp_path / 'out'}"]) == 0
    assert os.listdir(tmp_path / "out") == ["metrics.csv"]


def test_settings_of_a_configuration_are_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "--handler", "early_stopping", "--training.seed", "1"]) == 2
    assert "--training.seed: replay has no such option" in capsys.readouterr().err


def test_values_of_arguments_are_yaml() -> None:
    assert parse_handler("m.H:a=1e-3,b=x/y,c=[1, 2],d=null,e={f: 2, g: 3}") == {
        "class_path": "m.H",
        "init_args": {"a": 1e-3, "b": "x/y", "c": [1, 2], "d": None, "e": {"f": 2, "g": 3}},
    }
    assert parse_handler("""m.H:a="x,y=1",b=[[1, 2], [3]],c=it's,d=4""")["init_args"] == {
        "a": "x,y=1", "b": [[1, 2], [3]], "c": "it's", "d": 4,
    }  # fmt: skip
    with pytest.raises(
        ConfigurationError, match=r"--handler m.H:a=\[1,b=2: 'a=\[1,b=2' has no value in YAML: .*expected"
    ):
        parse_handler("m.H:a=[1,b=2")
    assert parse_handler("early_stopping") == {"class_path": "early_stopping", "init_args": {}}
