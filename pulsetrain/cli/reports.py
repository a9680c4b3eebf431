"""What the command line prints: errors, damage, results, log lines, and the command that resumes a run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

import structlog
from tqdm import tqdm

from pulsetrain.configuration.assemble import Assembly
from pulsetrain.configuration.claim import has_checkpoint
from pulsetrain.engine.checkpoint import find_checkpoints
from pulsetrain.engine.checkpoint.manifest import is_checkpoint_name
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.errors import PulsetrainError
from pulsetrain.export.event_formats import format_count
from pulsetrain.handlers import Checkpointer

__all__ = [
    "logs_on_stderr",
    "output_may_fail",
    "program",
    "report",
    "report_damage",
    "resume_command",
    "run_folder",
    "summary",
    "unsaved",
    "until_closed",
]

OK, FAILED, USAGE, DAMAGED, UNSAVED, STOPPED = 0, 1, 2, 3, 4, 130


def report(error: BaseException, status: int = USAGE) -> int:
    """Print an error on standard error, without a traceback.

    Notes, which say where in the code the error was raised, are printed for errors that are not ours.
    """
    text = str(error) or type(error).__name__
    expected = isinstance(error, PulsetrainError)
    print(f"pulsetrain: error: {text if expected else f'{type(error).__name__}: {text}'}", file=sys.stderr)
    for note in () if expected else getattr(error, "__notes__", ()):
        print(f"  {note}", file=sys.stderr)
    return status


def report_damage(damage: Collection[object]) -> int:
    """Print the damaged parts of logs on standard error; returns the exit status."""
    for each in damage:
        print(f"pulsetrain: damaged: {each}", file=sys.stderr)
    return DAMAGED if damage else OK


@contextmanager
def until_closed() -> Iterator[None]:
    """Print until the reader closes the pipe, as in `pulsetrain events runs/a | head`; then leave without an error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)


@contextmanager
def output_may_fail() -> Iterator[None]:
    """Continue where standard output or standard error cannot be written: the disk is full, or the reader is gone.

    What could not be written is lost, which a line on standard error reports.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lossy(stream)) for stream in before)
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        sys.stdout, sys.stderr = before


class _Lossy:
    """A stream whose writes do not fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        _silence(self._stream)
        print(f"pulsetrain: {self._stream.name} cannot be written: {error.strerror}; its text is lost", file=sys.stderr)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _silence(stream: TextIO) -> None:
    """Drop what is written from now on, and what is buffered: otherwise Python would write it at exit, and fail."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, stream.fileno())
    os.close(silence)


def summary(assembly: Assembly, seconds: float) -> str:
    """The results of a run, and where they are."""
    trainer, folder = assembly.trainer, assembly.folder
    state = trainer.state
    unit = getattr(trainer.strategy, "loss_unit", "")
    counts = [format_count(getattr(state, thing), thing) for thing in ("iteration", "update", "epoch")]
    if state.tokens:
        counts.append(format_count(state.tokens, "token"))
    rows = [("stopped", state.stop_reason or "at its end"), ("trained", f"{', '.join(counts)}, {seconds:.0f} s")]
    for name, value in state.metrics.items():
        rows.append((name, f"{value:.4f}{' ' + unit if unit and name.endswith('/loss') else ''}"))
    rows += [("not saved", text) for text in unsaved(assembly)]
    curve = folder / "plots" / "loss.png"
    paths = [("loss curve", str(curve))] if curve.exists() else []
    paths.append(("run folder", str(folder)))
    width = max(len(name) for name, _ in rows + paths) + 2
    summaries = [handler.summary() for handler in trainer.handlers if callable(getattr(handler, "summary", None))]
    lines = ["", *_table(rows, width)]
    for text in filter(None, summaries):
        lines += ["", text, ""]
    return "\n".join([*lines, *_table(paths, width)])


def unsaved(assembly: Assembly) -> list[str]:
    """For each Checkpointer whose last save failed: why, and what there is instead."""
    texts = []
    for handler in assembly.trainer.handlers:
        if isinstance(handler, Checkpointer) and handler.failure is not None:
            try:
                steps = [step_of(each) for each in find_checkpoints(handler.manager.checkpoint_dir)]
            except OSError:
                steps = []
            there = f"the newest checkpoint is of iteration {max(steps)}" if steps else "there is no checkpoint"
            texts.append(f"the final state: {handler.failure}; {there}")
    return texts


def _table(rows: list[tuple[str, str]], width: int) -> list[str]:
    return [f"{name:<{width}}{text}" for name, text in rows]


def resume_command(assembly: Assembly, config: Path, settings: Mapping[str, str]) -> str:
    """The command that resumes a run."""
    if not has_checkpoint(assembly.trainer):
        return "resume: not possible, no checkpoint was saved; add a Checkpointer to the handlers"
    words = [*program(), "train", str(config), "--run", str(assembly.folder), "--resume", "latest"]
    for name, value in settings.items():
        words += [f"--{name}={value}"]
    return f"resume: {shlex.join(words)}"


@contextmanager
def logs_on_stderr() -> Iterator[None]:
    """Write log lines to standard error, without breaking a progress bar."""
    before = structlog.get_config()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(colors=False, pad_level=False, pad_event_to=0),
        ],
        logger_factory=lambda *names: _StandardError(),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


class _StandardError:
    """Writes lines; a progress bar is drawn again below them."""

    def msg(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)

    debug = info = warning = warn = error = critical = exception = failure = msg


def program() -> list[str]:
    """The words that call this program: the bare name only where the shell finds this same one."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return [sys.executable, "-m", "pulsetrain"]
    found = shutil.which("pulsetrain")
    if called.name != "pulsetrain" or (found is not None and Path(found).samefile(called)):
        return ["pulsetrain"]
    return [str(called)]


def run_folder(text: str) -> Path:
    """A run folder on the command line, or the one that holds a checkpoint there, such as RUN/checkpoints/best.

    >>> run_folder("runs/a").as_posix(), run_folder("runs/a/checkpoints/best").as_posix()
    ('runs/a', 'runs/a')
    """
    path = Path(text)
    is_checkpoint = path.name in ("best", "latest") or is_checkpoint_name(path.name)
    return path.parent.parent if is_checkpoint and path.parent.name == "checkpoints" else path
