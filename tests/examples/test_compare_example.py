"""examples/distributed/compare.py: the processes that train together end with the weights of one that trains alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs_examples import EXAMPLES, run

pytestmark = pytest.mark.slow


def test_two_processes_end_where_one_does(tmp_path: Path) -> None:
    script = EXAMPLES / "distributed" / "compare.py"
    output = run(tmp_path, script, "--modes", "one,ddp,pipeline", "--steps", 10).output
    found = [re.fullmatch(r"(\w+) and one, (\S+): at most (\S+) apart", line) for line in output]
    compared = [(match[1], match[2]) for match in found if match is not None]
    names = ("weights", "train/loss", "val/loss")
    assert compared == [(mode, name) for mode in ("ddp", "pipeline") for name in names]
    assert len(output) == len(compared)
    for match in found:
        assert match is not None
        assert float(match[3]) <= (1e-12 if match[2] == "weights" else 1e-6)  # losses are compared in float32
    assert not list(tmp_path.iterdir()), "it should leave no files"
