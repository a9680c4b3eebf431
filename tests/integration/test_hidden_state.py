"""State of a user's code outside of state dicts. A run that is interrupted after it has changed, and resumed, ends with
the weights of the uninterrupted run, or the checkpoint and the resume name what they lack.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from pulsetrain import Checkpointer, Trainer, TrainingConfig
from pulsetrain.engine import CheckpointError, Events, Every, SupervisedStrategy
from tests.support.models import pairs, regression_model
from tests.support.runs import cut_after, weights

ROWS, BATCH, EPOCHS = 20, 4, 4
CUT, SAVED = 13, 12  # in the third epoch; handlers act once, after the second one


CASES: list[Any] = []


def case(*lacks: str, slow: bool = False) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    """A run whose checkpoint is said to lack this; nothing if it resumes exactly.

    The function makes the arguments of a Trainer, and `act`, what a handler does once, after the second epoch.
    """

    def add(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        marks = [pytest.mark.slow] if slow else []
        CASES.append(pytest.param(make, lacks, id=make.__name__.replace("_", " "), marks=marks))
        return make

    return add


def run(folder: Path, make: Callable[[], dict[str, Any]]) -> Trainer:
    torch.manual_seed(0)
    arguments = make()
    actions = {
        Events.STARTED: arguments.pop("start", None),
        Events.EPOCH_COMPLETED(once=2): arguments.pop("act", None),
        Events.ITERATION_STARTED: arguments.pop("always", None),
    }
    model = arguments.pop("model", None) or regression_model()
    data = arguments.pop("train_loader", None)
    data = DataLoader(pairs(ROWS), BATCH, shuffle=True) if data is None else data
    arguments.setdefault("optimizer", "adamw")
    arguments.setdefault("strategy", SupervisedStrategy("mse"))
    config = TrainingConfig(max_epochs=EPOCHS, learning_rate=0.05, seed=1)
    saver = Checkpointer(folder, Every(iterations=SAVED), at_end=False)
    made = Trainer(model, data, config=config, handlers=[saver], **arguments)
    for event, action in actions.items():
        if action is not None:
            made.add_event_handler(event, action)
    return made


def warned(logs: list[Any], what: str) -> list[str]:
    return [name for each in logs if what in each["event"] for name in each.get("attributes", ())]


# --------------------------------------------------------------------------------------------------- flags of modules


def unfreezing() -> tuple[Any, dict[str, Any]]:
    model = regression_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, {"model": model, "optimizer": optimizer, "act": lambda: model[0].requires_grad_(True)}


@case()
def a_backbone_is_unfrozen() -> dict[str, Any]:
    model, arguments = unfreezing()
    model[0].requires_grad_(False)
    return arguments


@case()
def a_backbone_is_unfrozen_that_a_handler_freezes_when_the_run_starts() -> dict[str, Any]:
    model, arguments = unfreezing()
    return {**arguments, "start": lambda: model[0].requires_grad_(False)}


@case()
def the_rate_of_dropout_is_set() -> dict[str, Any]:
    model = regression_model(dropout=0.1)
    return {"model": model, "act": lambda: setattr(model[3], "p", 0.5)}


@case()
def a_batchnorm_is_set_to_evaluation() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "act": model[1].eval}


@case("model.1.momentum")
def a_setting_of_a_module_of_torch_is_changed() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "act": lambda: setattr(model[1], "momentum", 0.5)}


@case("model.0: hooks")
def a_hook_is_registered() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "act": lambda: model[0].register_forward_hook(lambda module, given, output: output * 2)}


@case("model.0: hooks")
def a_hook_of_a_parameter_is_registered() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "act": lambda: model[0].weight.register_hook(lambda gradient: gradient * 2)}


# ------------------------------------------------------------------------------------------- what modules remember


class Remembering(nn.Module):
    """Adds to the outputs what it has seen of the batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = regression_model()
        self.keep()

    def keep(self) -> None:
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def add(self, value: Tensor) -> None:
        self.seen += value

    def forward(self, inputs: Tensor) -> Tensor:
        self.add(inputs.mean().detach())
        return self.inner(inputs) + self.seen.sum()


@case()
def a_buffer_is_not_persistent() -> dict[str, Any]:
    return {"model": Remembering()}


