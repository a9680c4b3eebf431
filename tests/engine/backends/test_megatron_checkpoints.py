"""Checkpoints of Megatron models: exact resumes, and those of one number of processes resumed on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pulsetrain.engine import Events
from pulsetrain.engine.checkpoint import load_checkpoint
from pulsetrain.handlers import EMA, Fingerprints
from tests.support.runs_of_megatron import GPT, LLAMA, alone, needs_megatron, resuming, together, whole

pytestmark = needs_megatron

KINDS = {"gpt": GPT, "llama": LLAMA}


def run_on(processes: int, body: Any) -> list[Any]:
    return [alone(body)] if processes == 1 else together(body, processes)


def _whole_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
    return {name: _whole_of(each) for name, each in value.items()} if isinstance(value, dict) else value


def _states(trainer: Any) -> dict[str, Any]:
    """The weights and the optimizer's state as wholes; all processes call this."""
    return {"weights": whole(trainer), "optimizer": _whole_of(trainer.optimizer.state_dict()["state"])}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_resumes_bit_for_bit(kind: str, processes: int, tmp_path: Path):
    def run(rank: int, folder: Path, stop: int | None = None, resume: str | None = None) -> Any:
        averages = EMA(0.9)
        trainer = resuming(folder, KINDS[kind], averages, Fingerprints(), tensor=processes, max_epochs=3)
        if stop is not None:
            trainer.on(Events.ITERATION_COMPLETED(once=stop))(lambda engine: engine.terminate(alike=True))
        history = trainer.train(resume=resume)
        return _states(trainer), _whole_of(averages.state_dict()["average"]["weights"]), history

    expected = run_on(processes, lambda rank: run(rank, tmp_path / "whole"))
    run_on(processes, lambda rank: run(rank, tmp_path / "parts", stop=4))
    assert run_on(processes, lambda rank: run(rank, tmp_path / "parts", resume="latest")) == expected


# processes, and how many of them hold one copy together
ON = {"one": (1, 1), "two": (2, 2), "copies": (2, 1), "four": (4, 2)}
MORE = [("copies", "two"), ("two", "copies"), ("four", "one"), ("four", "two"), ("one", "four")]
PAIRS = [("one", "two"), ("two", "one"), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("saves", "loads"), PAIRS)
def test_a_checkpoint_resumes_on_another_number_of_processes(saves: str, loads: str, kind: str, tmp_path: Path):
    (first, tensor), (second, other) = ON[saves], ON[loads]

    def saved(rank: int) -> Any:
        trainer = resuming(tmp_path, KINDS[kind], tensor=tensor, max_epochs=1)
        trainer.train()
        return _states(trainer), trainer.validate()["val/loss"]

    def resumed(rank: int) -> Any:
        trainer = resuming(tmp_path, KINDS[kind], tensor=other, max_epochs=2)
        trainer.load_checkpoint(tmp_path)
        states, loss = _states(trainer), trainer.validate()["val/loss"]
        return states, loss, trainer.train()["train/loss"]

    before, expected = run_on(first, saved)[0]
    for states, loss, losses in run_on(second, resumed):
        assert states == before
        assert loss == pytest.approx(expected, abs=1e-5)  # the parts are at their places
        assert losses[-1] < losses[0]


def test_each_process_saves_its_part_of_what_is_split_and_one_saves_what_is_not(tmp_path: Path):
    def run(rank: int) -> Any:
        trainer = resuming(tmp_path, LLAMA, tensor=2, max_epochs=1)
        trainer.train()
        return whole(trainer), sum(each.to_local().numel() for each in trainer.model.parameters())

    (weights, held), (_, _) = together(run)
    numbers = sum(torch.tensor(each).numel() for each in weights.values())
    assert held < 0.6 * numbers
    folder = next(path for path in sorted(tmp_path.rglob("manifest.json"))).parent
    assert {path.name for path in folder.glob("*.safetensors")} >= {"rank-00001.safetensors", "state.safetensors"}
    loaded = load_checkpoint(tmp_path)["model"]
    assert {name: each.tolist() for name, each in loaded.items()} == weights
