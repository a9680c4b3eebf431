"""Training in a notebook: a bar and the losses below the cell, and errors that fit on a screen."""

from __future__ import annotations

import base64
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

from tests.support.notebooks import execute, notebook_of, traceback_of  # noqa: E402  # it imports them

pytestmark = pytest.mark.slow

CELLS = {
    "trains": """
import torch
from torch import nn
from torch.utils.data import DataLoader
from pulsetrain import Events, PretrainStrategy, SupervisedStrategy, Trainer, TrainingConfig

model, pairs = nn.Linear(4, 1), [(torch.randn(4), torch.randn(1)) for _ in range(256)]
train, val = DataLoader(pairs, batch_size=4), DataLoader(pairs, batch_size=64)
config = TrainingConfig(max_epochs=3, log_every_n_steps=10)
Trainer(model, train, val, strategy=SupervisedStrategy("mse"), config=config).train();
""",
    "is silent": """
silent = TrainingConfig(max_epochs=1, progress=False)
Trainer(model, train, val, strategy=SupervisedStrategy("mse"), config=silent).train();
""",
    "gets a wrong shape": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x)

wrong = DataLoader([(torch.randn(3), torch.randn(1)) for _ in range(8)], batch_size=4)
trainer = Trainer(nn.Sequential(Block()), wrong, wrong, strategy=SupervisedStrategy("mse"))
trainer.train()
""",
    "shows all calls": "%xmode Verbose\n%tb",
    "debugs": "import sys, traceback\ntraceback.print_last()",
    "validates a wrong shape": "%xmode Context\ntrainer.validate()",
    "predicts with a wrong shape": "%xmode Context\ntrainer.predict([torch.randn(4, 3)])",
    "measures a wrong shape": """
tokens = TrainingConfig(max_tokens=100)
Trainer(model, wrong, strategy=PretrainStrategy(), config=tokens)
""",
    "reads a ragged batch in a worker": """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        return torch.randn(3 + row % 2), torch.randn(1)

ragged = DataLoader(Rows(), batch_size=4, num_workers=1)
Trainer(model, ragged, strategy=SupervisedStrategy("mse")).train()
""",
    "is interrupted": """
import os, signal
interrupted = Trainer(model, train, strategy=SupervisedStrategy("mse"), config=silent)

@interrupted.on(Events.ITERATION_COMPLETED(once=3))
def press(trainer):
    os.kill(os.getpid(), signal.SIGINT)

interrupted.train()
""",
    "is interrupted twice": """
again = Trainer(model, train, strategy=SupervisedStrategy("mse"), config=silent)

@again.on(Events.ITERATION_COMPLETED(once=3))
def press_twice(trainer):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)

again.train()
""",
    "fails after two errors": """
class Table(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def number(self, row):
        return {"a": 1.0}[row]

    def value(self, row):
        try:
            return self.number(row)
        except KeyError as error:
            raise ValueError(f"row {row} has no number") from error

    def __getitem__(self, row):
        try:
            return self.value(row), 1.0
        except ValueError as error:
            raise RuntimeError("the table cannot be read") from error

Trainer(model, DataLoader(Table()), strategy=SupervisedStrategy("mse"), config=silent).train()
""",
    "loads what does not exist": """
Trainer(model, train, strategy=SupervisedStrategy("mse"), config=silent).train(resume="lates")
""",
    "names an unknown argument": "Trainer(model, train, lr=0.1)",
    "fails in a handler": """
trainer = Trainer(model, train, strategy=SupervisedStrategy("mse"), config=silent)

@trainer.on(Events.ITERATION_COMPLETED)
def divide(trainer):
    1 / 0

trainer.train()
""",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each cell shows."""
    notebook = notebook_of(CELLS.values())
    found = execute(notebook, tmp_path_factory.mktemp("notebook"), allow_errors=True)
    return dict(zip(CELLS, found, strict=True))


def test_a_run_shows_a_bar_and_a_picture_of_its_losses(outputs: dict[str, list[Any]]) -> None:
    bar, curve = (each for each in outputs["trains"] if each.output_type == "display_data")
    assert 'value="192" max="192"' in bar.data["text/html"]
    assert "epoch 3/3, iteration 192/192 (100%)" in bar.data["text/plain"]
    assert "val/loss=" in bar.data["text/plain"]
    assert base64.b64decode(curve.data["image/png"]).startswith(b"\x89PNG")


def test_nothing_is_written_as_if_it_were_an_error(outputs: dict[str, list[Any]]) -> None:
    streams = {each.name: each.text for each in outputs["trains"] if each.output_type == "stream"}
    assert streams.keys() == {"stdout"}
    assert "Ended after 192 iterations" in streams["stdout"]


def test_progress_false_shows_nothing(outputs: dict[str, list[Any]]) -> None:
    assert outputs["is silent"] == []


@pytest.mark.parametrize("cell", ["gets a wrong shape", "validates a wrong shape", "predicts with a wrong shape"])
def test_a_wrong_shape_takes_less_than_25_lines_with_the_cause_last(cell: str, outputs: dict[str, list[Any]]) -> None:
    lines = traceback_of(outputs[cell])
    assert len(lines) < 25
    assert lines[-3].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x1)")
    assert lines[-2] == "in the module '0.linear', Linear(in_features=4, out_features=1, bias=True)"
    targets = "" if cell.startswith("predicts") else ", targets float32 (4, 1)"
    assert lines[-1] == f"given inputs float32 (4, 3){targets}"