class WithTensor(Remembering):
    def keep(self) -> None:
        self.seen = torch.zeros(1)


@case("model.seen")
def a_tensor_is_an_attribute_of_the_model() -> dict[str, Any]:
    return {"model": WithTensor()}


class WithBank(Remembering):
    def keep(self) -> None:
        self.bank: list[Tensor] = []

    def add(self, value: Tensor) -> None:
        self.bank = [*self.bank[-5:], value]

    @property
    def seen(self) -> Tensor:
        return torch.stack(self.bank)


@case("model.bank")
def a_list_of_tensors_is_an_attribute_of_the_model() -> dict[str, Any]:
    return {"model": WithBank()}


class WithLargeTensor(Remembering):
    def keep(self) -> None:
        self.large = torch.zeros(1 << 21)

    def add(self, value: Tensor) -> None:
        self.large[1] += value

    @property
    def seen(self) -> Tensor:
        return self.large[:2]


@case("model.large")
def one_element_of_a_large_tensor_changes() -> dict[str, Any]:
    return {"model": WithLargeTensor()}


class Averaging(nn.Module):
    """A loss relative to its average so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = (outputs - targets).square().mean()
        self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean


@case()
def a_loss_is_a_module_with_a_buffer() -> dict[str, Any]:
    return {"strategy": SupervisedStrategy(Averaging())}


class HoldingLosses(SupervisedStrategy):
    def __init__(self) -> None:
        super().__init__("mse")
        self.losses = {"main": Averaging(), "other": [1]}

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        return self.losses["main"](outputs, batch.targets)  # type: ignore[operator]


@case()
def a_strategy_holds_losses_in_a_dict() -> dict[str, Any]:
    return {"strategy": HoldingLosses()}


class ModuleStrategy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss, self.supervised = Averaging(), SupervisedStrategy("mse")
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.prepare_batch, self.compute_metrics = self.supervised.prepare_batch, lambda outputs, batch: {}

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        self.seen += 0.1
        return self.loss(outputs, batch.targets) * (1 + self.seen)


@case()
def a_strategy_is_a_module() -> dict[str, Any]:
    return {"strategy": ModuleStrategy()}


class Teaching(SupervisedStrategy):
    """Learns from a teacher, which follows the model's first layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__("mse")
        self.followed = (model[0].weight,)  # type: ignore[index]
        self.teacher = nn.Linear(4, 8).requires_grad_(False)

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        self.teacher.weight.data.mul_(0.9).add_(self.followed[0].detach(), alpha=0.1)
        return super().compute_loss(outputs, batch) * (1 + self.teacher(batch.inputs).square().mean())


@case()
def a_frozen_teacher_follows_the_model() -> dict[str, Any]:
    model = regression_model()
    return {"model": model, "strategy": Teaching(model)}


class Weighing(SupervisedStrategy):
    def __init__(self) -> None:
        super().__init__("mse")
        self.scale = torch.ones(())

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        self.scale = self.scale * 1.1
        return super().compute_loss(outputs, batch) * self.scale


@case("strategy.scale")
def a_tensor_is_an_attribute_of_the_strategy() -> dict[str, Any]:
    return {"strategy": Weighing()}


def closing() -> Callable[[Any, Any], Tensor]:
    seen = {"batches": 0}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen["batches"] += 1
        return (outputs - targets).square().mean() * seen["batches"]

    return loss


@case("strategy._loss")
def a_loss_has_a_dict_in_its_closure() -> dict[str, Any]:
    return {"strategy": SupervisedStrategy(closing())}


@case("handler tests.integration.test_hidden_state.a_handler_has_a_dict_in_its_closure.<locals>.look.seen")
def a_handler_has_a_dict_in_its_closure() -> dict[str, Any]:
    model, seen = regression_model(), {"batches": 0}

    def look() -> None:
        seen["batches"] += 1
        if seen["batches"] == 15:
            model[0].requires_grad_(False)

    return {"model": model, "always": look}


# -------------------------------------------------------------------------------------------------- the optimizer


