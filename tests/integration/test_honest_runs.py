"""Runs whose checkpoints hold all their state: no save, resume or verification reports any of it as unsaved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from pulsetrain import Checkpointer, Trainer, TrainingConfig, verify
from pulsetrain.engine import Every, JaxBackend, SupervisedStrategy, TorchBackend
from pulsetrain.engine.optimizers.registry import NAMES
from pulsetrain.handlers import EMA, SWA, Callback, EarlyStopping, EventRecorder, LossSpikeGuard, NaNGuard
from tests.pulsetrain.training import test_several_optimizers as several
from tests.support import models_hugging_face, runs_strategies
from tests.support.models import pairs, regression_model
from tests.support.runs import cut_after, guarded_data
from tests.support.runs_backends import needs_jax, nnx_model

ROWS, BATCH, EPOCHS = 20, 4, 3
EVERY, CUT = Every(iterations=4), 9

CASES: list[Any] = []


def case(*marks: Any) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    """A run with the arguments of a Trainer that the function returns."""

    def add(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        CASES.append(pytest.param(make, id=make.__name__.replace("_", " "), marks=marks))
        return make

    return add


def run(make: Callable[[], dict[str, Any]], folder: Path) -> Trainer:
    torch.manual_seed(0)
    random.seed(0)
    arguments = make()
    settings = {"max_epochs": EPOCHS, "learning_rate": 0.01, "seed": 1, "device": "cpu", **arguments.pop("config", {})}
    model, data = arguments.pop("model", None), arguments.pop("train_loader", None)
    saver = Checkpointer(
        folder, arguments.pop("every", EVERY), background=arguments.pop("background", False), at_end=False, keep_last=99
    )
    arguments.setdefault("strategy", SupervisedStrategy("mse"))
    arguments["handlers"] = [*arguments.get("handlers", ()), EventRecorder(folder), saver]
    return Trainer(
        regression_model() if model is None else model,
        DataLoader(pairs(ROWS), BATCH, shuffle=True) if data is None else data,
        config=TrainingConfig(**settings),
        **arguments,
    )


# ------------------------------------------------------------------------------------------------------------- data


def data(dataset: Any = None, **options: Any) -> dict[str, Any]:
    return {"train_loader": DataLoader(pairs(ROWS) if dataset is None else dataset, **{"batch_size": BATCH, **options})}


class Opened:
    """A file, or a connection."""

    def close(self) -> None: ...


class Augmented(Dataset[Any]):
    """Draws from every generator, opens a file when it is first read, and knows its mean only once it is asked."""

    def __init__(self) -> None:
        self.pairs, self.file, self.transforms = pairs(ROWS), None, [torch.relu, lambda row: row + torch.rand(4)]

    def __len__(self) -> int:
        return ROWS

    @cached_property
    def mean(self) -> Tensor:
        return self.pairs.tensors[0].mean(0)

    def __getitem__(self, row: int) -> Any:
        if self.file is None:
            self.file = Opened()
        inputs, targets = self.pairs[row]
        for transform in self.transforms:
            inputs = transform(inputs)
        return inputs - self.mean + random.random() + torch.from_numpy(np.random.rand(4)).float(), targets


class Reversed(Sampler[Any]):
    """A batch sampler of the user's without a state."""

    def __len__(self) -> int:
        return ROWS // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(last, last - BATCH, -1)) for last in range(ROWS - 1, 0, -BATCH)])


