"""What the command line says: errors, results, and how to go on."""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor
from tqdm import tqdm

from engine.errors import PulsetrainError
from engine.protocols import TrainingBatch
from pulsetrain.assembly import Assembly
from pulsetrain.run_folder import has_checkpoint

__all__ = ["batch_note", "logs_on_stderr", "report", "summary", "versions"]

OK, FAILED, USAGE, STOPPED = 0, 1, 2, 130


def versions() -> str:
    """Of this package and of what a run's numbers depend on most."""
    return f"pulsetrain {version('pulsetrain')} (torch {version('torch')}, Python {platform.python_version()})"


def report(error: BaseException, status: int = USAGE) -> int:
    """Say an error on standard error, without a traceback.

    What was noted on its way says where in the code it came from: of use where nobody foresaw the error.
    """
    text = str(error) or type(error).__name__
    foreseen = isinstance(error, PulsetrainError)
    print(f"pulsetrain: error: {text if foreseen else f'{type(error).__name__}: {text}'}", file=sys.stderr)
    for note in () if foreseen else getattr(error, "__notes__", ()):
        print(f"  {note}", file=sys.stderr)
    return status


def batch_note(error: BaseException) -> str | None:
    """The shapes of the batch that a model or a loss failed on; None where the error came from elsewhere."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, TrainingBatch):
                return f"given inputs {_described(value.inputs)}, targets {_described(value.targets)}"
    return None


def summary(assembly: Assembly, seconds: float) -> str:
    """What came out, and where it is."""
    trainer, folder = assembly.trainer, assembly.folder
    state = trainer.state
    unit = getattr(trainer.strategy, "loss_unit", "")
    counts = [_count(state.iteration, "iteration"), _count(state.update, "update"), _count(state.epoch, "epoch")]
    if state.tokens:
        counts.append(_count(state.tokens, "token"))
    rows = [("stopped", state.stop_reason or "at its bound"), ("trained", f"{', '.join(counts)}, {seconds:.0f} s")]
    for name, value in state.metrics.items():
        rows.append((name, f"{value:.4f}{' ' + unit if unit and name.endswith('/loss') else ''}"))
    curve = folder / "plots" / "loss.png"
    if curve.exists():
        rows.append(("loss curve", str(curve)))
    rows.append(("run folder", str(folder)))
    width = max(len(name) for name, _ in rows) + 2
    lines = ["", *(f"{name:<{width}}{text}" for name, text in rows)]
    for handler in trainer.handlers:
        if callable(getattr(handler, "summary", None)):
            lines += ["", handler.summary()]
    return "\n".join(lines)


def go_on(folder: Path, config: Path, settings: Mapping[str, str]) -> str:
    """The command that goes on with a run, ready to be copied."""
    if not has_checkpoint(folder):
        return "go on: not possible, for no checkpoint was saved: there is no Checkpointer among the handlers"
    words = [*_command(), "train", str(config), "--run", str(folder), "--resume", "latest"]
    for name, value in settings.items():
        words += [f"--{name}={value}"]
    return f"go on: {shlex.join(words)}"


@contextmanager
def logs_on_stderr() -> Iterator[None]:
    """Log lines go to standard error, round a progress bar, as long as this lasts."""
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
    """Writes lines; a bar that is being drawn moves on below them."""

    def msg(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)

    debug = info = warning = warn = error = critical = exception = failure = msg


def _command() -> list[str]:
    """How this program was called: its bare name only where the shell finds the same one."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return [sys.executable, "-m", "pulsetrain"]
    found = shutil.which("pulsetrain")
    if called.name != "pulsetrain" or (found is not None and Path(found).samefile(called)):
        return ["pulsetrain"]
    return [str(called)]


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_described(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)) and len(value) <= 8:
        return f"({', '.join(map(_described, value))})"
    return type(value).__name__
