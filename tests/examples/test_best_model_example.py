"""The model ends with the weights of the best validation; run as a user runs it, by its path from another folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs_examples import EXAMPLES, run

pytestmark = pytest.mark.slow


def test_best_model_lowers_the_rate_stops_early_and_keeps_the_best_weights(tmp_path: Path) -> None:
    output = run(tmp_path, EXAMPLES / "best_model.py").output
    output = [line for line in output if "[info " not in line]  # what the run logs
    *epochs, reason, kept = output
    form = r"epoch (\d+): rate (\d\.\d{5}), validation loss (\d\.\d{4})( \*)?"
    found = [match for line in epochs if (match := re.fullmatch(form, line)) is not None]
    assert len(found) == len(epochs) < 100
    assert [int(match[1]) for match in found] == list(range(1, len(found) + 1))

    rates, losses = [float(match[2]) for match in found], [float(match[3]) for match in found]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1 * rates[0]
    (marked,) = [index for index, match in enumerate(found) if match[4]]
    assert losses[marked] == min(losses)
    assert len(losses) - 1 - marked == 6  # the patience
    assert re.fullmatch(r"early stopping: val/loss has not improved on 0\.\d+ for 6 validations", reason)
    batches = 57  # of an epoch
    assert kept == f"kept: iteration {batches * (marked + 1)}, validation loss {losses[marked]:.4f}"
    assert losses[marked] < 0.15
    assert not list(tmp_path.iterdir()), "it should leave no files"