class Numbered(Sampler[int]):
    """A sampler of the user's whose order depends on the number that `set_epoch` gives."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for inputs, targets in pairs(ROWS):
            yield inputs + torch.rand(4), targets


def hugging_face(stream: bool) -> Any:
    import datasets

    inputs, targets = pairs(ROWS).tensors
    rows = datasets.Dataset.from_dict({"inputs": inputs.tolist(), "targets": targets.tolist()}).with_format("torch")
    return rows.to_iterable_dataset().shuffle(seed=0, buffer_size=8) if stream else rows


def as_pair(rows: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([each["inputs"] for each in rows]), torch.stack([each["targets"] for each in rows])


@case()
def a_loader() -> dict[str, Any]:
    return data(shuffle=True)


@case(pytest.mark.slow)
def workers() -> dict[str, Any]:
    return data(Augmented(), shuffle=True, num_workers=1)


@case(pytest.mark.slow)
def persistent_workers() -> dict[str, Any]:
    return data(Augmented(), shuffle=True, num_workers=2, persistent_workers=True)


@case()
def augmentations_and_a_file_that_is_opened_late() -> dict[str, Any]:
    return data(Augmented(), shuffle=True)


@case()
def a_weighted_sampler() -> dict[str, Any]:
    return data(sampler=WeightedRandomSampler(torch.arange(1.0, ROWS + 1).tolist(), ROWS))


@case()
def a_batch_sampler() -> dict[str, Any]:
    sampler = BatchSampler(RandomSampler(range(ROWS), generator=torch.Generator()), BATCH, drop_last=True)
    return {"train_loader": DataLoader(pairs(ROWS), batch_sampler=sampler)}


@case()
def a_batch_sampler_of_the_users() -> dict[str, Any]:
    return {"train_loader": DataLoader(pairs(ROWS), batch_sampler=Reversed())}


@case()
def a_sampler_with_replacement() -> dict[str, Any]:
    return data(sampler=RandomSampler(range(ROWS), replacement=True, num_samples=ROWS))


@case()
def a_distributed_sampler() -> dict[str, Any]:
    return data(sampler=DistributedSampler(range(ROWS), 1, 0))


@case()
def a_sampler_with_set_epoch() -> dict[str, Any]:
    return data(sampler=Numbered())


@case()
def subsets_and_concatenated_datasets() -> dict[str, Any]:
    return data(ConcatDataset([Subset(Augmented(), range(8)), Subset(pairs(ROWS), range(12))]))


@case()
def a_stream() -> dict[str, Any]:
    return data(Stream())


@case()
def a_list_of_batches() -> dict[str, Any]:
    return {"train_loader": list(DataLoader(pairs(ROWS), BATCH))}


@case(pytest.mark.slow)
def a_dataset_of_hugging_face() -> dict[str, Any]:
    return data(hugging_face(stream=False), collate_fn=as_pair, shuffle=True)


@case(pytest.mark.slow)
def a_stream_of_hugging_face() -> dict[str, Any]:
    return data(hugging_face(stream=True), collate_fn=as_pair)


@case(pytest.mark.slow, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"))
def a_loader_with_a_state() -> dict[str, Any]:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return {"train_loader": torchdata.StatefulDataLoader(Augmented(), BATCH, shuffle=True)}


# --------------------------------------------------------------------------------------------- models and averages


@case()
def averaged_weights() -> dict[str, Any]:
    return {"handlers": [EMA(decay=0.9)], "val_loader": DataLoader(pairs(8), BATCH)}


@case()
def weights_averaged_from_the_second_epoch_on() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return {"model": model, "handlers": [SWA(after_epoch=2)]}


@case()
def batch_norm_and_dropout() -> dict[str, Any]:
    return {"model": regression_model(dropout=0.3)}


class Attending(nn.Module):
    """Modules of torch that keep more than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
        self.recurrent, self.attention = nn.LSTM(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 1))
        self.last.bias = self.last.bias

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.normed(inputs)[:, None])
        return self.last(self.attention(hidden, hidden, hidden)[0][:, 0])


@case()
def recurrent_attending_and_parametrized_modules() -> dict[str, Any]:
    return {"model": Attending(), "config": {"optimizer": "sgd"}}


@case()
def a_frozen_backbone_in_evaluation() -> dict[str, Any]:
    model = regression_model()
    model[:2].requires_grad_(False).eval()
    return {"model": model}


@case()
def two_modules_with_optimizers_of_their_own() -> dict[str, Any]:
    return {"model": several.modules(), "strategy": several.InTurns(), "config": {"optimizer": "adam"}}


