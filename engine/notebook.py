"""Notebooks: whether this process computes for one, what is shown below a cell, and short tracebacks."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["CellOutput", "notebook_shell", "shorten_traceback"]

# files of this package, of Python's standard library, and of packages that are installed
_LIBRARY = re.compile(
    rf"{re.escape(str(Path(__file__).parents[1]))}[\\/]|{re.escape(sysconfig.get_path('stdlib'))}[\\/]"
    r"|.*[\\/](site|dist)-packages[\\/]"
)
# a call in the traceback that torch writes into the message of an error of a DataLoader's worker
_CALL_IN_WORKER = re.compile(r'  File "(?P<file>[^"]+)", line .*\n(?:    .*\n)*')


def notebook_shell() -> Any | None:
    """IPython's shell if this process is the kernel of a notebook, else None; IPython is not imported for that.

    >>> notebook_shell() is None
    True
    """
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return None if getattr(shell, "kernel", None) is None else shell


class CellOutput:
    """An output below the cell that runs, whose content can be replaced."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, content: Mapping[str, object], sizes: Mapping[str, object] | None = None) -> None:
        """Show the content in place of the earlier one.

        Args:
            content: the same in one or more forms, by their MIME types.
            sizes: the width or height of a picture, in pixels.
        """
        from IPython.display import DisplayHandle

        options = {"raw": True, "metadata": {form: dict(sizes or {}) for form in content if form.startswith("image/")}}
        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(dict(content), **options)
        else:
            self._handle.update(dict(content), **options)


def shorten_traceback(error: BaseException) -> None:
    """In a notebook, let IPython show only the calls in the user's own code: the first and the last of them.

    Of the errors that led to it, the first one is shown, with the last call in the user's own code.

    The error itself and its traceback do not change: `%debug` and `traceback.print_last()` see all calls, and after
    `%xmode Verbose`, so do `%tb` and later errors.
    """
    if notebook_shell() is not None:
        with suppress(AttributeError):  # an exception without a dictionary stays as it is
            error._render_traceback_ = _render  # type: ignore[attr-defined]  # IPython's protocol


def _render() -> list[str]:
    """The lines for the error that IPython is about to show.

    It is a function without the error, which IPython keeps in `sys.last_value`: an error that refers to itself would
    keep its frames, and what they hold, until the next garbage collection.
    """
    shell, error = notebook_shell(), sys.last_value
    assert shell is not None
    assert error is not None
    formatter = shell.InteractiveTB
    if formatter.mode != "Context":  # the user has chosen another form than IPython's usual one
        lines: list[str] = formatter.structured_traceback(type(error), error, error.__traceback__)
        return lines
    around = 3 if _led_to(error) else 5  # lines of code that are shown of a call; 5 is IPython's own number
    with _short_chain(error) as left_out:
        lines = formatter.structured_traceback(type(error), error, error.__traceback__, 0, around)
    if left_out:
        notes = len(getattr(error, "__notes__", ()))  # which follow the error as lines of their own
        lines[-1 - notes] = _without_calls_in_workers(lines[-1 - notes])
        lines.insert(-1 - notes, f"({left_out} are not shown; %xmode Verbose and %tb show them)\n")
    return lines


@contextmanager
def _short_chain(error: BaseException) -> Iterator[str]:
    """Shorten the tracebacks of an error and of those that led to it; yields what is left out meanwhile."""
    earlier = _led_to(error)
    tracebacks = [(each, each.__traceback__) for each in (error, *earlier)]
    cause, context, hides_context = error.__cause__, error.__context__, error.__suppress_context__
    left_out = 0
    try:
        for each, traceback in tracebacks:
            calls = list(_calls(traceback))
            own = [call for call in calls if not _is_of_library(call)]
            shown = (own[-1:] if each is not error or len(own) == 1 else [*own[:1], *own[-1:]]) or calls[-1:]
            left_out += len(calls) - len(shown)
            each.__traceback__ = _chained(shown)
        if len(earlier) > 1 and cause is not None:
            error.__cause__ = earlier[-1]
        elif len(earlier) > 1:
            error.__context__ = earlier[-1]
        between = " and the errors between these two" if len(earlier) > 1 else ""
        yield f"{left_out} further calls{between}" if left_out or between else ""
    finally:
        for each, traceback in tracebacks:
            each.__traceback__ = traceback
        error.__cause__, error.__context__ = cause, context
        error.__suppress_context__ = hides_context  # which setting the cause has changed


def _led_to(error: BaseException) -> list[BaseException]:
    """The errors that led to an error and that a traceback shows, the latest first."""
    found: list[BaseException] = [error]
    while True:
        last = found[-1]
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is None or any(before is each for each in found):
            return found[1:]
        found.append(before)


def _calls(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_of_library(call: TracebackType) -> bool:
    return bool(_LIBRARY.match(call.tb_frame.f_code.co_filename))


def _without_calls_in_workers(text: str) -> str:
    r"""The text of an error without the calls in libraries that a DataLoader's worker has made.

    >>> error = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    >>> calls = f'  File "{re.__file__}", line 1, in sub\n    go()\n  File "data.py", line 7, in read\n    rows[9]\n'
    >>> print(_without_calls_in_workers(f"{error}{calls}KeyError: 9\n"))
    Caught KeyError in DataLoader worker process 0.
    Original Traceback (most recent call last):
      File "data.py", line 7, in read
        rows[9]
    KeyError: 9
    """
    if "Original Traceback" not in text:
        return text
    return _CALL_IN_WORKER.sub(lambda call: "" if _LIBRARY.match(call["file"]) else call[0], text).rstrip("\n")


def _chained(calls: list[TracebackType]) -> TracebackType | None:
    found: TracebackType | None = None
    for each in reversed(calls):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found
