"""The states of validation sets: which are saved, and what is reported that a checkpoint lacks."""

from __future__ import annotations

from typing import Any

import structlog
import torch
from torch.utils.data import DataLoader, Subset

from pulsetrain.state.validation_sets import load_states_of_sets, states_of_sets
from tests.support.models import pairs
from tests.support.runs_hidden_state import ROWS
from tests.support.stateful_parts import SavedRows, SavedShuffling


def shuffled(rows: Any, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(rows, 4, shuffle=True, generator=torch.Generator().manual_seed(seed))


def batches(loader: DataLoader[Any]) -> list[Any]:
    return [inputs.tolist() for inputs, _ in loader]


def test_a_set_continues_with_the_order_and_the_rows_that_it_would_have_had():
    def sets() -> dict[str, DataLoader[Any]]:
        return {"rows": shuffled(SavedRows()), "sampler": DataLoader(pairs(ROWS), 4, sampler=SavedShuffling())}

    def pass_over(loaders: dict[str, DataLoader[Any]]) -> list[Any]:
        torch.manual_seed(0)
        return [batches(each) for each in loaders.values()]

    mine, other = sets(), sets()
    first = pass_over(mine)
    saved = states_of_sets(mine, [])
    second, third = pass_over(mine), pass_over(mine)
    load_states_of_sets(other, [], saved)
    assert [pass_over(other), pass_over(other)] == [second, third]
    assert second not in (first, third)


class OfAnotherKind(DataLoader[Any]):
    """A loader whose order cannot be keyed: each pass seeds its generator."""


def test_what_is_shared_with_the_training_data_is_left_out():
    rows, generator = SavedRows(), torch.Generator()
    train = OfAnotherKind(rows, 4, shuffle=True, generator=generator)
    shared = DataLoader(Subset(rows, range(8)), 4, shuffle=True, generator=generator)
    assert states_of_sets({"shared": train}, train) == states_of_sets({"shared": shared}, train) == {}
    assert states_of_sets({"list": [1, 2], "plain": DataLoader(pairs(ROWS), 4, shuffle=True)}, train) == {}


def test_a_generator_is_saved_that_the_order_of_the_training_data_does_not_draw_from():
    rows, generator = pairs(ROWS), torch.Generator().manual_seed(3)
    train = DataLoader(rows, 4, shuffle=True, generator=generator)
    sets = {"val": DataLoader(rows, 4, shuffle=True, generator=generator)}
    saved = states_of_sets(sets, train)
    assert {name: list(state["parts"]) for name, state in saved.items()} == {"val": []}
    first = batches(sets["val"])
    load_states_of_sets(sets, train, saved)
    assert batches(sets["val"]) == first != batches(sets["val"])


class Positions(SavedShuffling):
    """A sampler that cannot load what another one saved."""

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]


def test_a_part_that_cannot_load_what_was_saved_is_reported_and_does_not_stop_the_run():
    saved = states_of_sets({"val": DataLoader(pairs(ROWS), 4, sampler=SavedShuffling())}, [])
    with structlog.testing.capture_logs() as logs:
        load_states_of_sets({"val": DataLoader(pairs(ROWS), 4, sampler=Positions())}, [], saved)
    assert [each["parts"] for each in logs] == [["val: sampler (KeyError: 'place')"]]


def test_what_a_checkpoint_lacks_is_reported():
    loaders = {"val": shuffled(SavedRows()), "test": shuffled(pairs(ROWS))}
    saved = states_of_sets(loaders, [])
    for lacking, names in (
        ({}, ["test: sampler.generator", "val: dataset", "val: sampler.generator"]),
        ({"val": saved["val"]}, ["test: sampler.generator"]),
        ({**saved, "val": {"parts": {}, "generators": {}}}, ["val: dataset", "val: sampler.generator"]),
    ):
        with structlog.testing.capture_logs() as logs:
            load_states_of_sets(loaders, [], lacking)
        assert [each["parts"] for each in logs] == [names]
    with structlog.testing.capture_logs() as logs:
        load_states_of_sets(loaders, [], saved)
    assert logs == []