@case(pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"))
def a_llama_with_adapters() -> dict[str, Any]:
    model = models_hugging_face.with_adapters(models_hugging_face.model_of("llama"))
    made = models_hugging_face.trainer_of("sft", model)
    return {"model": model, "train_loader": list(made.train_loader) * 6, "strategy": type(made.strategy)()}


# --------------------------------------------------------------------------------------------- optimizers and precision


def with_optimizer(name: str) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        pytest.importorskip({"lion": "lion_pytorch"}.get(name, "schedulefree" if "free" in name else "torch"))
        return {"config": {"optimizer": name, "schedule": None if "free" in name else "cosine", "accumulate": 2}}

    return make


CASES += [pytest.param(with_optimizer(name), id=f"the optimizer {name}") for name in NAMES]


@case()
def bf16() -> dict[str, Any]:
    return {"config": {"precision": "bf16"}}


@case()
def fp16() -> dict[str, Any]:
    return {"config": {"precision": "fp16"}}


@case(pytest.mark.slow)
def a_compiled_model() -> dict[str, Any]:
    return {"backend": TorchBackend(compile=True)}


@case(pytest.mark.slow)
def a_model_that_the_user_has_compiled() -> dict[str, Any]:
    model = regression_model()
    model.compile(backend="eager")
    return {"model": model}


# ------------------------------------------------------------------------------------------------ handlers and saves


@case()
def a_guard_that_rewinds() -> dict[str, Any]:
    return {
        "train_loader": DataLoader(guarded_data((13,)), BATCH),
        "handlers": [NaNGuard("rewind", Every(iterations=3))],
        "every": Every(iterations=2),
    }


@case()
def a_guard_of_loss_spikes() -> dict[str, Any]:
    return {"handlers": [LossSpikeGuard()]}


@case()
def saves_in_the_background() -> dict[str, Any]:
    return {"background": True}


class Counting(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, trainer: Any, loss: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@case()
def callbacks_with_a_state_early_stopping_and_metrics() -> dict[str, Any]:
    torchmetrics = pytest.importorskip("torchmetrics")
    return {
        "callbacks": [Counting()],
        "handlers": [EarlyStopping(patience=9)],
        "val_loader": DataLoader(pairs(8), BATCH),
        "metrics": {"error": torchmetrics.MeanSquaredError()},
    }


# ------------------------------------------------------------------------------------------- strategies and backends


def of_task(task: runs_strategies.Task, on: str) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        return {
            "model": task.jax_model() if on == runs_strategies.JAX else task.model(),
            "train_loader": task.data(),
            "strategy": task.strategy(),
            "backend": runs_strategies.MAKE_BACKEND[on](),
            "config": {**runs_strategies.SETTINGS, **task.settings, "max_epochs": 3},
        }

    return make


for on in (runs_strategies.TORCH, runs_strategies.FUNCTIONAL, runs_strategies.JAX):
    for task in runs_strategies.TASKS:
        made = runs_strategies.case(task, on)
        CASES.append(pytest.param(of_task(task, on), id=f"{task.name} on {on}", marks=[*made.marks, pytest.mark.slow]))


@case(needs_jax, pytest.mark.slow)
def a_module_of_flax() -> dict[str, Any]:
    return {"model": nnx_model(), "backend": JaxBackend()}


@case()
def torch_functional() -> dict[str, Any]:
    return {"model": regression_model(dropout=0.3), "backend": TorchBackend(functional=True)}


# ------------------------------------------------------------------------------------------------------------- tests

OF_OTHER_SUBJECTS = (
    "the loader cannot start at a position",  # of streams
    "the run returns to a checkpoint",
    "not finite",
    "fp16",
    "metrics are computed on",
    "the training data holds random generators of its own",
)


def warnings(logs: list[Any]) -> list[Any]:
    found = [each for each in logs if each["log_level"] in ("warning", "error")]
    return [each for each in found if not any(other in each["event"] for other in OF_OTHER_SUBJECTS)]


def test_there_are_many_kinds_of_runs():
    assert len(CASES) >= 33


@pytest.mark.parametrize("make", CASES)
@pytest.mark.slow
def test_no_state_is_reported_as_unsaved(make: Callable[[], dict[str, Any]], tmp_path: Path):
    with structlog.testing.capture_logs() as logs:
        run(make, tmp_path / "whole").train()
        cut = run(make, tmp_path / "cut")
        cut_after(cut, CUT)
        cut.handlers[-2].detach()  # its log, which the resumed run continues
        assert cut.checkpoint_state()["unsaved"]["changed"] == []
        again = run(make, tmp_path / "cut")
        again.train(resume="latest")
        assert again.checkpoint_state()["unsaved"]["changed"] == []
        proof = verify(tmp_path / "whole", lambda folder: run(make, folder), from_iteration=5)
    assert warnings(logs) == []
    assert proof, str(proof)