class Counting(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.steps
        return super().step(closure)


@case("optimizer.steps")
def an_optimizer_counts_its_steps() -> dict[str, Any]:
    return {"optimizer": Counting}


@case()
def a_group_is_added_to_the_optimizer() -> dict[str, Any]:
    model = regression_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1:].parameters(), lr=0.05)

    def unfreeze() -> None:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    return {"model": model, "optimizer": optimizer, "act": unfreeze}


@case("model.0: parameters, buffers and modules")
def an_adapter_is_added_to_the_model() -> dict[str, Any]:
    model = regression_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, "act": lambda: add_adapter(model, optimizer)}


def add_adapter(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[0].register_parameter("adapter", nn.Parameter(torch.zeros(8)))
    model[0].register_forward_hook(lambda module, given, output: output + module.adapter)
    optimizer.add_param_group({"params": [model[0].adapter]})


# ------------------------------------------------------------------------------------------- samplers and datasets


class Sampling(Sampler[int]):
    def __init__(self) -> None:
        self.rows, self.passed = list(range(ROWS)), 0

    def __len__(self) -> int:
        return ROWS


class Shuffling(Sampling):
    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(ROWS).tolist()
        self.rows = [self.rows[place] for place in order]
        return iter(list(self.rows))


class CountingPasses(Sampling):
    def __iter__(self) -> Iterator[int]:
        self.passed += 1
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.passed)).tolist())


