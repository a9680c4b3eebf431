"""Training at the suggested rate is better than at the default, run as a user runs it: by its path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs_examples import EXAMPLES, run

pytestmark = pytest.mark.slow


def test_lr_finder_suggests_a_rate_that_trains_better_than_the_default_and_draws_it(tmp_path: Path) -> None:
    output = run(tmp_path, EXAMPLES / "lr_finder.py").output
    first, *trained = output
    suggestion = re.fullmatch(r"suggested learning rate: (\S+), after \d+ updates", first)
    assert suggestion is not None, first
    losses = [re.fullmatch(r"validation loss after 3 epochs at (\S+): (\d\.\d{4})", line) for line in trained]
    rates = {match[1]: float(match[2]) for match in losses if match is not None}
    assert list(rates) == ["0.001", suggestion[1]]
    assert rates[suggestion[1]] < 0.6 * rates["0.001"]
    plots = tmp_path / "runs" / "lr_finder" / "plots"
    assert (plots / "lr_finder.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "runs/lr_finder/plots/lr_finder.png",
        "runs/lr_finder/plots/lr_finder.svg",
    ]