@pytest.mark.parametrize(
    ("cell", "cause"),
    [
        ("measures a wrong shape", "TypeError: PretrainStrategy: 'tokens' is (float32 (4, 3), float32 (4, 1)); needs "),
        ("names an unknown argument", "ArgumentTypeError: Trainer(lr=0.1): is not an argument; pass config="),
    ],
)
def test_an_error_of_the_constructor_is_as_short(cell: str, cause: str, outputs: dict[str, list[Any]]) -> None:
    lines = traceback_of(outputs[cell])
    assert len(lines) < 15
    assert lines[-1].startswith(cause)


@pytest.mark.parametrize("cell", ["is interrupted", "is interrupted twice"])
def test_an_interrupt_is_short(cell: str, outputs: dict[str, list[Any]]) -> None:
    lines = traceback_of(outputs[cell])
    assert len(lines) < 25
    assert [line for line in lines[-2:] if line.startswith("KeyboardInterrupt")]


def test_of_a_chain_of_errors_the_first_and_the_last_are_shown(outputs: dict[str, list[Any]]) -> None:
    lines = traceback_of(outputs["fails after two errors"])
    assert len(lines) < 25
    assert [line for line in lines if line.startswith("KeyError: ")]
    assert not [line for line in lines if line.startswith("ValueError: ")]
    assert lines[-1] == "RuntimeError: the table cannot be read"
    assert "further calls and the errors between these two are not shown" in "\n".join(lines)
    assert any('return {"a": 1.0}[row]' in line and line.startswith("---->") for line in lines)


def test_a_checkpoint_that_does_not_exist_is_as_short(outputs: dict[str, list[Any]]) -> None:
    lines = traceback_of(outputs["loads what does not exist"])
    assert len(lines) < 15
    assert lines[-1].startswith("CheckpointError: lates: does not exist")


def test_an_error_in_a_worker_is_shown_without_the_calls_of_its_libraries(outputs: dict[str, list[Any]]) -> None:
    lines = traceback_of(outputs["reads a ragged batch in a worker"])
    assert len(lines) < 25
    assert "RuntimeError: Caught RuntimeError in DataLoader worker process 0." in lines
    assert lines[-1].startswith("RuntimeError: stack expects each tensor to be equal size")


def test_the_calls_in_the_users_own_code_are_shown(outputs: dict[str, list[Any]]) -> None:
    text = "\n".join(traceback_of(outputs["gets a wrong shape"]))
    assert "trainer.train()" in text
    assert "return self.linear(x)" in text
    assert "further calls are not shown; %xmode Verbose and %tb show them" in text


def test_the_whole_traceback_can_be_shown(outputs: dict[str, list[Any]]) -> None:
    for text in ("\n".join(traceback_of(outputs["shows all calls"])), outputs["debugs"][0].text):
        for file in ("pulsetrain/trainer.py", "events/engine.py", "torch/nn/modules/linear.py"):
            assert file in text
        assert text.rstrip().endswith("given inputs float32 (4, 3), targets float32 (4, 1)")


def test_an_error_of_a_handler_shows_its_line(outputs: dict[str, list[Any]]) -> None:
    lines = traceback_of(outputs["fails in a handler"])
    assert len(lines) < 25
    assert any("1 / 0" in line and line.startswith("---->") for line in lines)
    assert lines[-2] == "ZeroDivisionError: division by zero"
