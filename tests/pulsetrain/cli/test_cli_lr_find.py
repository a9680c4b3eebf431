"""`pulsetrain lr-find`: its output, the files it writes, and that the command it prints works as printed."""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path

import pytest

from pulsetrain.cli import main
from tests.support.programs_command_line import files

Streams = pytest.CaptureFixture[str]
# few and large batches: losses of four rows vary by more than a sweep can detect
SETTINGS = ("--data.init_args.rows", "400", "--training.accumulate", "10")
QUICK = ("--start", "1e-4", "--end", "100", "--iterations", "60", *SETTINGS)


def find(*words: str) -> int:
    return main(["lr-find", "config.yaml", *words])


def suggestion(output: str) -> float:
    found = re.search(r"^suggestion  (\S+)$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


def test_it_suggests_a_rate_and_leaves_no_files(
    folder: Path, capsys: Streams, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = files()
    assert find(*QUICK) == 0
    output = capsys.readouterr().out
    assert 1e-3 < suggestion(output) < 10
    assert "configured  0.01" in output
    assert files() == before
    assert list(temporary.glob("lr-find-*")) == []


def test_the_table_shows_the_sweep_and_marks_the_suggestion(folder: Path, capsys: Streams) -> None:
    assert find(*QUICK) == 0
    output = capsys.readouterr().out
    rows = re.findall(r"^ +(\S+e[-+]\d+) +(\S+) +(\S+)(  <- falls fastest)?$", output, re.MULTILINE)
    rates = [float(row[0]) for row in rows]
    assert rates == sorted(rates)
    assert rates[0] == 1e-4
    assert 10 <= len(rows) <= 13
    (marked,) = [float(rate) for rate, _, _, mark in rows if mark]
    assert f"{marked:.2g}" == f"{suggestion(output):.2g}"
    assert re.search(r"^the loss diverged after \d+ of 60 updates$", output, re.MULTILINE)


def test_the_command_that_it_prints_trains_at_the_rate(folder: Path, capsys: Streams) -> None:
    assert find(*QUICK, "--model.init_args.width", "4", "--training.learning_rate", "1e-5") == 0
    output = capsys.readouterr().out
    assert "configured  1e-05" in output
    line = next(line for line in output.splitlines() if line.startswith("use it: "))
    words = shlex.split(line.removeprefix("use it: "))
    words = words[words.index("train") :]
    assert "--model.init_args.width=4" in words
    assert sum("learning_rate" in word for word in words) == 1
    assert main(words) == 0
    config = (folder / "runs" / "tiny-1" / "config.yaml").read_text()
    assert f"learning_rate: {suggestion(output)}" in config
    assert "width: 4" in config


def test_the_next_run_is_numbered_as_if_there_had_been_no_sweep(folder: Path, capsys: Streams) -> None:
    assert find(*QUICK) == 0
    assert main(["train", "config.yaml"]) == 0
    assert [path.name for path in (folder / "runs").iterdir()] == ["tiny-1"]


def test_settings_that_would_write_into_a_run_folder_do_not(folder: Path) -> None:
    before = files()
    assert find(*QUICK, "--training.run_dir", "elsewhere", "--training.save_every_n_epochs", "1") == 0
    assert files() == before


@pytest.mark.slow
def test_the_plot_goes_where_it_is_asked_for(folder: Path, capsys: Streams) -> None:
    assert find(*QUICK, "--plot", "found") == 0
    assert sorted(path.name for path in Path("found/plots").iterdir()) == ["lr_finder.png", "lr_finder.svg"]
    assert Path("found/plots/lr_finder.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "plot        found/plots/lr_finder.png" in capsys.readouterr().out


def test_without_a_suggestion_it_says_why_and_fails(folder: Path, capsys: Streams) -> None:
    assert find("--start", "1e5", "--end", "1e9", "--iterations", "30") == 1
    output = capsys.readouterr().out
    assert "suggestion  none: the loss ran away after" in output
    assert "use it" not in output


def test_the_same_command_gives_the_same_answer(folder: Path, capsys: Streams) -> None:
    outputs = []
    for _ in range(2):
        assert find(*QUICK) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--start", "0"], "LRFinder(start_lr=0.0): needs a positive number"),
        (["--start", "fast"], "argument --start: invalid float value: 'fast'"),
        (["--start", "1", "--end", "0.1"], "LRFinder(start_lr=1.0): needs to be below end_lr=0.1"),
        (["--iterations", "3"], "LRFinder(iterations=3): needs a whole number of at least 20"),
        (["--training.optimiser", "sgd"], "did you mean 'optimizer'?"),
        (["--training.optimizer", "sdg"], "training.optimizer='sdg': unknown"),
        (["--model", "model.Nett"], "model.Nett"),
        (["--data", "data.nothing"], "data: the training set has no batch"),
        (["--plot", "config.yaml"], "cannot be written"),
        (["--resume", "latest"], "unrecognized arguments: --resume latest"),
    ],
)
def test_bad_input_is_reported_without_a_traceback(
    folder: Path, capsys: Streams, words: list[str], message: str
) -> None:
    before = files()
    assert find(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert files() == before


def test_an_error_of_the_model_says_how_to_see_where(folder: Path, capsys: Streams) -> None:
    assert find(*QUICK, "--model", "model.Late") == 2
    errors = capsys.readouterr().err
    assert "RuntimeError: it broke in the middle" in errors
    assert "--traceback shows where in the code" in errors
    assert "Traceback" not in errors


def test_a_missing_configuration_is_refused(folder: Path, capsys: Streams) -> None:
    assert main(["lr-find", "other.yaml"]) == 2
    assert "other.yaml: there is no such file" in capsys.readouterr().err
