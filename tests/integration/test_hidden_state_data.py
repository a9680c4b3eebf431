"""State of samplers, datasets, their copies in workers, and collate functions outside of state dicts. A run that is
interrupted after it has changed, and resumed, ends with the weights of the uninterrupted run, or the checkpoint and the
resume name what they lack.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset

from pulsetrain import Trainer
from pulsetrain.engine import Events
from tests.support.cases import Make
from tests.support.models import pairs
from tests.support.runs_hidden_state import (
    BATCH,
    ROWS,
    CasesOfHiddenState,
    check_that_what_has_changed_is_resumed_or_named,
)
from tests.support.stateful_parts import CountingRows, Rows, Sampling, SavedRows, SavedShuffling, Shuffling

CASES = CasesOfHiddenState()
case = CASES.case


# ------------------------------------------------------------------------------------------- samplers and datasets


class CountingPasses(Sampling):
    def __iter__(self) -> Iterator[int]:
        self.passed += 1
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.passed)).tolist())


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


class Caching(Rows):
    def __getitem__(self, row: int) -> Any:
        if row not in self.cache:
            self.cache[row] = self.pairs[row][0] + torch.randn(4)
        return self.cache[row], self.pairs[row][1]


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


class NumberedStream(IterableDataset[Any]):
    """The name of the method is that of samplers, which a run calls; it does not call this one."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(pairs(ROWS, seed=self.epoch))


@case("dataset.epoch")
def a_handler_sets_the_epoch_of_a_stream() -> dict[str, Any]:
    stream = NumberedStream()
    return {"train_loader": DataLoader(stream, BATCH), "act": lambda: stream.set_epoch(2)}


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.level


class Transformed(Rows):
    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transforms = [nn.Sequential(transform)]

    def __getitem__(self, row: int) -> Any:
        inputs, targets = self.pairs[row]
        return self.transforms[0](inputs), targets


@case("dataset.transforms")
def a_handler_sets_an_attribute_of_a_module_in_a_dataset() -> dict[str, Any]:
    gain = Gain()
    return of_rows(Transformed(gain)) | {"act": lambda: setattr(gain, "level", 3.0)}


@case("dataset.transforms", slow=True)
def a_handler_sets_the_rate_of_a_dropout_in_a_dataset() -> dict[str, Any]:
    dropout = nn.Dropout(0.1)
    return of_rows(Transformed(dropout)) | {"act": lambda: setattr(dropout, "p", 0.8)}


@case("collate_fn.seen")
def a_collate_fn_has_a_dict_in_its_closure() -> dict[str, Any]:
    seen = {"batches": 0}

    def collate(rows: Any) -> Any:
        seen["batches"] += 1
        inputs, targets = torch.utils.data.default_collate(rows)
        return inputs + seen["batches"], targets

    return {"train_loader": DataLoader(pairs(ROWS), BATCH, collate_fn=collate)}


# ------------------------------------------------------------------------------------------------- validation sets


def validated(rows: Any = None, **options: Any) -> dict[str, Any]:
    """A run whose learning rate depends on a loss over a part of a validation set."""

    def attach(engine: Any) -> None:
        @engine.on(Events.VALIDATION_COMPLETED)
        def rate() -> None:
            engine.optimizer.param_groups[0]["lr"] = 0.01 + 0.01 * engine.state.metrics["val/loss"] % 0.02

    rows = pairs(ROWS) if rows is None else rows
    return {"attached": attach, "val_loader": DataLoader(rows, 6, drop_last=True, **options)}


@case()
def a_validation_set_is_shuffled() -> dict[str, Any]:
    return validated(shuffle=True)


@case()
def a_validation_set_is_shuffled_with_a_generator_of_its_own() -> dict[str, Any]:
    return validated(shuffle=True, generator=torch.Generator().manual_seed(5))


@case(slow=True)
def a_validation_set_is_shuffled_with_the_generator_of_the_training_data() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    train = DataLoader(pairs(ROWS), BATCH, shuffle=True, generator=generator)
    return {**validated(shuffle=True, generator=generator), "train_loader": train}


@case(slow=True)
def a_validation_set_has_a_batch_sampler_with_a_generator_of_its_own() -> dict[str, Any]:
    sampler = RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(5))
    return validated() | {"val_loader": DataLoader(pairs(ROWS), batch_sampler=BatchSampler(sampler, 6, drop_last=True))}


@case()
def a_dataset_for_validation_keeps_its_state() -> dict[str, Any]:
    return validated(SavedRows())


@case(slow=True)
def a_sampler_for_validation_keeps_its_state() -> dict[str, Any]:
    return validated(sampler=SavedShuffling())


@case("val_loader val.dataset.count")
def a_dataset_for_validation_counts_its_rows() -> dict[str, Any]:
    return validated(CountingRows())


class Reading:
    """A loader of the user's with a state, which no checkpoint holds if it is a validation set."""

    def __init__(self) -> None:
        self.passed = 0

    def __iter__(self) -> Iterator[Any]:
        self.passed += 1
        return iter(DataLoader(pairs(ROWS), 6 + self.passed, drop_last=True))

    def state_dict(self) -> dict[str, Any]:
        return {"passed": self.passed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passed = state["passed"]


@case("val_loader val.loader.passed")
def a_validation_set_is_a_loader_of_the_users_with_a_state() -> dict[str, Any]:
    return validated() | {"val_loader": Reading()}


@case("val_loader val.sampler.rows", slow=True)
def a_sampler_for_validation_shuffles_its_own_list() -> dict[str, Any]:
    return validated(sampler=Shuffling())


@case()
def a_dataset_that_keeps_its_state_is_both_trained_on_and_validated_on() -> dict[str, Any]:
    rows = SavedRows()
    return {**validated(Subset(rows, range(12))), "train_loader": DataLoader(rows, BATCH)}


# ------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(("make", "lacks"), CASES)
def test_what_has_changed_is_resumed_or_named(make: Make, lacks: tuple[str, ...], tmp_path: Path):
    check_that_what_has_changed_is_resumed_or_named(make, lacks, tmp_path)
