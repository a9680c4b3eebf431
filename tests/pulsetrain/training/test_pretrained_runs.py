"""Runs of models whose weights each process reads its part of: by configuration, killed, resumed in another layout."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pulsetrain.configuration.assemble import assemble
from pulsetrain.configuration.parse import read_config
from pulsetrain.engine import Events, Every, pretrained
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.handlers import Checkpointer
from tests.support.pretrained import saved, trainer_of
from tests.support.ranks import in_processes

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")


def rows(count: int = 8) -> Any:
    return [{"input_ids": torch.arange(8).reshape(1, 8) + each} for each in range(count)]


def whole(model: Any) -> dict[str, Any]:
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in model.named_parameters()
    }


def values(processes: list[Any]) -> list[Any]:
    assert not any(each.error for each in processes), processes[0].error
    return [each.value for each in processes]


@pytest.mark.parametrize("parallel", [None, {"shard": 2}, {"tensor": 2}])
def test_a_configuration_names_the_folder(parallel: Any, tmp_path: Path) -> None:
    saved("llama", tmp_path / "llama")
    config = {
        "run": str(tmp_path / "run"),
        "model": {"class_path": "pulsetrain.engine.pretrained", "init_args": {"folder": str(tmp_path / "llama")}},
        "data": f"{__name__}.rows",
        "strategy": "PretrainStrategy",
        "training": {"max_iterations": 4, "optimizer": "sgd", "learning_rate": 0.1, "seed": 0},
        "handlers": [],
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**config, **({"parallel": parallel} if parallel else {})}))

    def run() -> tuple[bool, float]:
        made = assemble(read_config(file, {}), tmp_path)
        try:
            return is_sharded(made.trainer.model), made.trainer.train()["train/loss"][-1]
        finally:
            made.claim.release()

    if parallel is None:
        assert run()[1] < 4
        return
    found = values(in_processes(lambda rank: run()))
    assert found == [(True, found[0][1])] * 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("layout", ["one", "shards"])
def test_a_checkpoint_holds_adapters_alone(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = saved("llama", tmp_path / "model")

    def run(name: str, resume: str | None = None, **config: Any) -> dict[str, Any]:
        torch.manual_seed(0 if resume is None else 1)  # of the first values of adapters
        model = pretrained(folder, adapters={"r": 2, "target_modules": ["q_proj"]})
        saver = Checkpointer(tmp_path / name, Every(iterations=2))
        trainer = trainer_of(folder, layout, saver, model=model, optimizer="adamw", **config)
        trainer.train(resume=resume)
        return whole(trainer.model)

    def all_of(name: str, **options: Any) -> list[dict[str, Any]]:
        if layout == "one":
            return [run(name, **options)]
        return values(in_processes(lambda rank: run(name, **options)))

    expected = all_of("whole")
    all_of("run", max_epochs=1)
    (*_, newest) = CheckpointManager(tmp_path / "run" / "checkpoints").valid()
    names = {name for name in expected[0] if "lora_" in name}
    assert load_checkpoint(newest)["model"].keys() == names
    for found in all_of("run", resume="latest"):
        assert all(torch.equal(found[name], expected[0][name]) for name in found)


@pytest.mark.parametrize(("first", "then"), [("shards", "shards"), ("tensor", "tensor"), ("shards", "one")])
def test_a_run_that_was_killed_resumes(first: str, then: str, tmp_path: Path) -> None:
    folder = saved("tied", tmp_path / "model")

    def made(layout: str, run: str) -> Any:
        return trainer_of(folder, layout, Checkpointer(tmp_path / run, Every(iterations=2)), optimizer="adamw")

    def cut(trainer: Any) -> None:
        trainer.on(Events.ITERATION_COMPLETED(once=4))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        trainer.train()

    def resumed() -> tuple[int, dict[str, Any]]:
        trainer = made(then, "run")
        trainer.train(resume="latest")
        return trainer.state.iteration, whole(trainer.model)

    def straight() -> dict[str, Any]:
        trainer = made(first, "whole")
        trainer.train()
        return whole(trainer.model)

    in_processes(lambda rank: cut(made(first, "run")))
    expected = values(in_processes(lambda rank: straight()))[0]
    for iteration, weights in [resumed()] if then == "one" else values(in_processes(lambda rank: resumed())):
        assert iteration == 6
        for name, each in weights.items():
            torch.testing.assert_close(each, expected[name], **({"rtol": 0, "atol": 0} if first == then else {}))
