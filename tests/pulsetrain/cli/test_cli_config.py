"""`pulsetrain config`: it prints the configuration of the run, and training from its output gives the same run."""

from __future__ import annotations

import json
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from pulsetrain import TrainingConfig
from pulsetrain.cli import main
from pulsetrain.configuration.parse import STANDARD_HANDLERS
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine.checkpoint import CheckpointManager
from tests.support.programs_command_line import files, train

ODD = """
import torch
from torch import nn
from pulsetrain.engine.events.cadence import Every

CALLED = []

class Part:
    def __init__(self, size: int, scale: float = 0.5):
        self.size, self.scale = size, scale

class Odd(nn.Module):
    def __init__(self, width: int = 4, act=torch.tanh, sizes: tuple[int, ...] = (1, 2), every: Every = Every(epochs=2),
                 names: dict[str, float] | None = None, part: Part | None = None, text: str = "two\\nlines",
                 late: int = None, dtype: torch.dtype = torch.float32, gate=lambda x: x, mark=object(), **more):
        super().__init__()
        CALLED.append(1)
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)
"""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["config", "config.yaml", *words]) == 0
    return capsys.readouterr().out


def comments(text: str) -> dict[str, str]:
    """The comment after each key, where the key is unique."""
    marked = [line.partition("  # ") for line in text.splitlines()[1:]]
    return {line.strip().lstrip("- ").partition(":")[0]: comment for line, mark, comment in marked if mark}


def weights(run: str) -> dict[str, torch.Tensor]:
    manager = CheckpointManager(Path(run) / "checkpoints")
    latest = manager.get_latest()
    assert latest is not None
    found: dict[str, torch.Tensor] = manager.load(latest)["model"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["yaml", "json"])
def test_the_printed_configuration_gives_the_same_run(
    form: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--training.learning_rate=3e-3", "--training.weight_decay", "1e-5", "--model.init_args.width=4"]
    (folder / "full.yaml").write_text(printed(capsys, "--format", form, *settings))
    assert train("--run", "a", *settings) == 0
    assert main(["train", "full.yaml", "--run", "b"]) == 0
    a, b = weights("a"), weights("b")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert a["layers.0.weight"].shape == (4, 4)


def test_it_is_its_own_resolution(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = printed(capsys)
    (folder / "config.yaml").write_text(once)
    assert load_yaml(printed(capsys)) == load_yaml(once)


def test_every_setting_and_argument_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_yaml(printed(capsys))
    assert list(config["training"]) == [each.name for each in fields(TrainingConfig)]
    assert config["data"]["init_args"] == {"rows": 20, "features": 4}
    assert config["strategy"]["init_args"]["loss"] == "mse"
    assert config["handlers"][0]["init_args"]["keep_last"] == 3
    assert json.loads(printed(capsys, "--format", "json")) == config


def test_the_handlers_that_are_added_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.yaml").write_text("model: model.Net\ndata: data.loaders\n")
    text = printed(capsys)
    names = [each if isinstance(each, str) else each["class_path"] for each in load_yaml(text)["handlers"]]
    assert names == list(STANDARD_HANDLERS)
    assert comments(text)["handlers"] == comments(text)["training"] == comments(text)["strategy"] == "default"
    assert comments(text)["run"] == "default"


def test_comments_say_where_values_are_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--training.clip_grad_norm=1")
    marks = comments(text)
    assert marks["clip_grad_norm"] == "command line"
    assert marks["weight_decay"] == marks["validate_every"] == marks["rows"] == "default"
    assert not {"learning_rate", "seed", "width", "loss", "metric"} & marks.keys()
    assert text.splitlines()[0].endswith(f"keep it in {folder}")


def test_what_yaml_cannot_write_is_named_and_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "odd.py").write_text(ODD)
    part = "--model.init_args.part={class_path: odd.Part, init_args: {size: 3}}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        text = printed(capsys, "--model", "odd.Odd", part)
    assert warned == []
    config = load_yaml(text)
    assert config["model"]["init_args"] == {
        "part": {"class_path": "odd.Part", "init_args": {"size": 3, "scale": 0.5}},
        "width": 4,
        "act": "torch.tanh",
        "sizes": [1, 2],
        "every": {"epochs": 2},
        "names": None,
        "text": "two\nlines",
        "late": None,
        "dtype": "torch.float32",
    }
    assert "class_path: odd.Odd  # not written: gate (<lambda>), mark (object object)" in text
    import odd  # type: ignore[import-not-found]

    assert not odd.CALLED  # nothing was made
    (folder / "config.yaml").write_text(text)
    assert train("--run", "odd") == 0


def test_it_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files()
    printed(capsys)
    assert files() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--training.max_epoch 3", "training.max_epoch: unknown argument of TrainingConfig"),
        ("--training.lr 1e-3", "training.lr: unknown argument of TrainingConfig; set learning_rate=..."),
        ("--training.max_epochs many", "training.max_epochs='many': needs a whole number or null"),
        ("--training.accumulate 0", "training.accumulate=0: needs to be a whole number of at least 1"),
        ("--model.init_args.widht 3", "model.init_args.widht: unknown argument of Net; choose one of width"),
        ("--model.init_args.width wide", "model.init_args.width='wide': needs a whole number"),
        ("--handlers [Chekpointer]", "handlers[0]: class_path='Chekpointer': unknown name; choose one of"),
        ("--strategy supervisd", "did you mean 'supervised'?"),
        (
            "--metrics.accuracy pulsetrain.engine.metrics.Accurcy",
            "metrics.accuracy: class_path='pulsetrain.engine.metrics.Accurcy'",
        ),
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--format xml", "invalid choice: 'xml'"),
    ],
)
def test_bad_input_is_one_error(words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "config.yaml", *words.split()]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_a_file_that_is_not_there_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "nothing.yaml"]) == 2
    assert capsys.readouterr().err.startswith("pulsetrain: error: nothing.yaml: there is no such file")
