"""Digests that are summed over thousands of ranks are exact, and only what differs is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pulsetrain.engine.distributed.replicas import Difference, differ, difference, digest
from tests.support.ranks_in_threads import Meeting, in_threads

MANY = [2, 97, 10_000, 100_000]


def added(numbers: list[float], ranks: int) -> list[float]:
    """The sums over ranks that all send these numbers, one after the other in float64."""
    return [np.full(ranks, number).cumsum()[-1].item() for number in numbers]


@pytest.mark.parametrize("ranks", MANY)
def test_equal_values_of_any_number_of_ranks_never_differ(ranks: int):
    for step in range(100):
        assert not differ(added(digest({"step": step}), ranks), ranks), step


@pytest.mark.parametrize("ranks", MANY)
def test_one_rank_whose_digest_differs_by_one_is_found(ranks: int):
    for step in range(100):
        numbers = digest({"step": step})
        total, squares = added(numbers, ranks - 1)[:2]
        other = numbers[0] - 1 if numbers[0] else 1.0
        assert differ([total + other, squares + other * other, *added(numbers, ranks)[2:]], ranks), step


def test_every_number_of_a_digest_can_be_summed_exactly():
    numbers = [digest({"step": step}) for step in range(2000)]
    assert 100_000 * max(map(max, numbers)) <= 2**53
    assert len({tuple(each) for each in numbers}) == 2000
    assert all(len({each[part] for each in numbers}) > 1900 for part in (0, 2, 4))


def test_the_value_that_differs_is_gathered_and_no_other_one():
    def body(control: Meeting) -> Any:
        rank = control.ranks.rank
        return difference(control, {"same": "x" * 1000, "rate": 0.1 if rank != 3 else 0.2, "after": rank})

    found, controls = in_threads(body, 5)
    assert found == [Difference("rate", (3,), ("0.1", "0.1", "0.1", "0.2", "0.1"))] * 5
    assert all(control.gathered == [["0.1", "0.1", "0.1", "0.2", "0.1"]] for control in controls)


def test_nothing_is_gathered_if_nothing_differs():
    found, controls = in_threads(lambda control: difference(control, {"rate": 0.1, "step": 3}), 3)
    assert (found, [control.gathered for control in controls]) == ([None] * 3, [[]] * 3)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_value_that_one_rank_alone_has_is_named(rank: int):
    def body(control: Meeting) -> Any:
        return difference(control, {"rate": 0.1, **({"extra": 1} if control.ranks.rank == rank else {})})

    found, _ = in_threads(body, 3)
    values = tuple("1" if each == rank else "nothing" for each in range(3))
    assert found == [Difference("extra", (rank,), values)] * 3
