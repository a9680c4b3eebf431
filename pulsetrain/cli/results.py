"""What the commands that train print: results, log lines, and the command that resumes a run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from tqdm import tqdm

from pulsetrain.cli.launch import started_with
from pulsetrain.cli.reports import program
from pulsetrain.configuration.assemble import Assembly
from pulsetrain.configuration.claim import has_checkpoint
from pulsetrain.engine.checkpoint import find_checkpoints
from pulsetrain.engine.checkpoint.manifest import is_checkpoint_name
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.plain_text import format_count
from pulsetrain.handlers import Checkpointer, EventRecorder, SampleText
from pulsetrain.handlers.loggers.run_summary import best_in_history, report_command
from pulsetrain.handlers.metric_values.step_values import on_host, scalars
from pulsetrain.reproduce.processes import check_processes

__all__ = ["logs_on_stderr", "resume_command", "run_folder", "summary", "unsaved", "verify_command"]


def summary(assembly: Assembly, seconds: float) -> str:
    """The results of a run, and where they are."""
    trainer, folder = assembly.trainer, assembly.folder
    state = trainer.state
    unit = getattr(trainer.strategy, "loss_unit", "")
    counts = [format_count(getattr(state, thing), thing) for thing in ("iteration", "update", "epoch")]
    if state.tokens:
        counts.append(format_count(state.tokens, "token"))
    rows = [
        ("stopped", state.stop_reason or f"after {format_count(state.epoch, 'epoch')}"),
        ("trained", f"{', '.join(counts)}, {seconds:.0f} s"),
    ]
    for name, value in on_host(scalars(state.metrics)).items():  # handlers may put anything there
        best = best_in_history(trainer, name)
        of_all = "" if best is None or f"{best:.4f}" == f"{value:.4f}" else f" (best {best:.4f})"
        rows.append((name, f"{value:.4f}{' ' + unit if unit and name.endswith('/loss') else ''}{of_all}"))
    rows += [("not saved", text) for text in unsaved(assembly)]
    curve = folder / "plots" / "loss.png"
    paths = [("loss curve", str(curve))] if curve.exists() else []
    paths += [("best saved", str(each)) for each in _best_checkpoints(assembly)]
    paths.append(("run folder", str(folder)))
    if any(isinstance(handler, EventRecorder) for handler in trainer.handlers):
        paths.append(("report", report_command(folder, program())))
        if command := verify_command(folder):
            paths.append(("verify", command))
    width = max(len(name) for name, _ in rows + paths) + 2
    summaries = [handler.summary() for handler in trainer.handlers if isinstance(handler, SampleText)]
    lines = ["", *_table(rows, width)]
    for text in filter(None, summaries):
        lines += ["", text, ""]
    return "\n".join([*lines, *_table(paths, width)])


def _best_checkpoints(assembly: Assembly) -> Iterator[Path]:
    for handler in assembly.trainer.handlers:
        if isinstance(handler, Checkpointer) and handler.metric is not None:
            best = handler.manager.get_best()
            if best is not None:
                yield Path(str(best))


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


def verify_command(folder: Path) -> str:
    """The command that repeats a run in as many processes; "" where no single command does.

    Args:
        folder: the run folder.
    """
    count = ranks().world_size
    if count > 1 and not started_with():
        return ""
    try:
        check_processes(folder, 1, None, count)
    except ConfigurationError:  # the run was resumed in another number of processes
        return ""
    return shlex.join([*program(), "verify", str(folder), *([f"--launch.nproc={count}"] if count > 1 else [])])


def resume_command(assembly: Assembly, config: Path, settings: Mapping[str, str]) -> str:
    """The command that resumes a run, on as many processes."""
    if not has_checkpoint(assembly.trainer):
        return "resume: not possible, no checkpoint was saved; add a Checkpointer to the handlers"
    count, launched = ranks().world_size, started_with()
    by_torchrun = count > 1 and not launched
    words = ["train", str(config), "--folder" if by_torchrun else "--run", str(assembly.folder), "--resume", "latest"]
    for name, value in settings.items():
        words += [f"--{name}={value}"]
    if not by_torchrun:
        return f"resume: {shlex.join([*program(), *words, *(launched if count > 1 else [])])}"
    if os.environ.get("LOCAL_WORLD_SIZE") == str(count):
        return f"resume: {shlex.join(['torchrun', '--nproc_per_node', str(count), '-m', 'pulsetrain', *words])}"
    return f"resume: start the processes as before, each with: {shlex.join(['pulsetrain', *words])}"


@contextmanager
def logs_on_stderr() -> Iterator[None]:
    """Write log lines to standard error, without breaking a progress bar.

    Of several processes, each names its rank, and the main one alone writes what is mere information.
    """
    before = structlog.get_config()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            *([] if ranks().world_size == 1 else [_of_rank]),
            structlog.dev.ConsoleRenderer(colors=False, pad_level=False, pad_event_to=0),
        ],
        logger_factory=lambda *names: _StandardError(),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _of_rank(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    found = ranks()
    if not found.is_main and method in ("debug", "info"):
        raise structlog.DropEvent
    return {**event, "rank": found.rank}


class _StandardError:
    """Writes lines; a progress bar is drawn again below them."""

    def msg(self, line: str) -> None:
        tqdm.write(f"{line}\n", file=sys.stderr, end="")  # at once: other processes write there, too

    debug = info = warning = warn = error = critical = exception = failure = msg


def run_folder(path: Path) -> Path:
    """A run folder on the command line, or the one that holds a checkpoint there, such as RUN/checkpoints/best.

    >>> run_folder(Path("runs/a")).as_posix(), run_folder(Path("runs/a/checkpoints/best")).as_posix()
    ('runs/a', 'runs/a')
    """
    is_checkpoint = path.name in ("best", "latest") or is_checkpoint_name(path.name)
    return path.parent.parent if is_checkpoint and path.parent.name == "checkpoints" else path