class SavedShuffling(Shuffling):
    """Leaves out some rows, too, from the second epoch on."""

    level = 0

    def __iter__(self) -> Iterator[int]:
        for row in super().__iter__():
            yield row - row % (self.level + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.level = list(state["rows"]), state["level"]


@case("sampler.rows")
def a_sampler_shuffles_its_own_list() -> dict[str, Any]:
    return {"train_loader": DataLoader(pairs(ROWS), BATCH, sampler=Shuffling())}


@case("sampler.passed")
def a_sampler_counts_its_own_passes() -> dict[str, Any]:
    return {"train_loader": DataLoader(pairs(ROWS), BATCH, sampler=CountingPasses())}


@case()
def a_sampler_keeps_its_state() -> dict[str, Any]:
    sampler = SavedShuffling()
    return {
        "train_loader": DataLoader(pairs(ROWS), BATCH, sampler=sampler),
        "act": lambda: setattr(sampler, "level", 2),
    }


@case()
def a_sampler_that_keeps_its_state_is_changed_inside_a_pass() -> dict[str, Any]:
    sampler = SavedShuffling()

    def set_level(engine: Trainer) -> None:
        sampler.level = {11: 2, 12: 3}.get(engine.state.iteration, sampler.level)

    return {"train_loader": DataLoader(pairs(ROWS), BATCH, sampler=sampler), "always": set_level}


class Rows(Dataset[Any]):
    """Its rows depend on what it remembers."""

    def __init__(self) -> None:
        self.pairs, self.cache, self.count, self.level = pairs(ROWS), {}, 0, 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        inputs, targets = self.pairs[row]
        return inputs + self.level, targets


class Caching(Rows):
    def __getitem__(self, row: int) -> Any:
        if row not in self.cache:
            self.cache[row] = self.pairs[row][0] + torch.randn(4)
        return self.cache[row], self.pairs[row][1]


class CountingRows(Rows):
    def __getitem__(self, row: int) -> Any:
        self.count += 1
        inputs, targets = self.pairs[row]
        return inputs + self.count / 10, targets


class SavedRows(CountingRows):
    def __getitem__(self, row: int) -> Any:
        inputs, targets = super().__getitem__(row)
        return inputs + self.level, targets

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.level = state["count"], state["level"]


def of_rows(rows: Dataset[Any], **options: Any) -> dict[str, Any]:
    return {
        "train_loader": DataLoader(rows, BATCH, shuffle=True, **options),
        "act": lambda: setattr(rows, "level", 3),
    }


@case("dataset.cache")
def a_dataset_has_a_cache() -> dict[str, Any]:
    return of_rows(Caching())


@case("dataset.count")
def a_dataset_counts_its_rows() -> dict[str, Any]:
    return of_rows(CountingRows())


@case("dataset.level")
def a_handler_sets_the_level_of_a_dataset() -> dict[str, Any]:
    return of_rows(Rows())


@case("dataset.dataset.level")
def a_handler_sets_the_level_of_a_dataset_in_a_subset() -> dict[str, Any]:
    rows = Rows()
    return of_rows(rows) | {"train_loader": DataLoader(Subset(rows, range(ROWS)), BATCH)}


@case("dataset.level", slow=True)
def a_handler_sets_the_level_of_a_dataset_with_persistent_workers() -> dict[str, Any]:
    return of_rows(Rows(), num_workers=1, persistent_workers=True)


@case("dataset.count", slow=True)
def a_dataset_counts_its_rows_in_a_worker() -> dict[str, Any]:
    return of_rows(CountingRows(), num_workers=1)


@case("dataset.count", slow=True)
def a_dataset_counts_its_rows_in_persistent_workers() -> dict[str, Any]:
    return of_rows(CountingRows(), num_workers=2, persistent_workers=True)


@case()
def a_dataset_keeps_its_state() -> dict[str, Any]:
    return of_rows(SavedRows())


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.passed, self.level = 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.passed += 1
        for inputs, targets in pairs(ROWS, seed=self.passed):
            yield inputs + self.level, targets


class SavedStream(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passed, self.level = state["passed"], state["level"]


@case("dataset.passed")
def a_stream_counts_its_passes() -> dict[str, Any]:
    return {"train_loader": DataLoader(Stream(), BATCH)}


@case("dataset.level", "dataset.passed")
def a_stream_keeps_its_state_and_its_loader_does_not() -> dict[str, Any]:
    stream = SavedStream()
    return {"train_loader": DataLoader(stream, BATCH), "act": lambda: setattr(stream, "level", 2)}


@case("collate_fn.seen")
def a_collate_fn_has_a_dict_in_its_closure() -> dict[str, Any]:
    seen = {"batches": 0}

    def collate(rows: Any) -> Any:
        seen["batches"] += 1
        inputs, targets = torch.utils.data.default_collate(rows)
        return inputs + seen["batches"], targets

    return {"train_loader": DataLoader(pairs(ROWS), BATCH, collate_fn=collate)}


# ------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(("make", "lacks"), CASES)
def test_what_has_changed_is_resumed_or_named(make: Callable[[], Any], lacks: tuple[str, ...], tmp_path: Path):
    whole = run(tmp_path / "whole", make)
    whole.train()
    with structlog.testing.capture_logs() as saving:
        cut_after(run(tmp_path / "cut", make), CUT)
    manifest = json.loads((tmp_path / f"cut/checkpoints/{SAVED:09d}-checkpoint/manifest.json").read_text())
    again = run(tmp_path / "cut", make)
    with structlog.testing.capture_logs() as resuming:
        try:
            again.train(resume="latest")
        except CheckpointError as error:
            resuming.append({"event": "the checkpoint lacks state", "attributes": [str(error)]})
    expected, found = weights(whole), weights(again)
    if not lacks:
        assert [name for name in expected if not torch.equal(expected[name], found.get(name, torch.ones(0)))] == []
        assert not warned(saving, "are in no checkpoint")
        assert not warned(resuming, "the checkpoint lacks state")
        assert "unsaved" not in manifest
        return
    assert set(lacks) <= set(warned(saving, "are in no checkpoint")), saving
    assert len(set(warned(saving, "are in no checkpoint"))) == len(warned(saving, "are in no checkpoint"))
    assert set(lacks) <= set(manifest["unsaved"]["changed"])
    resumed = warned(resuming, "the checkpoint lacks state")
    refused = any("unexpected: 0.adapter" in each and "that handlers have added" in each for each in resumed)
    assert refused or set(lacks) <= set(resumed), resuming


def test_a_run_resumes_if_its_model_is_built_with_the_adapter_that_a_handler_has_added(tmp_path: Path):
    whole = run(tmp_path / "whole", an_adapter_is_added_to_the_model)
    whole.train()
    cut_after(run(tmp_path / "cut", an_adapter_is_added_to_the_model), CUT)

    def built() -> dict[str, Any]:
        made = an_adapter_is_added_to_the_model()
        made.pop("act")()
        return made

    again = run(tmp_path / "cut", built)
    again.train(resume="latest")
    expected, found = weights(whole), weights(again)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
