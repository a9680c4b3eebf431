"""Runs on many kinds of data, whose checkpoints hold all their state: no save, resume or verification reports any of it
as unsaved.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
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

from pulsetrain.handlers import Callback
from tests.support.cases import Cases, Make
from tests.support.models import pairs
from tests.support.runs_backends import needs_jax
from tests.support.runs_honest import BATCH, ROWS, check_that_no_state_is_reported_as_unsaved

CASES = Cases()
case = CASES.add


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


class Mapped(Dataset[Any]):
    """Opens an array on the disk when it is first read."""

    def __init__(self) -> None:
        self.pairs, self.array = pairs(ROWS), None

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        if self.array is None:
            with tempfile.NamedTemporaryFile(suffix=".npy") as file:
                np.save(file, self.pairs.tensors[0].numpy())
                file.flush()
                self.array = np.load(file.name, mmap_mode="r")
        return torch.tensor(self.array[row]), self.pairs[row][1]


@case()
def rows_of_an_array_on_the_disk() -> dict[str, Any]:
    return data(Mapped())


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


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[PAD]": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")


class Padding:
    """Pads with a collator of transformers, whose tokenizer writes down that it has warned."""

    def __init__(self) -> None:
        from transformers import DataCollatorWithPadding

        self.collator = DataCollatorWithPadding(tokenizer())

    def __call__(self, rows: Any) -> Any:
        padded = self.collator([{"input_ids": [0, 1]}, {"input_ids": [0]}])
        inputs, targets = torch.utils.data.default_collate(rows)
        return inputs + padded["input_ids"].sum(), targets


@case()
def a_collator_of_transformers_with_a_fast_tokenizer() -> dict[str, Any]:
    pytest.importorskip("transformers")
    return data(collate_fn=Padding(), shuffle=True)


class Jittering(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.strength, self.dropout = 0.1, torch.nn.Dropout(0.2)

    def forward(self, row: Tensor) -> Tensor:
        return self.dropout(row) + self.strength * torch.rand(4)


@case()
def modules_in_a_dataset() -> dict[str, Any]:
    augmented = Augmented()
    norm = torch.nn.LayerNorm(4, elementwise_affine=False)
    augmented.transforms = [
        torch.nn.Sequential(torch.nn.Dropout(0.1), norm),
        partial(torch.clamp, max=2.0),
        Jittering(),
    ]
    return data(augmented, shuffle=True)


@case()
def validation_sets_that_are_shuffled_with_generators_of_their_own() -> dict[str, Any]:
    def shuffled(rows: Any, seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(rows, 3, shuffle=True, drop_last=True, generator=generator)

    rows = Augmented()
    sets = {"val": shuffled(Subset(rows, range(8)), 1), "test": shuffled(Augmented(), 2), "list": [pairs(4)[:]]}
    return data(rows, shuffle=True) | {"val_loader": sets}


class EachEpoch(Callback):
    def on_epoch_begin(self, trainer: Any) -> None:
        trainer.val_loaders["val"].sampler.set_epoch(trainer.state.epoch)


@case()
def a_validation_set_whose_sampler_gets_the_epoch() -> dict[str, Any]:
    sampler = DistributedSampler(pairs(ROWS), num_replicas=1, rank=0)
    return {"val_loader": DataLoader(pairs(ROWS), 3, sampler=sampler), "callbacks": [EachEpoch()]}


@case()
def a_shuffled_validation_set() -> dict[str, Any]:
    return {"val_loader": DataLoader(pairs(ROWS), 3, shuffle=True, drop_last=True)}


class OfJax(Dataset[Any]):
    """Holds arrays of jax, one of them in its class, and a view that cannot be written to."""

    scale = None

    def __init__(self) -> None:
        import jax

        self.inputs, self.key, self.scale = (
            jax.numpy.asarray(pairs(ROWS).tensors[0]),
            jax.random.key(0),
            jax.numpy.ones(4),
        )
        self.targets = pairs(ROWS).tensors[1].numpy().copy()
        self.targets.flags.writeable = False

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return torch.from_numpy(np.array(self.inputs[row] * self.scale)), torch.tensor(self.targets[row])


@case(needs_jax)
def arrays_of_jax() -> dict[str, Any]:
    return data(OfJax(), shuffle=True)


# ------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("make", CASES)
@pytest.mark.slow
def test_no_state_is_reported_as_unsaved(make: Make, tmp_path: Path):
    check_that_no_state_is_reported_as_unsaved(make, tmp_path)
