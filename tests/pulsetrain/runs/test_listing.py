"""The order of listed runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pulsetrain.runs.listing import sorted_by
from pulsetrain.runs.progress import Progress
from pulsetrain.runs.summary import RunSummary, Status


def a_run(name: str, last: dict[str, float]) -> RunSummary:
    return RunSummary(Path(name), "", Status.COMPLETED, "", Progress(), None, None, last, {}, {}, (), None, 1)


@pytest.mark.parametrize(("reverse", "names"), [(False, "cdabe"), (True, "adcbe")])
def test_runs_whose_value_has_no_order_are_last(reverse: bool, names: str):
    losses = {"a": 3.0, "b": math.nan, "c": 1.0, "d": 2.0}
    runs = [*(a_run(name, {"train/loss": loss}) for name, loss in losses.items()), a_run("e", {})]
    found = sorted_by(runs, "train/loss", Path(), reverse=reverse)
    assert "".join(each.name for each in found) == names
