"""Models, data and settings that several processes cannot train with: each an error or a warning that says why."""

from __future__ import annotations

import importlib
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Loop, Trainer
from pulsetrain.engine import ConfigurationError, TorchBackend
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.environment import describe_environment
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import RANKS, double, dropping, linear, make, make_with, shared_loader

UNFIT = Topology(shard=3)


def sharded_by_modules(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return model


def sharded_by_a_wrapper(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def sharded_by_tensors(model: nn.Module) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), ColwiseParallel())


def sharded_in_part(model: nn.Module) -> nn.Module:
    return nn.Sequential(DistributedDataParallel(model), sharded_by_modules(nn.Linear(1, 1)))


def test_a_model_of_which_a_rank_would_save_its_shard_alone_is_refused():
    kinds = (sharded_by_modules, sharded_by_a_wrapper, sharded_by_tensors, sharded_in_part)

    def body(rank: int) -> list[str]:
        said = []
        for shard, learns in product(kinds, (True, False)):
            model = shard(linear()).requires_grad_(learns)
            wrapped = {"own": DistributedDataParallel(linear()), "sharded": model}
            for given in (wrapped,) if shard is sharded_by_modules else (model, wrapped):
                with pytest.raises(ConfigurationError) as refused:
                    make(given, shared_loader(rank, 8))
                said.append(str(refused.value))
        return said

    rule = r"one that is sharded, other than as a whole by fully_shard, is not supported: rank 0 of world_size=2 would"
    for ended in in_processes(body, own_group=True):
        assert ended.error == ""
        assert len(ended.value) == 2 * (1 + 2 * 3)
        assert all(re.search(rule, text) for text in ended.value), ended.value


def test_what_cannot_be_wrapped_here_has_to_be_wrapped_by_the_user():
    """Modules that a strategy calls by itself, a loop's body, and a backend that computes with values."""

    def body(rank: int) -> list[str]:
        said = []
        for attempt in (
            lambda: make({"a": linear(), "b": linear()}, shared_loader(rank, 8)),  # type: ignore[arg-type]
            lambda: Loop(linear(), shared_loader(rank, 8), optimizer="sgd"),
            lambda: Trainer(linear(), shared_loader(rank, 8), backend=TorchBackend("cpu", functional=True)),
        ):
            with pytest.raises(ConfigurationError) as refused:
                attempt()
            said.append(str(refused.value))
        return said

    for ended in in_processes(body, own_group=True):
        assert ended.error == ""
        assert all("of world_size=2 processes would train a model of its own; wrap" in text for text in ended.value)
        assert len(ended.value) == 3


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (
            lambda: DataLoader(double(12), 3),
            r"DataLoader\(batch_size=3\): is the global batch, which world_size=2 .* mult",
        ),
        (lambda: DataLoader(double(12), batch_size=None), "the dataset makes the batches itself, so world_size=2"),
    ],
    ids=["odd", "without batches"],
)
def test_a_batch_that_cannot_be_shared_out_is_refused(loader: Any, said: str):
    def body(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            make(linear().double(), loader())
        return str(refused.value)

    for ended in in_processes(body):
        assert ended.error == ""
        assert re.search(said, ended.value), ended.value


def test_ranks_with_other_settings_are_named_before_the_first_batch(tmp_path: Path):
    def body(rank: int) -> None:
        dropping(tmp_path / "run", learning_rate=0.1 * (1 + rank)).train()

    for ended in in_processes(body):
        assert "rank 1 has learning_rate=0.2, rank 0 has 0.1" in ended.error.splitlines()[-1]


class Own(DataLoader[Any]):
    """A loader of the user's, of which each process has its own."""


def test_other_code_versions_and_numbers_of_processes_are_named_before_the_first_batch():
    """The code differs where the model's tensors do."""

    def refusal(model: nn.Module, **options: Any) -> str:
        with pytest.raises(ConfigurationError) as refused:
            make_with(model, DataLoader(pairs(16), 4), None, **options)
        return str(refused.value)

    def body(rank: int) -> list[str]:
        found = [refusal(nn.Linear(4, 1 + rank)), refusal(linear(), backend=TorchBackend("cpu", topology=UNFIT))]
        with pytest.MonkeyPatch.context() as patched:
            environment = {**describe_environment("cpu"), **({"pulsetrain": "0.0"} if rank else {})}
            patched.setattr("pulsetrain.training.agreement.describe_environment", lambda device: environment)
            return [*found, refusal(linear())]

    rules = [
        r"started alike, and differ: rank 1 has the model's tensors=.*\(2, 4\).*, rank 0 has .*\(1, 4\)",
        r"Topology\(replicate=-1, shard=3\): does not fit 2 processes: start a multiple of 3",
        r"started alike, and differ: rank 1 has pulsetrain='0.0', rank 0 has '\d",
    ]
    for ended in in_processes(body):
        assert ended.error == ""
        for rule, text in zip(rules, ended.value, strict=True):
            assert re.search(rule, text), text


def test_processes_with_other_numbers_of_batches_are_named():
    def body(rank: int) -> None:
        own = Own(TensorDataset(*pairs(16)[: 12 + 4 * rank]), 4)
        make(linear(), own, log_every_n_steps=50, max_epochs=3).train()

    for each in in_processes(body):
        assert "rank 1 has batches in a pass=4, rank 0 has 3" in each.error.splitlines()[-1]


def test_a_batch_norm_of_each_process_is_warned_of_once():
    def body(rank: int) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        with structlog.testing.capture_logs() as logs:
            made = make(model, DataLoader(pairs(16), 4), val_loader=DataLoader(pairs(9), 4))
        made.train()
        return [line["first"] for line in logs if "BatchNorm" in line["event"]], [made.state.metrics, *made.history]

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert (first.value[0], second.value[0]) == (["1"], [])
    assert first.value[1] == second.value[1]


def test_processes_whose_model_is_written_differently_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = "from torch import nn\nclass Own(nn.Linear):\n    def forward(self, x): return {} * super().forward(x)\n"
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "own_model.py").write_text(code.format(1 + rank))

    def body(rank: int, version: int) -> None:
        monkeypatch.syspath_prepend(tmp_path / str(version))
        model = importlib.import_module("own_model").Own(4, 1)
        make(model, DataLoader(pairs(16), 4), max_epochs=1).train()

    for each in in_processes(lambda rank: body(rank, rank)):
        assert "ConfigurationError" in each.error
        assert "rank 1 has the code of own_model=" in each.error.splitlines()[-1]
    assert [each.error for each in in_processes(lambda rank: body(rank, 1))] == ["", ""]
