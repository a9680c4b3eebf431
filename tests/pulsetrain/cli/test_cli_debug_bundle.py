"""`pulsetrain debug` on a crash bundle: of a real run that failed in another process."""

from __future__ import annotations

import io
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from pulsetrain.cli import main
from pulsetrain.handlers.crash.crash_bundle import read_bundle
from tests.support import programs
from tests.support.programs_command_line import train

HANDLERS = "[EventRecorder, CrashBundle, {class_path: Checkpointer, init_args: {every: {iterations: 1}}}]"
STRATEGY = """
from pulsetrain.engine.strategies import SupervisedStrategy

class Strict(SupervisedStrategy):
    def compute_loss(self, outputs, batch):
        loss = super().compute_loss(outputs, batch)
        if not loss.isfinite():
            raise IndexError("the loss is NaN")
        return loss
"""
DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def planted(row: int):
    inputs = torch.randn(40, 4)
    inputs[row, 2] = float("nan")
    return DataLoader(TensorDataset(inputs, torch.ones(40, 1)), batch_size=4)
"""


class Pipe(io.StringIO):
    """Standard input that contains this text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.buffer = io.BytesIO(text.encode())  # type: ignore[misc]


def words(row: int, handlers: str) -> list[str]:
    Path("strict.py").write_text(STRATEGY)
    Path("dirty.py").write_text(DATA)
    settings = ["--data", "dirty.planted", f"--data.init_args.row={row}", "--strategy", "strict.Strict"]
    return ["--run", "failed", *settings, "--strategy.init_args.loss=mse", "--handlers", handlers]


def crash(row: int = 21, *more: str, handlers: str = HANDLERS) -> str:
    """The output of the failing command."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as output:
        assert train(*words(row, handlers), *more) == 1
    return output.getvalue()


def debug(path: str | Path, lines: str, *more: str) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", Pipe(lines))
        status = main(["debug", str(path), *more])
    return status, output.getvalue()


@pytest.fixture
def failed(folder: Path) -> Path:
    """A run whose row 21 is NaN; the first batches do not contain it."""
    crash()
    return folder / "failed"


def bundle_in(run: Path) -> Path:
    (found,) = (run / "crash").iterdir()
    return found


@pytest.mark.slow
def test_a_failed_command_names_the_bundle_and_debug_opens_it(folder: Path) -> None:
    done = programs.run("-m", "pulsetrain", "train", "config.yaml", *words(21, HANDLERS))
    assert done.returncode == 1
    output, path = done.stderr, bundle_in(Path("failed"))
    assert "pulsetrain: error: IndexError: the loss is NaN" in output
    assert f"crash bundle: {path}" in output
    assert f"pulsetrain debug {path} opens the crash bundle" in output
    assert not Path("failed/crash.txt").exists()
    opened = programs.run("-m", "pulsetrain", "debug", path, text="batch\ntraceback\n")
    assert opened.returncode == 0
    assert "1 NaN, in rows" in opened.stdout
    assert opened.stdout.splitlines()[-1] == "given inputs float32 (4, 4), targets float32 (4, 1)"


def test_it_opens_right_before_the_fault_with_everything_available(failed: Path) -> None:
    bundle = read_bundle(bundle_in(failed))
    row = bundle.rows.index(21) if bundle.rows else -1
    lines = f"traceback\nlocals 1\nbatch\nbatch {row}\nnorms\nevents 1\n"
    status, output = debug(bundle.folder, lines)
    assert status == 0
    assert f"crash bundle {bundle.folder}: IndexError: the loss is NaN" in output
    assert "the run ended in: IndexError: the loss is NaN" in output
    assert 'raise IndexError("the loss is NaN")' in output
    assert "    loss = float32 () on cpu" in output
    assert f"rows of the dataset: {', '.join(map(str, bundle.rows or ()))}" in output
    assert f"1 NaN, in rows {row}" in output
    assert f"row {row} is row 21 of the dataset" in output
    assert ", nan, " in output
    assert "weights: 4 tensors, 0 of them" in output
    assert f"checkpoint {bundle.facts['iteration'] - 1:09d}-checkpoint" in output  # its run's, not the bundle's


def test_the_batch_is_the_one_the_run_would_train_on(failed: Path) -> None:
    bundle = read_bundle(bundle_in(failed))
    inputs, _ = bundle.batch
    assert inputs.isnan().any(1).nonzero().flatten().tolist() == [(bundle.rows or []).index(21)]
    state = torch.load(bundle.folder / "batch.pt", weights_only=True)
    assert torch.equal(state[1], torch.ones(4, 1))


def test_the_run_itself_offers_its_bundle(failed: Path) -> None:
    status, output = debug(failed, "batch\n")
    assert status == 0
    assert "rows of the dataset: " in output


def test_a_bundle_that_was_moved_opens_with_its_own_events(failed: Path, tmp_path: Path) -> None:
    moved = Path(shutil.move(bundle_in(failed), tmp_path / "sent"))
    status, output = debug(moved, "batch\nback to iteration_completed\n")
    assert status == 0
    assert "the run ended in: IndexError: the loss is NaN" in output
    assert "trainer's iteration_completed" in output
    assert debug(moved, "", "--live") == (
        2,
        f"crash bundle {moved}: IndexError: the loss is NaN\n  traceback, locals, batch, norms show its content\n"
        f"pulsetrain: error: --live: {moved} is a crash bundle, which has no checkpoints; name its run folder\n",
    )


def test_a_crash_that_the_run_survived_opens_too(failed: Path, folder: Path) -> None:
    path = bundle_in(failed)
    assert "IndexError" in crash(21, "--resume=latest", "--data.init_args.row=0")
    folders = sorted((failed / "crash").iterdir())
    assert len(folders) == 2
    for each in folders:
        status, output = debug(each, "state\n")
        assert status == 0
        assert f"crash bundle {each}" in output
    assert f"crash bundle {next(each for each in folders if each != path)}" in debug(failed, "")[1]


def test_without_a_recorder_the_bundle_contains_the_events(folder: Path) -> None:
    crash(handlers="[CrashBundle]")
    status, output = debug(bundle_in(Path("failed")), "goto start\nnext to iteration_completed\nstate\n")
    assert status == 0
    assert "output: loss" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("batch 99", "batch 99: batch[0] has no such row; its shape is (4, 4)"),
        ("batch x", "batch x: needs a whole number"),
        ("norms weight", "norms weight: choose one of weights, gradients, optimizer"),
    ],
)
def test_wrong_arguments_are_reported(line: str, message: str, failed: Path) -> None:
    status, output = debug(bundle_in(failed), line + "\n")
    assert status == 2
    assert message in output


def test_a_run_without_an_update_leaves_no_bundle_and_mentions_none(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "early.py").write_text(
        "from model import Net\n\nclass Early(Net):\n    def forward(self, x):\n        1/0\n"
    )
    assert train("--model", "early.Early", "--handlers", "[CrashBundle]") == 2
    output = capsys.readouterr().err
    assert "ZeroDivisionError" in output
    assert "bundle" not in output
    assert not Path("runs").exists()


HUNGRY = """
import torch
from model import Net

