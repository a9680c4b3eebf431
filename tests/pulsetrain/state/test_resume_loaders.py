"""A run interrupted inside an epoch and resumed ends like the uninterrupted one, with every kind of loader."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch.utils.data import DataLoader

from pulsetrain import Trainer
from pulsetrain.engine import Events, Every
from pulsetrain.engine.data.keyed_loader import KeyedLoader
from tests.support.loaders import (
    BATCH_SIZE,
    LOADERS,
    ROWS,
    Stateful,
    augmented,
    cut,
    end_workers,
    flat,
    make,
    outcome,
    resumed,
)
from tests.support.runs import cut_after, saving_run, weights
from tests.support.stateful_parts import SavedRows, SavedShuffling


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


# a pass has 10 batches (13 of 3, 7 of 6): in the first pass, at its end, and in a later one; the first without workers
# only, which are restarted in any resumed pass
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "iteration"),
    [(name, iteration) for name in LOADERS for iteration in (4, 10, 17) if iteration != 4 or "worker" not in name],
)
def test_a_run_interrupted_inside_an_epoch_ends_like_the_uninterrupted_one(
    name: str, iteration: int, tmp_path: Path, whole_run: Callable[[str], dict[str, Any]]
):
    expected = whole_run(name)
    cut(LOADERS[name](), tmp_path, iteration)
    assert resumed(LOADERS[name](), tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
def test_another_number_of_workers_after_the_interruption_changes_nothing(
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


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("subclass", [("Subclass", 7)]),
        ("list", []),
        ("draws", []),
        ("torchdata's, 2 workers", []),
        ("torchdata's, draws", []),
        ("torchdata's, draws, 2 workers", [("StatefulDataLoader", 7)]),
    ],
)
def test_reading_a_pass_again_is_reported(name: str, reported: list[tuple[str, int]], tmp_path: Path):
    cut(LOADERS[name](), tmp_path, 17)
    with structlog.testing.capture_logs() as logs:
        resumed(LOADERS[name](), tmp_path)
    assert reread(logs) == reported


@pytest.mark.slow
@pytest.mark.parametrize("event", [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED])
@pytest.mark.parametrize("name", ["draws", "generating", "state of its own", "torchdata's"])
def test_a_batch_that_was_read_but_not_trained_on_is_repeated(
    name: str, event: Events, tmp_path: Path, whole_run: Callable[[str], dict[str, Any]]
):
    expected = whole_run(name)
    for stop in (17, 25):  # the second time after a resume
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
        assert run.data.trained == stop - 1
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


@pytest.mark.slow
def test_persistent_workers_end_before_their_loader_is_garbage_collected():
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


@pytest.mark.parametrize(
    ("event", "iteration"),
    [
        (Events.EPOCH_COMPLETED(once=2), 10),
        (Events.GET_BATCH_STARTED(once=8), 7),
        (Events.GET_BATCH_STARTED(once=8), 8),
    ],
    ids=str,
)
def test_what_a_handler_sets_of_the_data_before_the_first_batch_after_a_resume_holds(
    event: Any, iteration: int, tmp_path: Path
):
    """Each epoch has 5 batches: the checkpoint is made after the last one of the second, or in mid-epoch."""

    def run(folder: Path) -> Trainer:
        rows, sampler = SavedRows(), SavedShuffling()
        made = saving_run(
            folder, every=Every(iterations=iteration), epochs=3, train_loader=DataLoader(rows, 4, sampler=sampler)
        )

        @made.on(event)
        def change() -> None:
            rows.level, sampler.level = 3, 2

        return made

    whole = run(tmp_path / "whole")
    whole.train()
    cut_after(run(tmp_path / "cut"), iteration)
    again = run(tmp_path / "cut")
    again.train(resume="latest")
    expected, found = weights(whole), weights(again)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
