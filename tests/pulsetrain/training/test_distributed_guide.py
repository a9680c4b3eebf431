"""The Python and YAML of the pages about several processes, in two processes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from torch.utils.data import DataLoader

import pulsetrain
from pulsetrain.engine import Events, SupervisedStrategy, TorchBackend
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.distributed.topology import Topology
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import in_one_process, linear, make

PAGES = ("distributed.md", "model_parallel.md", "virtual_ranks.md")
GUIDE = "\n".join((Path(__file__).parents[3] / "docs" / page).read_text() for page in PAGES)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)


def the_python_with(word: str) -> str:
    (code,) = [each for each in blocks("python") if word in each]
    return code


def test_the_python_about_several_processes_shards_a_model_and_ends_a_run_whose_processes_differ():
    sharding, stopping = the_python_with("Topology(shard=2)"), the_python_with("RANKS_DIVERGED")

    def body(rank: int) -> Any:
        names: dict[str, Any] = {**vars(pulsetrain), "TorchBackend": TorchBackend, "Topology": Topology}
        names |= {"Events": Events, "model": nn.Sequential(linear()), "loader": DataLoader(pairs(16), 4)}
        exec(sharding, names)
        names["trainer"] = made = make(linear(), DataLoader(pairs(16), 4), max_epochs=9)
        exec(stopping, names)
        if rank == 1:
            made.on(Events.ITERATION_COMPLETED(once=6))(lambda: made.optimizer.param_groups[0].update(lr=0.2))
        made.train()
        return is_sharded(names["model"]), made.state.iteration, made.state.stop_reason

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value
    is_split, ended, reason = first.value
    assert is_split
    assert 6 <= ended < 36
    assert reason.startswith("learning_rates differs in rank")


def test_the_yaml_about_several_processes_describes_a_topology():
    found = [yaml.safe_load(block) for block in blocks("yaml")]
    sharding, virtual = (Topology(**each["parallel"]) for each in found if "parallel" in each)
    assert sharding.sizes(4) == (2, 2)
    assert (virtual.virtual, virtual.sizes(4)) == (4, (4, 1))


def test_the_python_about_virtual_ranks_gives_two_processes_the_bits_of_one():
    code = the_python_with("virtual")

    def body(rank: int) -> Any:
        names: dict[str, Any] = {**vars(pulsetrain), "TorchBackend": TorchBackend, "Topology": Topology}
        names |= {"model": linear(), "loader": DataLoader(pairs(16), 4)}
        settings = pulsetrain.TrainingConfig(max_epochs=1, seed=3)
        names["Trainer"] = partial(pulsetrain.Trainer, strategy=SupervisedStrategy("mse"), config=settings)
        exec(code, names)
        names["trainer"].train()
        return [each.tolist() for each in names["model"].parameters()]

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value == in_one_process(body, forked=True).value
