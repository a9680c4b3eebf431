"""Users' type checkers know the types of everything that the installed package exports."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs_installs import BUILD, checked, copy_tree, run

pytestmark = pytest.mark.slow

UNTYPED = """

def untyped(value):
    return value


class Inferred:
    def __init__(self, values: list[int]) -> None:
        self.sorted_values = sorted(values)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is installed; built from a copy, since a build leaves files in its tree."""
    folder = tmp_path_factory.mktemp("types")
    command = [sys.executable, *BUILD, "install", "--no-deps", "--no-build-isolation", "--target", folder / "site"]
    checked(*command, copy_tree(folder / "tree"))
    return folder / "site"


def symbols(site: Path, package: str) -> dict[str, dict[str, Any]]:
    """What the installed package exports, by name, as pyright sees it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # pyright asks the first python
    command = [sys.executable, "-m", "pyright", "--verifytypes", package, "--ignoreexternal", "--outputjson"]
    done = run(*command, cwd=site.parent, PYTHONPATH=str(site), PATH=path)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    report = json.loads(done.stdout)["typeCompleteness"]
    assert Path(report["packageRootDirectory"]).is_relative_to(site), report["packageRootDirectory"]
    return {each["name"]: each for each in report["symbols"] if each["isExported"]}


def without_type(found: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Symbols whose type is unknown, partially unknown or inferred differently by each checker, and why."""
    return {
        name: [each["message"] for each in symbol["diagnostics"] if each["severity"] == "error"]
        for name, symbol in found.items()
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
    }


def test_every_exported_symbol_has_a_known_type(site: Path) -> None:
    found = symbols(site, "pulsetrain")
    assert len(found) > 5000
    assert {"pulsetrain.trainer.Trainer.train", "pulsetrain.engine.events.engine.Engine.run"} <= found.keys()
    wrong = without_type(found)
    assert not wrong, json.dumps(wrong, indent=1)


def test_a_parameter_without_a_type_and_an_inferred_attribute_are_found(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site, tmp_path / "site")
    with (tmp_path / "site" / "pulsetrain" / "engine" / "schedules" / "decay.py").open("a") as module:
        module.write(UNTYPED)
    found = without_type(symbols(tmp_path / "site", "pulsetrain.engine.schedules"))
    place = "pulsetrain.engine.schedules.decay"
    assert found.keys() == {f"{place}.untyped", f"{place}.Inferred", f"{place}.Inferred.sorted_values"}