class Hungry(Net):
    def __init__(self, at: int):
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            torch.empty(2**58, dtype=torch.uint8)
        return super().forward(x)
"""


def test_a_failed_allocation_is_explained_at_the_prompt(folder: Path) -> None:
    (folder / "hungry.py").write_text(HUNGRY)
    settings = ["--run", "failed", "--model", "hungry.Hungry", "--model.init_args", "{at: 3}"]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as output:
        assert train(*settings, "--handlers", "[CrashBundle]") == 1
    (note,) = [line for line in output.getvalue().splitlines() if line.startswith("  memory: a step needs ")]
    status, shown = debug(bundle_in(Path("failed")), "memory\n")
    assert status == 0
    assert note in shown.splitlines()
    assert "traceback, locals, batch, norms, memory show its content" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["requested", "288,230,376", "GB,", "on", "cpu"] in lines
    assert ["parameters", "196", "B", "held", "after", "the", "step", "had", "failed"] in lines
    assert "one allocation, of 288,230,376 GB, was more than that" in note
    assert "kept from the forward pass: " in shown
    assert note.removeprefix("  memory: ") in shown.splitlines()


def test_a_first_step_that_does_not_fit_says_what_would(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "hungry.py").write_text(HUNGRY)
    settings = ["--model", "hungry.Hungry", "--model.init_args", "{at: 1}", "--handlers", "[CrashBundle]"]
    assert train(*settings) == 2
    output = capsys.readouterr().err
    assert "you tried to allocate 288230376151711744 bytes" in output
    assert "  memory: a step needs " in output
    assert "bundle" not in output
    assert not Path("runs").exists()


def test_anomalies_are_asked_for_in_the_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = "[{class_path: CrashBundle, init_args: {faults: [exception_raised, anomaly_detected], events: 5}}]"
    assert train("--handlers", both) == 0
    assert train("--handlers", "[{class_path: CrashBundle, init_args: {faults: [exception_raise]}}]") == 2
    assert "did you mean 'exception_raised'?" in capsys.readouterr().err


def test_help_says_that_a_bundle_can_be_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "--help"]) == 0
    assert "RUN/crash/NAME" in capsys.readouterr().out
