"""PPO learns to balance the pole, whatever the seed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pulsetrain.engine.recording import EventLog
from tests.support.programs_examples import EXAMPLES, run

pytestmark = pytest.mark.slow

pytest.importorskip("gymnasium", reason="gymnasium is not installed")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_pole_is_balanced(seed: int, tmp_path: Path) -> None:
    output = run(tmp_path, EXAMPLES / "cartpole.py", "--seed", str(seed), "--run-dir", "run").output
    returned = re.fullmatch(r"average return over 20 episodes: (\d+\.\d)", output[-1])
    assert returned is not None
    assert float(returned[1]) >= 475.0
    rollouts = sum(1 for _ in EventLog(tmp_path / "run").read(event="rollout_completed"))
    reported = [line for line in output if line.startswith("rollout ")]
    assert len(reported) == rollouts // 5 >= 2
