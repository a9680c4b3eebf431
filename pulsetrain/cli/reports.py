"""What every command prints: errors and damage, on streams that may fail."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

from pulsetrain.engine.distributed.launcher import started
from pulsetrain.engine.errors import PulsetrainError
from pulsetrain.engine.plain_text import plain

__all__ = ["output_may_fail", "program", "report", "report_damage", "until_closed"]

OK, FAILED, USAGE, DAMAGED, UNSAVED, STOPPED = 0, 1, 2, 3, 4, 130
PROGRAM = "PULSETRAIN_PROGRAM"  # the environment variable in which launched processes find what the user has called
_LINES = "\n\t"  # that errors may have


def report(error: BaseException, status: int = USAGE) -> int:
    """Print an error on standard error, without a traceback.

    Notes, which say where in the code the error was raised, are printed for errors that are not ours.
    """
    text = plain(str(error), _LINES) or type(error).__name__
    expected = isinstance(error, PulsetrainError)
    print(f"pulsetrain: {_who()}error: {text if expected else f'{type(error).__name__}: {text}'}", file=sys.stderr)
    for note in () if expected else getattr(error, "__notes__", ()):
        print(f"  {plain(note, _LINES)}", file=sys.stderr)
    return status


def _who() -> str:
    """Which of several processes this is."""
    try:
        rank, world_size, *_ = started()
    except PulsetrainError:
        return ""
    return f"rank {rank}: " if world_size > 1 else ""


def report_damage(damage: Collection[object]) -> int:
    """Print the damaged parts of logs on standard error; returns the exit status."""
    for each in damage:
        print(f"pulsetrain: damaged: {plain(str(each))}", file=sys.stderr)
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


def program() -> list[str]:
    """The words that call this program: the bare name only where the shell finds this same one."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return shlex.split(os.environ.get(PROGRAM, "")) or [sys.executable, "-m", "pulsetrain"]
    found = shutil.which("pulsetrain")
    if called.name != "pulsetrain" or (found is not None and Path(found).samefile(called)):
        return ["pulsetrain"]
    return [str(called)]
