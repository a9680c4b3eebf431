"""A run cut in the middle of an epoch and gone on with ends as the uncut one, whatever gives the batches."""

from __future__ import annotations

import functools
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from engine import CheckpointError, Events, Every
from engine.batches import KeyedLoader
from handlers import Checkpointer
from pulsetrain import Trainer
from tests.pulsetrain.small import loader, pairs, regression_model, trainer
from tests.pulsetrain.test_resume import cut_after

ROWS, BATCH_SIZE = 40, 4  # 10 batches a pass
CONFIG = {"max_epochs": 3, "optimizer": "adamw", "seed": 7}
Pair = tuple[Tensor, Tensor]
INPUTS, TARGETS = pairs(ROWS).tensors


def noise() -> float:
    """From all three generators that a dataset may draw from."""
    return 0.1 * (random.random() + float(np.random.rand()) + torch.rand(()).item())


class Augmented(Dataset[Pair]):
    """Draws for each sample, and knows which were read in this process."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Pair:
        self.read.append(index)
        return INPUTS[index] + noise(), TARGETS[index]


class Subclass(DataLoader[Any]):
    """May do anything, so nothing is taken over."""


class Stream(IterableDataset[Pair]):
    """Each worker gives its share, in an order that it draws."""

    def __iter__(self) -> Iterator[Pair]:
        worker = get_worker_info()
        share = list(range(ROWS))[worker.id :: worker.num_workers] if worker else list(range(ROWS))
        random.shuffle(share)
        for index in share:
            yield INPUTS[index] + noise(), TARGETS[index]


class Generating:
    """No loader of torch's: draws what it gives."""

    def __iter__(self) -> Iterator[Pair]:
        for _ in range(ROWS // BATCH_SIZE):
            inputs = torch.randn(BATCH_SIZE, 4) + noise()
            yield inputs, inputs.sum(1, keepdim=True)


class Chunked:
    """Draws an order for several batches at a time, and nothing in between."""

    def __iter__(self) -> Iterator[Pair]:
        for start in (0, ROWS // 2):
            order = start + np.random.permutation(ROWS // 2)
            for chunk in np.split(order, ROWS // 2 // BATCH_SIZE):
                yield INPUTS[chunk], TARGETS[chunk]


class Stateful:
    """Keeps its position and its order itself; a sample's noise is not part of its state."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.position = 0
        self.read = 0

    def __iter__(self) -> Iterator[Pair]:
        if self.position == 0:
            self.order = torch.randperm(ROWS).tolist()
        while self.position < ROWS:
            chunk = self.order[self.position : self.position + BATCH_SIZE]
            self.position += BATCH_SIZE
            self.read += 1
            yield INPUTS[chunk] + noise(), TARGETS[chunk]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = list(state["order"]), state["position"]


class Shuffling(Sampler[int]):
    """Has no generator of its own: shuffles by python's."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(ROWS))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return ROWS


def augmented(workers: int = 0, kind: Callable[..., Any] = DataLoader, **options: Any) -> Any:
    return kind(Augmented(), **{"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": workers, **options})


def stream(workers: int = 0, **options: Any) -> Any:
    return DataLoader(Stream(), batch_size=BATCH_SIZE, num_workers=workers, **options)


def torchdata_loader(workers: int = 0, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its constructor uses what torch has deprecated
        return module.StatefulDataLoader(
            pairs(ROWS), batch_size=BATCH_SIZE, shuffle=True, num_workers=workers, **options
        )


def list_of_batches() -> list[Pair]:
    return list(zip(INPUTS.split(BATCH_SIZE), TARGETS.split(BATCH_SIZE), strict=True))


def own_batches() -> Any:
    batches = BatchSampler(Shuffling(), BATCH_SIZE, drop_last=False)
    return augmented(batch_sampler=batches, batch_size=1, shuffle=None)


LOADERS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: loader(ROWS, BATCH_SIZE),
    "draws": augmented,
    "draws, 1 worker": lambda: augmented(1),
    "draws, 2 workers": lambda: augmented(2),
    "draws, 2 persistent workers": lambda: augmented(2, persistent_workers=True),
    "drop_last": lambda: augmented(batch_size=3, drop_last=True),
    "a smaller last batch": lambda: augmented(batch_size=6),
    "batch_sampler": own_batches,
    "sampler with weights": lambda: augmented(
        sampler=WeightedRandomSampler(torch.linspace(0.1, 1.0, ROWS), ROWS), shuffle=None
    ),
    "sampler with replacement": lambda: augmented(
        sampler=RandomSampler(range(ROWS), replacement=True, num_samples=ROWS), shuffle=None
    ),
    "sampler of one's own": lambda: augmented(sampler=Shuffling(), shuffle=None),
    "subclass": lambda: augmented(kind=Subclass),
    "subclass, 2 workers": lambda: augmented(2, Subclass),
    "subclass, 2 persistent workers": lambda: augmented(2, Subclass, persistent_workers=True),
    "subclass, 2 workers, sampler of one's own": lambda: augmented(2, Subclass, sampler=Shuffling(), shuffle=None),
    "stream": stream,
    "stream, 2 workers": lambda: stream(2),
    "stream, 2 persistent workers": lambda: stream(2, persistent_workers=True),
    "generating": Generating,
    "draws now and then": Chunked,
    "state of its own": Stateful,
    "torchdata's": torchdata_loader,
    "torchdata's, 2 workers": lambda: torchdata_loader(2),
    "list": list_of_batches,
}


def make(data: Any, folder: Path, every: Every | None = None) -> Trainer:
    """As in a process of its own: the generators stand elsewhere each time."""
    checkpointer = Checkpointer(folder, every=every or Every(epochs=100), at_end=False)
    run = trainer(CONFIG, model=regression_model(dropout=0.3), train_loader=data, handlers=[checkpointer])
    random.seed()
    np.random.seed()
    torch.seed()
    return run


def end_workers(run: Trainer) -> None:
    """Now, and not in a garbage collection, in which torch would wait 5 s for each that its loader has kept."""
    if isinstance(run.train_loader, DataLoader):
        run.train_loader._iterator = None


def outcome(run: Trainer) -> dict[str, Any]:
    return {
        "iterations": run.state.iteration,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "history": run.history.get_history(),
    }


def flat(state: Any, path: str = "") -> dict[str, Any]:
    """Each leaf by its path; tensors by their bytes."""
    if isinstance(state, dict | list | tuple):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {name: leaf for key, value in pairs for name, leaf in flat(value, f"{path}/{key}").items()}
    return {path: state.numpy().tobytes() if isinstance(state, Tensor) else state}


@functools.cache
def uncut(name: str, folder: Path) -> dict[str, Any]:
    run = make(LOADERS[name](), folder)
    run.train()
    end_workers(run)
    assert run.state.epoch == 3
    return flat(outcome(run))


@pytest.fixture
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    base = tmp_path_factory.getbasetemp()
    return lambda name: uncut(name, base / f"whole_{list(LOADERS).index(name)}")


def cut(data: Any, folder: Path, iteration: int) -> None:
    run = make(data, folder, Every(iterations=iteration))
    cut_after(run, iteration)
    end_workers(run)


def resumed(data: Any, folder: Path) -> dict[str, Any]:
    run = make(data, folder)
    run.train(resume="latest")
    end_workers(run)
    return flat(outcome(run))


# a pass has 10 batches (13 of 3, 7 of 6): in the first pass, at its end, and in a later one
@pytest.mark.parametrize("iteration", [4, 10, 17])
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_cut_in_the_middle_of_an_epoch_ends_as_the_uncut_one(
    name: str, iteration: int, tmp_path: Path, whole_run: Callable[[str], dict[str, Any]]
):
    expected = whole_run(name)
    cut(LOADERS[name](), tmp_path, iteration)
    assert resumed(LOADERS[name](), tmp_path) == expected


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
def test_another_number_of_workers_from_the_cut_on_changes_nothing(
    before: int, after: int, tmp_path: Path, whole_run: Callable[[str], dict[str, Any]]
):
    expected = whole_run("draws")
    cut(augmented(before), tmp_path, 17)
    assert resumed(augmented(after), tmp_path) == expected


def test_samples_that_were_trained_on_are_not_read_again(tmp_path: Path):
    data = augmented()
    cut(data, tmp_path, 17)
    trained_on = data.dataset.read[-7 * BATCH_SIZE :]
    again = augmented()
    resumed(again, tmp_path)
    read = again.dataset.read
    assert len(read) == 3 * ROWS - 17 * BATCH_SIZE
    assert sorted(trained_on + read[: 3 * BATCH_SIZE]) == list(range(ROWS))  # the rest of the pass


def test_a_loader_with_a_state_is_not_read_again(tmp_path: Path):
    cut(Stateful(), tmp_path, 17)
    again = Stateful()
    with structlog.testing.capture_logs() as logs:
        resumed(again, tmp_path)
    assert again.read == 30 - 17
    assert not reread(logs)


def reread(logs: list[Any]) -> list[tuple[str, int]]:
    return [(entry["loader"], entry["batches"]) for entry in logs if "read again" in entry["event"]]


@pytest.mark.parametrize(("name", "told"), [("subclass", [("Subclass", 7)]), ("list", []), ("draws", [])])
def test_reading_a_pass_again_is_told_of(name: str, told: list[tuple[str, int]], tmp_path: Path):
    cut(LOADERS[name](), tmp_path, 17)
    with structlog.testing.capture_logs() as logs:
        resumed(LOADERS[name](), tmp_path)
    assert reread(logs) == told


@pytest.mark.parametrize("event", [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED])
@pytest.mark.parametrize("name", ["draws", "generating", "state of its own", "torchdata's"])
def test_a_batch_that_was_given_and_not_trained_on_comes_again(
    name: str, event: Events, tmp_path: Path, whole_run: Callable[[str], dict[str, Any]]
):
    expected = whole_run(name)
    for stop in (17, 25):  # the second time behind a resume
        run = make(LOADERS[name](), tmp_path, Every(epochs=100))
        run.handlers[0].detach()
        run.handlers[0].at_end = True
        run.handlers[0].attach(run)
        counter = stop if event == Events.ITERATION_STARTED else stop - 1

        @run.on(event)
        def end(engine: Trainer, counter: int = counter) -> None:
            if engine.state.iteration == counter:
                engine.terminate()

        run.train(resume="latest")
        assert run.position.trained == stop - 1
        end_workers(run)
    assert resumed(LOADERS[name](), tmp_path) == expected


@pytest.mark.parametrize("name", ["draws", "state of its own"])
def test_a_checkpoint_that_was_loaded_and_saved_at_once_is_the_same_position(
    name: str, tmp_path: Path, whole_run: Callable[[str], dict[str, Any]]
):
    expected = whole_run(name)
    cut(LOADERS[name](), tmp_path, 17)
    between = make(LOADERS[name](), tmp_path / "between")
    between.load_checkpoint(next((tmp_path / "checkpoints").glob("000000017-*")))
    between.save_checkpoint()
    assert resumed(LOADERS[name](), tmp_path / "between") == expected


def test_kept_workers_end_before_a_garbage_collection_takes_their_loader():
    keyed = KeyedLoader(augmented(1, persistent_workers=True), 0)
    list(keyed.begin(1))
    keyed.itself = keyed  # type: ignore[attr-defined]  # as a trainer is part of a cycle
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        del keyed
        gc.collect()
        kinds = {type(each).__name__ for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert "KeyedLoader" in kinds
    assert "_MultiProcessingDataLoaderIter" not in kinds


# ----------------------------------------------------------------------------------------------- other data


class Sized(Augmented):
    """As many rows as asked for, each of which knows its number."""

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


def goes_on(data: Any, folder: Path) -> tuple[Trainer, list[int], list[list[str]]]:
    """The run, the iterations at its epochs' ends, and how its data is told to differ."""
    run = make(data, folder)
    ends: list[int] = []
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: ends.append(engine.state.iteration))
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    return run, ends, [line["differences"] for line in logs if "training data is not what" in line["event"]]


def test_the_same_data_is_not_told_of(tmp_path: Path):
    for name in ("draws", "batch_sampler", "subclass", "stream", "generating", "list", "state of its own"):
        cut(LOADERS[name](), tmp_path / name, 17)
        assert goes_on(LOADERS[name](), tmp_path / name)[1:] == ([20, 30], [])


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "ends"), [(8, False, [19, 24]), (3, True, [21, 34]), (40, False, [18, 19])]
)
def test_inside_a_pass_batches_of_another_size_go_on_behind_the_samples_that_it_has_given(
    batch_size: int, drop_last: bool, ends: list[int], tmp_path: Path
):
    before = sized()
    cut(before, tmp_path, 17)
    given = before.dataset.read[-7 * BATCH_SIZE :]
    after = sized(batch_size=batch_size, drop_last=drop_last)
    run, epochs, told = goes_on(after, tmp_path)
    batches = ROWS // batch_size
    assert told == [[f"batches: 10 -> {batches}", f"batch_size: 4 -> {batch_size}"]]
    assert (epochs, run.state.epoch, run.state.epoch_length) == (ends, 3, batches)
    rest = after.dataset.read[: ROWS - len(given)]
    assert sorted(given + rest) == list(range(ROWS))  # no sample of the pass twice, none left out
    assert len(after.dataset.read) == ROWS - len(given) + (ROWS // batch_size * batch_size if drop_last else ROWS)


def test_a_run_that_went_on_with_another_batch_size_can_be_cut_again(tmp_path: Path):
    cut(sized(), tmp_path, 17)
    run = make(sized(batch_size=8), tmp_path, Every(iterations=1))
    run.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: e.terminate() if e.state.iteration == 18 else None, phase=3
    )
    run.train(resume="latest")
    data = sized(batch_size=8)
    run, ends, told = goes_on(data, tmp_path)
    assert (ends, told) == ([19, 24], [])
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
def test_inside_a_pass_over_other_rows_a_loader_that_is_asked_for_a_position_is_refused(
    name: str, rows: int, tmp_path: Path
):
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
def test_between_two_epochs_the_next_begins_a_pass_over_the_new_data(name: str, rows: int, every: str, tmp_path: Path):
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
    run, ends, (told,) = goes_on(data, tmp_path)
    last = 20 + rows // BATCH_SIZE
    assert ends == ([20, last] if every == "the last batch" else [last])
    assert (run.state.iteration, run.state.epoch_length) == (last, rows // BATCH_SIZE)
    assert f"batches: 10 -> {rows // BATCH_SIZE}" in told
    if name in ("draws", "batch_sampler", "subclass"):
        assert sorted(data.dataset.read) == list(range(rows))  # one whole pass


@pytest.mark.parametrize("name", ["subclass", "list"])
def test_inside_a_pass_a_loader_that_is_read_again_goes_on_behind_as_many_batches(name: str, tmp_path: Path):
    cut(others_of_a_length(ROWS)[name], tmp_path, 17)
    run, ends, (told,) = goes_on(others_of_a_length(80)[name], tmp_path)
    assert "batches: 10 -> 20" in told
    assert (ends, run.state.epoch_length) == ([30, 50], 20)
    fewer = make(others_of_a_length(20)[name], tmp_path)
    with pytest.raises(CheckpointError, match="the checkpoint is 7 batches inside an epoch, which has fewer now"):
        fewer.train(resume="latest")


def test_another_kind_of_loader_is_told_of_or_refused(tmp_path: Path):
    cut(sized(), tmp_path, 17)
    assert goes_on(sized(kind=Subclass), tmp_path)[2] == [["loader: DataLoader -> Subclass", "samples: 40 -> None"]]
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
