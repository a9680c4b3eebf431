"""Executes notebooks in a kernel of their own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

from tests.support.ports import free_port

__all__ = ["execute", "notebook_of", "traceback_of"]


CHANNELS = ("shell", "iopub", "stdin", "hb", "control")


def notebook_of(cells: Iterable[str]) -> Any:
    """A notebook with these cells of code."""
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])


def execute(notebook: Any, folder: Path, *, allow_errors: bool = False) -> list[list[Any]]:
    """Execute a notebook in the folder; returns the outputs of each of its cells, which it then holds, too.

    Raises:
        CellExecutionError: a cell failed, unless errors are allowed.
    """
    client = NotebookClient(
        notebook,
        timeout=300,
        startup_timeout=300,
        iopub_timeout=60,
        config=Config({"KernelManager": {"cache_ports": False, **{f"{each}_port": free_port() for each in CHANNELS}}}),
        kernel_name="python3",
        allow_errors=allow_errors,
        resources={"metadata": {"path": str(folder)}},
    )
    own = {"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / ".ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    client.execute(env={**os.environ, **own})
    return [cell.get("outputs", []) for cell in notebook.cells]


def traceback_of(outputs: Iterable[Any]) -> list[str]:
    """The lines of the error that a cell ended with, without colours."""
    (error,) = (each for each in outputs if each.output_type == "error")
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback)).splitlines()
