"""Resuming on changed data: what is reported, what is rejected, and where the run continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from pulsetrain import Trainer
from pulsetrain.engine import CheckpointError, Events, Every
from pulsetrain.handlers import Checkpointer
from tests.support.loaders import (
    BATCH_SIZE,
    INPUTS,
    LOADERS,
    ROWS,
    TARGETS,
    Augmented,
    Pair,
    Subclass,
    cut,
    list_of_batches,
    make,
)
from tests.support.models import trainer
from tests.support.runs import cut_after


class Sized(Augmented):
    """A given number of rows, each of which contains its number."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Pair:
        self.read.append(index)
        return INPUTS[index % ROWS], TARGETS[index % ROWS]


def sized(rows: int = ROWS, batch_size: int = BATCH_SIZE, kind: Callable[..., Any] = DataLoader, **options: Any) -> Any:
    return kind(Sized(rows), **{"batch_size": batch_size, "shuffle": True, **options})


def resume_on(data: Any, folder: Path) -> tuple[Trainer, list[int], list[list[str]]]:
    """The run, the iterations at its epochs' ends, and the reported differences of its data."""
    run = make(data, folder)
    ends: list[int] = []
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: ends.append(engine.state.iteration))
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    return run, ends, [line["differences"] for line in logs if "training data differs" in line["event"]]


@pytest.mark.slow
def test_the_same_data_is_not_reported(tmp_path: Path):
    for name in ("draws", "batch_sampler", "subclass", "stream", "generating", "list", "state of its own"):
        cut(LOADERS[name](), tmp_path / name, 17)
        assert resume_on(LOADERS[name](), tmp_path / name)[1:] == ([20, 30], [])


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "ends"), [(8, False, [19, 24]), (3, True, [21, 34]), (40, False, [18, 19])]
)
def test_inside_a_pass_batches_of_another_size_continue_after_the_samples_already_read(
    batch_size: int, drop_last: bool, ends: list[int], tmp_path: Path
):
    before = sized()
    cut(before, tmp_path, 17)
    given = before.dataset.read[-7 * BATCH_SIZE :]
    after = sized(batch_size=batch_size, drop_last=drop_last)
    run, epochs, reported = resume_on(after, tmp_path)
    batches = ROWS // batch_size
    assert reported == [[f"batches: 10 -> {batches}", f"batch_size: 4 -> {batch_size}"]]
    assert (epochs, run.state.epoch, run.state.epoch_length) == (ends, 3, batches)
    rest = after.dataset.read[: ROWS - len(given)]
    assert sorted(given + rest) == list(range(ROWS))  # no sample of the pass twice, none left out
    assert len(after.dataset.read) == ROWS - len(given) + (ROWS // batch_size * batch_size if drop_last else ROWS)


def test_a_run_resumed_with_another_batch_size_can_be_interrupted_again(tmp_path: Path):
    cut(sized(), tmp_path, 17)
    run = make(sized(batch_size=8), tmp_path, Every(iterations=1))
    run.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: e.terminate() if e.state.iteration == 18 else None, phase=3
    )
    run.train(resume="latest")
    data = sized(batch_size=8)
    run, ends, reported = resume_on(data, tmp_path)
    assert (ends, reported) == ([19, 24], [])
    assert len(data.dataset.read) == ROWS - 7 * BATCH_SIZE - 8 + ROWS


def others_of_a_length(rows: int) -> dict[str, Any]:
    return {
        "draws": sized(rows),
        "batch_sampler": sized(
            rows, batch_size=1, shuffle=None, batch_sampler=BatchSampler(RandomSampler(range(rows)), BATCH_SIZE, False)
        ),
        "sampler": sized(rows, shuffle=None, sampler=WeightedRandomSampler(torch.ones(rows), rows)),
        "subclass": sized(rows, kind=Subclass),
        "list": list_of_batches()[:10] * 2 if rows == 80 else list_of_batches()[: rows // BATCH_SIZE],
    }


@pytest.mark.parametrize("rows", [20, 80])
@pytest.mark.parametrize("name", ["draws", "batch_sampler", "sampler"])
def test_inside_a_pass_over_other_rows_a_loader_that_seeks_is_rejected(name: str, rows: int, tmp_path: Path):
    cut(others_of_a_length(ROWS)[name], tmp_path, 17)
    run = make(others_of_a_length(rows)[name], tmp_path)
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=rf"batches: 10 -> {rows // 4}.*rows: 40 -> {rows}\): .*from a checkpoint of an"
    ):
        run.train(resume="latest")
    assert all(torch.equal(before[key], value) for key, value in run.model.state_dict().items())
    assert run.state.iteration == 0


