"""A run killed at any moment, even inside a save, and resumed each time ends like a run that was never killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.victims import VICTIMS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


NAMES = ("everything", "hidden_state", "unsaved_state", "rewinds", "log_loss", "log_loss_and_rewinds")


def kills(count: int, seed: int, *victims: str) -> dict[str, Any]:
    """In a process of its own, since it forks."""
    command = [sys.executable, "-m", "tests.faults.kills", "--kills", str(count), "--seed", str(seed)]
    done = subprocess.run([*command, "--victims", *victims], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


def test_every_kind_of_victim_is_tested():
    assert tuple(VICTIMS) == NAMES


@pytest.mark.skipif(sys.platform != "linux", reason="forks its victims and kills their process groups")
@pytest.mark.parametrize("name", NAMES)
def test_kills_change_nothing_in_the_result_and_no_claim_about_it_is_false(name: str):
    tally = kills(8, 1, name)
    assert tally["differences"] == [], tally["stderr"]
    assert tally["kills"] == tally["by_victim"][name] == 8
    assert tally["inside_saves"] + tally["inside_rewinds"] > 0
    assert tally["runs"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="forks its victims")
def test_killed_ranks_damage_nothing_and_resume_bit_for_bit():
    command = [sys.executable, "-m", "tests.faults.rank_kills", "--kills", "12", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    tally = json.loads(done.stdout)
    assert tally["faults"] == []
    assert tally["kills"] >= 12
    assert min(tally["kills_of_rank"]) > 0
    assert tally["longest_wait"] < 30  # after 15 s of silence a process counts as gone
