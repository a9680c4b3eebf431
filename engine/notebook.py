"""Notebooks: whether this process computes for one, what is shown below a cell, and short tracebacks."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

__all__ = ["CellOutput", "notebook_shell", "shorten_traceback"]

_INSTALLED = re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}|.*[\\/](site|dist)-packages[\\/]")


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
    with _short_chain(error) as left_out:
        lines = formatter.structured_traceback(type(error), error, error.__traceback__, tb_offset=0)
    if left_out:
        notes = len(getattr(error, "__notes__", ()))  # which follow the error as lines of their own
        lines.insert(-1 - notes, f"({left_out} further calls are not shown; %xmode Verbose and %tb show them)\n")
    return lines


@contextmanager
def _short_chain(error: BaseException) -> Iterator[int]:
    """Shorten the tracebacks of an error and of those that led to it; yields how many calls are left out meanwhile."""
    whole: list[tuple[BaseException, TracebackType | None]] = []
    each: BaseException | None = error
    while each is not None and each not in (other for other, _ in whole):
        whole.append((each, each.__traceback__))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    left_out = 0
    try:
        for each, traceback in whole:
            calls = list(_calls(traceback))
            own = [call for call in calls if not _is_of_library(call)]
            shown = (own if len(own) <= 2 else [own[0], own[-1]]) or calls[-1:]
            left_out += len(calls) - len(shown)
            each.__traceback__ = _chained(shown)
        yield left_out
    finally:
        for each, traceback in whole:
            each.__traceback__ = traceback


def _calls(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_of_library(call: TracebackType) -> bool:
    """Whether it is code of this package, of an installed one, or of Python's standard library."""
    name = call.tb_frame.f_globals.get("__name__", "")
    return name.partition(".")[0] == "pulsetrain" or bool(_INSTALLED.match(call.tb_frame.f_code.co_filename))


def _chained(calls: list[TracebackType]) -> TracebackType | None:
    found: TracebackType | None = None
    for each in reversed(calls):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found
