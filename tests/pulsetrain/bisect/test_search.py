"""The search for what makes a result bad, with results that are simulated."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsetrain.bisect.search import Verdict, causes, first_bad, minimal


class Judge:
    """Bad where one of the causes is applied as a whole; unresolved where a pair that does not fit is split."""

    def __init__(self, *of: set[int], together: Sequence[set[int]] = ()) -> None:
        self.causes, self.together, self.asked = of, together, list[tuple[int, ...]]()

    def __call__(self, some: Sequence[int]) -> Verdict:
        self.asked.append(tuple(some))
        if any(0 < len(pair & set(some)) < len(pair) for pair in self.together):
            return Verdict.UNRESOLVED
        return Verdict.BAD if any(cause <= set(some) for cause in self.causes) else Verdict.GOOD


@given(st.integers(1, 24), st.data())
def test_what_is_found_is_bad_and_not_bad_without_any_one(size: int, data: st.DataObject):
    numbers = st.sets(st.integers(0, size - 1), min_size=1, max_size=min(size, 4))
    judge = Judge(*data.draw(st.lists(numbers, min_size=1, max_size=3)))
    found = minimal(range(size), judge)
    assert judge(found) is Verdict.BAD
    assert all(judge([each for each in found if each != one]) is not Verdict.BAD for one in found if len(found) > 1)
    assert found == sorted(found)


@given(st.integers(2, 64), st.data())
def test_a_single_cause_takes_a_logarithm_of_trials(size: int, data: st.DataObject):
    judge = Judge({data.draw(st.integers(0, size - 1))})
    minimal(range(size), judge)
    assert len(judge.asked) <= 2 * size.bit_length()


@given(st.integers(1, 16), st.data())
def test_every_independent_cause_is_found(size: int, data: st.DataObject):
    single = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    assert sorted(causes(range(size), Judge(*({each} for each in single)))) == [[each] for each in sorted(single)]


def test_two_settings_that_are_bad_only_together():
    assert minimal(range(8), Judge({1, 6})) == [1, 6]


def test_settings_that_work_only_together_do_not_mislead():
    judge = Judge({5}, together=[{2, 3}])
    assert minimal(range(8), judge) == [5]


def test_if_nothing_is_bad_there_is_no_cause():
    assert causes(range(4), Judge()) == []


def line(size: int) -> dict[int, list[int]]:
    """A history without branches."""
    return {each: [each - 1] for each in range(size)}


@pytest.mark.parametrize("size", range(1, 12))
def test_the_first_bad_one_of_a_line(size: int):
    for bad in range(size):
        asked = []

        def judge(each: int, bad: int = bad, asked: list[int] = asked) -> Verdict:
            asked.append(each)
            return Verdict.BAD if each >= bad else Verdict.GOOD

        assert first_bad(line(size), judge) == ([bad], [])
        assert len(asked) <= size.bit_length()


def test_neighbours_that_fail_leave_several_suspects():
    def judge(each: int) -> Verdict:
        if each in (3, 4):
            return Verdict.UNRESOLVED
        return Verdict.BAD if each >= 4 else Verdict.GOOD

    assert first_bad(line(8), judge) == ([3, 4, 5], [3, 4])


@pytest.mark.parametrize("cause", ["a1", "a2", "b1", "merge"])
@pytest.mark.parametrize("order", [("a1", "b1", "a2"), ("a1", "a2", "b1"), ("b1", "a1", "a2")])
def test_an_innocent_commit_of_another_branch_is_not_named(order: tuple[str, ...], cause: str):
    parents = {"a1": ["good"], "a2": ["a1"], "b1": ["good"], "merge": ["a2", "b1"]}
    after = {"a1": {"a1", "a2", "merge"}, "a2": {"a2", "merge"}, "b1": {"b1", "merge"}, "merge": {"merge"}}
    history = {each: parents[each] for each in (*order, "merge")}
    assert first_bad(history, lambda each: Verdict.BAD if each in after[cause] else Verdict.GOOD) == ([cause], [])


@given(st.data())
def test_the_first_bad_one_of_any_history(data: st.DataObject):
    size = data.draw(st.integers(1, 24))
    parents = {
        each: data.draw(st.lists(st.integers(0, each - 1), min_size=1, max_size=2)) if each else []
        for each in range(size)
    }
    heads = [each for each in range(size) if not any(each in parents[other] for other in range(size))]
    parents[size] = heads
    cause = data.draw(st.integers(0, size))
    bad = {cause}
    for each in range(cause + 1, size + 1):
        bad |= {each} if bad & set(parents[each]) else set()
    judged: list[int] = []

    def judge(each: int) -> Verdict:
        judged.append(each)
        return Verdict.BAD if each in bad else Verdict.GOOD

    assert first_bad(parents, judge) == ([cause], [])
    assert len(set(judged)) == len(judged) <= size