@pytest.mark.parametrize("every", ["the last batch", "the epoch"])
@pytest.mark.parametrize("rows", [20, 80])
@pytest.mark.parametrize("name", ["draws", "batch_sampler", "sampler", "subclass", "list"])
def test_between_two_epochs_the_next_starts_a_pass_over_the_new_data(name: str, rows: int, every: str, tmp_path: Path):
    run = make(
        others_of_a_length(ROWS)[name], tmp_path, Every(iterations=10) if every == "the last batch" else Every(epochs=1)
    )
    event = Events.ITERATION_COMPLETED if every == "the last batch" else Events.EPOCH_COMPLETED

    @run.on(event, phase=3)
    def leave(engine: Trainer) -> None:
        if engine.state.iteration == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train()
    data = others_of_a_length(rows)[name]
    run, ends, (reported,) = resume_on(data, tmp_path)
    last = 20 + rows // BATCH_SIZE
    assert ends == ([20, last] if every == "the last batch" else [last])
    assert (run.state.iteration, run.state.epoch_length) == (last, rows // BATCH_SIZE)
    assert f"batches: 10 -> {rows // BATCH_SIZE}" in reported
    if name in ("draws", "batch_sampler", "subclass"):
        assert sorted(data.dataset.read) == list(range(rows))  # one whole pass


@pytest.mark.parametrize("name", ["subclass", "list"])
def test_inside_a_pass_a_loader_that_is_read_again_skips_as_many_batches(name: str, tmp_path: Path):
    cut(others_of_a_length(ROWS)[name], tmp_path, 17)
    run, ends, (reported,) = resume_on(others_of_a_length(80)[name], tmp_path)
    assert "batches: 10 -> 20" in reported
    assert (ends, run.state.epoch_length) == ([30, 50], 20)
    fewer = make(others_of_a_length(20)[name], tmp_path)
    with pytest.raises(CheckpointError, match="the checkpoint is 7 batches inside an epoch, which has fewer now"):
        fewer.train(resume="latest")


def test_another_kind_of_loader_is_reported_or_rejected(tmp_path: Path):
    cut(sized(), tmp_path, 17)
    assert resume_on(sized(kind=Subclass), tmp_path)[2] == [["loader: DataLoader -> Subclass", "samples: 40 -> None"]]
    cut(sized(kind=Subclass), tmp_path / "back", 17)
    with pytest.raises(CheckpointError, match="loader: Subclass -> DataLoader"):
        make(sized(), tmp_path / "back").train(resume="latest")


def test_a_bound_in_iterations_holds_over_other_data(tmp_path: Path):
    def run(data: Any, every: Every) -> Trainer:
        checkpointer = Checkpointer(tmp_path, every=every, at_end=False)
        return trainer({"max_iterations": 37, "seed": 7}, train_loader=data, handlers=[checkpointer])

    cut_after(run(sized(), Every(iterations=10)), 20)
    again = run(sized(20), Every(iterations=10))
    again.train(resume="latest")
    assert (again.state.iteration, again.state.epoch) == (37, 6)


class Shared(IterableDataset[Any]):
    """Its workers share the rows out, so that their order depends on the number of workers."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return iter([(INPUTS[row], TARGETS[row]) for row in range(first, ROWS, step)])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0), (1, 2), (2, 1)])
def test_a_pass_whose_order_depends_on_the_number_of_workers_is_resumed_with_that_number_only(
    before: int, now: int, tmp_path: Path
):
    def data(workers: int) -> DataLoader[Any]:
        return DataLoader(Shared(), BATCH_SIZE, num_workers=workers)

    cut_after(make(data(before), tmp_path, Every(iterations=1)), 5)
    with pytest.raises(CheckpointError, match=f"num_workers={now}.*; resume with {before} workers, as then"):
        make(data(now), tmp_path).train(resume="latest")
    make(data(before), tmp_path).train(resume="latest")
