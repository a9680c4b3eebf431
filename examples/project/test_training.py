"""Tests of this project: pytest test_training.py."""

from pathlib import Path
from typing import Any

from data import loaders
from model import Classifier

from pulsetrain import Accuracy, Trainer, TrainingConfig
from pulsetrain.testing import assert_overfits, assert_resumes_exactly, run_two_batches


def build_trainer(handlers: list[Any]) -> Trainer:
    training, validation = loaders()
    config = TrainingConfig(max_epochs=1, seed=0, progress=False)
    metrics = {"accuracy": Accuracy()}
    return Trainer(Classifier(), training, validation, metrics=metrics, config=config, handlers=handlers)


def test_everything_fits_together() -> None:
    assert "val/accuracy" in run_two_batches(build_trainer([]))


def test_the_model_can_memorise_a_batch() -> None:
    assert_overfits(build_trainer([]))


def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(build_trainer, tmp_path)
