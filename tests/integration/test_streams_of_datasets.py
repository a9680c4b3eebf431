"""Streams of Hugging Face's datasets: a run that was cut off continues with the next example, in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.engine.data.loaders import begin_stream, draws_from_a_buffer
from pulsetrain.handlers import Checkpointer
from tests.support.ranks import in_processes

datasets = pytest.importorskip("datasets", reason="datasets is not there: pip install 'pulsetrain[huggingface]'")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

# what torchdata itself calls
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")]

EXAMPLES, BATCH, PASSES = 22, 4, 2


def collate(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.tensor([[float(each["number"])] for each in rows])
    return numbers, numbers


def stream(kind: str, rank: int = 0, world: int = 1) -> Any:
    numbers = datasets.Dataset.from_dict({"number": list(range(EXAMPLES))})
    found = numbers.to_iterable_dataset(num_shards=4)
    if kind != "in order":
        found = found.shuffle(seed=4, buffer_size=8 if kind == "shuffled" else 1)
    if world > 1:
        from datasets.distributed import split_dataset_by_node

        found = split_dataset_by_node(found, rank, world)
    return found


LOADERS: dict[str, Callable[[Any, int], Any]] = {
    "DataLoader": lambda data, workers: DataLoader(data, BATCH, collate_fn=collate, num_workers=workers),
    "StatefulDataLoader": lambda data, workers: stateful_dataloader.StatefulDataLoader(
        data, BATCH, collate_fn=collate, num_workers=workers
    ),
}


def trained(loader: Any, folder: Path, *, resume: str | None = None, until: int | None = None) -> list[list[int]]:
    """The examples of each iteration."""
    seen: list[list[int]] = []
    made = Trainer(
        nn.Linear(1, 1),
        loader,
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=PASSES, optimizer="sgd", learning_rate=1e-4, seed=0),
        handlers=[Checkpointer(folder, Every(iterations=1))],
    )

    def note(engine: Any) -> None:
        seen.append([int(each) for each in engine.state.batch[0].flatten()])
        if engine.state.iteration == until:
            engine.terminate()

    made.on(Events.ITERATION_COMPLETED)(note)
    made.train(resume=resume)
    return seen


def values(processes: list[Any]) -> list[Any]:
    assert not any(each.error for each in processes), processes[0].error
    return [each.value for each in processes]


@pytest.mark.parametrize(
    ("loader", "kind", "workers"),
    [
        ("DataLoader", "in order", 0),
        ("DataLoader", "shuffled", 0),
        ("DataLoader", "shuffled", 2),
        ("StatefulDataLoader", "in order", 0),
        ("StatefulDataLoader", "in order", 2),
        ("StatefulDataLoader", "shards", 0),
        ("StatefulDataLoader", "shuffled", 0),
        ("StatefulDataLoader", "shuffled", 2),
    ],
)
def test_a_run_continues_with_the_next_example(loader: str, kind: str, workers: int, tmp_path: Path) -> None:
    made = lambda: LOADERS[loader](stream(kind), workers)  # noqa: E731
    whole = trained(made(), tmp_path / "whole")
    passes = [sorted(chain(*each)) for each in (whole[: len(whole) // 2], whole[len(whole) // 2 :])]
    assert passes == [list(range(EXAMPLES))] * 2
    if kind == "shuffled":
        assert whole[: len(whole) // 2] != whole[len(whole) // 2 :], "each pass has its own order"
    for until in (2, len(whole) // 2 + 3):
        folder = tmp_path / str(until)
        assert trained(made(), folder, until=until) == whole[:until]
        assert trained(made(), folder, resume="latest") == whole[until:]


@pytest.mark.parametrize("kind", ["in order", "shuffled"])
@pytest.mark.parametrize("loader", ["DataLoader", "StatefulDataLoader"])
def test_processes_that_split_a_stream_continue_as_well(loader: str, kind: str, tmp_path: Path) -> None:
    def run(rank: int, folder: str, **options: Any) -> list[list[int]]:
        return trained(LOADERS[loader](stream(kind, rank, 2), 0), tmp_path / folder, **options)

    whole = values(in_processes(lambda rank: run(rank, "whole")))
    count = len(whole[0]) // 2
    assert sorted(chain(*(each for rank in whole for each in rank[:count]))) == list(range(EXAMPLES))
    for until in (2, count + 1):
        first = values(in_processes(lambda rank, until=until: run(rank, str(until), until=until)))
        then = values(in_processes(lambda rank, until=until: run(rank, str(until), resume="latest")))
        assert [one + other for one, other in zip(first, then, strict=True)] == whole


def test_a_stream_that_draws_from_a_buffer_is_known() -> None:
    for loader in ("DataLoader", "StatefulDataLoader"):
        found = [draws_from_a_buffer(LOADERS[loader](stream(kind), 0)) for kind in ("in order", "shards", "shuffled")]
        assert found == [False, False, True]
    both = datasets.interleave_datasets([stream("in order"), stream("shuffled")])
    assert draws_from_a_buffer(both.map(lambda row: row))


def test_the_pass_is_given_to_streams_of_the_package_alone() -> None:
    class Own(torch.utils.data.IterableDataset[int]):
        epoch = 5

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(())

    own, found = Own(), stream("shuffled")
    for each in (own, found):
        begin_stream(DataLoader(each), 3)
    assert (own.epoch, found.epoch) == (5, 2)
