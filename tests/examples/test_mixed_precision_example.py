"""examples/mixed_precision_accumulation.py, run as a user runs it: by its path, from another folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs_examples import EXAMPLES, run

pytestmark = pytest.mark.slow

LINE = re.compile(r"(.+?) +(\d+) batches, (\d+) updates, (\d+) skipped, loss ([\d.]+), accuracy ([\d.]+)")


def test_the_four_runs_train_alike_and_fp16_says_what_it_left_out(tmp_path: Path):
    output = run(tmp_path, EXAMPLES / "mixed_precision_accumulation.py").output
    found = [match for match in map(LINE.fullmatch, output) if match]
    whole, parts, bf16, fp16 = found
    assert [int(each[2]) for each in found] == [120, 480, 240, 60 + 60 * 7]
    assert {each[3] for each in found} == {"120"}
    assert float(parts[5]) == pytest.approx(float(whole[5]), abs=0.002)  # the same updates, up to rounding
    assert float(bf16[5]) == pytest.approx(float(whole[5]), abs=0.01)
    assert [int(each[4]) > 0 for each in found] == [False, False, False, True]
    announced = sum(int(count) for count in re.findall(r"by iteration \d+: (\d+) updates skipped", "\n".join(output)))
    assert announced == int(fp16[4])
    assert all(float(each[6]) > 0.9 for each in found)
    assert not list(tmp_path.iterdir())
