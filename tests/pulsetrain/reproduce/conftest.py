"""A recorded run for the tests of `verify`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.runs_verified import build


@pytest.fixture(scope="package")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    build(folder).train()
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recorded, tmp_path / "run")
