"""examples/byte_lm/megatron.yaml, which trains a Megatron model by configuration alone."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pulsetrain.cli import main
from tests.support.programs_command_line import by_two
from tests.support.programs_examples import EXAMPLES
from tests.support.runs_of_megatron import alone, needs_megatron

pytestmark = [needs_megatron, pytest.mark.slow]

FEW = [
    "--training.max_iterations=6",
    "--training.warmup_steps=2",
    "--training.log_every_n_steps=3",
    "--training.device=cpu",
]


def losses_of(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def test_it_trains_and_is_verified_with_one_process_and_with_two(tmp_path: Path):
    config, one, two = str(EXAMPLES / "byte_lm" / "megatron.yaml"), tmp_path / "one", tmp_path / "two"
    assert alone(lambda rank: main(["train", config, "--run", str(one), *FEW])) == 0
    words = ["train", config, "--run", str(two), "--backend.init_args.tensor", "2", *FEW]
    assert [status for status, _ in by_two(words)] == [0, 0]
    assert losses_of(two) == pytest.approx(losses_of(one), abs=1e-4)
    assert len(losses_of(one)) == 2
    (status, text), _ = by_two(["verify", str(two)])
    assert status == 0, text
    assert "events of 2 processes agree bit for bit" in text
