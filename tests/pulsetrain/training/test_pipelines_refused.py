"""Models, batches and settings that a pipeline cannot compute with: errors before training, or at the first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, DPOStrategy, GRPOStrategy, SFTStrategy
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.handlers import BestModel, CrashBundle, GradientMonitor, NaNGuard
from tests.support.ranks import in_processes
from tests.support.runs_of_pipelines import gpt, layers, pipelined, texts
from tests.support.runs_of_ranks import double, make_with, shared_loader


class Skipping(nn.Module):
    """Its second block sees what its first one got."""

    pipeline_plan = "blocks"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Bilinear(4, 4, 1)])

    def forward(self, inputs: Tensor) -> Tensor:
        embedded = self.embed(inputs)
        found: Tensor = self.blocks[1](self.blocks[0](embedded), embedded)
        return found


class Scaling(Skipping):
    """Something happens between its blocks."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[0](self.embed(inputs)) * 2
        found: Tensor = self.blocks[1](hidden, hidden.detach())
        return found


class Disordered(Skipping):
    """What it registers first computes last."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[0](inputs)
        found: Tensor = self.blocks[1](self.embed(hidden), inputs)
        return found


class Direct(nn.Module):
    pipeline_plan = "blocks"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[2].weight = model[1].weight
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "layers that do not divide": (lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), {}, "3 layers from '0'"),
    "a layer that is there twice": (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2), {}, "has a layer twice"),
    "a part without parameters": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Tanh(), nn.Tanh()), {}, "have 2, 3 alone",
    ),
    "BatchNorm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 1)), {},
        "1 is a BatchNorm",
    ),
    "a model without values": (
        lambda: nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 1)), {}, "0.weight is on the meta device",
    ),
    "a model without a plan": (lambda: nn.Bilinear(4, 4, 1), {}, "pipeline_plan = 'blocks'"),
    "a path that is not there": (lambda: Skipping(), {"blocks": "layers"}, "there are: 'blocks'"),
    "a parameter beside the layers": (Direct, {}, "scale is a parameter of Direct itself"),
    "a parameter of two processes": (_tied, {}, "1.weight and 2.weight are one parameter"),
}  # fmt: skip


def test_models_that_cannot_be_split_are_refused_before_training():
    def run(rank: int) -> list[str]:
        said = []
        for build, topology, _ in REFUSED.values():
            with pytest.raises(ConfigurationError) as refused:
                make_with(build().double(), DataLoader(double(16), 4), None, backend=pipelined(**topology))
            said.append(str(refused.value))
        return said

    for each in in_processes(run):
        assert each.error == ""
        for (name, (_, _, expected)), text in zip(REFUSED.items(), each.value, strict=True):
            assert expected in text, (name, text)


@pytest.mark.parametrize("model", [Skipping, Scaling, Disordered])
def test_a_model_whose_layers_need_more_than_the_layer_before_is_refused(model: type[nn.Module]):
    def run(rank: int) -> None:
        make_with(model().double(), DataLoader(double(16), 4), None, backend=pipelined()).train()

    ended = in_processes(run)
    assert all("the model cannot be split at " in each.error for each in ended)


@pytest.mark.parametrize("strategy", [DPOStrategy, GRPOStrategy])
def test_strategies_that_copy_the_model_or_call_parts_of_it_are_refused(strategy: type[Any]):
    def run(rank: int) -> None:
        Trainer(gpt(), DataLoader(texts(8), 4), strategy=strategy(), backend=pipelined(), config=TrainingConfig())

    for each in in_processes(run):
        assert f"strategy={strategy.__name__}" in each.error.splitlines()[-1]
        assert "is not known to work with a sharded model" in each.error


def test_what_does_not_know_pipelines_is_refused_before_training(tmp_path: Any):
    def run(rank: int) -> list[str]:
        said = []
        for handler, options in (
            (BestModel("val/loss"), {}),
            (CrashBundle(tmp_path), {}),
            (GradientMonitor(histograms=True), {}),
            (NaNGuard(), {"optimizer": "muon"}),
        ):
            with pytest.raises(ConfigurationError) as refused:
                make_with(
                    layers(), DataLoader(double(16), 4), DataLoader(double(9), 2), handler, backend=pipelined(),
                    **options,
                )  # fmt: skip
            said.append(str(refused.value))
        return said

    for each in in_processes(run):
        assert each.error == ""
        for name, text in zip(("BestModel", "CrashBundle", "GradientMonitor", "Muon"), each.value, strict=True):
            assert name in text


class Ragged(SFTStrategy):
    """Makes rows longer that are alone in their batch."""

    def prepare_batch(self, batch: Any, check: bool = False) -> Any:
        length = 8 if len(batch["labels"]) > 1 else 12
        return super().prepare_batch({name: each[:, :length] for name, each in batch.items()}, check)


def test_parts_of_a_batch_that_differ_are_refused():
    def run(rank: int) -> None:
        loader, config = DataLoader(texts(3), 3), TrainingConfig(max_epochs=1)
        Trainer(gpt(), loader, strategy=Ragged(), backend=pipelined(microbatches=2), config=config).train()

    for each in in_processes(run):
        assert "pad all rows of a batch to one length" in each.error


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        ({"pipeline": 0}, "pipeline=0"),
        ({"schedule": "zigzag"}, "1f1b"),
        ({"schedule": "gpipe"}, r"schedule='gpipe'\): is for pipelines; set pipeline=2"),
        ({"pipeline": 2, "microbatches": 1}, "at least one for each process"),
        ({"pipeline": 2, "microbatches": 3, "schedule": "interleaved"}, "the same number for each"),
        ({"pipeline": 2, "tensor": 2}, "not supported together"),
        ({"pipeline": 2, "param_dtype": "bfloat16"}, "not supported together"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(topology: dict[str, Any], text: str):
    with pytest.raises(ConfigurationError, match=text):
        Topology(**topology)


def test_one_process_alone_is_not_a_pipeline():
    with pytest.raises(ConfigurationError, match="does not fit 1 process: start a multiple of 2"):
        make_with(layers(), DataLoader(double(16), 4), None, backend=pipelined())


def test_processes_of_one_pipeline_that_read_different_samples_are_refused():
    def run(rank: int) -> None:
        make_with(layers(), shared_loader(rank, 16), None, backend=pipelined()).train()

    for each in in_processes(run):
        assert "need the same batches" in each.error
