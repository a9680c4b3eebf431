"""Where the classes of a configuration are looked up first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pulsetrain.configuration.rebuild import base_of


def test_what_a_sweep_has_written_is_found_beside_the_configuration_that_it_varies(tmp_path: Path):
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "out" / "front").mkdir(parents=True)
    saved = {"config": str(project / "base.yaml"), "base": {}}
    (tmp_path / "out" / "sweep.yaml").write_text(json.dumps(saved))
    assert base_of(tmp_path / "out") == base_of(tmp_path / "out" / "front") == project


@pytest.mark.parametrize(
    "text",
    [
        "config: PROJECT/base.yaml\n",
        "config: PROJECT/base.yaml\nbase: {}\n",
        "config: {",
        "\x00",
        pytest.param("[" * 100_000, id="nests"),
    ],
)
def test_a_sweep_of_the_user_beside_a_configuration_changes_nothing(text: str, tmp_path: Path):
    (tmp_path / "sweep.yaml").write_text(text.replace("PROJECT", str(tmp_path)))
    assert base_of(tmp_path) == tmp_path
