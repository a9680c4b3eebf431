"""The notebooks: each runs from its first cell to its last, and is kept without outputs."""

from __future__ import annotations

import ast
import json
import re
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

from tests.support.notebooks import execute  # noqa: E402  # it imports them
from tests.support.programs_examples import EXAMPLES  # noqa: E402

FOLDER = EXAMPLES / "notebooks"


def printed(outputs: list[Any]) -> str:
    return "".join(each.text for each in outputs if each.output_type == "stream")


def run(name: str, folder: Path) -> list[list[Any]]:
    """What each cell of code shows, when the notebook is executed in a folder of its own."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    return [each for each in execute(notebook, folder) if each]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_has_a_title_and_no_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["cells"][0]["source"][0].startswith("# ")
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_starts_with_the_command_that_installs_what_it_imports(path: Path) -> None:
    first, *cells = nbformat.read(path, as_version=4).cells
    command = re.search(r"in the checkout of Pulsetrain, `pip install \. (jupyterlab.*)`", first.source)
    assert command is not None
    required = [each for each in requires("pulsetrain") or [] if "extra ==" not in each]
    installed = {"pulsetrain", *command[1].split(), *(re.split(r"[^\w-]", each)[0] for each in required)}
    code = ast.parse("\n".join(cell.source for cell in cells if cell.cell_type == "code"))
    imported = {each.module for each in ast.walk(code) if isinstance(each, ast.ImportFrom) and each.module}
    imported |= {name.name for each in ast.walk(code) if isinstance(each, ast.Import) for name in each.names}
    modules = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    owners = packages_distributions()
    assert {module for module in modules if not installed.intersection(owners[module])} == set()


@pytest.mark.slow
def test_the_quickstart_trains_resumes_and_predicts(tmp_path: Path) -> None:
    first, trained, predicted, wrong = run("quickstart", tmp_path)
    kinds = [each.output_type for each in first]
    assert kinds.count("display_data") == 2  # the bar and the losses
    assert "after 5 epochs: accuracy 0.9" in printed(trained)
    found, labels = (re.findall(r"\d+", line) for line in printed(predicted).splitlines())
    assert len(found) == len(labels) == 10
    assert sum(one == other for one, other in zip(found, labels, strict=True)) >= 8
    assert "mat1 and mat2 shapes cannot be multiplied (32x63 and 64x128)" in printed(wrong)
    again = run("quickstart", tmp_path)
    assert printed(again[2]) == printed(predicted)  # the run has ended, and is found as it was


@pytest.mark.slow
def test_the_flight_recorder_finds_the_row(tmp_path: Path) -> None:
    _, rows, stops, difference = run("flight_recorder", tmp_path)
    assert printed(rows).splitlines()[-1] == "rows that were in each of their batches: {77}"
    assert printed(stops).startswith("patience 1: ")
    assert "first difference: event" in printed(difference)
