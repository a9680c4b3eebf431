"""examples/byte_lm/parallel.yaml, which splits the byte-level GPT over two processes by configuration alone."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pulsetrain.cli import main
from tests.support.programs_command_line import by_two
from tests.support.programs_examples import EXAMPLES
from tests.support.runs_of_ranks import in_one_process

pytestmark = pytest.mark.slow

CONFIG = str(EXAMPLES / "byte_lm" / "parallel.yaml")
FEW = ["--training.max_iterations=6", "--training.warmup_steps=2", "--training.log_every_n_steps=3"]
LAYOUTS = {
    "copies": [],
    "shards": ["--parallel.shard=2"],
    "tensor": ["--parallel.tensor=2"],
    "sequence": ["--parallel.tensor=2", "--parallel.sequence_parallel=true"],
    "pipeline": ["--parallel.pipeline=2"],
}


def losses_of(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def test_each_layout_has_the_losses_of_one_process(tmp_path: Path) -> None:
    found = in_one_process(lambda rank: main(["train", CONFIG, "--run", str(tmp_path / "one"), *FEW]), forked=True)
    assert (found.value, found.error) == (0, "")
    assert len(losses_of(tmp_path / "one")) == 2
    for layout, words in LAYOUTS.items():
        ended = by_two(["train", CONFIG, "--run", str(tmp_path / layout), *words, *FEW])
        assert [status for status, _ in ended] == [0, 0], (layout, ended)
        assert losses_of(tmp_path / layout) == pytest.approx(losses_of(tmp_path / "one"), abs=1e-4), layout
