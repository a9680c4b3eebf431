"""What MegatronBackend refuses before training starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pulsetrain.engine import ArgumentTypeError, ConfigurationError, MegatronBackend, MegatronGPT
from pulsetrain.handlers import BestModel
from tests.support.runs_of_megatron import GPT, LLAMA, alone, errors_of, make, needs_megatron, resuming, texts


def test_without_megatron_core_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(
        ConfigurationError, match=r"MegatronBackend: cannot import megatron\.core.*pulsetrain\[megatron\]"
    ):
        MegatronBackend("cpu")


@needs_megatron
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor": 0}, r"MegatronBackend\(tensor=0\)"),
        ({"pipeline": 2}, r"MegatronBackend\(pipeline=2\): Megatron's pipeline schedule .*not supported"),
        ({"sequence_parallel": True}, r"Topology\(sequence_parallel=True, tensor=1\): splits what lies between"),
        ({"sequence_parallel": True, "tensor": 2}, r"MegatronBackend\(sequence_parallel=True\): .*torch\.cuda"),
        ({"distributed_optimizer": True}, r"MegatronBackend\(distributed_optimizer=True\): .*torch\.cuda"),
    ],
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        MegatronBackend("cpu", **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 5}, r"hidden=32\): needs a multiple of heads=5"),
        ({"groups": 3}, r"heads=4\): needs a multiple of groups=3"),
        ({"layers": 0}, r"layers=0"),
        ({"norm": "batch"}, r"norm='batch'\): unknown; choose one of layer, rms"),
        ({"positions": "rope"}, r"positions='rope'\): unknown; choose one of learned, rotary"),
        (
            {"heads": 32, "positions": "rotary"},
            r"hidden=32\): rotary positions need an even width",
        ),
        ({"dropout": 1.0}, r"dropout=1\.0"),
        ({"dtype": "int8"}, r"dtype='int8'"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(sizes: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=rf"MegatronGPT\({message}"):
        MegatronGPT(**{**GPT, **sizes})


@needs_megatron
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 33, "heads": 3}, r"MegatronGPT\(heads=3\): 3 heads cannot be split over tensor=2"),
        ({"groups": 1}, r"MegatronGPT\(groups=1\): 1 groups cannot be split"),
        ({"feed_forward": 47}, r"MegatronGPT\(feed_forward=47\)"),
        ({"vocabulary": 65}, r"MegatronGPT\(vocabulary=65\): 65 tokens cannot be split"),
        ({"attention_dropout": 0.1}, r"MegatronGPT\(attention_dropout=0\.1\): processes that hold different heads"),
    ],
)
def test_layers_that_two_processes_cannot_share_out_are_refused(sizes: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        MegatronBackend("cpu", tensor=2).build(MegatronGPT(**{**GPT, **sizes}))


@needs_megatron
def test_a_module_of_torch_is_refused():
    with pytest.raises(ArgumentTypeError, match="needs a MegatronGPT"):
        make(GPT, model=nn.Linear(2, 2))


@needs_megatron
@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"compile": True}])
def test_settings_that_the_layers_do_not_support_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigurationError, match="not supported with Megatron's layers"):
        make(GPT, **settings)


@needs_megatron
def test_another_number_of_processes_is_refused():
    with pytest.raises(ConfigurationError, match="does not fit 1 process: start a multiple of 2"):
        make(GPT, tensor=2)


@needs_megatron
def test_processes_with_different_models_are_refused():
    for error in errors_of(lambda rank: make(GPT, model=MegatronGPT(**{**GPT, "layers": 2 + rank}), tensor=2)):
        assert "rank 1 has model=MegatronGPT(layers=3" in error


@needs_megatron
def test_a_loader_that_gives_each_process_its_own_samples_is_refused():
    def run(rank: int) -> None:
        make(GPT, tensor=2, data=list(DataLoader(texts(16), 4))[rank : rank + 1]).train()

    for error in errors_of(run):
        assert "that of rank 1 is not that of rank 0" in error


@needs_megatron
def test_loaders_without_a_length_that_end_at_different_batches_are_refused():
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def __iter__(self) -> Any:
            return iter(texts(self.rows))

    def run(rank: int) -> None:
        make(GPT, tensor=2, data=DataLoader(Stream(8 + 8 * rank), 4), max_epochs=1).train()

    for error in errors_of(run):
        assert "have to get the same batches" in error


@needs_megatron
def test_handlers_that_need_whole_weights_are_refused(tmp_path: Path):
    def run(rank: int) -> None:
        make(GPT, BestModel("val/loss", folder=tmp_path), tensor=2)

    for error in errors_of(run):
        assert "not for models that are sharded" in error


@needs_megatron
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    alone(lambda rank: resuming(tmp_path, GPT, max_epochs=1).train() and None)

    def run(rank: int) -> None:
        resuming(tmp_path, LLAMA, tensor=2).load_checkpoint(tmp_path)

    for error in errors_of(run):
        assert "the checkpoint's weights do not fit the model" in error


@needs_megatron
def test_groups_that_other_code_has_made_are_kept_or_refused():
    def run(rank: int) -> list[str]:
        from megatron.core import parallel_state

        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel(1)
        make(GPT, tensor=2)
        return []

    for error in errors_of(run):
        assert "megatron.core.parallel_state has been initialized with 1" in error


@needs_megatron
def test_a_model_is_trained_with_the_groups_with_which_it_was_built():
    def run(rank: int) -> list[str]:
        losses = [make(GPT, tensor=2).train()["train/loss"][-1] for _ in range(2)]
        assert losses[0] == losses[1]
        first = make(GPT, tensor=2)
        make(GPT, tensor=1)
        first.train()
        return []

    for error in errors_of(run):
        assert "have been made again for a model with another `tensor`" in error


@needs_megatron
def test_a_model_that_was_built_by_another_backend_is_refused():
    def run(rank: int) -> list[str]:
        built = MegatronBackend("cpu", tensor=2).build(MegatronGPT(**GPT))
        MegatronBackend("cpu").build(built)
        return []

    for error in errors_of(run):
        assert "the model was built with tensor=2, sequence_parallel=False" in error
